"""The demo's turns on two real engines of one process."""

from pathlib import Path

import pytest

from rollout_spec_lab.bench.engine import EnginePlan
from rollout_spec_lab.bench.load import Load
from rollout_spec_lab.demo.turns import LEAST_PAIRS, METHODS, serve_in_turns

PROMPTS = [[1, *[5, 9] * 14, 7], [1, 8, 4], [1, 30, 31, 32]]


@pytest.mark.long
def test_both_sides_of_a_pair_give_the_same_tokens(chat_model: str, tmp_path: Path) -> None:
    engine = {
        "max_num_seqs": 4, "max_model_len": 128, "max_num_batched_tokens": 64, "enforce_eager": True,
        "kv_cache_memory_bytes": 64 << 20,
    }  # fmt: skip
    load = Load(PROMPTS, group_size=4, max_tokens=32, natural_ends=True, temperature=0.3)
    plan = EnginePlan(load, METHODS, chat_model, "float32", engine, spec={"batch_threshold": 8})
    found = serve_in_turns(plan, 2, 0.0, tmp_path)
    assert len(found.seconds) == LEAST_PAIRS
    assert found.agreement.num_identical == found.agreement.num_tokens > 100
    assert found.tokens_per_step > 1 and 0 < found.acceptance_rate < 1
    assert found.speedup.value > 0 and found.speedup.ci95[0] < found.speedup.ci95[1]
    assert not list(tmp_path.iterdir())
