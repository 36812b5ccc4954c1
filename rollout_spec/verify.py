"""Lossless verification of draft tokens, vectorised in plain torch, without a kernel of its own.

No loop over positions or requests but over those with a generator of their own, which can draw for no
other. What would take as much memory as the logits goes in chunks of rows as large as
`blocks.rows_at_a_time` has them: of 2**20 values on a CPU, whose cache holds that: 3 rows of a vocabulary
of 152 k and 16 of one of 32 k, of which two values a token are held, and down to one in
`sample_recovered_tokens`, which holds more; elsewhere 16 times that.

Two methods. *Coupled* (`coupled_sample`) draws the target's own token at every position with noise that is a
function of the request and the position, and keeps the draft as far as it is the same: what comes out does
not depend on what was drafted. *Standard* (`rejection_sample`) is speculative-sampling rejection (Leviathan
et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318) with the names and signatures of vLLM's
`vllm.v1.sample.rejection_sampler`, so that a function here can take its counterpart's place on any device.
Layout, as there: the draft tokens of all requests stand in one flat row, `cu_num_draft_tokens[i]` is the end
of request i's.

Operations of this module, `blocks` and `keyed`, views and copies apart, all of which torch_npu has (read in
its op-plugin's list, op_plugin/config/op_plugin_functions.yaml, for torch 2.1 to 2.8; not run), to which come
those of `noise`: add, amax, arange, argmax, cat, clamp, cumsum, div, eq, exp, exponential,
floor_divide, full, gather, ge, gt, index, index_put, index_select, le, log, logical_not, lt, masked_fill,
mul, nonzero, rand, remainder, repeat_interleave, scatter, softmax, sub, sum, uniform, where, zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollout_spec import keyed
from rollout_spec.blocks import (
    BLOCK_SIZE,
    argmax,
    block_peaks,
    block_values,
    chunk_size,
    rows_at_a_time,
    split_blocks,
)
from rollout_spec.keyed import KeyedStep

PLACEHOLDER_TOKEN_ID = -1
# Of logits of at most so small a part of a chunk every sum is computed: bounds take more operations, and wait
# for the device.
FEW = 4
SLACK = 1e-4  # by how much a bound gives way, many times what float32 may be off by
GREEDY_TEMPERATURE = 0  # vLLM up to 0.11 wrote -1


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
        bonus_token_ids: int [batch_size, 1]. Where `step` owes those of sampled requests
            (`KeyedStep.sample_behind`), they are drawn here, behind the drafts that have held to their ends.
        sampling_metadata: vLLM's; `temperature`, `all_greedy` and `all_random` are read.

    Returns:
        int32 [batch_size, max_spec_len + 1]: the target's tokens, then -1.

    Memory: as `keyed.keyed_sample`, of the target's or of the bonus logits, whichever are more; up to their
    size instead of 3/4 of it where some bonus tokens are drawn. Bonus logits are kept until here.
    """
    is_mixed = not (sampling_metadata.all_greedy or sampling_metadata.all_random)
    own = argmax(target_logits) if sampling_metadata.all_greedy else step.sample(target_logits)
    if is_mixed:
        sampled = sampling_metadata.temperature > GREEDY_TEMPERATURE
        own = torch.where(sampled[step.requests(target_logits.device)], own, argmax(target_logits))

    # On the host: elsewhere each operation on so few numbers is a launch, and on a CPU torch's take longer.
    tokens = _on_host(own, bonus_token_ids)
    num_tokens = step.num_tokens
    is_same = tokens[:num_tokens] == draft_token_ids.cpu().numpy()
    rows, num_accepted = _accepted_prefixes(is_same, step.num_draft_tokens, max_spec_len)
    if step.owes_tokens and not sampling_metadata.all_greedy:
        has_held = num_accepted == step.num_draft_tokens
        if is_mixed:
            has_held &= sampled.cpu().numpy()
        (requests,) = has_held.nonzero()
        own_behind = step.sample_owed(torch.from_numpy(requests).to(own.device))
        tokens[num_tokens + requests] = own_behind.cpu().numpy()
    return _emitted(tokens, rows, num_accepted).to(own.device)


def _on_host(of_drafts: torch.Tensor, behind: torch.Tensor) -> npt.NDArray[np.int64]:
    """A copy of the tokens at draft positions and of those behind the drafts, [num_tokens + batch_size]."""
    return np.concatenate([of_drafts.cpu().numpy(), behind.view(-1).cpu().numpy()], dtype=np.int64)


def _accepted_prefixes(
    accepted: npt.NDArray[np.bool_], num_draft_tokens: list[int], max_spec_len: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where the tokens of each request stand, and how many of its draft tokens come before one that fails.

    Args:
        accepted: [num_tokens].

    Returns:
        [batch_size, max_spec_len + 1]: the places of a request's draft tokens, then num_tokens + its number;
        [batch_size].
    """
    counts, offsets = np.array(num_draft_tokens)[:, np.newaxis], np.arange(max_spec_len + 1)
    behind = len(accepted) + np.arange(len(counts))[:, np.newaxis]
    rows = np.where(offsets < counts, counts.cumsum(axis=0) - counts + offsets, behind)
    # The last column is of no draft token, so one that fails is always found: the first.
    failed = np.concatenate([~accepted, np.ones(len(counts), np.bool_)])[rows]
    return rows, failed.argmax(axis=1)


def _emitted(
    tokens: npt.NDArray[np.int64], rows: npt.NDArray[np.int64], num_accepted: npt.NDArray[np.int64]
) -> torch.Tensor:
    """Each request's tokens up to and with the first behind what was accepted, then -1.

    Args:
        tokens: [num_tokens + batch_size], the target's own where a draft token has failed.
        rows, num_accepted: of `_accepted_prefixes`.

    Returns:
        int32 [batch_size, max_spec_len + 1], on the host.
    """
    emitted = tokens[rows].astype(np.int32)
    emitted[np.arange(rows.shape[1]) > num_accepted[:, np.newaxis]] = PLACEHOLDER_TOKEN_ID
    return torch.from_numpy(emitted)


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

    A request with a generator gets the tokens that the counterparts give it in the same state. Afterwards its
    state is not theirs where all of its draft was accepted: they draw noise all the same. In a batch without
    generators, and without `use_fp64_gumbel`, the recovered tokens are drawn with noise for the blocks and
    for the tokens of one block instead of for all tokens: the same distribution (`keyed.keyed_sample`).

    Returns:
        int32 [batch_size, max_spec_len + 1]: accepted tokens, then the recovered or bonus token, then -1.

    Raises:
        ValueError: synthetic acceptance is asked for; it is a benchmark's mode and not lossless.

    Memory: chunks of rows, 8 x vocab_size bytes a row for those whose acceptance the bounds leave open, and
    as many (12 with `use_fp64_gumbel`) for the recovered tokens; at most the logits' size or a chunk's, as in
    `keyed.keyed_sample`, whichever is less, but one row of each. The bounds take at most
    32 x (128 + vocab_size / 128) bytes a row, whatever the chunk. For 8 requests with one draft token each
    and a vocabulary of 32,000 that is 1.0 MB, as the logits; with eight each 4.2 MB on a CPU, the logits 8.2.
    """
    if synthetic_mode or synthetic_conditional_rates is not None:
        raise ValueError(
            "rejection_sample_method=synthetic is not lossless and is not supported by rollout_spec"
        )
    device, num_tokens = target_logits.device, draft_token_ids.shape[0]
    drafts = draft_token_ids.long()
    best = None if sampling_metadata.all_random else argmax(target_logits)
    if sampling_metadata.all_greedy:
        accepted = best == drafts
    else:
        uniform = _uniform(num_tokens, num_draft_tokens, sampling_metadata.generators, device)
        accepted = _accepted(drafts, draft_probs, target_logits, uniform, target_is_probs)
        if best is not None:
            greedy = sampling_metadata.temperature <= GREEDY_TEMPERATURE
            greedy = expand_batch_to_tokens(greedy, cu_num_draft_tokens, num_tokens)
            accepted = torch.where(greedy, best == drafts, accepted)

    rows, num_accepted = _accepted_prefixes(accepted.cpu().numpy(), num_draft_tokens, max_spec_len)
    (rejecting,) = (num_accepted < num_draft_tokens).nonzero()
    failed = rows[rejecting, num_accepted[rejecting]]
    rejected, at = (torch.from_numpy(numbers).to(device) for numbers in (rejecting, failed))
    if best is not None and sampling_metadata.all_greedy:
        own = best[at]
    else:
        vocab_size = target_logits.shape[-1]
        parts = 3 if use_fp64_gumbel else 2  # probabilities, and the logits they come from or the noise
        size = max(1, min(rows_at_a_time(device, parts * vocab_size), num_tokens // parts))
        own = torch.cat(
            [
                _recovered(
                    requests, places, target_logits, draft_probs, drafts, sampling_metadata.generators,
                    use_fp64_gumbel, target_is_probs,
                )
                for requests, places in zip(rejected.split(size), at.split(size), strict=True)
            ]
        )  # fmt: skip
        if best is not None:
            own = torch.where(greedy[at], best[at], own)
    tokens = _on_host(drafts, bonus_token_ids)
    tokens[failed] = own.cpu().numpy()
    return _emitted(tokens, rows, num_accepted).to(device)


def _accepted(
    drafts: torch.Tensor,
    draft_probs: torch.Tensor | None,
    logits: torch.Tensor,
    uniform: torch.Tensor,
    is_probs: bool,
) -> torch.Tensor:
    """Whether uniform < target / draft, of the draft tokens' probabilities; bool [num_tokens].

    Strictly less, and uniform is in [0, 1): a token of probability 0 is never accepted.

    What takes the time is a row's sum of exponentials. It lies between the sum of its blocks' largest and
    BLOCK_SIZE times that. With the block of the largest logit summed, these bounds decide first; only the
    rows that they leave open are summed as a whole.
    """
    chosen = drafts.unsqueeze(-1)
    proposed = None if draft_probs is None else draft_probs.gather(-1, chosen).squeeze(-1).double()
    if is_probs:
        return uniform < _ratio(logits.gather(-1, chosen), proposed)
    if FEW * logits.numel() <= chunk_size(logits.device):
        return uniform < _ratio(_probs_of(logits, chosen), proposed)

    peaks = block_peaks(*split_blocks(logits))
    block = peaks.argmax(dim=-1, keepdim=True)
    top = peaks.gather(-1, block)
    summed = (block_values(logits, block) - top).exp_().sum(dim=-1, keepdim=True)
    others = (peaks - top).exp_().scatter_(-1, block, 0).sum(dim=-1, keepdim=True)
    mass = (logits.gather(-1, chosen) - top).exp_()
    accepted = uniform < _ratio(mass / (summed + BLOCK_SIZE * others) * (1 - SLACK), proposed)
    may_be = uniform < _ratio(mass / (summed + others) * (1 + SLACK), proposed)
    left_open = torch.where(accepted, False, may_be).nonzero().squeeze(-1)
    # A copy of the rows, and their probabilities.
    size = max(1, min(rows_at_a_time(logits.device, 2 * logits.shape[-1]), len(logits) // 2))
    for at in left_open.split(size):
        probs = _probs_of(logits[at], chosen[at])
        accepted[at] = uniform[at] < _ratio(probs, None if proposed is None else proposed[at])
    return accepted


def _ratio(probs: torch.Tensor, proposed: torch.Tensor | None) -> torch.Tensor:
    """Of [n, 1] and float64 [n], float64 [n]; 0 where nothing was proposed."""
    ratio = probs.squeeze(-1).double()
    return ratio if proposed is None else torch.where(proposed > 0, ratio / proposed, 0.0)


def _probs_of(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The probability of a token of each row, [n, 1]; `token_ids` is int64 [n, 1]."""
    return logits.softmax(dim=-1).gather(-1, token_ids)


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

    For callers of the counterparts; `rejection_sample` draws for the requests that reject only. All draft
    tokens of a request race with the same noise, as theirs do.

    Memory: noise for a chunk of requests, 4 x vocab_size bytes each (8 with `use_fp64_gumbel`), and for a
    chunk of rows their probabilities and noise, 8 (12) x vocab_size bytes each. At most the size of
    `target_probs` or a chunk's, as in `rejection_sample`, whichever is less, but one request and one row.

    Args:
        target_probs: float32 [num_tokens, vocab_size]; the other arguments as in `rejection_sample`.

    Returns:
        [num_tokens], of draft_token_ids' dtype.
    """
    counts, vocab_size = np.array(num_draft_tokens), target_probs.shape[-1]
    ends, drafting = counts.cumsum(), counts.nonzero()[0]
    room = min(rows_at_a_time(device, vocab_size), len(target_probs)) // (2 if use_fp64_gumbel else 1)
    num_requests, num_rows = max(1, room // 2), max(1, room // 4)
    tokens = torch.empty_like(draft_token_ids)
    for first in range(0, len(drafting), num_requests):
        requests = drafting[first : first + num_requests]
        drawn = _noise(
            torch.from_numpy(requests).to(device), vocab_size, sampling_metadata.generators, use_fp64_gumbel
        )
        rows = torch.arange(ends[requests[0]] - counts[requests[0]], ends[requests[-1]], device=device)
        owners = torch.from_numpy(np.arange(len(requests)).repeat(counts[requests])).to(device)
        for at, owner in zip(rows.split(num_rows), owners.split(num_rows), strict=True):
            own = _race(
                _without_draft(
                    target_probs[at], None if draft_probs is None else draft_probs[at],
                    draft_token_ids[at].long(),
                ),
                drawn[owner],
            )  # fmt: skip
            tokens[at] = own.to(tokens.dtype)
        del drawn  # before the next requests' is made
    return tokens


def _recovered(
    requests: torch.Tensor,
    rows: torch.Tensor,
    logits: torch.Tensor,
    draft_probs: torch.Tensor | None,
    drafts: torch.Tensor,
    generators: dict[int, torch.Generator],
    use_fp64: bool,
    is_probs: bool,
) -> torch.Tensor:
    """The target's own tokens, int64 [n], of n requests at their first rejected draft tokens, `rows`."""
    probs = logits[rows]
    if not is_probs:
        probs = probs.softmax(dim=-1)
    masses = _without_draft(probs, None if draft_probs is None else draft_probs[rows], drafts[rows])
    if generators or use_fp64:
        return _race(masses, _noise(requests, logits.shape[-1], generators, use_fp64))
    return keyed.race(masses, _noise(requests, keyed.num_drawn(logits.shape[-1]), generators, use_fp64))


def _without_draft(
    target_probs: torch.Tensor, draft_probs: torch.Tensor | None, drafts: torch.Tensor
) -> torch.Tensor:
    """max(target - draft, 0), in the place of `target_probs`; 0 for a point-mass draft's token."""
    if draft_probs is None:
        return target_probs.scatter_(-1, drafts.unsqueeze(-1), 0.0)
    return target_probs.sub_(draft_probs).clamp_(min=0)


def _race(masses: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """The winner of each row's exponential race, int64 [n]; `drawn`, the noise, is overwritten."""
    return argmax(torch.div(masses, drawn, out=drawn))


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
        seeded = list(generators)
        is_theirs = requests.unsqueeze(-1) == torch.tensor(seeded, device=requests.device)
        for row, i in is_theirs.nonzero().tolist():
            drawn[row].exponential_(generator=generators[seeded[i]])
    # An exact 0 would make 0 / 0 of a masked token, and argmax prefers a NaN.
    return drawn.clamp_(min=torch.finfo(dtype).tiny)
