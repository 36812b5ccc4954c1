"""A draft model, simulated: right at given rates over recorded responses, more often where a text repeats."""

import dataclasses
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from rollout_spec.config import SpecConfig
from rollout_spec.drafting.native import Int32Array
from rollout_spec.predict.replay import token_matrix
from rollout_spec.predict.replay_drafters import IndexDrafter
from rollout_spec.trace import ResponseDrafts, Rollout

# What is easy for the suffix index is easy for a model. Where the index is right, the model is wrong half as
# often as on average; elsewhere it is wrong more often, so that the average is the rate that was asked for.
EASIER = 0.5
AGREEMENT = 0.4  # share of the places where both are wrong at which they draft the same token
NO_TOKEN = 2**30
"""Wrong tokens get ids from here on, which no text uses, a new one each time: otherwise the drafter would
learn that one token is always wrong."""


def with_simulated_drafts(lines: Iterable[Rollout], acceptance: Sequence[float]) -> Iterator[Rollout]:
    """The lines with a model's drafts in place of any that they had.

    A draft depends on its place in the text only, so every drafter meets the same model. It has a token for
    each of `acceptance`: how often that is right where those before it are.
    """
    config = SpecConfig(num_speculative_tokens=1, min_survival=0.0)
    index = IndexDrafter(config)
    for line in lines:
        guesses = _guesses(index, line)
        agrees = np.concatenate(guesses) == np.concatenate(line.responses)
        share = min(float(agrees.mean()) if len(agrees) else 0.0, 0.99)
        each = zip(line.responses, guesses, strict=True)
        drafts = [_drafts_in(*one, acceptance, share) for one in each]
        yield dataclasses.replace(line, model_drafts=drafts)


def _guesses(index: IndexDrafter, line: Rollout) -> list[Int32Array]:
    """What the suffix index alone would draft for every token of each response, -1: nothing."""
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


def _nums_right(
    response: Int32Array, guesses: Int32Array, acceptance: Sequence[float], share: float, draws: np.ndarray
) -> Int32Array:
    """How many tokens are right of the draft after the first i tokens of a response, [n]. `draws`: random
    numbers in [0, 1), [n], which decide it."""
    num = len(response)
    agrees = guesses == response
    harder = EASIER * share / (1 - share)
    found = np.zeros(num, np.int32)
    for depth, rate in enumerate(acceptance[:num]):
        here = slice(depth, num)  # the draft after i tokens has its token of this depth at i + depth
        rates = np.where(agrees[here], 1 - (1 - rate) * EASIER, rate - (1 - rate) * harder)
        found[: num - depth] += (found[: num - depth] == depth) & (draws[here] < rates)
    return found


def _drafts_in(
    response: Int32Array, guesses: Int32Array, acceptance: Sequence[float], share: float
) -> ResponseDrafts:
    """The model's drafts in a response. It believes of each token what is so on average.

    Where a draft becomes wrong, it has the index's own wrong guess in a share of the places. `guesses` are
    those of `_guesses`, of which a `share` is right in the line.
    """
    num, rng = len(response), np.random.default_rng(zlib.crc32(response.tobytes()))
    draws, guess_draws = rng.random((2, num))  # is it right; if not, is it the index's own guess?
    nums_right = _nums_right(response, guesses, acceptance, share, draws)
    log_odds = np.array([math.log(max(rate, 1e-6) / max(1 - rate, 1e-6)) for rate in acceptance], np.float32)
    says_guess = (guesses >= 0) & (guesses != response) & (guess_draws < AGREEMENT)
    others = rng.integers(NO_TOKEN, 2**31, (num, len(log_odds)), np.int32)
    tokens = np.full((num, len(log_odds)), -1, np.int32)
    for depth in range(min(num, len(log_odds))):
        here = slice(depth, num)
        right = nums_right[: num - depth]
        wrong = np.where((right == depth) & says_guess[here], guesses[here], others[here, depth])
        tokens[: num - depth, depth] = np.where(right > depth, response[here], wrong)
    return ResponseDrafts(tokens, np.broadcast_to(log_odds, tokens.shape))
