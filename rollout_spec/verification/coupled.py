"""Coupled verification: what is sampled does not depend on drafts.

`coupled_verify` draws the target's own token at every position of a draft and keeps the draft as far as it
is the same. A token's noise is a function of the request's key and the position. Plain steps draw with the
same noise, so a request gets the same tokens whatever was drafted, in any batch. A draft token is accepted
exactly as often as by rejection sampling: with the target's probability of it.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from rollout_spec.verification import blocks, noise
from rollout_spec.verification.blocks import BLOCK_SIZE
from rollout_spec.verification.prefixes import matching_prefixes
from rollout_spec.verification.transfers import just_wait, to_device

# Values that are added at a time: `_sums`.
SUM_SIZE = 16
# A block that wins has a logit this close to the row's largest: `_token_scores`.
WINNING_DISTANCE = 32


class StepNoise:
    """The noise of a step's rows: of all draft positions, then of the positions after the drafts.

    Attributes:
        keys: int64 [batch_size], each request's (`noise.make_key`).
        positions: int64 [batch_size], of each request's first token in this step.
        num_draft_tokens: per request, 0 included.
        before_wait: called each time before the host waits for the device in this step: it can do something
            useful meanwhile. All that waits in verification is given the step's noise, and this with it.
    """

    def __init__(
        self,
        keys: npt.ArrayLike,
        positions: npt.ArrayLike,
        num_draft_tokens: list[int],
        before_wait: Callable[[], None] = just_wait,
    ) -> None:
        counts, requests = np.array(num_draft_tokens), np.arange(len(num_draft_tokens))
        self.keys, self.positions = np.asarray(keys, np.int64), np.asarray(positions, np.int64)
        self.num_draft_tokens, self.before_wait = num_draft_tokens, before_wait
        self.draft_requests = requests.repeat(counts)  # the request of each draft token, int64 [num_tokens]
        num_tokens = len(self.draft_requests)
        offsets = np.arange(num_tokens) - (counts.cumsum() - counts)[self.draft_requests]
        rows, ahead = np.concatenate([self.draft_requests, requests]), np.concatenate([offsets, counts])
        self._seeds = noise.row_seeds(self.keys[rows], self.positions[rows] + ahead)
        self._noise_values: torch.Tensor | None = None

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """What is drawn at the draft positions, int64 [num_tokens], of logits [num_tokens, vocab_size]."""
        return race(logits, self._noise(logits)[: len(self.draft_requests)], self.before_wait)

    def sample_after(self, logits: torch.Tensor) -> torch.Tensor:
        """What is drawn after the drafts, int64 [batch_size], of logits [batch_size, vocab_size]."""
        return race(logits, self._noise(logits)[len(self.draft_requests) :], self.before_wait)

    def _noise(self, logits: torch.Tensor) -> torch.Tensor:
        """All rows' noise; computed together, when the first logits come."""
        if self._noise_values is None:
            self._noise_values = race_noise(self._seeds, logits)
        return self._noise_values


def coupled_verify(
    draft_token_ids: torch.Tensor,
    max_spec_len: int,
    target_logits: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    is_sampled: torch.Tensor | bool,
    step_noise: StepNoise,
) -> torch.Tensor:
    """Draw the target's own tokens; keep them up to and with the first that differs from the draft.

    Args:
        draft_token_ids: int [num_tokens], of all requests, one after the other.
        max_spec_len: the largest number of a request's draft tokens, or more.
        target_logits: float32 [num_tokens, vocab_size], temperature, top-k and top-p applied.
        bonus_token_ids: int [batch_size, 1], the target's token after each draft (`sample_after`).
        is_sampled: bool [batch_size], or one for all: else a request gets the likeliest tokens.

    Returns int32 [batch_size, max_spec_len + 1]: the target's tokens, then -1. Memory: see `race`.
    """
    if is_sampled is False:
        own = blocks.argmax(target_logits)
    else:
        own = step_noise.sample(target_logits)
        if is_sampled is not True:
            requests = to_device(step_noise.draft_requests, own.device)
            own = torch.where(is_sampled[requests], own, blocks.argmax(target_logits))
    counts, before_wait = step_noise.num_draft_tokens, step_noise.before_wait
    return matching_prefixes(own, draft_token_ids, bonus_token_ids, counts, max_spec_len, before_wait)


def shortfall(
    logits: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """By how much a token missed being drawn: 0 for the token that is drawn.

    The larger of its block's and its own distance to the winner, in units of (logit + Gumbel noise): about
    the least error of a logit that could have made it win. float32 [n]; inf for a token of probability 0,
    also where float32 can only say 0 of its whole block (e**-87 or less of the likeliest token's).

    Args:
        logits: as for `race`.
        keys, positions: as for `noise.row_seeds`.
        token_ids: int64 [n].
    """
    values = race_noise(noise.row_seeds(keys.cpu(), positions.cpu()), logits)
    peaks = blocks.block_peaks(logits)
    top = peaks.amax(dim=-1, keepdim=True)
    masses = _block_masses(logits, torch.ones_like(peaks, dtype=torch.bool), top)
    block = (token_ids // BLOCK_SIZE).unsqueeze(-1)
    # Far below the row's largest logit all values underflow to 0: such a block has its own peak for a unit.
    peak = peaks.gather(-1, block)
    scores = _token_scores(logits, block, torch.where(peak < top - WINNING_DISTANCE, peak, top), values)
    of_block = _missed(masses / values[:, BLOCK_SIZE:], block)
    missed = torch.cat([of_block, _missed(scores, (token_ids % BLOCK_SIZE).unsqueeze(-1))], dim=-1)
    # Not a number: nothing of its block can be drawn, or the logits have no number.
    return torch.where(missed >= 0, missed, torch.inf).amax(dim=-1)


def _missed(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    logarithms = scores.log()
    return logarithms.amax(dim=-1, keepdim=True) - logarithms.gather(-1, chosen)


def race_noise(seeds: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The noise of a `race` of these logits, on their device: for each token of a block, then each block."""
    num_blocks = -(-logits.shape[-1] // BLOCK_SIZE)
    return noise.exponential(seeds, BLOCK_SIZE + num_blocks, logits.device)


def race(
    logits: torch.Tensor, noise_values: torch.Tensor, before_wait: Callable[[], None] = just_wait
) -> torch.Tensor:
    """Draw one token a row.

    In a race each runner's score is its probability / its Exp(1) noise, and the largest score wins: a runner
    wins as often as is its share of all probabilities (Gumbel's trick in linear space). The first race is
    between blocks of 128 tokens, with their sums, the second between the tokens of the block that has won. So
    a token is drawn with (its block's share) x (its share of the block): the softmax. That takes noise for
    vocab_size / 128 + 128 runners a row, not for every token. Ties go to the lowest token id.

    A block's sum lies between its largest probability and 128 times that. So most blocks cannot win, and
    only the others are summed.

    Args:
        logits: float32 [n, vocab_size]; -inf where a token must not be drawn.
        noise_values: `race_noise`: float32 [n, 128 + number of blocks].
        before_wait: see `StepNoise`.

    Returns int64 [n]. A row's token does not depend on the other rows.

    Memory: one temporary of 16 MiB or of the logits' size, whichever is less, and at most
    32 x (128 + vocab_size / 128) bytes a row: less than 0.1 of its logits from a vocabulary of 32,000 on.
    """
    of_blocks = noise_values[:, BLOCK_SIZE:]
    peaks = blocks.block_peaks(logits)
    top = peaks.amax(dim=-1, keepdim=True)
    least = (peaks - top).exp_().div_(of_blocks)
    # In a row of NaN no block can win; its token is fixed all the same, whatever the other rows hold.
    can_win = least >= least.amax(dim=-1, keepdim=True) / (BLOCK_SIZE + 1)
    masses = _block_masses(logits, can_win, top, before_wait)
    block = masses.div_(of_blocks).argmax(dim=-1, keepdim=True)
    return blocks.best_token(block, _token_scores(logits, block, top, noise_values))


def log_odds(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """ln(p / (1 - p)) of each row's token, int64 [n]: float32 [n], infinite where it is certain."""
    logits = logits.float()
    log_p = logits.gather(1, tokens.unsqueeze(1)).squeeze(1) - logits.logsumexp(1)
    return log_p - torch.log(-torch.expm1(log_p))


def _block_masses(
    logits: torch.Tensor, wanted: torch.Tensor, top: torch.Tensor, before_wait: Callable[[], None] = just_wait
) -> torch.Tensor:
    """The sums of exp(logit - `top`) of the blocks that are wanted, else 0: float32 [n, number of blocks].

    wanted: bool [n, number of blocks]; a last block that is not whole is always summed.
    top: the largest logit of each row, [n, 1].
    """
    whole, rest = blocks.split_blocks(logits)
    masses = torch.zeros_like(wanted, dtype=top.dtype)
    wanted = wanted[:, : whole.shape[1]]
    before_wait()
    for chunk in wanted.nonzero().split(max(1, blocks.CHUNK_SIZE // BLOCK_SIZE)):
        rows, columns = chunk.unbind(-1)
        masses[rows, columns] = _sums(whole[rows, columns].sub_(top.index_select(0, rows)).exp_())
    if rest.shape[1]:
        last = (rest - top).exp_()
        missing = last.new_zeros(len(last), -last.shape[1] % SUM_SIZE)
        masses[:, -1] = _sums(torch.cat([last, missing], dim=-1))
    return masses


def _sums(values: torch.Tensor) -> torch.Tensor:
    """Each row's sum, [n]; it does not depend on the other rows.

    CUDA's order of additions depends on the number of rows where more than 32 values are added at a time.
    """
    return values.view(len(values), values.shape[1] // SUM_SIZE, SUM_SIZE).sum(dim=-1).sum(dim=-1)


def _token_scores(
    logits: torch.Tensor, block: torch.Tensor, top: torch.Tensor, noise_values: torch.Tensor
) -> torch.Tensor:
    """The scores of the tokens of one block a row, [n, BLOCK_SIZE].

    Relative to the row's largest logit: a block that wins the other race has one WINNING_DISTANCE of it at
    most, since no two values of noise are further apart than 2**38 and a sum has 2**7 tokens.

    block: int64 [n, 1].
    top: the logit that counts as probability 1: the row's largest or the block's, [n, 1].
    """
    return blocks.block_values(logits, block).sub_(top).exp_().div_(noise_values[:, :BLOCK_SIZE])
