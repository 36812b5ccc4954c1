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
index, index_put, index_select, le, log, lt, mul, nonzero, ones, rand, remainder, repeat_interleave, scatter,
softmax, sub, sum, uniform, where, zeros.
"""

from __future__ import annotations

from typing import Any

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
    peaks = _peaks(logits)
    drawn = noise.exponential(keys, positions, BLOCK_SIZE + peaks.shape[-1])
    runners = drawn[:, BLOCK_SIZE:]
    least = (peaks - peaks.amax(dim=-1, keepdim=True)).exp() / runners
    can_win = (BLOCK_SIZE + 1) * least >= least.amax(dim=-1, keepdim=True)
    block = (_masses(logits, peaks, can_win) / runners).argmax(dim=-1, keepdim=True)
    return block.squeeze(-1) * BLOCK_SIZE + _race_inside(logits, block, drawn).argmax(dim=-1)


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
    peaks = _peaks(logits)
    drawn = noise.exponential(keys, positions, BLOCK_SIZE + peaks.shape[-1])
    masses = _masses(logits, peaks, torch.ones_like(peaks, dtype=torch.bool))
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


def _masses(logits: torch.Tensor, peaks: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The sums of exp(logit - the row's largest) of the blocks that are wanted, [n, number of blocks], or 0.

    Args:
        peaks: the largest logit of each block.
        wanted: bool, of the same shape; a last block that is not whole is always summed.
    """
    top = peaks.amax(dim=-1, keepdim=True)
    whole, rest = _split(logits)
    masses = torch.zeros_like(peaks)
    for chunk in wanted[:, : whole.shape[1]].nonzero().split(_num_rows(logits.device, BLOCK_SIZE)):
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
    return torch.where(token_ids <= last, values.gather(-1, token_ids.clamp(max=last)), -torch.inf)


def _peaks(values: torch.Tensor) -> torch.Tensor:
    """Each block's largest value, [n, number of blocks]."""
    whole, rest = _split(values)
    parts = [whole.amax(dim=-1)] if whole.shape[1] else []
    return torch.cat([*parts, rest.amax(dim=-1, keepdim=True)] if rest.shape[-1] else parts, dim=-1)


def _split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the whole blocks, [n, number of whole blocks, BLOCK_SIZE], and of what is behind them."""
    num_whole = values.shape[-1] // BLOCK_SIZE
    end = num_whole * BLOCK_SIZE
    return values[:, :end].unflatten(-1, (num_whole, BLOCK_SIZE)), values[:, end:]


def _argmax(values: torch.Tensor) -> torch.Tensor:
    """The lowest index of each row's largest value, int64 [n]; torch's is slow on a CPU for long rows."""
    block = _peaks(values).argmax(dim=-1, keepdim=True)
    return block.squeeze(-1) * BLOCK_SIZE + _inside(values, block).argmax(dim=-1)


def _num_rows(device: torch.device, length: int) -> int:
    """Of how many rows of this length memory should hold temporaries at a time."""
    return max(1, CHUNK_SIZES.get(device.type, CHUNK_SIZE) // length)


def coupled_sample(
    draft_token_ids: torch.Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    cu_num_draft_tokens: torch.Tensor,
    target_logits: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    sampling_metadata: Any,
    keys: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Draw the target's own tokens; keep them up to and with the first that differs from the draft.

    For drafts that are certain (a point mass) a draft token is accepted with the probability that rejection
    sampling accepts it, and neither uniform numbers nor recovered tokens are needed.

    Args:
        draft_token_ids: int [num_tokens].
        num_draft_tokens: per request, 0 included.
        max_spec_len: the largest of these, or more.
        cu_num_draft_tokens: int [batch_size].
        target_logits: float32 [num_tokens, vocab_size], temperature, top-k and top-p applied.
        bonus_token_ids: int [batch_size, 1], drawn by `keyed_sample` behind the whole draft.
        sampling_metadata: vLLM's; `temperature`, `all_greedy` and `all_random` are read.
        keys: int64 [batch_size], each request's.
        positions: int64 [batch_size], of each request's first draft token.

    Returns:
        int32 [batch_size, max_spec_len + 1]: the target's tokens, then -1.

    Memory: as `keyed_sample`; never more than one temporary of the ragged logits' size.
    """
    device, batch_size = target_logits.device, len(num_draft_tokens)
    lengths = torch.diff(cu_num_draft_tokens, prepend=cu_num_draft_tokens.new_zeros(1)).long()
    requests, offsets = _rows(lengths, draft_token_ids.shape[0])

    if sampling_metadata.all_greedy:
        own = _argmax(target_logits)
    else:
        own = keyed_sample(target_logits, keys[requests], positions[requests] + offsets)
        if not sampling_metadata.all_random:
            greedy = _greedy_mask(sampling_metadata, batch_size, device)
            own = torch.where(greedy[requests], _argmax(target_logits), own)

    agreed = torch.zeros(batch_size, max_spec_len + 1, dtype=torch.long, device=device)
    agreed[requests, offsets] = (own == draft_token_ids).long()
    num_accepted = agreed.cumprod(dim=-1).sum(dim=-1, keepdim=True)

    output = torch.full_like(agreed, PLACEHOLDER_TOKEN_ID)
    output[requests, offsets] = own
    output.scatter_(-1, lengths.unsqueeze(-1), bonus_token_ids.long())
    columns = torch.arange(max_spec_len + 1, device=device)
    return torch.where(columns <= num_accepted, output, PLACEHOLDER_TOKEN_ID).int()


def _rows(lengths: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each draft token its request and its place in that request's draft, int64 [num_tokens] each."""
    requests = torch.repeat_interleave(
        torch.arange(lengths.shape[0], device=lengths.device), lengths, output_size=num_tokens
    )
    starts = lengths.cumsum(0) - lengths
    return requests, torch.arange(num_tokens, device=lengths.device) - starts[requests]


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
    device, batch_size = target_logits.device, len(num_draft_tokens)
    lengths = torch.diff(cu_num_draft_tokens, prepend=cu_num_draft_tokens.new_zeros(1)).long()
    starts = cu_num_draft_tokens.long() - lengths
    requests, offsets = _rows(lengths, draft_token_ids.shape[0])
    drafts = draft_token_ids.long()
    greedy = _greedy_mask(sampling_metadata, batch_size, device)

    accepted = torch.zeros_like(drafts, dtype=torch.bool)
    if not sampling_metadata.all_random:
        accepted = _argmax(target_logits) == drafts
    if not sampling_metadata.all_greedy:
        uniform = _uniform(drafts.shape[0], num_draft_tokens, sampling_metadata.generators, device)
        chosen = drafts.unsqueeze(-1)
        ratio = _probs_of(target_logits, chosen, target_is_probs).squeeze(-1).double()
        if draft_probs is not None:
            proposed = draft_probs.gather(-1, chosen).squeeze(-1).double()
            ratio = torch.where(proposed > 0, ratio / proposed, torch.zeros_like(ratio))
        # uniform is in [0, 1): strictly less, so that a token of probability 0 is never accepted
        accepted = torch.where(greedy[requests], accepted, uniform < ratio)

    verdicts = torch.zeros(batch_size, max_spec_len + 1, dtype=torch.long, device=device)
    verdicts[requests, offsets] = accepted.long()
    num_accepted = verdicts.cumprod(dim=-1).sum(dim=-1)

    output = torch.full(
        (batch_size, max_spec_len + 1), PLACEHOLDER_TOKEN_ID, dtype=torch.int32, device=device
    )
    kept = offsets < num_accepted[requests]
    output[requests[kept], offsets[kept]] = drafts[kept].int()
    last = bonus_token_ids.view(-1).to(torch.int32).clone()
    rejected = torch.nonzero(num_accepted < lengths).squeeze(-1)
    at = (starts + num_accepted)[rejected]
    size = _num_rows(device, 4 * target_logits.shape[-1])  # logits, probabilities, noise, a margin
    chunks = zip(rejected.split(size), at.split(size), strict=True)
    last[rejected] = torch.cat(
        [
            _own_tokens(
                chunk, target_logits[rows], None if draft_probs is None else draft_probs[rows], drafts[rows],
                sampling_metadata, use_fp64_gumbel, target_is_probs,
            )
            for chunk, rows in chunks
        ]
    )  # fmt: skip
    output[torch.arange(batch_size, device=device), num_accepted] = last
    return output


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


def _greedy_mask(sampling_metadata: Any, batch_size: int, device: torch.device) -> torch.Tensor:
    if sampling_metadata.all_greedy:
        return torch.ones(batch_size, dtype=torch.bool, device=device)
    return sampling_metadata.temperature <= GREEDY_TEMPERATURE


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
