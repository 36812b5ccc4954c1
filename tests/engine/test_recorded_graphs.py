"""What the tests' own CUDA graphs replay, and that they show what a GPU would not forgive."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("triton")
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from tests.engine import recorded_graphs


def _double(source, target, num: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, num)
    tl.store(target + places, 2 * tl.load(source + places))


double = InterpretedFunction(_double)


@pytest.fixture(autouse=True)
def graphs_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_graphs.install(monkeypatch.setattr)
    recorded_graphs.waits.clear()


def captured(run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        found = run()
    return graph, found


def test_a_layer_a_kernel_and_a_copy_run_again_on_what_is_in_their_inputs_then() -> None:
    torch.manual_seed(0)
    layer, inputs, copied = torch.nn.Linear(4, 4), torch.randn(4), torch.empty(4)

    def run() -> torch.Tensor:
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


def test_a_number_that_python_had_read_stays_and_the_wait_for_it_is_counted() -> None:
    length, row = torch.tensor(2), torch.arange(4.0)
    graph, found = captured(lambda: row * int(length))
    length.fill_(3)
    graph.replay()
    assert found.tolist() == [0, 2, 4, 6]
    assert len(recorded_graphs.waits) == 1 and "item" in str(recorded_graphs.waits)


def test_what_a_replay_reads_and_did_not_write_is_spoilt() -> None:
    kept = list[torch.Tensor]()

    def run() -> torch.Tensor:
        if not kept:
            kept.append(torch.ones(2))
        return kept[0] * 2

    captured(run)[0].replay()
    assert kept[0].tolist() == [1, 1], "its own graph writes it anew"
    graph, found = captured(run)
    captured_first = torch.cuda.CUDAGraph()
    captured_first.made = kept
    captured_first.replay()
    graph.replay()
    assert found.isnan().all()


def test_a_selection_by_mask_waits() -> None:
    captured(lambda: torch.arange(3.0)[torch.tensor([True, False, True])])
    assert any("index" in name for name in recorded_graphs.waits)
