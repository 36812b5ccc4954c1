"""Where the MRV2 of vLLM 0.24, 0.29 and 0.32 differ in what our speculator and sampler use.

What is installed is asked for its parameters. Arguments go by the names that vLLM 0.32 has for them.
"""

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample import gumbel
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode import rejection_sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from rollout_spec.patches import Patch, record

PASS_BY_PASS = Patch(
    name="vllm-mrv2-pass-by-pass",
    reason="from 0.29 on vLLM takes all passes of a model after the first in one CUDA graph, which could "
    "leave none out",
    upstream="vllm/v1/worker/gpu/spec_decode/autoregressive/speculator.py",
    until="vLLM takes as many passes as it is told in each step",
)
# Methods of a speculator (vLLM 0.29, 0.32) that choose such a graph.
_FUSES = ("_configure_fused_multi_step_decode", "_configure_decode_metadata_update")

HAS_VERIFY = hasattr(RejectionSampler, "_verify")
_VERIFY_NAMES = list(inspect.signature(RejectionSampler._verify).parameters)[1:] if HAS_VERIFY else []
_SAMPLE_NAMES = frozenset(inspect.signature(Sampler.sample).parameters)

# What we call and replace, for `guard_all`: owner, name, and the parameters in each version.
_VERIFY = (
    (RejectionSampler, "_verify",
     ("self", "logits", "draft_logits", "draft_sampled", "pos", "cu_num_logits", "idx_mapping",
      "idx_mapping_np", "expanded_idx_mapping", "expanded_local_pos")),
)  # fmt: skip
_CALL = (
    (RejectionSampler, "_get_logprobs_tensors", ("self", "input_batch", "sampled", "num_sampled", "logits")),
    (rejection_sampler, "get_num_sampled_and_rejected",
     ("num_sampled", "seq_lens", "cu_num_logits", "idx_mapping", "prefill_len")),
    (SamplerOutput, "__init__",
     ("self", "sampled_token_ids", "logprobs_tensors", "num_nans", "num_sampled", "num_rejected")),
)  # fmt: skip
_ROWS = ("self", "logits", "expanded_idx_mapping")
_INPUTS = ("idx_mapping_np", "pos", "input_ids", "expanded_local_pos")
OF_SAMPLER: tuple[tuple[Any, ...], ...] = (
    (Sampler, "add_request",
     ("self", "req_idx", "prompt_len", "sampling_params"),
     ("self", "req_idx", "sampling_params")),
    (Sampler, "sample",
     (*_ROWS, *_INPUTS, "return_logprobs"),
     (*_ROWS, "idx_mapping", *_INPUTS, "return_logprobs"),
     (*_ROWS, "idx_mapping", *_INPUTS, "seq_lens_upper_bound_np", "return_logprobs")),
    *(_VERIFY if HAS_VERIFY else _CALL),
)  # fmt: skip
_DRAW = ("idx_mapping", "temperature", "seeds", "draft_step", "draft_logits")
OF_SPECULATOR: tuple[tuple[Any, ...], ...] = (
    (DraftModelSpeculator, "sample_draft",
     ("self", "hidden_states", "positions", *_DRAW),
     ("self", "hidden_states", "sample_src_positions", *_DRAW)),
    (gumbel, "gumbel_sample",
     ("logits", "expanded_idx_mapping", "temperature", "seed", "pos", "apply_temperature")),
)  # fmt: skip
PIECE_BYTES = 1 << 30  # of logits that are verified at a time, as vLLM 0.29's MAX_CHUNK_BYTES
_OF_ROWS = ("logits_indices", "expanded_idx_mapping", "expanded_local_pos")  # of a batch, by rows of logits
_OF_OUTPUT = ("sampled_token_ids", "num_nans", "num_sampled", "num_rejected")
_HAS_SALT = "is_drafting" in inspect.signature(gumbel.gumbel_sample).parameters


def sample(sampler: Sampler, given: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """`Sampler.sample` at every position: tokens and processed logits. given: of `verify_arguments`."""
    inputs = {**given, "input_ids": given["draft_sampled"]}
    return sampler.sample(**{name: inputs[name] for name in inputs if name in _SAMPLE_NAMES})


def draw_as_target(
    speculator: DraftModelSpeculator,
    logits: torch.Tensor,
    positions: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
) -> torch.Tensor:
    """Draw a draft's tokens, int64 [num_rows], with the noise that the target draws with where it verifies
    them.

    logits: [num_rows, vocab_size], of the target's vocabulary.
    positions, idx_mapping, temperature, seeds: what `DraftModelSpeculator.sample_draft` is given.
    """
    # vLLM 0.24 gives the position of the input token, and has no other noise for drafts.
    where = {"pos": positions, "is_drafting": False} if _HAS_SALT else {"pos": positions + 1}
    return gumbel.gumbel_sample(
        logits, idx_mapping, temperature, seeds, apply_temperature=True,
        use_fp64=speculator.use_fp64_gumbel, **where,
    )  # fmt: skip


def shortfall(
    logits: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """`coupled.shortfall` with MRV2's noise, of one row: how much the token's logit must rise to be drawn."""
    device = current_platform.device_type
    row, token = logits.to(device), int(token_ids)
    where = {"pos": positions.to(device) - 1, **({"is_drafting": False} if _HAS_SALT else {})}
    fixed = [torch.zeros(1, dtype=torch.int32, device=device), torch.ones(1, device=device), keys.to(device)]

    def is_drawn(more: float) -> bool:
        raised = row.clone()
        raised[0, token] += more
        return int(gumbel.gumbel_sample(raised, *fixed, apply_temperature=False, **where)) == token

    low, high = 0.0, next((2.0**i for i in range(-10, 10) if is_drawn(2.0**i)), torch.inf)
    if is_drawn(low) or high == torch.inf:
        return torch.tensor([0.0 if is_drawn(low) else torch.inf])
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if is_drawn(middle) else (middle, high)
    return torch.tensor([high])


def verify_arguments(values: Sequence[Any]) -> dict[str, Any]:
    """What `RejectionSampler._verify` is called with, from vLLM 0.29 on, by name."""
    given = dict(zip(_VERIFY_NAMES, values, strict=True))
    # Before 0.32 nothing tells the placeholders of a padded request from drafts. They are tokens that the row
    # had before, and the model has read them: one that is right may stay.
    return {"verify_draft_sampled": given["draft_sampled"], **given}


def pieces(logits: torch.Tensor, input_batch: Any) -> Iterator[tuple[torch.Tensor, Any]]:
    """A batch in pieces of whole requests, of 1 GiB at most in float32; from 0.29 on vLLM cuts it so."""
    most, ends = max(1, PIECE_BYTES // (4 * logits.shape[1])), input_batch.cu_num_logits_np
    start, num_reqs = 0, len(ends) - 1
    while start < num_reqs:
        fitting = int(np.searchsorted(ends, ends[start] + most, side="right")) - 1
        end = max(start + 1, fitting)
        rows, first = slice(int(ends[start]), int(ends[end])), int(ends[start])
        # `idx_mapping_np` stays whole: by it vLLM knows what any request asks for, and all pieces get alike.
        yield (
            logits[rows],
            dataclasses.replace(
                input_batch,
                idx_mapping=input_batch.idx_mapping[start:end],
                seq_lens=input_batch.seq_lens[start:end],
                cu_num_logits=input_batch.cu_num_logits[start : end + 1] - first,
                cu_num_logits_np=ends[start : end + 1] - first,
                **{name: getattr(input_batch, name)[rows] for name in _OF_ROWS},
            ),
        )
        start = end


def joined(outputs: list[SamplerOutput], input_batch: Any) -> SamplerOutput:
    """What vLLM 0.24's `RejectionSampler.__call__` gives for a batch, of its pieces."""
    if len(outputs) == 1:
        return outputs[0]
    parts = {name: [getattr(each, name) for each in outputs] for name in _OF_OUTPUT}
    whole = {name: None if each[0] is None else torch.cat(each) for name, each in parts.items()}
    logprobs = None
    if outputs[0].logprobs_tensors is not None:
        *columns, _ = zip(*(each.logprobs_tensors for each in outputs), strict=True)
        logprobs = LogprobsTensors(*map(torch.cat, columns), input_batch.cu_num_logits_np.tolist())
    return SamplerOutput(**whole, logprobs_tensors=logprobs)


def inputs_of(input_batch: Any) -> dict[str, Any]:
    """What `verify_arguments` gives, but for the logits, of a batch of vLLM 0.24, which has no `_verify`."""
    inputs = input_batch.input_ids[input_batch.logits_indices]
    names = ("cu_num_logits", "idx_mapping", "idx_mapping_np", "expanded_idx_mapping", "expanded_local_pos")
    return {
        "draft_sampled": inputs,
        "verify_draft_sampled": inputs,
        "pos": input_batch.positions[input_batch.logits_indices],
        **{name: getattr(input_batch, name) for name in names},
    }


def verified(
    verifier: RejectionSampler,
    input_batch: Any,
    logits: torch.Tensor,
    processed: torch.Tensor,
    tokens: torch.Tensor,
    num_sampled: torch.Tensor,
) -> SamplerOutput:
    """What vLLM 0.24's `RejectionSampler.__call__` gives for tokens that `coupled_verify` has chosen."""
    num_nans = rejection_sampler.get_num_nans(logits) if verifier.sampler.compute_nans else None
    kept = processed if verifier.sampler.logprobs_mode == "processed_logprobs" else logits
    logprobs = verifier._get_logprobs_tensors(input_batch, tokens, num_sampled, kept)
    num_sampled, num_rejected = rejection_sampler.get_num_sampled_and_rejected(
        num_sampled, input_batch.seq_lens, input_batch.cu_num_logits, input_batch.idx_mapping,
        verifier.sampler.req_states.prefill_len.gpu,
    )  # fmt: skip
    return SamplerOutput(
        sampled_token_ids=tokens, logprobs_tensors=logprobs, num_nans=num_nans, num_sampled=num_sampled,
        num_rejected=num_rejected,
    )  # fmt: skip


def draft_pass_by_pass(speculator: DraftModelSpeculator) -> None:
    """Let a speculator run its passes one by one."""
    for name in (each for each in _FUSES if hasattr(speculator, each)):
        setattr(speculator, name, lambda: None)
        record(PASS_BY_PASS)
