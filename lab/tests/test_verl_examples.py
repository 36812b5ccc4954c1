"""The script that tries verl's example scripts, on a checkout with four of our own."""

from __future__ import annotations

from pathlib import Path

import pytest

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
