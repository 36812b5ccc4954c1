"""Drawing tokens with noise that is a function of the request and the position, never of the drafts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from rollout_spec import noise
from rollout_spec.blocks import (
    BLOCK_SIZE,
    best_token,
    block_peaks,
    block_sums,
    block_values,
    chunk_size,
    rows_at_a_time,
    split_blocks,
)

# Of logits of at most so small a part of a chunk all blocks are summed: to find those that can win takes more
# operations, and waits for the device.
SMALL = 16
SUMMED = 16  # values added at a time: `_sums`
WITHIN = 32  # of a row's largest logit lies that of the block that wins: `_race_inside`


def keyed_sample(logits: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Draw one token a row, by noise that depends on the row's key and position only.

    Two races of probability / Exp(1) noise (Gumbel's trick in linear space): one between blocks of 128
    tokens, by their sums, one between the tokens of the block that won. A race is won in proportion to the
    masses that run, so a token is drawn with (its block's share) x (its share of the block), the softmax; and
    a row needs noise for vocab_size / 128 + 128 runners instead of one for every token. A block's sum lies
    between its largest probability and 128 times that, so most blocks cannot win; they are not summed, but
    where the logits are small (SMALL). Ties go to the lowest token id.

    Args:
        logits: float32 [n, vocab_size]; -inf where a token must not be drawn.
        keys: int64 [n], not negative (`noise.make_key`).
        positions: int64 [n], the token's place in its sequence, prompt included.

    Returns:
        int64 [n]. A row's token does not depend on the other rows.

    Memory: one temporary of a chunk's size (4 MiB on a CPU, 64 MiB elsewhere) or of 3/4 of the logits',
    whichever is less, and at most 32 x (128 + vocab_size / 128) bytes a row, less than 0.1 of its logits
    with a vocabulary of 32,000 or more. Where the logits are at most a 16th of a chunk it has their size.
    """
    return _keyed_race(logits, _drawn(_seeds(keys, positions), logits))


def num_drawn(vocab_size: int) -> int:
    """How many values of noise a token takes: one for each token of a block, one for each block."""
    return BLOCK_SIZE + -(-vocab_size // BLOCK_SIZE)


def _seeds(keys: torch.Tensor, positions: torch.Tensor) -> npt.NDArray[np.int64]:
    """Of keys and positions on any device."""
    return noise.row_seeds(keys.cpu(), positions.cpu())


def _drawn(seeds: npt.NDArray[np.int64], logits: torch.Tensor) -> torch.Tensor:
    """The noise of both races, of the tokens inside a block, then of the blocks, where the logits are."""
    return noise.exponential(seeds, num_drawn(logits.shape[-1]), logits.device)


def _keyed_race(logits: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    blocks, runners = split_blocks(logits), drawn[:, BLOCK_SIZE:]
    if SMALL * logits.numel() <= chunk_size(logits.device):
        top = logits.amax(dim=-1, keepdim=True)
        masses = _masses(*blocks, top)
    else:
        peaks = block_peaks(*blocks)
        top = peaks.amax(dim=-1, keepdim=True)
        least = (peaks - top).exp_().div_(runners)
        cannot_win = least < least.amax(dim=-1, keepdim=True) / (BLOCK_SIZE + 1)
        # None of a row that has no number: it gets the token that it gets where all blocks are summed.
        masses = _masses_of(cannot_win.logical_not_(), *blocks, top)
    block = masses.div_(runners).argmax(dim=-1, keepdim=True)
    return best_token(block, _race_inside(logits, block, top, drawn))


def race(masses: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Draw one token a row in proportion to its mass, by the two races of `keyed_sample`.

    Args:
        masses: float32 [n, vocab_size], not negative.
        drawn: Exp(1) noise, float32 [n, num_drawn(vocab_size)].

    Returns:
        int64 [n].
    """
    sums = block_sums(*split_blocks(masses))
    block = sums.div_(drawn[:, BLOCK_SIZE:]).argmax(dim=-1, keepdim=True)
    return best_token(block, block_values(masses, block).div_(drawn[:, :BLOCK_SIZE]))


def shortfall(
    logits: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """By how much a token missed being drawn: 0 for the token that `keyed_sample` draws.

    The larger of its block's and its own distance to the winner, in units of (logit + Gumbel noise): about
    the least error of a logit that could have made it win.

    Args:
        token_ids: int64 [n]; the other arguments as in `keyed_sample`.

    Returns:
        float32 [n]; inf for a token of probability 0, also where float32 can only say 0 of its whole block
        (e**-87 or less of the likeliest token's).
    """
    drawn = _drawn(_seeds(keys, positions), logits)
    top = logits.amax(dim=-1, keepdim=True)
    masses = _masses(*split_blocks(logits), top)
    block = (token_ids // BLOCK_SIZE).unsqueeze(-1)
    # A block that cannot win may have nothing above 0 relative to the row's largest logit.
    peak = block_values(logits, block).amax(dim=-1, keepdim=True)
    inside = _race_inside(logits, block, torch.where(peak < top - WITHIN, peak, top), drawn)
    missed = torch.cat(
        [
            _missed(masses / drawn[:, BLOCK_SIZE:], block),
            _missed(inside, (token_ids % BLOCK_SIZE).unsqueeze(-1)),
        ],
        dim=-1,
    )
    # Not a number: nothing of its block can be drawn, or the logits have no number.
    return torch.where(missed >= 0, missed, torch.inf).amax(dim=-1)


def _missed(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    reached = scores.log()
    return reached.amax(dim=-1, keepdim=True) - reached.gather(-1, chosen)


def _masses(whole: torch.Tensor, rest: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """The blocks' sums of exp(logit - the row's largest), [n, number of blocks].

    Args:
        top: the largest logit of each row, [n, 1].
    """
    masses = _sums((whole - top.unsqueeze(-1)).exp_())
    return torch.cat([masses, _mass_of_rest(rest, top)], dim=-1) if rest.shape[-1] else masses


def _masses_of(
    wanted: torch.Tensor, whole: torch.Tensor, rest: torch.Tensor, top: torch.Tensor
) -> torch.Tensor:
    """`_masses`, bit for bit, of the blocks that are wanted, of others 0.

    Args:
        wanted: bool, of the result's shape; a last block that is not whole is always summed.
    """
    masses = torch.zeros_like(wanted, dtype=top.dtype)
    num = min(rows_at_a_time(top.device, BLOCK_SIZE), 3 * wanted.numel() // 4 + 1)  # blocks at a time
    for chunk in wanted[:, : whole.shape[1]].nonzero().split(num):
        rows, blocks = chunk.unbind(-1)
        masses[rows, blocks] = _sums(whole[rows, blocks].sub_(top.index_select(0, rows)).exp_())
    if rest.shape[-1]:
        masses[:, -1:] = _mass_of_rest(rest, top)
    return masses


def _mass_of_rest(rest: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """Of the block behind the whole ones, [n, 1]."""
    last = (rest - top).exp_()
    if missing := -last.shape[-1] % SUMMED:
        last = torch.cat([last, last.new_zeros(len(last), missing)], dim=-1)
    return _sums(last.unsqueeze(1))


def _sums(values: torch.Tensor) -> torch.Tensor:
    """Sums of at most BLOCK_SIZE values, those of the last dimension; a row's does not depend on the others.

    CUDA's order of additions depends on the number of rows where more than 32 values are added at a time.
    """
    *shape, size = values.shape
    return values.view(*shape, size // SUMMED, SUMMED).sum(dim=-1).sum(dim=-1)


def _race_inside(
    logits: torch.Tensor, block: torch.Tensor, top: torch.Tensor, drawn: torch.Tensor
) -> torch.Tensor:
    """The scores of the tokens of one block a row, [n, BLOCK_SIZE].

    Relative to the row's largest logit: a block that wins the other race has one WITHIN of it, since no
    two values of noise are further apart than 2**38 and a sum has 2**7 tokens.

    Args:
        block: int64 [n, 1].
        top: what 1 stands for in each row, the largest logit of the row or of the block, [n, 1].
    """
    return block_values(logits, block).sub_(top).exp_().div_(drawn[:, :BLOCK_SIZE])


class KeyedStep:
    """A step's rows for keyed sampling: all draft positions, then those behind the drafts.

    Their noise is drawn together, when the first logits come.

    Args:
        keys: int64 [batch_size], each request's.
        positions: int64 [batch_size], of each request's first token in this step.
        num_draft_tokens: per request, 0 included.
    """

    def __init__(
        self,
        keys: npt.ArrayLike,
        positions: npt.ArrayLike,
        num_draft_tokens: list[int],
    ) -> None:
        counts, requests = np.array(num_draft_tokens), np.arange(len(num_draft_tokens))
        drafting = requests.repeat(counts)
        offsets = np.arange(len(drafting)) - (counts.cumsum() - counts)[drafting]
        rows, ahead = np.concatenate([drafting, requests]), np.concatenate([offsets, counts])
        self._seeds = noise.row_seeds(np.asarray(keys)[rows], np.asarray(positions)[rows] + ahead)
        self._drafting = drafting
        self._drawn: torch.Tensor | None = None
        self._owed: torch.Tensor | None = None  # logits behind the drafts, of tokens still to be drawn
        self.num_draft_tokens, self.num_tokens = num_draft_tokens, len(drafting)

    def requests(self, device: torch.device) -> torch.Tensor:
        """The number of each draft token's request, int64 [num_tokens]."""
        return torch.from_numpy(self._drafting).to(device)

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """`keyed_sample` at the draft positions, int64 [num_tokens]."""
        return _keyed_race(logits, self._noise(logits)[: self.num_tokens])

    def sample_behind(self, logits: torch.Tensor) -> torch.Tensor:
        """`keyed_sample` behind the drafts, int64 [batch_size].

        In a step with drafts that is for `sample_owed` to do, once it is known which of them have held to
        their ends, and what comes back is zeros: nobody needs a token behind one that is rejected. `logits`
        are kept until then.
        """
        if not self.num_tokens:
            return _keyed_race(logits, self._noise(logits))
        self._owed = logits
        return torch.zeros(len(logits), dtype=torch.int64, device=logits.device)

    @property
    def owes_tokens(self) -> bool:
        """Whether `sample_behind` has left its tokens to `sample_owed`."""
        return self._owed is not None

    def sample_owed(self, requests: torch.Tensor) -> torch.Tensor:
        """The tokens behind the drafts of these requests; both int64 [m]. After it no others can be drawn."""
        assert self._owed is not None
        logits, self._owed = self._owed, None
        if not len(requests):
            return requests
        drawn = self._noise(logits)[self.num_tokens :]
        if len(requests) == len(logits):
            return _keyed_race(logits, drawn)
        # Half for the rows, half for what a race makes of them.
        size = min(rows_at_a_time(logits.device, 2 * logits.shape[-1]), len(logits) // 2)
        chunks = requests.split(size)
        return torch.cat([_keyed_race(logits.index_select(0, c), drawn.index_select(0, c)) for c in chunks])

    def _noise(self, logits: torch.Tensor) -> torch.Tensor:
        if self._drawn is None:
            self._drawn = _drawn(self._seeds, logits)
        return self._drawn
