"""Resumed rows of MRV1 that compute their own tokens again: vLLM takes their chunks for drafts.

To MRV1 a row decodes once its prompt is computed. A preempted request then still has tokens of its own to
compute. Mamba 2 treats a chunk of 2 to K + 1 of them as a token with drafts: it stores one state per token,
and the next step reads the first token's state instead of the last's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_spec.patches import Patch, guard_parameters, replace_function

RECURRENT_CHUNKS = Patch(
    name="vllm-recurrent-chunks",
    reason="with drafts, the tokens of a policy with layers of Mamba 2 are wrong: a preempted request "
    "computes its own tokens again, and a chunk of up to 1 + K of them passes for a row with drafts",
    upstream="vllm/v1/worker/gpu_model_runner.py, GPUModelRunner._build_attention_metadata; "
    "vllm/v1/attention/backends/utils.py, reorder_batch_to_split_decodes_and_prefills",
    until="MRV1 takes a row for a decoding one when all its tokens but the last are computed, as MRV2 does",
)


def fix() -> None:
    """Let MRV1 take all tokens that a row has to compute for its prompt, where it sorts rows. Idempotent.

    Raises:
        PatchError: the installed vLLM is not one that this was written for.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Runner

    guard_parameters(RECURRENT_CHUNKS, Runner, "_may_reorder_batch", ("self", "scheduler_output"))
    guard_parameters(
        RECURRENT_CHUNKS, Runner, "_build_attention_metadata", ("self", "num_tokens", "num_reqs")
    )
    for name in ("_may_reorder_batch", "_build_attention_metadata"):
        replace_function(Runner, name, _for_known_tokens(getattr(Runner, name)), patch=RECURRENT_CHUNKS)


def _for_known_tokens(method: Any) -> Any:
    @functools.wraps(method)
    def call_for_known_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _known_tokens_as_prompts(self):
            return method(self, *args, **kwargs)

    return call_for_known_tokens


@contextlib.contextmanager
def _known_tokens_as_prompts(runner: Any) -> Iterator[None]:
    if runner.speculative_config is None or not runner.model_config.is_hybrid or not in_prompt(runner).any():
        yield
        return
    batch, n = runner.input_batch, runner.input_batch.num_reqs
    batch.num_prompt_tokens[:n] = _num_known(batch)
    try:
        yield
    finally:  # the rows may have changed places
        batch.num_prompt_tokens[:n] = [runner.requests[name].num_prompt_tokens for name in batch.req_ids]


def in_prompt(runner: Any) -> npt.NDArray[np.bool_]:
    """Which rows of an MRV1 still compute their prompt, or their own tokens again."""
    batch = runner.input_batch
    return batch.num_computed_tokens_cpu[: batch.num_reqs] < _num_known(batch)


def _num_known(batch: Any) -> npt.NDArray[np.int32]:
    """Tokens to compute before a row decodes: its prompt, and its own tokens but the last."""
    n = batch.num_reqs
    return np.maximum(batch.num_prompt_tokens[:n], batch.num_tokens_no_spec[:n] - 1)
