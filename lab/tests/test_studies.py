"""The studies behind records and pages: their lists fit this code."""

import re
from pathlib import Path

import pytest

from rollout_spec_lab.studies import when_it_pays
from rollout_spec_lab.studies.mutants import ROOT, TARGETS, Target, core_mutants
from tests.text import write_trace


def test_what_is_mutated_is_there() -> None:
    """Files and tests by their names; each change of the C core once in its file."""
    named = [name for target in TARGETS for name in (*target.files, *target.tests)]
    assert [name for name in named if not (ROOT / name).is_file()] == []
    assert all(old != new for _, old, new in core_mutants())


@pytest.mark.parametrize("target", [target for target in TARGETS if target.chosen])
def test_what_is_chosen_names_tests(target: Target) -> None:
    """A word that no test has any more would leave its mutants alive."""
    texts = [(ROOT / name).read_text() for name in target.tests]
    names = [Path(name).stem for name in target.tests]
    names += [name for text in texts for name in re.findall(r"def (test_\w+)", text)]
    words = {*re.findall(r"\w+", target.chosen)} - {"or", "and", "not"}
    assert [word for word in words if not any(word in name for name in names)] == []


def test_when_it_pays_prints_a_row_for_each_device_and_runner(tmp_path, capsys) -> None:
    file = write_trace(tmp_path / "trace.jsonl", ([1, 2], [[5, 6, 7] * 20] * 4))
    picture = tmp_path / "pays.png"
    when_it_pays.main([f"{file}:8", "--policies", "8B", "--output", str(picture)])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == [
        f"| 8B, 1 x {device}{runner}" for runner in ("", ", MRV1") for device in ("h100", "910b")
    ]
    assert all(0.9 < float(cell.strip("| ")) < 20 for row in rows for cell in row[1:3])
    assert {cell for row in rows for cell in row[3:]} == {"-", "- |"}
    assert picture.read_bytes().startswith(b"\x89PNG")
