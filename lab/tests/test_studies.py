"""The studies behind records and pages: what they make of their input; their lists fit this code."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_spec_lab.studies.mutants import ROOT, TARGETS, core_mutants
from rollout_spec_lab.studies.when_it_pays import POLICIES, ROWS, TEXTS, Gain, table


def test_what_is_mutated_is_there() -> None:
    """Files and tests by their names; each change of the C core once in its file."""
    named = [name for target in TARGETS for name in (*target.files, *target.tests)]
    assert [name for name in named if not (ROOT / name).is_file()] == []
    assert all(each.old != each.new for each in core_mutants())


def gain(policy: str, device: str, text: str, rows: int) -> Gain:
    return Gain(policy, device, text, rows, {"v1": 1.5, "v2": 2.0})


def test_the_table_has_v1_in_brackets_behind_v2() -> None:
    found = [gain(POLICIES[0].name, "910b", next(iter(TEXTS)), rows) for rows in ROWS]
    cells = " 2.00 (1.50) |" * len(ROWS)
    assert table(found).splitlines()[2:] == [f"| 1.5B | 1 x 910b | short code |{cells}"]


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
