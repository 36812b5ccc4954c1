"""The tests' own CUDA graphs show what a GPU would not forgive; that they replay the rest, engines show."""

import pytest

pytest.importorskip("triton")
import torch

from tests.engine import recorded_graphs


def test_waits_are_counted_and_what_a_replay_reads_and_did_not_write_is_spoilt(monkeypatch):
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
