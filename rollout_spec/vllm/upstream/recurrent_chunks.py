"""Resumed rows of MRV1 that compute their own tokens again: vLLM takes their chunks for drafts.

To MRV1 a row decodes once its prompt is computed. A preempted request then still has tokens of its own to
compute. Mamba 2 treats a chunk of 2 to K + 1 of them as a token with drafts: it stores one state per token,
and the next step reads the first token's state instead of the last's.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from rollout_spec import recurrent
from rollout_spec.patches import Patch, wrap
from rollout_spec.vllm.mrv1.prompt_rows import in_prompt, num_known
from rollout_spec.vllm.upstream import RECURRENT_MRV1

WHERE = {RECURRENT_MRV1: "vllm.v1.worker.gpu_model_runner"}
PATCH = Patch(
    name="vllm-recurrent-chunks",
    reason="with drafts, the tokens of a policy with layers of Mamba 2 are wrong: a preempted request "
    "computes its own tokens again, and a chunk of up to 1 + K of them passes for a row with drafts",
    upstream="vllm/v1/worker/gpu_model_runner.py, GPUModelRunner._build_attention_metadata; "
    "vllm/v1/attention/backends/utils.py, reorder_batch_to_split_decodes_and_prefills",
    until="MRV1 takes a row for a decoding one when all its tokens but the last are computed, as MRV2 does",
)


def fix(module: Any) -> None:
    """Let MRV1 take all tokens that a row has to compute for its prompt, where it sorts rows."""

    @wrap(module.GPUModelRunner, "_may_reorder_batch", PATCH, "0f58c03a")  # 0.23 to 0.33
    def reorder_for_known_tokens(reorder: Any, self: Any, scheduler_output: Any) -> Any:
        with _known_tokens_as_prompts(self):
            return reorder(self, scheduler_output)

    bodies = "d5d7d83a", "d9b2afb4", "8af7e993", "0d39c10e", "a5a61d2d"  # 0.23; 0.24; 0.29; 0.32; 0.33

    @wrap(module.GPUModelRunner, "_build_attention_metadata", PATCH, *bodies)
    def build_for_known_tokens(
        build: Any, self: Any, num_tokens: int, num_reqs: int, *args: Any, **kwargs: Any
    ) -> Any:
        with _known_tokens_as_prompts(self):
            return build(self, num_tokens, num_reqs, *args, **kwargs)


@contextlib.contextmanager
def _known_tokens_as_prompts(runner: Any) -> Iterator[None]:
    has_mamba_2 = recurrent.has_mamba_2(runner.model_config.architecture)
    if runner.speculative_config is None or not has_mamba_2 or not in_prompt(runner).any():
        yield
        return
    batch, n = runner.input_batch, runner.input_batch.num_reqs
    batch.num_prompt_tokens[:n] = num_known(batch)
    try:
        yield
    finally:  # the rows may have changed places
        batch.num_prompt_tokens[:n] = [runner.requests[name].num_prompt_tokens for name in batch.req_ids]
