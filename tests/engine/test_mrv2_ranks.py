"""Two ranks on MRV2, data-parallel or tensor-parallel, its Triton kernels interpreted."""

import pytest

from tests.engine.conftest import EXPERTS, make_tiny
from tests.engine.interpreting import WITH_GRAPHS, interpreted
from tests.engine.serving import assert_each_same

MODULE = "tests.engine.interpreted_ranks"
GRAPHS = "tests.engine.interpreted_graph_ranks"
KINDS = pytest.mark.parametrize("module", [MODULE, pytest.param(GRAPHS, marks=WITH_GRAPHS)])


@pytest.mark.long
@KINDS
def test_ranks_that_step_together_schedule_ahead_or_wait_each_by_its_gate(module, tmp_path):
    model = make_tiny("Qwen2Moe", tmp_path / "model", **EXPERTS)
    results = interpreted(module, tmp_path / "results.json", model, "data-parallel")
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
    if module == GRAPHS:  # vLLM looks at the ranks' numbers of tokens, which a GPU has on the host
        assert_same_graphs(ranks["notes"], {"aten.is_nonzero.default in vllm.forward_context.make"})


@pytest.mark.long
@KINDS
def test_tensor_parallel_ranks_verify_the_same_drafts(module, chat_model, tmp_path):
    """The step is on its way to both when the first one drafts."""
    found = interpreted(module, tmp_path / "results.json", chat_model, "tensor-parallel")
    assert_each_same(found["drafted"]["requests"], found["plain"]["requests"])
    first, second = found["drafted"]["drafts"]
    assert first == second
    assert sum(map(bool, first)) > 10 and found["drafted"]["num_failed_steps"] == 0
    if module == GRAPHS:
        assert_same_graphs(found["drafted"]["notes"], set())


def assert_same_graphs(notes, waits):
    """Both ranks replay the same number of both kinds, with nothing that a GPU would not forgive."""
    first, second = notes
    assert first == second
    assert first["faults"] == {} and first["waits"].keys() <= waits
    # On 0.24 steps in which only one of the two has drafts take none.
    assert min(first["replays"][f"ModelCudaGraphManager {steps}"] for steps in ("plain", "drafts")) > 1
