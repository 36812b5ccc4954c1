"""On a GPU every row of logits is cut in one way, however many rows there are."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.sample.ops import topk_topp_sampler, topk_topp_triton

from rollout_spec import patches
from rollout_spec.vllm.both_runners.top_k_top_p import cut_rows_alike
from rollout_spec.vllm.versions import version
from tests.accelerator import DEVICE, HOST, Accelerator
from tests.engine.interpreting import interpreted

NUMS_ROWS = (1, 7, 8, 64, 65)


@pytest.fixture
def ways(monkeypatch):
    """The ways that logits are cut in from now on, in a process of an engine on a GPU."""
    found: list[str] = []
    monkeypatch.setattr(patches, "_applied", {})
    monkeypatch.setattr(topk_topp_sampler, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.setattr(topk_topp_sampler, "HAS_TRITON", True)
    for name in ("apply_top_k_top_p_pytorch", "apply_top_k_top_p_triton"):

        def cut(logits, k, p, way=name, **_):
            found.append(way.rpartition("_")[2])
            return logits

        monkeypatch.setattr(topk_topp_sampler, name, cut, raising=False)
    if hasattr(topk_topp_triton, "_SPLIT_MAX_BATCH"):
        monkeypatch.setattr(topk_topp_triton, "_SPLIT_MAX_BATCH", topk_topp_triton._SPLIT_MAX_BATCH)
    return found


@pytest.mark.parametrize(("device", "expected"), [(DEVICE, "triton"), (HOST, "pytorch")])
def test_rows_are_cut_by_one_kernel(ways, device, expected):
    for _ in range(2):  # once
        cut_rows_alike()
    with Accelerator() as accelerator:
        for num_rows in NUMS_ROWS:
            logits = torch.zeros(num_rows, 4)
            logits = accelerator.put(logits) if device == DEVICE else logits
            function = "apply_top_k_top_p" if device == DEVICE else "apply_top_k_top_p_pytorch"
            getattr(topk_topp_sampler, function)(logits, torch.ones(num_rows), None)
    assert ways == [expected] * len(NUMS_ROWS)


@pytest.mark.skipif(not hasattr(topk_topp_triton, "_SPLIT_MAX_BATCH"), reason="before 0.32 no row is split")
def test_no_row_is_split(ways, monkeypatch):
    """By vLLM's own choice of kernels."""
    cut_rows_alike()
    for name in ("_topk_topp", "_apply_topp_split"):
        monkeypatch.setattr(topk_topp_triton, name, lambda *_, name=name: ways.append(name))
    monkeypatch.setattr(topk_topp_triton, "num_compute_units", lambda _: 4)
    with Accelerator() as accelerator:
        for num_rows in NUMS_ROWS:
            p = accelerator.put(torch.full((num_rows,), 0.9))
            topk_topp_triton.apply_top_k_top_p_triton(accelerator.put(torch.zeros(num_rows, 4)), None, p)
    assert ways == ["_topk_topp"] * len(NUMS_ROWS)


@pytest.mark.skipif(version() == "0.23.0", reason="the tests interpret the kernels of vLLM 0.24 and later")
def test_of_tokens_that_tie_the_smallest_ids_stay(tmp_path):
    found = interpreted("tests.engine.interpreted_cuts", tmp_path / "results.json")
    assert all(one["are_first"] for one in found.values())
    assert {*found["top-k, 7"]["kept"], *found["top-k, 8"]["kept"]} == {20}


@pytest.mark.skipif(not hasattr(topk_topp_triton, "_max_sampler_batch_size"), reason="before vLLM 0.32")
def test_an_engine_warms_up_for_no_more_rows_than_a_step_has(ways, monkeypatch):
    asked = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=64), num_speculative_tokens=15)
    # Not vLLM's own: an engine that this process has started may have replaced that.
    monkeypatch.setattr(topk_topp_triton, "_max_sampler_batch_size", lambda vllm_config: 64 * 16)
    cut_rows_alike()
    assert topk_topp_triton._max_sampler_batch_size(asked) == 64 * 16
    cut_rows_alike(64 + 100)
    assert topk_topp_triton._max_sampler_batch_size(asked) == 64 + 100
