"""The load of a simulation: which requests come in which rollout, and which engine serves them.

A load is the lines of a recording, perhaps copied, each with all responses or the first. The lines of one
training step are one rollout, and all its requests are there from its beginning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from rollout_spec.config import UserError
from rollout_spec.drafting.native import Int32Array
from rollout_spec.placement import GroupPlacement
from rollout_spec.trace import ResponseDrafts, Rollout

_MAX_TOKEN = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Request:
    """One response that an engine decodes, or one turn of it."""

    name: str
    sample: str  # its turns share it
    group: str
    prompt_token_ids: Int32Array
    response: Int32Array
    model_drafts: ResponseDrafts | None = None
    num_cached: int = 0  # tokens of the prompt that the turns before have
    num_group_tokens: int | None = None  # tokens of it that are the group's prompt; None: all
    next_turn: Request | None = None

    @property
    def num_tokens(self) -> int:
        """With its prompt."""
        return len(self.prompt_token_ids) + len(self.response)

    @property
    def turns(self) -> Iterator[Request]:
        turn: Request | None = self
        while turn is not None:
            yield turn
            turn = turn.next_turn


def rollouts_of(lines: Iterable[Rollout]) -> list[list[Rollout]]:
    """The lines of each training step, in the recording's order; lines without a step are one rollout."""
    rollouts: dict[int | None, list[Rollout]] = {}
    for line in lines:
        rollouts.setdefault(line.step, []).append(line)
    return list(rollouts.values())


def comes_back(lines: Iterable[Rollout]) -> bool:
    """Whether any group has lines in more than one rollout."""
    groups = [group for rollout in rollouts_of(lines) for group in {line.group for line in rollout}]
    return len(set(groups)) < len(groups)


def copied(lines: Sequence[Rollout], num_copies: int) -> list[Rollout]:
    """Every line `num_copies` times, without drafts of a model. A copy has groups and tokens of its own: the
    drafter learns nothing from one copy about another."""
    texts = [array for line in lines for array in (line.prompt_token_ids, *line.responses)]
    vocabulary = 1 + max((int(array.max()) for array in texts if array.size), default=0)
    if num_copies * vocabulary > _MAX_TOKEN:
        raise UserError(f"--copies {num_copies}: at most {_MAX_TOKEN // vocabulary} with these token ids")
    return [
        dataclasses.replace(
            line,
            group=f"{line.group}.{i}" if i else line.group,
            prompt_token_ids=line.prompt_token_ids + shift,
            responses=[response + shift for response in line.responses],
        )
        for i, shift in enumerate(np.arange(num_copies, dtype=np.int32) * vocabulary)
        for line in lines
    ]


def requests_of(lines: Sequence[Rollout], group_size: int | None) -> list[Request]:
    """The requests of one rollout: the first `group_size` responses of every line, None: all of them. Of an
    agent's sample its first turn.

    A response, or a turn, without a token needs no step and is left out.
    """
    first = (
        _first_turn(line, j, f"{i}.{j}")
        for i, line in enumerate(lines)
        for j in range(len(line.responses[:group_size]))
    )
    return [request for request in first if request is not None]


def _first_turn(line: Rollout, number: int, sample: str) -> Request | None:
    prompt, response = line.prompt_token_ids, line.responses[number]
    if not line.turns:
        model_drafts = line.model_drafts[number] if line.model_drafts else None
        return Request(sample, sample, line.group, prompt, response, model_drafts) if len(response) else None
    text, turn = np.append(prompt, response), None
    turns = [[begin, end] for begin, end in line.turns_of(number) if begin < end]
    ends = [0, *(end for _, end in turns)]
    for i, (begin, end) in reversed(list(enumerate(turns))):
        spoken, cached = text[len(prompt) + begin : len(prompt) + end], len(prompt) + ends[i] if i else 0
        before = text[: len(prompt) + begin]
        turn = Request(f"{sample}/{i}", sample, line.group, before, spoken, None, cached, len(prompt), turn)
    return turn


def assign(requests: Sequence[Request], num_engines: int, max_imbalance: int) -> list[list[Request]]:
    """The requests of every engine, placed as our router does, all before the first one ends."""
    engines: list[list[Request]] = [[] for _ in range(num_engines)]
    placement = GroupPlacement(max_imbalance)
    for request in requests:
        loads = {i: len(engine) for i, engine in enumerate(engines)}
        engines[placement.choose(request.group, loads)].append(request)
    return engines
