"""Two ranks on MRV2, data-parallel or tensor-parallel, its Triton kernels interpreted."""

import pytest

from tests.engine.conftest import make_tiny
from tests.engine.serving import assert_each_same
from tests.engine.test_runner_v2 import interpreted


@pytest.mark.long
def test_ranks_that_step_together_schedule_ahead_or_wait_each_by_its_gate(tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    more = {"shared_expert_intermediate_size": 128, "pad_token_id": 0}
    model = make_tiny("Qwen2Moe", tmp_path / "model", **experts, **more)
    results = interpreted("tests.engine.interpreted_ranks", tmp_path / "results.json", model, "data-parallel")
    ranks = results["ranks"]
    assert ranks["requests"] == results["plain"]
    first, second = ranks["last_step"]
    assert first == second, "both know of all passes"
    assert first[1] == 1, "a dummy batch is a plain step"
    for passes, counters in zip(ranks["passes"], ranks["counters"], strict=True):
        # A busy machine has shown one between the steps, with vLLM 0.32: it costs a pass and no token.
        assert passes.rstrip("d").count("d") <= 1, "while a rank has requests it runs no dummy batch"
        assert counters["num_accepted_tokens"] > 0
        assert counters["num_failed_steps"] == 0
    closed = [counters["num_steps_off_threshold"] for counters in ranks["counters"]]
    assert closed[0] > 0 == closed[1]


@pytest.mark.long
def test_tensor_parallel_ranks_verify_the_same_drafts(chat_model, tmp_path):
    """The step is on its way to both when the first one drafts."""
    path, module = tmp_path / "results.json", "tests.engine.interpreted_ranks"
    found = interpreted(module, path, chat_model, "tensor-parallel")
    assert_each_same(found["drafted"]["requests"], found["plain"]["requests"])
    first, second = found["drafted"]["drafts"]
    assert first == second
    assert sum(map(bool, first)) > 10 and found["drafted"]["num_failed_steps"] == 0
