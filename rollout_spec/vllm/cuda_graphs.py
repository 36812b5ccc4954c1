"""Full graphs for plain steps, which an engine without a drafter has; on MRV2 `mrv2/plain_graphs.py`.

With speculation vLLM captures its full graphs for steps in which every row has K draft tokens. Those of a
drafter that chooses are seldom so, and a plain step would go piece by piece. Here full graphs are captured
for plain steps. Steps with drafts have piecewise ones; on MRV2 from vLLM 0.29 on `mrv2/draft_graphs.py` adds
full ones. On NPUs it stays as it is, and for policies with layers of Mamba 2, whose metadata is captured for
K draft tokens in every row only.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform

from rollout_spec import recurrent
from rollout_spec.vllm.recurrent_policies import in_prompt
from rollout_spec.vllm.refusals import WITHOUT_GRAPHS

logger = init_logger(f"vllm.{__name__}")


def fills_drafts(vllm_config: VllmConfig) -> bool:
    """Whether only steps in which every row has K draft tokens have a graph.

    With vllm-ascend's FULL_DECODE_ONLY: it keeps a graph's parameters by its number of tokens, so graphs of
    plain steps have no place beside those.
    """
    if not current_platform.is_out_of_tree():
        return False
    return vllm_config.compilation_config.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY


def capture_plain_steps(runner: Any) -> None:
    """Capture full graphs for plain steps in an MRV1. Call it before the model is loaded."""
    if runner.model_config.is_hybrid:
        _keep_prompts_out(runner)
    if has_plain_graphs(runner):
        if runner.vllm_config.compilation_config.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY:
            logger.warning("rollout_spec: %s", WITHOUT_GRAPHS)
        runner.uniform_decode_query_len = runner.cudagraph_dispatcher.uniform_decode_query_len = 1


def has_plain_graphs(runner: Any) -> bool:
    """False for layers of Mamba 2."""
    model = runner.vllm_config.model_config
    return not (model.is_hybrid and recurrent.has_mamba_2(model.architecture))


def _keep_prompts_out(runner: Any) -> None:
    """MRV1 takes a full graph by a step's shape. That of recurrent layers is of decoding rows: a step with a
    chunk of a prompt of the same shape would replay it with the slots of an earlier step."""
    name = "_determine_batch_execution_and_padding"
    determine = getattr(runner, name)

    @functools.wraps(determine)
    def determine_for_decodes(*args: Any, **kwargs: Any) -> Any:
        if "force_uniform_decode" not in kwargs and in_prompt(runner).any():  # a dummy run has it
            kwargs["force_uniform_decode"] = False
        return determine(*args, **kwargs)

    setattr(runner, name, determine_for_decodes)
