"""How our speculator and sampler call vLLM's, where the MRV2 of 0.24, 0.29 and 0.32 take other arguments.

What is installed is asked for its parameters. Arguments go by the names that vLLM 0.32 has for them.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.sample import gumbel
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from rollout_spec.vllm.mrv2 import sampler_24

HAS_VERIFY = hasattr(RejectionSampler, "_verify")
VERIFY_NAMES = list(inspect.signature(RejectionSampler._verify).parameters)[1:] if HAS_VERIFY else []
_SAMPLE_NAMES = frozenset(inspect.signature(Sampler.sample).parameters)

# What we call and replace, for `guard_all`: owner, name, and the parameters in each version.
_VERIFY = (
    (RejectionSampler, "_verify",
     ("self", "logits", "draft_logits", "draft_sampled", "pos", "cu_num_logits", "idx_mapping",
      "idx_mapping_np", "expanded_idx_mapping", "expanded_local_pos")),
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
    *(_VERIFY if HAS_VERIFY else sampler_24.CALLED),
)  # fmt: skip
_DRAW = ("idx_mapping", "temperature", "seeds", "draft_step", "draft_logits")
OF_SPECULATOR: tuple[tuple[Any, ...], ...] = (
    (DraftModelSpeculator, "sample_draft",
     ("self", "hidden_states", "positions", *_DRAW),
     ("self", "hidden_states", "sample_src_positions", *_DRAW)),
    (gumbel, "gumbel_sample",
     ("logits", "expanded_idx_mapping", "temperature", "seed", "pos", "apply_temperature")),
)  # fmt: skip
HAS_QUERY_LENS = hasattr(BatchExecutionDescriptor, "max_query_len")
HAS_SALT = "is_drafting" in inspect.signature(gumbel.gumbel_sample).parameters


def sample(sampler: Sampler, given: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """`Sampler.sample` at every position: tokens and processed logits. given: of `_verify`, by name."""
    inputs = {**given, "input_ids": given["draft_sampled"]}
    return sampler.sample(**{name: inputs[name] for name in inputs if name in _SAMPLE_NAMES})
