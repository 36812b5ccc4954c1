"""What the demo says: the speed by its turns; tokens and rewards by its two trainings."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout_spec.files import as_json, write_files
from rollout_spec.report.comparison import FILES, draw, interval, sentences, table_columns, table_rows
from rollout_spec.report.measures import Comparison
from rollout_spec.report.page import Table, render
from rollout_spec_lab.demo.turns import Turns


def to_dict(comparison: Comparison, turns: Turns) -> dict[str, Any]:
    """summary.json: `speedup` and its interval are those of the turns; all else is of the trainings."""
    speedup = turns.speedup.to_dict()
    own = {"speedup": speedup["value"], "speedup_ci95": speedup["ci95"], "turns": turns.to_dict()}
    return comparison.to_dict() | own


def headline(turns: Turns) -> str:
    return (
        f"{turns.speedup.value:.2f}× tokens per second ({interval(turns.speedup.ci95, len(turns.seconds))})"
    )


def of_turns(turns: Turns) -> list[str]:
    """What the turns found, in two or three sentences."""
    low, high = turns.speedup.ci95
    verdict = "Drafts made rollouts faster" if low > 1.0 else "Drafts made rollouts slower"
    verdict = verdict if low > 1.0 or high < 1.0 else "No clear difference with drafts and without"
    same, compared = turns.agreement.num_identical, turns.agreement.num_tokens
    found = [
        f"{verdict}: {headline(turns)}.",
        "How: before the trainings, one process served their prompts with drafts off and on in turn, "
        f"{len(turns.seconds)} times each, with the policy as it was before training. Both sides of a pair "
        f"run within seconds, so the machine is the same. {same:,} of {compared:,} tokens were the same.",
    ]
    if math.isfinite(turns.acceptance_rate):
        found.append(
            f"In the turns, {turns.acceptance_rate:.1%} of the draft tokens were accepted. A decode step "
            f"gave {turns.tokens_per_step:.2f} tokens; plain decoding gives 1."
        )
    return found


def text(comparison: Comparison, turns: Turns) -> list[str]:
    return [*of_turns(turns), *comparison.warnings, *sentences(comparison, speed=_of_trainings(comparison))]


def _of_trainings(comparison: Comparison) -> list[str]:
    """Their own ratio, which the machine's drift can change, and whether it did."""
    said = (
        f"The two trainings ran one after the other, with {comparison.speedup.value:.2f}× tokens per second."
    )
    if comparison.has_drifted:
        said = (
            "The two trainings ran one after the other, and the machine changed in between: training without "
            f"rollouts took {comparison.drift:.2f}× as long per token with drafts. So they give no ratio."
        )
    return [said + " They are there to show that drafts change neither tokens nor rewards."]


def tables(comparison: Comparison, turns: Turns, intervals: bool = True) -> list[Table]:
    pairs = [
        [str(number), f"{off:.1f}", f"{on:.1f}", f"{off / on:.2f}×"]
        for number, (off, on) in enumerate(turns.seconds, start=1)
    ]
    total = [sum(side) for side in zip(*turns.seconds, strict=True)]
    pairs.append(["all", *(f"{seconds:.1f}" for seconds in total), f"{turns.speedup.value:.2f}×"])
    return [
        ("In turns: seconds for the same requests", ["pair", "off", "sam", "speed"], pairs),
        ("The two trainings", table_columns(comparison), table_rows(comparison, intervals)),
    ]


def write(comparison: Comparison, turns: Turns, folder: Path, facts: Mapping[str, str]) -> dict[str, Path]:
    """Write summary.json, report.png and report.html into `folder`; their paths, by kind."""
    picture = draw(comparison)
    page = render(
        "demo", headline(turns), text(comparison, turns), tables(comparison, turns), facts, picture,
        "Each measure over the training steps, off and sam", draw(comparison, 1),
    )  # fmt: skip
    summary = as_json(to_dict(comparison, turns))
    write_files(folder, {FILES["json"]: summary, FILES["png"]: picture, FILES["html"]: page})
    return {kind: folder / name for kind, name in FILES.items()}
