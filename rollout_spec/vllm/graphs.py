"""Full CUDA graphs for plain steps, which an engine without a drafter has.

With speculation vLLM captures its full graphs for steps in which every row has K draft tokens. Those of a
drafter that chooses are seldom so, and a plain step would go piece by piece. Here full graphs are captured
for plain steps; steps with drafts have piecewise ones.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.logger import init_logger

logger = init_logger(f"vllm.{__name__}")


def capture_plain_steps(runner: Any) -> None:
    """Do so in a runner V1 that has not loaded its model yet."""
    _say_what_has_none(runner)
    runner.uniform_decode_query_len = runner.cudagraph_dispatcher.uniform_decode_query_len = 1


def capture_plain_steps_v2(runner: Any) -> None:
    """Do so in a runner V2, whose `decode_query_len` has other uses when the cache is there."""
    _say_what_has_none(runner)
    initialize_kv_cache = runner.initialize_kv_cache

    @functools.wraps(initialize_kv_cache)
    def initialize_for_plain_steps(*args: Any, **kwargs: Any) -> None:
        decode_query_len, runner.decode_query_len = runner.decode_query_len, 1
        try:
            initialize_kv_cache(*args, **kwargs)
        finally:
            runner.decode_query_len = decode_query_len

    runner.initialize_kv_cache = initialize_for_plain_steps


def _say_what_has_none(runner: Any) -> None:
    if runner.vllm_config.compilation_config.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY:
        logger.warning(
            "rollout_spec: compilation_config.cudagraph_mode=FULL_DECODE_ONLY: steps with drafts run without "
            "CUDA graphs; take FULL_AND_PIECEWISE"
        )
