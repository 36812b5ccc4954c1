"""What the quick demo and the recipe of .ci/run must have left in outputs/."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

DEMO = Path("outputs/demo")


def steps_of(file: Path) -> list[dict[str, Any]]:
    """What verl's file logger has of each training step."""
    return [json.loads(line)["data"] for line in file.read_text().splitlines()]


def the_demo_measured_both_trainings(summary: dict[str, Any]) -> None:
    for method in ("off", "sam"):
        run = summary[method]
        assert len(run["rollout_seconds"]) == len(run["reward"]) == 2, run
        assert all(seconds > 0 for seconds in run["rollout_seconds"]), run
    assert summary["speedup"] == summary["turns"]["speedup"]["value"] > 0, summary["turns"]
    assert (DEMO / "report.png").stat().st_size > 0


def the_first_step_has_the_same_tokens(summary: dict[str, Any]) -> None:
    """Before the first update only the drafts differ, and they change no token but at a near tie."""
    agreement = summary["first_step_agreement"]
    different = agreement["num_tokens"] - agreement["num_identical"]
    # A response counts up to its first difference, so this is one response at most.
    assert 0 <= different <= 1 < agreement["num_tokens"], agreement
    if not different:
        for name in ("reward", "response_length"):
            off, sam = (summary[method][name][0] for method in ("off", "sam"))
            assert math.isclose(off, sam, rel_tol=1e-6), (name, off, sam)


def the_demo_logs_what_the_gate_did() -> None:
    logged = {name for step in steps_of(DEMO / "sam/metrics.jsonl") for name in step}
    expected = ("share_on", "share_off_cost", "num_draft_tokens")  # how much it drafts, the machine decides
    assert {f"rollout/spec_{name}" for name in expected} <= logged, sorted(logged)


def the_recipe_drafted() -> None:
    """.ci/run has it draft at any number of rows, whatever the machine makes of it."""
    [step] = steps_of(Path("outputs/recipe.jsonl"))
    assert step["rollout/spec_num_draft_tokens"] > 0 and step["training/global_step"] == 1, step


if __name__ == "__main__":
    summary = json.loads((DEMO / "summary.json").read_text())
    the_demo_measured_both_trainings(summary)
    the_first_step_has_the_same_tokens(summary)
    the_demo_logs_what_the_gate_did()
    the_recipe_drafted()
