"""What make says to a VERL or VLLM that it cannot take, and when it installs a checkout of verl anew."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def make(*arguments: str, option: str = "-n") -> subprocess.CompletedProcess:
    """Of what would be done, by default. The make that runs the tests hands its own arguments down."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MAKE", "MFLAGS")) and name not in ("VERL", "VLLM", "ENGINE", "VENV")
    }
    return subprocess.run(
        ["make", "--no-print-directory", option, *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def checkout_of(folder: Path, pins: str) -> Path:
    """As much of a checkout of verl as make looks at."""
    (folder / "verl/trainer").mkdir(parents=True)
    (folder / "verl/trainer/main_ppo.py").write_text("")
    (folder / "setup.py").write_text("")
    (folder / "pyproject.toml").write_text(f"vllm = [\n    {pins}\n]\n")
    return folder


AT_HAND = "0.24.0 0.23.0 0.29.0 0.32.0"


@pytest.mark.parametrize("target", ["test", "demo"])
@pytest.mark.parametrize(
    ("pins", "arguments", "message"),
    [
        (None, [], "VERL={verl}: no checkout of verl (no verl/trainer/main_ppo.py)"),
        (None, ["VLLM=0.29.0"], "VERL={verl}: no checkout of verl (no verl/trainer/main_ppo.py)"),
        (
            '"vllm==0.31.5",',
            [],
            f"VERL={{verl}}: it pins vLLM 0.31.5; at hand are {AT_HAND}: name one to try, as VLLM=0.24.0",
        ),
        (
            '"vllm>=0.18.0",',
            [],
            f"VERL={{verl}}: it pins no vLLM; at hand are {AT_HAND}: name one to try, as VLLM=0.24.0",
        ),
        (
            '"vllm==0.29.0",',
            ["VLLM=1.2.3"],
            f"VLLM=1.2.3: must be {AT_HAND}, or left out for the one that VERL pins",
        ),
    ],
)
def test_what_cannot_be_had_is_one_line(
    pins: str | None, arguments: list[str], message: str, target: str, tmp_path: Path
) -> None:
    verl = tmp_path if pins is None else checkout_of(tmp_path, pins)
    done = make(target, f"VERL={verl}", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    line = re.sub(r"^Makefile:\d+: \*\*\* |  Stop\.$", "", done.stderr.strip())
    assert line == message.format(verl=verl) + "."


def test_a_vllm_that_is_not_at_hand_is_one_line_without_verl_too() -> None:
    done = make("test", "VLLM=1.2.3")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "VLLM=1.2.3: must be 0.23.0 0.29.0 0.32.0, or left out" in done.stderr


@pytest.mark.parametrize(
    ("pinned", "arguments", "vllm"),
    [("0.29.0", [], "0.29.0"), ("0.24.0", [], "0.24.0"), ("0.31.5", ["VLLM=0.29.0"], "0.29.0")],
)
def test_a_checkout_gets_the_vllm_that_it_pins_or_the_named_one(
    pinned: str, arguments: list[str], vllm: str, tmp_path: Path
) -> None:
    verl = checkout_of(tmp_path, f'"vllm=={pinned}",')
    done = make("demo", f"VERL={verl}", *arguments)
    assert done.returncode == 0, done.stderr
    assert f".venv/verl-{vllm}/bin/rollout-spec-lab demo" in done.stdout


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_a_checkout_lacks_no_package_whatever_the_python(python: str, tmp_path: Path) -> None:
    """One that the lock of its vLLM has for another Python only is as in cpu.txt."""
    for name in ("bin/uv", "verl-0.29.0/bin/python"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    verl, packages = checkout_of(tmp_path / "verl", '"vllm==0.29.0",'), tmp_path / "verl-0.29.0/packages.txt"
    done = make(str(packages), f"VERL={verl}", f"VENV={tmp_path}", "PYTHON=none", option="-s")
    assert done.returncode == 0, done.stderr
    wanted, given = (named(file, python) for file in (ROOT / "requirements/cpu.txt", packages))
    assert wanted - given == {"verl"}


def named(lock: Path, python: str) -> set[str]:
    """The packages of a lock for a Python on Linux."""
    lines = [line for line in lock.read_text().splitlines() if line and not line.startswith("#")]
    environment = {"python_full_version": f"{python}.9", "python_version": python}
    return {
        one.name for one in map(Requirement, lines) if one.marker is None or one.marker.evaluate(environment)
    }


def test_another_commit_is_installed_anew(tmp_path: Path) -> None:
    verl = checkout_of(tmp_path, '"vllm==0.24.0",')

    def stamp() -> str:
        found = re.search(r"touch \S+(\.checkout-\w{16})$", make("dev", f"VERL={verl}").stdout, re.MULTILINE)
        assert found
        return found[1]

    first = stamp()
    (verl / "verl/__pycache__").mkdir()
    (verl / "verl/__pycache__/a.pyc").write_text("what an import leaves")
    assert stamp() == first
    (verl / "verl/trainer/main_ppo.py").write_text("1")
    assert stamp() != first
