"""Which CUDA graph vLLM's runner takes for a step, asked of its own dispatcher with CUDA's settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

K = 8  # draft tokens


@pytest.fixture
def runner(make_engine: Callable) -> Any:
    core = make_engine({"num_speculative_tokens": K}).llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner


def graphs(runner: Any, *steps: list[int], mode: str = "FULL_AND_PIECEWISE") -> list[str]:
    """The mode of each step's graph; a step is the number of tokens of each row."""
    from vllm.config import CUDAGraphMode

    settings, dispatcher = runner.vllm_config.compilation_config, runner.cudagraph_dispatcher
    for keys in dispatcher.cudagraph_keys.values():
        keys.clear()
    query_len = runner.uniform_decode_query_len
    sizes = [size for size in (1, 2, 4, 8, 9, 18, 27, 36) if size % query_len == 0]  # as vLLM adjusts them
    settings.cudagraph_capture_sizes, settings.max_cudagraph_capture_size = sizes, 36
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode[mode], query_len)
    found = []
    for rows in steps:
        is_uniform = runner._is_uniform_decode(max(rows), query_len, sum(rows), len(rows))
        found.append(dispatcher.dispatch(sum(rows), is_uniform)[0].name)
    return found


def test_plain_steps_with_a_drafter_have_full_graphs(runner: Any) -> None:
    plain, drafts = [1] * 7, [1 + K, 1, 4]
    assert graphs(runner, plain, drafts, [1]) == ["FULL", "PIECEWISE", "FULL"]
    # What vLLM does by itself: only steps in which all rows have K draft tokens have one.
    runner.uniform_decode_query_len = runner.cudagraph_dispatcher.uniform_decode_query_len = 1 + K
    assert graphs(runner, plain, drafts, [1 + K] * 2) == ["PIECEWISE", "PIECEWISE", "FULL"]


def test_a_mode_without_graphs_for_steps_with_drafts_is_said(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import CUDAGraphMode

    from rollout_spec.vllm.graphs import capture_plain_steps

    assert graphs(runner, [1] * 7, [1 + K, 1, 4], mode="FULL_DECODE_ONLY") == ["FULL", "NONE"]
    said: list[str] = []
    monkeypatch.setattr("rollout_spec.vllm.graphs.logger.warning", said.append)
    for mode in ("NONE", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"):
        assert not said
        runner.vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode[mode]
        capture_plain_steps(runner)
    [warning] = said
    assert "FULL_DECODE_ONLY: steps with drafts run without CUDA graphs" in warning
