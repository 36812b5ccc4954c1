"""Two data-parallel ranks of a mixture of experts on model runner V2, its Triton kernels interpreted."""

from __future__ import annotations

import pathlib
import re

import pytest

from tests.engine.conftest import make_tiny
from tests.engine.test_runner_v2 import interpreted


@pytest.mark.long
def test_ranks_that_step_together_schedule_ahead_or_wait_each_by_its_gate(tmp_path: pathlib.Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    more = {"shared_expert_intermediate_size": 128, "pad_token_id": 0}
    model = make_tiny("Qwen2Moe", tmp_path / "model", **experts, **more)
    results = interpreted("tests.engine.interpreted_ranks", model, tmp_path / "results.json")
    assert results["ranks"]["requests"] == results["plain"]
    ranks = results["ranks"]["found"]
    assert {len(rank["passes"]) for rank in ranks} == {len(ranks[0]["passes"])}
    assert ranks[0]["ranks"] == ranks[1]["ranks"], "both know of all passes"
    assert ranks[0]["ranks"][1] == 1, "a dummy batch is a plain step"
    for rank in ranks:
        assert re.fullmatch("s+d+", rank["passes"]), "a rank that waits makes no other run a dummy batch"
        assert rank["counters"]["num_accepted_tokens"] > 0
        assert rank["counters"]["num_failed_steps"] == 0
    assert ranks[0]["counters"]["num_steps_off_threshold"] > 0
    assert ranks[1]["counters"]["num_steps_off_threshold"] == 0
