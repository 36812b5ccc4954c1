"""The studies behind records and pages: their lists fit this code."""

from __future__ import annotations

from rollout_spec_lab.studies.mutants import ROOT, TARGETS, core_mutants


def test_what_is_mutated_is_there() -> None:
    """Files and tests by their names; each change of the C core once in its file."""
    named = [name for target in TARGETS for name in (*target.files, *target.tests)]
    assert [name for name in named if not (ROOT / name).is_file()] == []
    assert all(each.old != each.new for each in core_mutants())
