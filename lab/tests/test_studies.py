"""The studies behind records and pages: what they make of their input; their lists fit this code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollout_spec.trace import Rollout
from rollout_spec_lab.studies.mutants import ROOT, TARGETS, core_mutants
from rollout_spec_lab.studies.when_it_pays import POLICIES, ROWS, TEXTS, Gain, ranges, rollout_of, table


def test_what_is_mutated_is_there() -> None:
    """Files and tests by their names; each change of the C core once in its file."""
    named = [name for target in TARGETS for name in (*target.files, *target.tests)]
    assert [name for name in named if not (ROOT / name).is_file()] == []
    assert all(each.old != each.new for each in core_mutants())


def line(step: int, num_responses: int) -> Rollout:
    text = np.arange(4, dtype=np.int32)
    return Rollout(f"group{step}", step, text, [text] * num_responses)


@pytest.mark.parametrize(("rows", "num_lines"), [(1, 4), (32, 4), (33, 5), (256, 32)])
def test_the_first_step_is_copied_until_there_are_enough_requests(rows: int, num_lines: int) -> None:
    """Whole lines of 6 and 10 responses, in turn; 32 requests at least."""
    lines = rollout_of([line(1, 6), line(1, 10), line(2, 99)], rows)
    assert [len(each.responses) for each in lines] == ([6, 10] * 16)[:num_lines]
    assert {each.step for each in lines} == {None}


def gain(policy: str, device: str, text: str, rows: int, dear: float) -> Gain:
    return Gain(policy, device, text, rows, {"v1": 1.5, "v2": 2.0}, dear)


def test_the_table_has_v1_in_brackets_behind_v2() -> None:
    found = [gain(POLICIES[0].name, "910b", next(iter(TEXTS)), rows, 2.0) for rows in ROWS]
    cells = " 2.00 (1.50) |" * len(ROWS)
    assert table(found).splitlines()[2:] == [f"| 1.5B | 1 x 910b | short code |{cells}"]


@pytest.mark.parametrize(
    ("dear", "said"),
    [
        ((2.0, 1.999), "0 %"),
        ((1.9, 1.9), "-5 %"),
        ((1.9, 1.999), "-5 to 0 %"),
        ((2.001, 2.04), "0 to +2 %"),
        ((1.9, 2.04), "-5 to +2 %"),
    ],
)
def test_a_range_is_of_all_texts_and_devices(dear: tuple[float, float], said: str) -> None:
    found = [
        gain(policy.name, device, "maths", rows, value)
        for policy in POLICIES
        for rows in ROWS
        for device, value in zip(("h100", "910b"), dear, strict=True)
    ]
    assert ranges(found).splitlines()[2] == f"| 1.5B |{f' {said} |' * len(ROWS)}"


SCRIPTS = {
    "passes": "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=${INFER_BACKEND:-vllm} $MORE",
    "refused": "ray job submit -- python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.agent.no_such=1",
    "other": "python3 -m verl.trainer.sft_trainer",
    "silent": "echo python3 -m verl.trainer.main_ppo",
}


@pytest.mark.slow
def test_each_launch_of_a_script_has_its_outcome(tmp_path: Path) -> None:
    """One that knows `INFER_BACKEND` is launched with sglang too."""
    from rollout_spec_lab.studies.verl_examples import launches, outcome_of

    (tmp_path / "examples/ppo").mkdir(parents=True)
    for name, line in SCRIPTS.items():
        (tmp_path / f"examples/ppo/{name}.sh").write_text(f"MORE='trainer.nnodes=2'\n{line}\n")
    found = {name.removeprefix("examples/ppo/"): outcome_of(call) for name, call in launches(tmp_path)}
    refused = found.pop("refused.sh")
    assert refused.startswith(
        "verl refuses it without us: Could not override 'actor_rollout_ref.rollout.agent.no_such'"
    ), refused
    assert found == {
        "passes.sh": "passes",
        "passes.sh INFER_BACKEND=sglang": "refused: `name=sglang`: rollout.spec needs vllm",
        "other.sh": "no launch of `verl.trainer.main_ppo`: verl.trainer.sft_trainer",
        "silent.sh": "no launch of `verl.trainer.main_ppo`: no call of a module",
    }
