"""What the tests' own CUDA graphs replay, and that they show what a GPU would not forgive."""

import pytest

pytest.importorskip("triton")
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from tests.engine import recorded_graphs


@InterpretedFunction
def double(source, target, num: tl.constexpr):
    places = tl.arange(0, num)
    tl.store(target + places, 2 * tl.load(source + places))


@pytest.fixture(autouse=True)
def graphs_of_the_tests(monkeypatch):
    recorded_graphs.install(monkeypatch.setattr)
    recorded_graphs.waits.clear()


def captured(run):
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        found = run()
    return graph, found


def test_a_layer_a_kernel_and_a_copy_run_again_on_what_is_in_their_inputs_then():
    torch.manual_seed(0)
    layer, inputs, copied = torch.nn.Linear(4, 4), torch.randn(4), torch.empty(4)

    def run():
        out = layer(inputs).relu()
        doubled = torch.empty_like(out)
        double[(1,)](out, doubled, num=4)
        copied.copy_(doubled)
        return copied[1:] + 1

    graph, found = captured(run)
    before = found.clone()
    inputs.neg_()
    graph.replay()
    with torch.inference_mode():
        expected = 2 * layer(inputs).relu()
    torch.testing.assert_close(found, expected[1:] + 1)
    assert not torch.equal(found, before)
    assert not recorded_graphs.waits


def test_waits_are_counted_and_what_a_replay_reads_and_did_not_write_is_spoilt():
    row, mask, number = torch.ones(2), torch.tensor([True, False]), torch.tensor(2)
    graph, found = captured(lambda: row[mask] * int(number))
    assert len(recorded_graphs.waits) == 2 and "item" in str(recorded_graphs.waits)
    assert found.tolist() == [2]
    graph.made.append(row)  # as if its capture had made it
    graph.replay()
    assert found.isnan().all()
