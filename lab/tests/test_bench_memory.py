"""A training by epochs with less and less memory: no budget is a cliff."""

import pytest

from rollout_spec_lab.bench.memory import Training, measure


@pytest.mark.parametrize(("shuffled", "engines"), [(False, 1), (True, 2)])
def test_a_quarter_of_the_memory_gives_nine_tenths_of_the_tokens(shuffled, engines):
    """In whatever order prompts return, and wherever: packed texts take a twelfth of indexed ones."""
    training = Training(
        num_prompts=48, num_tokens=300, num_epochs=3, num_engines=engines, shuffled=shuffled, drift=0.05
    )
    results = measure(training, (0.25, 0.5, 1.0))["results"]
    assert [row["max_index_mb"] for row in results[:3]] == [1, 3, 6]
    assert results[-1]["tokens_per_step"] > 3
    assert min(row["of_unlimited"] for row in results) > 0.9
