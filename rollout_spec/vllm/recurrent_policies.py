"""Engines of policies with recurrent layers: the fixes that they need, and how far MRV1's rows are."""

import importlib
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.config import VllmConfig

from rollout_spec.vllm import upstream


def keep_states_right(vllm_config: VllmConfig) -> None:
    """Fix what vLLM does with the states of a worker's policy, if it drafts; the worker has its runner.

    Raises PatchError: the installed vLLM is not one that the fixes were written for.
    """
    if vllm_config.model_config.is_hybrid and vllm_config.speculative_config is not None:
        is_mrv2 = vllm_config.use_v2_model_runner
        for fix, name in upstream.fixes(upstream.RECURRENT_MRV2 if is_mrv2 else upstream.RECURRENT_MRV1):
            upstream.mend(fix, importlib.import_module(name))


def in_prompt(runner: Any) -> npt.NDArray[np.bool_]:
    """Which rows of an MRV1 still compute their prompt, or their own tokens again."""
    batch = runner.input_batch
    return batch.num_computed_tokens_cpu[: batch.num_reqs] < num_known(batch)


def num_known(batch: Any) -> npt.NDArray[np.int32]:
    """Tokens to compute before each row decodes: its prompt, and its own tokens but the last."""
    n = batch.num_reqs
    return np.maximum(batch.num_prompt_tokens[:n], batch.num_tokens_no_spec[:n] - 1)
