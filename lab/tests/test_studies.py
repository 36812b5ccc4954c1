"""The studies behind records and pages: what they make of their input; their lists fit this code."""

from __future__ import annotations

import json
from pathlib import Path

from rollout_spec.report.responses import Agreement
from rollout_spec_lab.studies import lasting
from rollout_spec_lab.studies.mutants import ROOT, TARGETS, core_mutants


def test_what_is_mutated_is_there() -> None:
    """Files and tests by their names; each change of the C core once in its file."""
    named = [name for target in TARGETS for name in (*target.files, *target.tests)]
    assert [name for name in named if not (ROOT / name).is_file()] == []
    assert all(each.old != each.new for each in core_mutants())


def recorded(step: int, *responses: list[int], kind: str = "train") -> dict:
    return {
        "group": "g", "step": step, "prompt_token_ids": [1, 2, 3], "responses": responses,
        "names": [[7, step, kind, "0", "digest", 0, number] for number in range(len(responses))],
    }  # fmt: skip


def test_a_training_is_read_step_by_step_without_its_validations(tmp_path: Path) -> None:
    runs = {}
    for name, last in (("off", 8), ("sam", 9)):
        folder = tmp_path / name / "rollouts"
        folder.mkdir(parents=True)
        lines = [
            recorded(2, [*range(10, 18)], [*range(10, 17), last]), recorded(1, [*range(10, 34)]),
            recorded(1, [9], kind="val"),
        ]  # fmt: skip
        (folder / "rollouts-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        runs[name] = lasting.trained(tmp_path / name)
    assert [(one.step, len(one.line.responses)) for one in runs["sam"]] == [(1, 1), (2, 2)]
    found = lasting.agreements(runs["off"], runs["sam"])
    assert found == {1: Agreement(24, 24), 2: Agreement(16, 15)}
    without, with_history = (lasting.drafted(runs["sam"], history) for history in (0, 8))
    assert [*without] == [*with_history] == [1, 2]
    # The second step finds in its history what the first has said.
    assert with_history[2].num_draft_tokens > without[2].num_draft_tokens
