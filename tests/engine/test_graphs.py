"""Which CUDA graph vLLM's runner takes for a step, asked of its own dispatcher with CUDA's settings."""

import pytest
import torch
from vllm.config import CUDAGraphMode

from tests.engine.conftest import runner_of
from tests.engine.graph_steps import GRAPHS, STEPS, K


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


def test_waits_are_counted_and_what_a_replay_reads_and_did_not_write_is_spoilt(monkeypatch):
    """Of the tests' own CUDA graphs; that they replay the rest, engines show."""
    pytest.importorskip("triton")
    from tests.engine import recorded_graphs

    recorded_graphs.install(monkeypatch.setattr)
    recorded_graphs.waits.clear()
    row, mask, number = torch.ones(2), torch.tensor([True, False]), torch.tensor(2)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        found = row[mask] * int(number)
    assert len(recorded_graphs.waits) == 2 and "item" in str(recorded_graphs.waits)
    assert found.tolist() == [2]
    graph.made.append(row)  # as if its capture had made it
    graph.replay()
    assert found.isnan().all()
