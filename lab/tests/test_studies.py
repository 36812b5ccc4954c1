"""The studies behind records and pages: their lists fit this code."""

import re
from pathlib import Path

import pytest

from rollout_spec_lab.studies.mutants import ROOT, TARGETS, Target, core_mutants


def test_what_is_mutated_is_there() -> None:
    """Files and tests by their names; each change of the C core once in its file."""
    named = [name for target in TARGETS for name in (*target.files, *target.tests)]
    assert [name for name in named if not (ROOT / name).is_file()] == []
    assert all(each.old != each.new for each in core_mutants())


@pytest.mark.parametrize("target", [target for target in TARGETS if target.chosen])
def test_what_is_chosen_names_tests(target: Target) -> None:
    """A word that no test has any more would leave its mutants alive."""
    texts = [(ROOT / name).read_text() for name in target.tests]
    names = [Path(name).stem for name in target.tests]
    names += [name for text in texts for name in re.findall(r"def (test_\w+)", text)]
    words = {*re.findall(r"\w+", target.chosen)} - {"or", "and", "not"}
    assert [word for word in words if not any(word in name for name in names)] == []
