"""Old states of recurrent layers: vLLM before 0.32 reads them in rows without a draft.

A step leaves the state after each of a row's tokens in a slot of its own. The next step must read the slot
of the last accepted token. vLLM does so only in the rows that it takes for speculative ones.
"""

import inspect
from typing import Any

import numpy.typing as npt
import torch

from rollout_spec.patches import Patch, misfit, wrap
from rollout_spec.vllm.upstream import RECURRENT_MRV1, RECURRENT_MRV2

WHERE = {
    RECURRENT_MRV1: "vllm.v1.worker.gpu_model_runner",
    RECURRENT_MRV2: "vllm.v1.worker.gpu.model_states.mamba_hybrid",
}
PATCH = Patch(
    name="vllm-recurrent-rows",
    reason="with drafts, the tokens of a policy with recurrent layers are wrong: a row that has no draft "
    "after a step with one reads the state of its first slot, an old one",
    upstream="vllm/v1/worker/gpu_model_runner.py, GPUModelRunner._prepare_inputs; "
    "vllm/v1/attention/backends/gdn_attn.py; vllm/v1/worker/gpu/model_states/mamba_hybrid.py",
    until="a decoding row without a draft stays a speculative row (0.32 does it: vllm 39273, 40875)",
)


def applies(_: Any) -> bool:
    """Whether this vLLM does not take a decoding row without a draft for a speculative one."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return "zero_draft_decode_mask" not in inspect.getsource(GPUModelRunner._prepare_inputs)


def fix(module: Any) -> None:
    """Let every decoding row of a recurrent policy be a speculative one."""
    from vllm.v1.attention.backends import gdn_attn

    _fix_linear_attention(gdn_attn.GDNAttentionMetadataBuilder)
    if hasattr(module, "GPUModelRunner"):
        _fix_mrv1(module.GPUModelRunner)
    else:
        _fix_mrv2(module)


def _fix_linear_attention(builder: Any) -> None:
    """The metadata's builder reads the signs of the numbers of drafts, and whether their sum is 0."""

    @wrap(builder, "build", PATCH, "0fb6c90f", "7be67f18", "aa65a6eb")  # 0.23; 0.24; 0.29
    def build_with_speculative_rows(
        build: Any, self: Any, common_prefix_len: int, common_attn_metadata: Any,
        num_accepted_tokens: torch.Tensor | None = None,
        num_decode_draft_tokens_cpu: torch.Tensor | None = None, fast_build: bool = False,
    ) -> Any:  # fmt: skip
        numbers = num_decode_draft_tokens_cpu
        if numbers is not None:
            numbers = torch.where(numbers == 0, 1, numbers)
        return build(self, common_prefix_len, common_attn_metadata, num_accepted_tokens, numbers, fast_build)


def _fix_mrv1(runner: Any) -> None:
    """Mark the rows after `_prepare_inputs`, and have the marks read in steps without drafts too."""
    if "use_spec_decode" not in inspect.signature(runner._build_attention_metadata).parameters:
        raise misfit(PATCH, "GPUModelRunner._build_attention_metadata takes no use_spec_decode")

    @wrap(runner, "_prepare_inputs", PATCH, "b135df2f", "6aa3b3fe", "df8b324a")  # 0.23; 0.24; 0.29
    def prepare_and_mark(
        prepare: Any, self: Any, scheduler_output: Any, num_scheduled_tokens: npt.NDArray
    ) -> Any:
        prepared = prepare(self, scheduler_output, num_scheduled_tokens)
        if _has_states(self):
            _mark(self, scheduler_output, num_scheduled_tokens)
        return prepared

    @wrap(runner, "_build_attention_metadata", PATCH, "d5d7d83a", "d9b2afb4", "8af7e993")  # 0.23; 0.24; 0.29
    def build_from_marks(build: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if _has_states(self):
            kwargs["use_spec_decode"] = True
        return build(self, *args, **kwargs)


def _has_states(runner: Any) -> bool:
    return runner.speculative_config is not None and runner.model_config.is_hybrid


def _mark(runner: Any, scheduler_output: Any, num_scheduled_tokens: npt.NDArray) -> None:
    """A decoding row without a draft has 0 draft tokens, where vLLM has -1 for "is not decoding"."""
    batch, numbers = runner.input_batch, runner.num_decode_draft_tokens
    n = batch.num_reqs
    if not scheduler_output.scheduled_spec_decode_tokens:  # vLLM leaves the numbers of an earlier step
        numbers.np.fill(-1)
    decodes = batch.num_computed_tokens_cpu[:n] >= batch.num_prompt_tokens[:n]
    numbers.np[:n][decodes & (num_scheduled_tokens[:n] == 1) & (numbers.np[:n] < 0)] = 0
    numbers.copy_to_gpu()


def _fix_mrv2(model_states: Any) -> None:
    """Mark the same rows in front of the metadata, which MRV2 builds for recurrent policies in a module."""

    @wrap(model_states, "build_attn_metadata", PATCH, "8fbd7acd", "e406c9cb", "ba0edadf")  # 0.23; 0.24; 0.29
    def build_with_marks(build: Any, attn_groups: Any, num_reqs: int, *args: Any, **kwargs: Any) -> Any:
        rows = kwargs["model_specific_attn_metadata"]
        numbers = rows.num_decode_draft_tokens_cpu
        if numbers is not None:  # not at the capture of a graph
            lengths = torch.diff(kwargs["query_start_loc_cpu"])[: len(numbers)]
            numbers[(numbers < 0) & (lengths == 1) & ~rows.is_prefilling] = 0
        return build(attn_groups, num_reqs, *args, **kwargs)
