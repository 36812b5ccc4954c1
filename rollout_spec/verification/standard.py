"""Standard verification, for vLLM's CPU engine where its own is broken: speculative-sampling rejection.

Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318. The functions have the names, signatures
and random numbers of vLLM's `vllm.v1.sample.rejection_sampler`, so that each can take its counterpart's
place. Layout, as there: the draft tokens of all requests stand in one flat row, and
`cu_num_draft_tokens[i]` is the end of request i's.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from rollout_spec.verification.blocks import argmax, rows_at_a_time
from rollout_spec.verification.coupled import num_drawn, race
from rollout_spec.verification.prefixes import first_rejected, matching_prefixes
from rollout_spec.verification.transfers import sent


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

    A request with a generator gets the tokens that the counterpart gives it in the same state. Afterwards its
    state is not the counterpart's where all of its draft was accepted: that one draws noise all the same.

    Returns:
        int32 [batch_size, max_spec_len + 1]: accepted tokens, then the recovered or bonus token, then -1.

    Raises:
        ValueError: synthetic acceptance is asked for; it is a benchmark's mode and not lossless.

    Memory: temporaries of 16 MiB, or of the logits' size where that is less, and of 5 rows at least.
    """
    if synthetic_mode or synthetic_conditional_rates is not None:
        raise ValueError(
            "rejection_sample_method=synthetic is not lossless and is not supported by rollout_spec"
        )
    if sampling_metadata.all_greedy:
        best = argmax(target_logits)
        return matching_prefixes(best, draft_token_ids, bonus_token_ids, num_draft_tokens, max_spec_len)
    device, drafts, generators = target_logits.device, draft_token_ids.long(), sampling_metadata.generators
    uniform = _uniform(num_draft_tokens, generators, device)
    accepted = _accepted(drafts, draft_probs, target_logits, uniform)
    best = None
    if not sampling_metadata.all_random:
        best = argmax(target_logits)
        is_greedy = sampling_metadata.temperature <= 0
        is_greedy = expand_batch_to_tokens(is_greedy, cu_num_draft_tokens, len(drafts))
        accepted = torch.where(is_greedy, best == drafts, accepted)

    # What replaces a rejected token differs from it, so the others can stand for the target's own.
    own = drafts.clone()
    rejecting, places = first_rejected(accepted.cpu().numpy(), num_draft_tokens)
    at = sent(places, device)
    dtype = torch.float64 if use_fp64_gumbel else torch.float32
    recovered = _recovered(rejecting.tolist(), at, drafts, draft_probs, target_logits, generators, dtype)
    own[at] = recovered if best is None else torch.where(is_greedy[at], best[at], recovered)
    return matching_prefixes(own, drafts, bonus_token_ids, num_draft_tokens, max_spec_len)


def _uniform(
    num_draft_tokens: list[int], generators: dict[int, torch.Generator], device: torch.device
) -> torch.Tensor:
    """float64 [num_tokens]: float32 would draw an exact 0 too often. A seeded request uses its generator."""
    uniform = torch.rand(sum(num_draft_tokens), dtype=torch.float64, device=device)
    ends = list(itertools.accumulate(num_draft_tokens))
    for i, generator in generators.items():
        uniform[ends[i] - num_draft_tokens[i] : ends[i]].uniform_(generator=generator)
    return uniform


def _accepted(
    drafts: torch.Tensor, draft_probs: torch.Tensor | None, logits: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """Whether uniform < target / draft, of the draft tokens' probabilities; bool [num_tokens].

    Strictly less, and uniform is in [0, 1): a token of probability 0 is never accepted.
    """
    chosen = drafts.unsqueeze(-1)
    rows = zip(*(x.split(rows_at_a_time(logits.shape[1])) for x in (logits, chosen)), strict=True)
    target = torch.cat([part.softmax(dim=-1).gather(-1, ids) for part, ids in rows]).squeeze(-1).double()
    if draft_probs is None:
        return uniform < target
    proposed = draft_probs.gather(-1, chosen).squeeze(-1).double()
    return uniform < torch.where(proposed > 0, target / proposed, 0.0)


def _recovered(
    requests: list[int],
    rows: torch.Tensor,
    drafts: torch.Tensor,
    draft_probs: torch.Tensor | None,
    logits: torch.Tensor,
    generators: dict[int, torch.Generator],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The target's own tokens, int64 [n], of n requests at their first rejected draft tokens.

    The distribution is max(target - draft, 0), normalised; for a point-mass draft the target's without the
    draft token. An exponential race decides: argmax of probability / Exp(1) noise. It is run between tokens
    where the counterpart's random numbers must be met; elsewhere as `coupled.race`, which needs less noise.

    Args:
        requests: the numbers of the n requests.
        rows: int64 [n], where the rejected tokens stand.
        dtype: of the noise.
    """
    vocab_size = logits.shape[1]
    size = rows_at_a_time(5 * vocab_size)  # masses, noise of up to 8 bytes, the masses once more
    own = [rows.new_empty(0)]
    for first in range(0, len(requests), size):
        at = rows[first : first + size]
        masses = logits[at].softmax(dim=-1)
        if draft_probs is None:
            masses.scatter_(-1, drafts[at].unsqueeze(-1), 0.0)
        else:
            masses.sub_(draft_probs[at]).clamp_(min=0)
        by_token = bool(generators) or dtype == torch.float64
        num = vocab_size if by_token else num_drawn(vocab_size)
        drawn = torch.empty(len(at), num, dtype=dtype, device=masses.device)
        _fill_with_noise(drawn, requests[first : first + size], generators)
        own.append(argmax(torch.div(masses, drawn, out=drawn)) if by_token else race(masses.log_(), drawn))
    return torch.cat(own)


def _fill_with_noise(
    drawn: torch.Tensor, requests: list[int], generators: dict[int, torch.Generator]
) -> None:
    """Exp(1) noise, a row for each of the requests; a seeded one draws from its generator."""
    drawn.exponential_()
    for row, i in enumerate(requests):
        if i in generators:
            drawn[row].exponential_(generator=generators[i])
    # An exact 0 would make 0 / 0 of a masked token, and argmax prefers a NaN.
    drawn.clamp_(min=torch.finfo(drawn.dtype).tiny)
