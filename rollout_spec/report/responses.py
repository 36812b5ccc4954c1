"""What a run's recorded responses say: how many end in a loop, and how many are another run's."""

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from rollout_spec import trace
from rollout_spec.metrics import Counters
from rollout_spec.sample_names import is_repeated

# A loop's longest n-gram, how many times in a row that stands at the end, and the tokens of all of
# them, which keep short runs of one token ("----") from counting.
MAX_PERIOD, MIN_REPEATS, MIN_TOKENS = 32, 4, 24


@dataclasses.dataclass
class Agreement(Counters):
    """How many tokens are the same, each response up to its first difference."""

    num_tokens: int = 0  # compared: up to and with the first that differs
    num_identical: int = 0


def _rollouts(run: Path) -> Iterator[trace.Rollout]:
    for file in sorted((run / trace.FOLDER).glob("*.jsonl")):
        yield from trace.read_trace(file)


def looping_share(run: Path) -> float:
    """The share of a run's recorded responses that end in a loop, which is easy to draft; NaN without any."""
    found = [is_looping(response.tolist()) for line in _rollouts(run) for response in line.responses]
    return sum(found) / len(found) if found else math.nan


def is_looping(token_ids: Sequence[int]) -> bool:
    """Whether a response ends in one n-gram repeated without a break."""
    ends = ((token_ids[-max(n * MIN_REPEATS, MIN_TOKENS) :], n) for n in range(1, MAX_PERIOD + 1))
    return any(len(end) >= max(n * MIN_REPEATS, MIN_TOKENS) and end[n:] == end[:-n] for end, n in ends)


def first_step_agreement(off: Path, on: Path) -> Agreement | None:
    """Compare the tokens of two runs before their first weight sync, sample by sample; None unless both
    recorded samples of the same names.

    Until then nothing but the drafts tells the runs apart: with our noise in both, the tokens are the
    same up to rounding. What an asynchronous trainer interrupted and finished later does not count.
    """
    ours, theirs = (_first_step_responses(run) for run in (off, on))
    names = ours.keys() & theirs.keys()
    return Agreement.sum(agreement(ours[name], theirs[name]) for name in names) if names else None


def agreement(one: Sequence[int], other: Sequence[int]) -> Agreement:
    """How many tokens two responses to one request share."""
    num_identical = trace.num_alike(one, other)
    return Agreement(min(num_identical + 1, max(len(one), len(other))), num_identical)


def _first_step_responses(run: Path) -> dict[str, list[int]]:
    """Responses by the names of their samples: of rows, or of first prompts where nobody knows the row."""
    named = [
        (line.step or 0, name, response)
        for line in _rollouts(run)
        for name, response in zip(line.names, line.responses, strict=False)
        if is_repeated(name)
    ]
    first = min((step for step, _, _ in named), default=0)
    return {json.dumps(name): response.tolist() for step, name, response in named if step == first}
