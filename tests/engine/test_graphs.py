"""Which CUDA graph vLLM's runner takes for a step, asked of its own dispatcher with CUDA's settings."""

import pytest
from vllm.config import CUDAGraphMode

from tests.engine.conftest import runner_of

K = 8  # draft tokens
# How many tokens each row has: in plain steps of all sizes that an engine here serves, in one with drafts,
# and in one of longest drafts only.
STEPS = [[[1] * num_rows for num_rows in range(1, 17)], [[1 + K, 1, 4]], [[1 + K] * 2]]
# Of each of vLLM's modes, on both runners.
GRAPHS = {
    "FULL_AND_PIECEWISE": ["FULL", "PIECEWISE", "PIECEWISE"],
    "FULL_DECODE_ONLY": ["FULL", "NONE", "NONE"],
    "PIECEWISE": ["PIECEWISE", "PIECEWISE", "PIECEWISE"],
}


@pytest.fixture
def runner(make_engine):
    return runner_of(make_engine({"num_speculative_tokens": K}, fresh=True))


def graphs(runner, mode="FULL_AND_PIECEWISE"):
    settings, dispatcher = runner.vllm_config.compilation_config, runner.cudagraph_dispatcher
    for keys in dispatcher.cudagraph_keys.values():
        keys.clear()
    query_len = runner.uniform_decode_query_len
    sizes = (1, 2, 4, 8, 9, 16, 18, 27, 36)
    settings.cudagraph_capture_sizes = [size for size in sizes if size % query_len == 0]  # as vLLM has it
    settings.max_cudagraph_capture_size = 36
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode[mode], query_len)

    def graph(rows):
        is_uniform = runner._is_uniform_decode(max(rows), query_len, sum(rows), len(rows))
        return dispatcher.dispatch(sum(rows), is_uniform)[0].name

    return [" ".join({graph(rows) for rows in steps}) for steps in STEPS]


def test_full_graphs_are_for_plain_steps(runner):
    assert {mode: graphs(runner, mode) for mode in GRAPHS} == GRAPHS
