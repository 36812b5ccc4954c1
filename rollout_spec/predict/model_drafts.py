"""A model that drafts, simulated over recorded responses: right so often, oftener where the text repeats."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from rollout_spec.config import SpecConfig
from rollout_spec.drafting.native import Int32Array
from rollout_spec.predict.replay import IndexProposer, token_matrix
from rollout_spec.trace import Proposals, Rollout

# What is easy for the suffix index is easy for a model: where the index is right the model is wrong half as
# often as on the whole, and elsewhere so much oftener that the whole is what was asked for.
EASIER = 0.5
AGREEMENT = 0.4  # of the tokens that both have wrong, those that are the same
NO_TOKEN = 2**31 - 1  # what a model says that is wrong, in no text; the next ones are below it


def simulate_model(
    lines: Iterable[Rollout], acceptance: Sequence[float], num_tokens: int
) -> Iterator[Rollout]:
    """The lines, each with a model's drafts, whatever they had before.

    What it says at one place depends on the place only: another drafter sees the same model.

    Args:
        acceptance: how often a token is right, behind none, one, two, ... right ones; the last goes on.
        num_tokens: of a draft.
    """
    config = SpecConfig(num_speculative_tokens=1, min_survival=0.0)
    rates = np.array([acceptance[min(depth, len(acceptance) - 1)] for depth in range(num_tokens)])
    with contextlib.closing(IndexProposer(config)) as index:
        for line in lines:
            guesses = _guesses(index, line)
            agrees = np.concatenate(guesses) == np.concatenate(line.responses)
            share = min(float(agrees.mean()) if len(agrees) else 0.0, 0.99)
            proposals = [
                _proposals(*each, rates, share) for each in zip(line.responses, guesses, strict=True)
            ]
            yield dataclasses.replace(line, proposals=proposals)


def _guesses(index: IndexProposer, line: Rollout) -> list[Int32Array]:
    """What the suffix index alone would say in the place of every token of each response, -1: nothing."""
    token_ids, ends = token_matrix(line, 1)
    prompt_len = len(line.prompt_token_ids)
    found = np.full((len(ends), int(ends.max()) - prompt_len), -1, np.int32)
    index.start(line, ())
    for i in range(found.shape[1]):
        rows = np.flatnonzero(ends > prompt_len + i).astype(np.int32)
        level = np.full(len(rows), prompt_len + i, np.int32)
        drafts, numbers = index.draft(rows, token_ids, level, np.ones(len(rows), np.int32))
        found[rows, i] = np.where(numbers > 0, drafts[:, 0], -1)
    index.finish()
    return [guesses[: end - prompt_len] for guesses, end in zip(found, ends, strict=True)]


def _proposals(response: Int32Array, guesses: Int32Array, rates: np.ndarray, share: float) -> Proposals:
    """Drawn by the response's own seed; `share`: of the tokens of its line that the index says rightly."""
    num, num_tokens = len(response), len(rates)
    luck, whim = np.random.default_rng(zlib.crc32(response.tobytes())).random((2, num))
    agrees = guesses == response
    says = np.where((guesses >= 0) & (whim < AGREEMENT), guesses, NO_TOKEN)  # where it is wrong
    tokens = np.full((num, num_tokens), -1, np.int32)
    is_right = np.ones(num, bool)  # all that it has drafted so far
    for depth, rate in enumerate(rates[:num]):
        here = slice(depth, num)  # behind i tokens, the one in the place i + depth
        harder = EASIER * share / (1 - share)
        rate = np.where(agrees[here], 1 - (1 - rate) * EASIER, rate - (1 - rate) * harder)
        goes_on = is_right[: num - depth]
        is_right = goes_on & (luck[here] < rate)
        wrong = np.where(goes_on & ~agrees[here], says[here], NO_TOKEN - depth)
        tokens[: num - depth, depth] = np.where(is_right, response[here], wrong)
    log_odds = np.array([math.log(max(rate, 1e-6) / max(1 - rate, 1e-6)) for rate in rates], np.float32)
    return Proposals(tokens, np.broadcast_to(log_odds, tokens.shape))
