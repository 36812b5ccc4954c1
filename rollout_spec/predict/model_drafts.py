"""A draft model, simulated: right at given rates over recorded responses, more often where a text repeats."""

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

# What is easy for the suffix index is easy for a model. Where the index is right, the model is wrong half as
# often as on average; elsewhere it is wrong more often, so that the average is the rate that was asked for.
EASIER = 0.5
AGREEMENT = 0.4  # share of the places where both are wrong at which they draft the same token
NO_TOKEN = 2**31 - 1  # a wrong token that no text has; further ones count down from it


def simulate_model(lines: Iterable[Rollout], acceptance: Sequence[float]) -> Iterator[Rollout]:
    """The lines with a model's drafts in place of any that they had.

    A draft depends on its place in the text only, so every drafter meets the same model.

    Args:
        acceptance: how often the first, second, ... token of a draft is right where those before it are.
            There are as many tokens in a draft.
    """
    config = SpecConfig(num_speculative_tokens=1, min_survival=0.0)
    rates = np.array(acceptance)
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
    """What the suffix index alone would draft in the place of every token of each response, -1: nothing."""
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
    """Drawn with the response's own seed; `share`: how often the index is right in this line."""
    num, num_tokens = len(response), len(rates)
    luck, whim = np.random.default_rng(zlib.crc32(response.tobytes())).random((2, num))
    agrees = guesses == response
    says = np.where((guesses >= 0) & (whim < AGREEMENT), guesses, NO_TOKEN)  # where it is wrong
    tokens = np.full((num, num_tokens), -1, np.int32)
    is_right = np.ones(num, bool)  # whether all tokens of the draft so far are
    for depth, rate in enumerate(rates[:num]):
        here = slice(depth, num)  # the draft behind i tokens has its token of this depth at i + depth
        harder = EASIER * share / (1 - share)
        rate = np.where(agrees[here], 1 - (1 - rate) * EASIER, rate - (1 - rate) * harder)
        goes_on = is_right[: num - depth]
        is_right = goes_on & (luck[here] < rate)
        wrong = np.where(goes_on & ~agrees[here], says[here], NO_TOKEN - depth)
        tokens[: num - depth, depth] = np.where(is_right, response[here], wrong)
    log_odds = np.array([math.log(max(rate, 1e-6) / max(1 - rate, 1e-6)) for rate in rates], np.float32)
    return Proposals(tokens, np.broadcast_to(log_odds, tokens.shape))
