"""The requests of a rollout: drawn for `bench engine`, or those of a recording."""

import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout_spec.config import UserError
from rollout_spec.predict.load import copied
from rollout_spec.trace import Rollout

MIN_RESPONSE_TOKENS = 8
RANDOM_PROMPT_TOKENS = 64
LEAST_REQUESTS = 32  # that `one_rollout` has at least: with fewer, one long response decides


@dataclasses.dataclass(frozen=True)
class Load:
    """Requests shaped like GRPO's: groups of samples of one prompt, a few of them much longer than the rest.

    Lengths are log-normal. Every request generates exactly its length, whatever the method: it ignores ends.
    """

    prompts: Sequence[Sequence[int]]  # token ids
    group_size: int = 8
    median_tokens: float = 96.0
    sigma: float = 0.9
    max_tokens: int = 512
    natural_ends: bool = False  # instead, the model ends a response, or `max_tokens`; methods change lengths
    temperature: float = 1.0
    seed: int = 0
    # To each prompt, which come whatever is sampled; beside them only `temperature` and `seed` count.
    recorded: Sequence[Sequence[Sequence[int]]] | None = None

    def requests(self, repeat: int) -> list[dict[str, Any]]:
        """The requests of one repeat, the same for every method, siblings next to each other.

        Each has the number of its `prompt`, `max_tokens`, and a `name`, which keys its noise.
        """
        return [
            {"prompt": i, "max_tokens": int(length), "name": ["bench", self.seed, repeat, i, sample]}
            for i, lengths in enumerate(self._lengths(repeat))
            for sample, length in enumerate(lengths)
        ]

    def _lengths(self, repeat: int) -> list[list[int]]:
        if self.recorded is not None:
            return [[len(response) for response in responses] for responses in self.recorded]
        shape = len(self.prompts), self.group_size
        if self.natural_ends:
            return np.full(shape, self.max_tokens).tolist()
        rng = np.random.default_rng([self.seed, repeat])
        drawn = self.median_tokens * np.exp(self.sigma * rng.standard_normal(shape))
        return np.clip(drawn.astype(int), min(MIN_RESPONSE_TOKENS, self.max_tokens), self.max_tokens).tolist()

    @property
    def all_recorded(self) -> list[Sequence[int]] | None:
        """The responses to all requests, in their order."""
        return None if self.recorded is None else list(itertools.chain.from_iterable(self.recorded))

    def lines(self, repeat: int, responses: Sequence[Sequence[int]]) -> list[Rollout]:
        """The responses to the requests of a repeat as recorded rollouts, a line for each prompt."""
        found = [Rollout(str(i), None, np.array(each, np.int32), []) for i, each in enumerate(self.prompts)]
        for request, response in zip(self.requests(repeat), responses, strict=True):
            found[request["prompt"]].responses.append(np.array(response, np.int32))
        return found


def recorded_load(lines: Sequence[Rollout], max_tokens: int, model: str) -> Load:
    """A recording to be served again, no response longer than `max_tokens`; a UserError if the vocabulary of
    `model`, a folder with config.json, lacks a token."""
    vocab_size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    prompts = [line.prompt_token_ids.tolist() for line in lines]
    recorded = [[each[:max_tokens].tolist() for each in line.responses] for line in lines]
    largest = max(map(max, [*prompts, *itertools.chain.from_iterable(recorded)]))
    if largest >= vocab_size:
        raise UserError(f"the recording has the token {largest}, the model's vocabulary is of {vocab_size}")
    longest = max(len(response) for responses in recorded for response in responses)
    return Load(prompts, group_size=max(map(len, recorded)), max_tokens=longest, recorded=recorded)


def first_rollout(lines: Sequence[Rollout], limit: int | None) -> list[Rollout]:
    """The lines of the first training step, without empty responses; a UserError if there are no others."""
    found = [
        dataclasses.replace(line, responses=[each for each in line.responses if len(each)])
        for line in lines
        if line.step == lines[0].step and len(line.prompt_token_ids)
    ][:limit]
    if not any(line.responses for line in found):
        raise UserError("no token in any response of the trace")
    return found


def first_responses(lines: Sequence[Rollout], number: int) -> list[Rollout]:
    """The first `number` responses of a rollout; a UserError if it has fewer."""
    found, left = list[Rollout](), number
    for line in lines:
        if taken := line.responses[:left]:
            found.append(dataclasses.replace(line, responses=taken))
            left -= len(taken)
    if left:
        raise UserError(f"--rows {number}: the recording has {number - left} responses in its first step")
    return found


def random_prompts(
    number: int, vocab_size: int, seed: int, num_tokens: int = RANDOM_PROMPT_TOKENS
) -> list[list[int]]:
    """Prompts without any structure: token ids drawn alike from the whole vocabulary."""
    rng = np.random.default_rng([seed, vocab_size])
    return rng.integers(0, vocab_size, (number, num_tokens)).tolist()


def one_rollout(lines: Sequence[Rollout], num_rows: int) -> list[Rollout]:
    """About as many requests as an engine runs at a time, whole and all there from the beginning.

    The first training step's lines in their order, as copies again and again, until `num_rows` requests are
    there, and `LEAST_REQUESTS`. So with `LEAST_REQUESTS` rows or more, all begin together, and the longest
    response ends alone; with fewer rows, the others wait.
    """
    lines = [dataclasses.replace(line, step=None) for line in lines if line.step == lines[0].step]
    wanted = max(LEAST_REQUESTS, num_rows)
    num_responses = sum(len(line.responses) for line in lines)
    many = copied(lines, math.ceil(wanted / num_responses))
    totals = itertools.accumulate(len(line.responses) for line in many)
    return many[: next(i for i, total in enumerate(totals, 1) if total >= wanted)]
