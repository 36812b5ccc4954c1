"""What a rollout's engine steps say: its phases, methods in pairs, and the time of a step."""

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollout_spec.report.measures import paired
from rollout_spec.report.runs import for_json, ratio

RATIOS = {  # of what, to the first method's: tokens and seconds of a rollout
    "tokens_per_s": ("num_tokens", "makespan_s"),
    "front_tokens_per_s": ("front_tokens", "front_s"),
    "tail_tokens_per_s": ("tail_tokens", "tail_s"),
}


@dataclasses.dataclass
class Timeline:
    """One rollout: a value per engine step that gave a token, so all lists have the same length."""

    seconds: list[float] = dataclasses.field(default_factory=list)  # since the step before
    num_running: list[int] = dataclasses.field(default_factory=list)  # requests, prefills included
    num_rows: list[int] = dataclasses.field(default_factory=list)  # of them, those that decoded
    num_tokens: list[int] = dataclasses.field(default_factory=list)  # generated, by prefills too
    num_prefills: list[int] = dataclasses.field(default_factory=list)  # requests that gave their first token
    num_draft_tokens: list[int] = dataclasses.field(default_factory=list)  # verified in this step
    num_accepted_tokens: list[int] = dataclasses.field(default_factory=list)

    def add(self, **step: float) -> None:
        for field in dataclasses.fields(self):
            getattr(self, field.name).append(step[field.name])

    def figures(self, threshold: int) -> dict[str, float]:
        """Seconds and counts of one rollout. Its front goes up to the last step with more than `threshold`
        running requests; its tail is what comes after that."""
        above = np.flatnonzero(np.array(self.num_running) > threshold)
        front = int(above[-1]) + 1 if len(above) else 0
        seconds, tokens = np.array(self.seconds), np.array(self.num_tokens)
        return {
            "makespan_s": float(seconds.sum()),
            "front_s": float(seconds[:front].sum()),
            "tail_s": float(seconds[front:].sum()),
            "num_tokens": int(tokens.sum()),
            "front_tokens": int(tokens[:front].sum()),
            "tail_tokens": int(tokens[front:].sum()),
            "num_decoded_tokens": int(tokens.sum()) - sum(self.num_prefills),
            "num_row_steps": sum(self.num_rows),
            "num_steps": len(seconds),
            "num_draft_tokens": sum(self.num_draft_tokens),
            "num_accepted_tokens": sum(self.num_accepted_tokens),
        }


def summarise(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> list[dict[str, Any]]:
    """One result per method: means of the seconds, ratios of the sums, `ratios` to the first method with 95 %
    intervals (see `report.measures.paired`), and `tokens_per_s_over` every other method likewise.

    runs: per method what `Timeline.figures` says of every repeat, and `draft_cpu_s`; equal numbers are pairs.
    """
    first = next(iter(runs.values()))
    results = []
    for method, mine in runs.items():

        def total(name: str, mine: Sequence[Mapping[str, float]] = mine) -> float:
            return sum(run[name] for run in mine)

        changes = {name: paired(_amounts(first, name), _amounts(mine, name)) for name in RATIOS}
        seconds = ("makespan_s", "front_s", "tail_s", "draft_cpu_s")
        result: dict[str, Any] = {"method": method, "num_repeats": len(mine)}
        result |= {name: total(name) / len(mine) for name in seconds}
        result |= {name: for_json(on.value) for name, (_, on, _) in changes.items()}
        result["acceptance_rate"] = for_json(ratio(total("num_accepted_tokens"), total("num_draft_tokens")))
        result["tokens_per_step"] = for_json(ratio(total("num_decoded_tokens"), total("num_row_steps")))
        result["ratios"] = {name: change.to_dict() for name, (_, _, change) in changes.items()}
        result["tokens_per_s_over"] = {
            other: paired(_amounts(theirs, "tokens_per_s"), _amounts(mine, "tokens_per_s"))[2].to_dict()
            for other, theirs in runs.items()
            if other != method
        }
        results.append(result | {"repeats": list(mine)})
    return results


def _amounts(runs: Sequence[Mapping[str, float]], name: str) -> np.ndarray:
    return np.array([[run[amount] for run in runs] for amount in RATIOS[name]], float)


def step_times(timelines: Sequence[Timeline]) -> list[dict[str, Any]]:
    """Mean seconds of plain vLLM's steps and ours, by verified tokens (rows and drafts); without prefills."""
    found: defaultdict[tuple[bool, int], list[float]] = defaultdict(list)
    for line in timelines:
        columns = (line.seconds, line.num_running, line.num_rows, line.num_draft_tokens)
        for seconds, running, rows, drafts in zip(*columns, strict=True):
            if rows == running:
                found[drafts > 0, rows + drafts].append(seconds)
    return [
        {"drafted": drafted, "num_tokens": num, "seconds": statistics.fmean(steps), "num_steps": len(steps)}
        for (drafted, num), steps in sorted(found.items())
    ]
