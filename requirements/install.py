"""Build an environment of this checkout, if it is not as it should be, and run a program in it.

    python requirements/install.py [NAME] [--verl DIR] [--packages-only] [PROGRAM ARGUMENT ...]

NAME is of environments.py, or `ascend-VERSION`, or `engine`: `cuda` where there is an NVIDIA GPU, else
`cpu`. These two are the folder `.venv` itself, all others are folders in it. The Makefile calls this before
anything is installed, so it needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from environments import ENVIRONMENTS, VLLMS, Pins, fail, packages

ROOT = Path(__file__).resolve().parents[1]
UV = "uv==0.13.8"
IN_VENV_ITSELF = ("cpu", "cuda")
WITHOUT_CHECKOUT = ("docs", "mutants")
# What an editable installation is made from; other edits of Python and YAML take effect by themselves.
SOURCES = ("pyproject.toml", "setup.py", "lab/pyproject.toml", "native/*.c", "native/*.h", "native/*.py")
# What vLLM's `suffix` runs on, for the tests that compare with it: C++20, built with the torch that is here.
SUFFIX = "arctic-inference==0.1.1"
# vllm-ascend, and the environment it runs in. What it asks for is not installable without an NPU's libraries,
# and without its kernels it is plain Python: so it is a folder on the path, beside all environments.
ASCENDS = {"ascend-0.23.0": "0.23.0", "ascend-0.23.0.post1": "0.23.0", "ascend-0.24.0rc1": "cpu"}
ASCEND_PLUGINS = (
    "ascend,ascend_kv_connector,ascend_model_loader,ascend_service_profiling,rollout_spec,torch_npu_stub"
)


def why_not() -> str | None:
    """What this Python lacks to make environments."""
    if not (3, 11) <= sys.version_info[:2] < (3, 13):
        return "must be Python 3.11 or 3.12"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "has no headers (Python.h), which a package such as python3-dev brings"
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        return "has no ensurepip, which a package such as python3-venv brings"
    return None


def run(*command: object, **environment: str) -> None:
    done = subprocess.run([str(part) for part in command], env={**os.environ, **environment}, check=False)
    if done.returncode:
        fail(f"this failed: {' '.join(map(str, command))}")


def once(stamp: Path, digest: str, do: Callable[[], None]) -> None:
    """Do it, unless it was done with the same contents before."""
    if stamp.exists() and stamp.read_text() == digest:
        return
    stamp.unlink(missing_ok=True)
    do()
    stamp.write_text(digest)


def digest_of(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
        digest.update(b"\0")
    return digest.hexdigest()


def digest_of_files(folder: Path, patterns: Iterable[str]) -> str:
    """By name and content, without what running leaves."""
    files = sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})
    sources = [file for file in files if file.suffix != ".pyc"]
    return digest_of(
        *(part for file in sources for part in (str(file.relative_to(folder)), file.read_bytes()))
    )


class Builder:
    """Builds environments in and under one folder, with the `uv` in it."""

    def __init__(self, home: Path) -> None:
        self.home = home.absolute()
        self.uv = self.home / "bin/uv"
        if not self.uv.exists():
            if reason := why_not():
                fail(f"PYTHON={sys.executable}: {reason}")
            if not shutil.which(os.environ.get("CC", "cc").split()[0]):
                fail("a C compiler is needed: install cc, or name one as CC")
            run(sys.executable, "-m", "venv", self.home)
            run(
                self.home / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", UV
            )

    def pip(self, folder: Path, *arguments: object, **environment: str) -> None:
        """No package brings another one: lock.txt names them all."""
        command = (self.uv, "pip", "install", "--quiet", "--no-deps", "--python", folder / "bin/python")
        run(*command, *arguments, **environment)

    def build(self, name: str, *, verl: Path | None, with_suffix: bool, packages_only: bool) -> Path:
        """The environment's folder."""
        if verl is not None:
            vllm = vllm_of(verl, name)
            folder = self.home / f"verl-{vllm}"
            self.install(folder, packages_for_verl(vllm))
            self.install_verl(folder, verl)
        else:
            base = ASCENDS.get(name, name)
            folder = self.folder_of(base)
            self.install(folder, packages(base))
        if name in ASCENDS:
            self.install_ascend(name)
        if with_suffix:
            self.install_suffix(folder)
        if not packages_only and name not in WITHOUT_CHECKOUT:
            self.install_checkout(folder)
        return folder

    def folder_of(self, name: str) -> Path:
        if name in IN_VENV_ITSELF:
            return self.home
        return self.home / (f"vllm-{name}" if name in VLLMS else name)

    def install(self, folder: Path, pins: Pins) -> None:
        lines = [f"{package}=={version}" for package, version in pins.items()]

        def do() -> None:
            print(
                f"Installing {len(pins)} packages into {folder}. What is not in a cache is downloaded.",
                flush=True,
            )
            if folder != self.home:
                run(self.uv, "venv", "--quiet", "--clear", "--python", self.home / "bin/python", folder)
            with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
                file.write("\n".join(lines))
                file.flush()
                # Else every process of Ray compiles them anew.
                self.pip(folder, *["--compile-bytecode"] * (folder == self.home), "-r", file.name)

        once(folder / ".packages", digest_of(*lines), do)

    def after_packages(self, folder: Path, *parts: str) -> str:
        """The digest of a step that is to be done again when the packages change."""
        return digest_of((folder / ".packages").read_text(), *parts)

    def install_checkout(self, folder: Path) -> None:
        """This checkout, so that edits take effect."""
        stamp = folder / ".checkout"
        if not list(ROOT.glob("rollout_spec/drafting/_native.*.so")):
            stamp.unlink(missing_ok=True)
        digest = self.after_packages(folder, str(ROOT), digest_of_files(ROOT, SOURCES))
        editable = ("--no-build-isolation", "--editable", ROOT, "--editable", ROOT / "lab")
        once(stamp, digest, lambda: self.pip(folder, *editable))

    def install_verl(self, folder: Path, verl: Path) -> None:
        """From a copy: building leaves files where it builds."""

        def do() -> None:
            with tempfile.TemporaryDirectory() as copy:
                shutil.copytree(verl / "verl", Path(copy, "verl"))
                for name in ("pyproject.toml", "setup.py", "README.md"):
                    shutil.copy(verl / name, copy)
                self.pip(folder, "--no-build-isolation", "--reinstall", copy)

        digest = digest_of_files(verl, ("verl/**/*", "pyproject.toml", "setup.py"))
        once(folder / ".verl", self.after_packages(folder, digest), do)

    def install_suffix(self, folder: Path) -> None:
        def do() -> None:
            try:
                self.pip(folder, "--no-build-isolation", SUFFIX, PATH=self.path_of(folder))
            except SystemExit:
                print(f"{SUFFIX} cannot be built here: its tests are skipped", file=sys.stderr)

        once(folder / ".suffix", self.after_packages(folder, SUFFIX), do)

    def install_ascend(self, name: str) -> None:
        """Built with the tools of `.venv`."""
        target, release = self.ascend(name), name.removeprefix("ascend-")
        target.mkdir(parents=True, exist_ok=True)
        plain = {"COMPILE_CUSTOM_KERNELS": "0", "SOC_VERSION": "ascend910b1", "PATH": self.path_of(self.home)}
        arguments = ("--target", target, "--no-build-isolation", "--no-binary", "vllm-ascend")
        digest = digest_of(release)
        once(
            target / ".built",
            digest,
            lambda: self.pip(self.home, *arguments, f"vllm-ascend=={release}", **plain),
        )

    def ascend(self, name: str) -> Path:
        return self.home / "ascend" / name.removeprefix("ascend-")

    def path_of(self, folder: Path) -> str:
        """PATH in an environment; `uv` is in one only."""
        return f"{folder}/bin:{self.home}/bin:{os.environ['PATH']}"


def vllm_of(verl: Path, name: str) -> str:
    """The version of vLLM for a checkout of verl: the named one, or that which it pins."""
    if not (verl / "verl/trainer/main_ppo.py").is_file():
        fail(f"VERL={verl}: no checkout of verl (no verl/trainer/main_ppo.py)")
    if name in VLLMS:
        return name
    pinned = re.findall(r'"vllm==([^"]+)"', (verl / "pyproject.toml").read_text())
    fits = [version for version in pinned if version in VLLMS]
    if not fits:
        pins = f"vLLM {', '.join(sorted(set(pinned)))}" if pinned else "no vLLM"
        fail(f"VERL={verl}: it pins {pins}; name one of {', '.join(VLLMS)} as VLLM=VERSION")
    return fits[0]


def packages_for_verl(vllm: str) -> Pins:
    """The environment of a vLLM; what it lacks and verl needs is as in `cpu`."""
    pins = packages("cpu") | packages(VLLMS[vllm])
    del pins["verl"]
    return pins


def engine() -> str:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return "cpu"
    return "cuda" if listed.startswith("GPU") else "cpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ["engine", *ENVIRONMENTS, *ASCENDS, *VLLMS]
    parser.add_argument("name", nargs="?", default="engine", help=", ".join(dict.fromkeys(names)))
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", metavar="DIR")
    parser.add_argument("--verl", type=Path, metavar="DIR", help="with this checkout of verl")
    parser.add_argument("--with-suffix", action="store_true", help=f"with {SUFFIX}, built here")
    parser.add_argument("--packages-only", action="store_true", help="without this checkout")
    parser.add_argument(
        "--fits", action="store_true", help="only say whether this Python can make environments"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if arguments.fits:
        raise SystemExit(why_not())
    name = arguments.name
    if name not in names:
        fail(f"{name}: must be one of {', '.join(dict.fromkeys(names))}")
    if arguments.verl is None:
        name = engine() if name == "engine" else VLLMS.get(name, name)
    builder = Builder(arguments.venv)
    folder = builder.build(
        name, verl=arguments.verl, with_suffix=arguments.with_suffix, packages_only=arguments.packages_only
    )
    if arguments.program:
        own = {"PATH": builder.path_of(folder)}
        if name in ASCENDS:
            own |= {"VLLM_PLUGINS": ASCEND_PLUGINS, "PYTHONPATH": f"tests/ascend/stub:{builder.ascend(name)}"}
        os.execvpe(arguments.program[0], arguments.program, {**os.environ, **own})


if __name__ == "__main__":
    main()
