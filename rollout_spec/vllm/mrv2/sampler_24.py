"""Verification on the MRV2 of vLLM 0.24, which goes with it: its `RejectionSampler` has no `_verify`."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode import rejection_sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

# What we call, for `guard_all`.
CALLED = (
    (RejectionSampler, "_get_logprobs_tensors", ("self", "input_batch", "sampled", "num_sampled", "logits")),
    (rejection_sampler, "get_num_sampled_and_rejected",
     ("num_sampled", "seq_lens", "cu_num_logits", "idx_mapping", "prefill_len")),
    (SamplerOutput, "__init__",
     ("self", "sampled_token_ids", "logprobs_tensors", "num_nans", "num_sampled", "num_rejected")),
)  # fmt: skip
PIECE_BYTES = 1 << 30  # of logits that are verified at a time, as vLLM 0.29's MAX_CHUNK_BYTES
_OF_ROWS = ("logits_indices", "expanded_idx_mapping", "expanded_local_pos")  # of a batch, by rows of logits
_OF_OUTPUT = ("sampled_token_ids", "num_nans", "num_sampled", "num_rejected")


def verify_in_pieces(
    verifier: RejectionSampler, verify: Callable[..., Any], logits: torch.Tensor, input_batch: Any
) -> SamplerOutput:
    """What `RejectionSampler.__call__` gives; verify: `sampler.verify_by_sampling`."""
    outputs = []
    for part, batch in _pieces(logits, input_batch):
        found = verify(verifier, {"logits": part, **_inputs_of(batch)})
        outputs.append(_verified(verifier, batch, part, *found))
        del found  # its logits, before there are others
    return _joined(outputs, input_batch)


def _pieces(logits: torch.Tensor, input_batch: Any) -> Iterator[tuple[torch.Tensor, Any]]:
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


def _joined(outputs: list[SamplerOutput], input_batch: Any) -> SamplerOutput:
    """The output for a batch, of those for its pieces."""
    if len(outputs) == 1:
        return outputs[0]
    parts = {name: [getattr(each, name) for each in outputs] for name in _OF_OUTPUT}
    whole = {name: None if each[0] is None else torch.cat(each) for name, each in parts.items()}
    logprobs = None
    if outputs[0].logprobs_tensors is not None:
        *columns, _ = zip(*(each.logprobs_tensors for each in outputs), strict=True)
        logprobs = LogprobsTensors(*map(torch.cat, columns), input_batch.cu_num_logits_np.tolist())
    return SamplerOutput(**whole, logprobs_tensors=logprobs)


def _inputs_of(input_batch: Any) -> dict[str, Any]:
    """What `_verify` of later versions is given, but for the logits, of a batch."""
    inputs = input_batch.input_ids[input_batch.logits_indices]
    names = ("cu_num_logits", "idx_mapping", "idx_mapping_np", "expanded_idx_mapping", "expanded_local_pos")
    return {
        "draft_sampled": inputs,
        "verify_draft_sampled": inputs,
        "pos": input_batch.positions[input_batch.logits_indices],
        **{name: getattr(input_batch, name) for name in names},
    }


def _verified(
    verifier: RejectionSampler, input_batch: Any, logits: torch.Tensor, processed: torch.Tensor,
    tokens: torch.Tensor, num_sampled: torch.Tensor,
) -> SamplerOutput:  # fmt: skip
    """The output for tokens that were chosen."""
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
