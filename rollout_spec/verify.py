"""Lossless verification of draft tokens, vectorised in plain torch: no kernel, no loop over requests.

Two methods. *Coupled* (`coupled_sample`) draws the target's own token at every position with noise that is a
function of the request and the position, and keeps the draft as far as it is the same: what comes out does
not depend on what was drafted. *Standard* (`rejection_sample`) is speculative-sampling rejection (Leviathan
et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318) with the names and signatures of vLLM's
`vllm.v1.sample.rejection_sampler`, so that a function here can take its counterpart's place on any device.
Layout, as there: the draft tokens of all requests stand in one flat row, `cu_num_draft_tokens[i]` is the end
of request i's.

Operations, views and copies apart, all of which torch_npu has, to which come those of `noise`: add, amax,
arange, argmax, cat, clamp, cumprod, cumsum, div, eq, exp, exponential, floor_divide, full, gather, ge, gt,
index, index_put, index_select, le, log, lt, masked_fill, mul, nonzero, ones, rand, remainder,
repeat_interleave, scatter, softmax, sub, sum, uniform, where, zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollout_spec import noise

PLACEHOLDER_TOKEN_ID = -1
GREEDY_TEMPERATURE = 0  # vLLM up to 0.11 wrote -1
BLOCK_SIZE = 256  # of the vocabulary, in the keyed race and in an argmax
# Logits whose softmax is held at a time, by whole rows: what fits into a CPU's cache; elsewhere as many as
# make a launch worth its time.
CHUNK_SIZES = {"cpu": 1 << 20}
CHUNK_SIZE = 1 << 24


def keyed_sample(logits: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Draw one token a row, by noise that depends on the row's key and position only.

    Two races of probability / Exp(1) noise (Gumbel's trick in linear space): one between blocks of 256
    tokens, by their sums, one between the tokens of the block that won. A race is won in proportion to the
    masses that run, so a token is drawn with (its block's share) x (its share of the block), the softmax; and
    a row needs noise for vocab_size / 256 + 256 runners instead of one for every token. A block's sum lies
    between its largest probability and 256 times that, so most blocks cannot win and are not summed. Ties go
    to the lowest token id.

    Args:
        logits: float32 [n, vocab_size]; -inf where a token must not be drawn.
        keys: int64 [n], not negative (`noise.make_key`).
        positions: int64 [n], the token's place in its sequence, prompt included.

    Returns:
        int64 [n]. A row's token does not depend on the other rows.

    Memory: one temporary of a chunk's size (4 MiB on a CPU, 64 MiB elsewhere) or of the logits', whichever is
    less, and about 12 x (256 + vocab_size / 256) words a row.
    """
    return _keyed_race(logits, _drawn(keys, positions, logits.shape[-1]))


def _drawn(keys: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The noise of both races: of the tokens inside a block, then of the blocks."""
    return noise.exponential(keys, positions, BLOCK_SIZE + -(-vocab_size // BLOCK_SIZE))


def _keyed_race(logits: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    blocks, runners = _split(logits), drawn[:, BLOCK_SIZE:]
    peaks = _peaks(*blocks)
    top = peaks.amax(dim=-1, keepdim=True)
    least = (peaks - top).exp_().div_(runners)
    can_win = least >= least.amax(dim=-1, keepdim=True) / (BLOCK_SIZE + 1)
    block = _masses(*blocks, top, can_win).div_(runners).argmax(dim=-1, keepdim=True)
    return _token(block, _race_inside(logits, block, drawn))


def shortfall(
    logits: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """By how much a token missed being drawn: 0 for the token that `keyed_sample` draws.

    The larger of its block's and its own distance to the winner, in units of (logit + Gumbel noise): about
    the least error of a logit that could have made it win.

    Args:
        token_ids: int64 [n]; the other arguments as in `keyed_sample`.

    Returns:
        float32 [n]; inf for a token of probability 0.
    """
    blocks, drawn = _split(logits), _drawn(keys, positions, logits.shape[-1])
    peaks = _peaks(*blocks)
    top = peaks.amax(dim=-1, keepdim=True)
    masses = _masses(*blocks, top, torch.ones_like(peaks, dtype=torch.bool))
    block = (token_ids // BLOCK_SIZE).unsqueeze(-1)
    inside = _race_inside(logits, block, drawn)
    missed = torch.cat(
        [
            _missed(masses / drawn[:, BLOCK_SIZE:], block),
            _missed(inside, (token_ids % BLOCK_SIZE).unsqueeze(-1)),
        ],
        dim=-1,
    )
    return missed.amax(dim=-1)


def _missed(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    reached = scores.log()
    return reached.amax(dim=-1, keepdim=True) - reached.gather(-1, chosen)


def _masses(whole: torch.Tensor, rest: torch.Tensor, top: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The sums of exp(logit - the row's largest) of the blocks that are wanted, [n, number of blocks], or 0.

    Args:
        top: the largest logit of each row, [n, 1].
        wanted: bool, of the result's shape; a last block that is not whole is always summed.
    """
    masses = torch.zeros_like(wanted, dtype=top.dtype)
    for chunk in wanted[:, : whole.shape[1]].nonzero().split(_num_rows(top.device, BLOCK_SIZE)):
        rows, blocks = chunk.unbind(-1)
        masses[rows, blocks] = whole[rows, blocks].sub_(top[rows]).exp_().sum(dim=-1)
    if rest.shape[-1]:
        masses[:, -1] = (rest - top).exp_().sum(dim=-1)
    return masses


def _race_inside(logits: torch.Tensor, block: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """The scores of the tokens of one block a row, [n, BLOCK_SIZE]; `block` is int64 [n, 1]."""
    return _inside(logits, block).softmax(dim=-1, dtype=torch.float32) / drawn[:, :BLOCK_SIZE]


def _inside(values: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """One block's values a row, [n, BLOCK_SIZE]; -inf beyond the vocabulary."""
    token_ids = block * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=values.device)
    last = values.shape[-1] - 1
    return values.gather(-1, token_ids.clamp(max=last)).masked_fill_(token_ids > last, -torch.inf)


def _token(block: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The best token of one block a row, int64 [n]; `block` is int64 [n, 1]."""
    return (block * BLOCK_SIZE).squeeze(-1).add_(scores.argmax(dim=-1))


def _peaks(whole: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Each block's largest value, [n, number of blocks]."""
    if not rest.shape[-1]:
        return whole.amax(dim=-1)
    parts = [whole.amax(dim=-1)] if whole.shape[1] else []
    return torch.cat([*parts, rest.amax(dim=-1, keepdim=True)], dim=-1)


def _split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the whole blocks, [n, number of whole blocks, BLOCK_SIZE], and of what is behind them."""
    num_whole = values.shape[-1] // BLOCK_SIZE
    end = num_whole * BLOCK_SIZE
    return values[:, :end].unflatten(-1, (num_whole, BLOCK_SIZE)), values[:, end:]


def _argmax(values: torch.Tensor) -> torch.Tensor:
    """The lowest index of each row's largest value, int64 [n]; torch's is slow on a CPU for long rows."""
    block = _peaks(*_split(values)).argmax(dim=-1, keepdim=True)
    return _token(block, _inside(values, block))


def _num_rows(device: torch.device, length: int) -> int:
    """Of how many rows of this length memory should hold temporaries at a time."""
    return max(1, CHUNK_SIZES.get(device.type, CHUNK_SIZE) // length)


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
        device: torch.device,
    ) -> None:
        counts, requests = np.array(num_draft_tokens), np.arange(len(num_draft_tokens))
        drafting = requests.repeat(counts)
        offsets = np.arange(len(drafting)) - (counts.cumsum() - counts)[drafting]
        rows, ahead = np.concatenate([drafting, requests]), np.concatenate([offsets, counts])
        columns = np.stack([np.asarray(keys)[rows], np.asarray(positions)[rows] + ahead, rows])
        self._keys, self._positions, self.requests = torch.from_numpy(columns).to(device)
        self._drawn: torch.Tensor | None = None
        self.num_draft_tokens, self.num_tokens = num_draft_tokens, len(drafting)

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """`keyed_sample` at the draft positions, int64 [num_tokens]."""
        return _keyed_race(logits, self._noise(logits.shape[-1])[: self.num_tokens])

    def sample_behind(self, logits: torch.Tensor) -> torch.Tensor:
        """`keyed_sample` behind the drafts, int64 [batch_size]."""
        return _keyed_race(logits, self._noise(logits.shape[-1])[self.num_tokens :])

    def _noise(self, vocab_size: int) -> torch.Tensor:
        if self._drawn is None:
            self._drawn = _drawn(self._keys, self._positions, vocab_size)
        return self._drawn


def coupled_sample(
    draft_token_ids: torch.Tensor,
    max_spec_len: int,
    target_logits: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    sampling_metadata: Any,
    step: KeyedStep,
) -> torch.Tensor:
    """Draw the target's own tokens; keep them up to and with the first that differs from the draft.

    For drafts that are certain (a point mass) a draft token is accepted with the probability that rejection
    sampling accepts it, and neither uniform numbers nor recovered tokens are needed.

    Args:
        draft_token_ids: int [num_tokens].
        max_spec_len: the largest number of a request's draft tokens, or more.
        target_logits: float32 [num_tokens, vocab_size], temperature, top-k and top-p applied.
        bonus_token_ids: int [batch_size, 1], drawn by `step.sample_behind`.
        sampling_metadata: vLLM's; `temperature`, `all_greedy` and `all_random` are read.

    Returns:
        int32 [batch_size, max_spec_len + 1]: the target's tokens, then -1.

    Memory: as `keyed_sample`; never more than one temporary of the ragged logits' size.
    """
    if sampling_metadata.all_greedy:
        own = _argmax(target_logits)
    else:
        own = step.sample(target_logits)
        if not sampling_metadata.all_random:
            greedy = sampling_metadata.temperature <= GREEDY_TEMPERATURE
            own = torch.where(greedy[step.requests[: step.num_tokens]], _argmax(target_logits), own)

    rows = _padded_rows(step.num_draft_tokens, max_spec_len, target_logits.device)
    tokens = torch.cat([own, bonus_token_ids.view(-1).long()])[rows]
    columns, num_accepted = _num_accepted(own == draft_token_ids, rows)
    return torch.where(columns <= num_accepted, tokens, PLACEHOLDER_TOKEN_ID).int()


def _padded_rows(num_draft_tokens: list[int], max_spec_len: int, device: torch.device) -> torch.Tensor:
    """[batch_size, max_spec_len + 1]: where a request's draft tokens stand, then num_tokens + its number."""
    counts, offsets = np.array(num_draft_tokens)[:, np.newaxis], np.arange(max_spec_len + 1)
    ends = counts.cumsum(axis=0)
    behind = ends[-1] + np.arange(len(counts))[:, np.newaxis]
    return torch.from_numpy(np.where(offsets < counts, ends - counts + offsets, behind)).to(device)


def _num_accepted(accepted: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers 0 to max_spec_len, and how many draft tokens come before a request's first that fails.

    Args:
        accepted: bool [num_tokens].
        rows: `_padded_rows`.

    Returns:
        int64 [max_spec_len + 1] and [batch_size, 1].
    """
    verdicts = torch.cat([accepted, accepted.new_zeros(rows.shape[0])])[rows].long()
    columns = torch.arange(rows.shape[1], device=rows.device)
    return columns, verdicts.cumprod(dim=-1).sum(dim=-1, keepdim=True)


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat each request's value for each of its tokens.

    Args:
        x: [batch_size], any dtype.
        cu_num_tokens: [batch_size], cumulative number of tokens.
        num_tokens: the last of these.
        replace_from, replace_to: a value of x to be replaced, and by what.

    Returns:
        [num_tokens], of x's dtype.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return torch.repeat_interleave(values, counts, output_size=num_tokens)


def rejection_sample(
    draft_token_ids: torch.Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    cu_num_draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_logits: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    sampling_metadata: Any,
    synthetic_mode: bool = False,
    synthetic_conditional_rates: torch.Tensor | None = None,
    use_fp64_gumbel: bool = False,
    target_is_probs: bool = False,
) -> torch.Tensor:
    """Accept a prefix of every draft and add one token of the target's own.

    Args:
        draft_token_ids: int [num_tokens].
        num_draft_tokens: per request, 0 included.
        max_spec_len: the largest of these.
        cu_num_draft_tokens: int [batch_size].
        draft_probs: [num_tokens, vocab_size], or None for drafts that are certain (a point mass).
        target_logits: float32 [num_tokens, vocab_size], temperature, top-k and top-p applied.
        bonus_token_ids: int [batch_size, 1], the target's token behind a fully accepted draft.
        sampling_metadata: vLLM's; `temperature`, `all_greedy`, `all_random` and `generators` are read.
        use_fp64_gumbel: draw the recovered tokens' noise in float64.
        target_is_probs: `target_logits` holds their softmax, as vllm-ascend 0.11 hands it on.

    Returns:
        int32 [batch_size, max_spec_len + 1]: accepted tokens, then the recovered or bonus token, then -1.

    Raises:
        ValueError: synthetic acceptance is asked for; it is a benchmark's mode and not lossless.

    Memory: one temporary of a chunk's size, as in `keyed_sample`, of the logits' or of four rows', and of two
    more rows with `draft_probs`.
    """
    if synthetic_mode or synthetic_conditional_rates is not None:
        raise ValueError(
            "rejection_sample_method=synthetic is not lossless and is not supported by rollout_spec"
        )
    device, num_tokens = target_logits.device, draft_token_ids.shape[0]
    drafts = draft_token_ids.long()
    if sampling_metadata.all_greedy:
        accepted = _argmax(target_logits) == drafts
    else:
        uniform = _uniform(num_tokens, num_draft_tokens, sampling_metadata.generators, device)
        chosen = drafts.unsqueeze(-1)
        ratio = _probs_of(target_logits, chosen, target_is_probs).squeeze(-1).double()
        if draft_probs is not None:
            proposed = draft_probs.gather(-1, chosen).squeeze(-1).double()
            ratio = torch.where(proposed > 0, ratio / proposed, torch.zeros_like(ratio))
        # uniform is in [0, 1): strictly less, so that a token of probability 0 is never accepted
        accepted = uniform < ratio
        if not sampling_metadata.all_random:
            greedy = sampling_metadata.temperature <= GREEDY_TEMPERATURE
            greedy = expand_batch_to_tokens(greedy, cu_num_draft_tokens, num_tokens)
            accepted = torch.where(greedy, _argmax(target_logits) == drafts, accepted)

    rows = _padded_rows(num_draft_tokens, max_spec_len, device)
    columns, num_accepted = _num_accepted(accepted, rows)
    last = bonus_token_ids.to(torch.int32).view(-1, 1).clone()
    at = rows.gather(-1, num_accepted).squeeze(-1)
    rejected = (at < num_tokens).nonzero().squeeze(-1)
    at = at[rejected]
    size = _num_rows(device, 4 * target_logits.shape[-1])  # logits, probabilities, noise, a margin
    chunks = zip(rejected.split(size), at.split(size), strict=True)
    last[rejected, 0] = torch.cat(
        [
            _own_tokens(
                chunk, target_logits[rows], None if draft_probs is None else draft_probs[rows], drafts[rows],
                sampling_metadata, use_fp64_gumbel, target_is_probs,
            )
            for chunk, rows in chunks
        ]
    )  # fmt: skip
    tokens = torch.cat([draft_token_ids.int(), last.view(-1)])[rows]
    return torch.where(columns < num_accepted, tokens, PLACEHOLDER_TOKEN_ID).scatter_(-1, num_accepted, last)


def _probs_of(logits: torch.Tensor, token_ids: torch.Tensor, is_probs: bool) -> torch.Tensor:
    """The probability of a token of each row, [n, 1]; `token_ids` is int64 [n, 1]."""
    if is_probs:
        return logits.gather(-1, token_ids)
    size = _num_rows(logits.device, logits.shape[-1])
    pairs = zip(logits.split(size), token_ids.split(size), strict=True)
    return torch.cat([chunk.softmax(dim=-1).gather(-1, tokens) for chunk, tokens in pairs])


def sample_recovered_tokens(
    max_spec_len: int,
    num_draft_tokens: list[int],
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    sampling_metadata: Any,
    device: torch.device,
    use_fp64_gumbel: bool = False,
) -> torch.Tensor:
    """Draw, at every draft position, the token that replaces the draft token if it is the first one rejected.

    The distribution is max(target - draft, 0), normalised; for a point-mass draft the target's without the
    draft token. An exponential race decides: argmax of probability / Exp(1) noise.

    For callers of the counterparts; `rejection_sample` draws for the requests that reject only. The peak is a
    float32 [batch, vocab_size] of noise, as theirs, whose random stream it follows.

    Args:
        target_probs: float32 [num_tokens, vocab_size]; the other arguments as in `rejection_sample`.

    Returns:
        [num_tokens], of draft_token_ids' dtype.
    """
    generators = {i: g for i, g in sampling_metadata.generators.items() if num_draft_tokens[i]}
    requests = torch.arange(len(num_draft_tokens), device=device)
    drawn = _noise(requests, target_probs.shape[-1], generators, use_fp64_gumbel)
    requests = expand_batch_to_tokens(requests, cu_num_draft_tokens, draft_token_ids.shape[0])
    chunks = torch.arange(draft_token_ids.shape[0], device=device).split(
        _num_rows(device, target_probs.shape[-1])
    )
    tokens = [
        _race(
            target_probs[rows], None if draft_probs is None else draft_probs[rows],
            draft_token_ids[rows].long(), drawn[requests[rows]],
        )
        for rows in chunks
    ]  # fmt: skip
    return torch.cat(tokens).to(draft_token_ids.dtype)


def _own_tokens(
    requests: torch.Tensor,
    logits: torch.Tensor,
    draft_probs: torch.Tensor | None,
    drafts: torch.Tensor,
    sampling_metadata: Any,
    use_fp64_gumbel: bool,
    is_probs: bool,
) -> torch.Tensor:
    """The target's own tokens, int32 [n], of n requests at their first rejected draft tokens."""
    if sampling_metadata.all_greedy:
        return _argmax(logits).int()
    drawn = _noise(requests, logits.shape[-1], sampling_metadata.generators, use_fp64_gumbel)
    target_probs = logits if is_probs else logits.softmax(dim=-1)
    recovered = _race(target_probs, draft_probs, drafts, drawn)
    if not sampling_metadata.all_random:
        greedy = sampling_metadata.temperature[requests] <= GREEDY_TEMPERATURE
        recovered = torch.where(greedy, _argmax(logits), recovered)
    return recovered.int()


def _race(
    target_probs: torch.Tensor, draft_probs: torch.Tensor | None, drafts: torch.Tensor, drawn: torch.Tensor
) -> torch.Tensor:
    if draft_probs is not None:
        return _argmax((target_probs - draft_probs).clamp_(min=0).div_(drawn))
    return _argmax((target_probs / drawn).scatter_(-1, drafts.unsqueeze(-1), -1.0))


def _uniform(
    num_tokens: int, num_draft_tokens: list[int], generators: dict[int, torch.Generator], device: torch.device
) -> torch.Tensor:
    """float64 [num_tokens]: float32 would draw an exact 0 too often. A seeded request uses its generator."""
    uniform = torch.rand(num_tokens, dtype=torch.float64, device=device)
    if generators:
        ends = torch.tensor(num_draft_tokens).cumsum(0).tolist()
        for i, generator in generators.items():
            if num_draft_tokens[i]:
                uniform[ends[i] - num_draft_tokens[i] : ends[i]].uniform_(generator=generator)
    return uniform


def _noise(
    requests: torch.Tensor, vocab_size: int, generators: dict[int, torch.Generator], use_fp64: bool
) -> torch.Tensor:
    """Exp(1) noise, one row for each of the requests, int64 [n]; a seeded one draws from its generator."""
    dtype = torch.float64 if use_fp64 else torch.float32
    drawn = torch.empty(requests.shape[0], vocab_size, dtype=dtype, device=requests.device).exponential_()
    if generators:
        for row, request in enumerate(requests.tolist()):
            if request in generators:
                drawn[row].exponential_(generator=generators[request])
    # An exact 0 would make 0 / 0 of a masked token, and argmax prefers a NaN.
    return drawn.clamp_(min=torch.finfo(dtype).tiny)
