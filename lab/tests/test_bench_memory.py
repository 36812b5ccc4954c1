"""A training by epochs with less and less memory: no budget is a cliff."""

import dataclasses

import numpy as np
import pytest

from rollout_spec.predict.load import requests_of
from rollout_spec_lab.bench.memory import Training, lines_of, rewritten, simulate_budgets


@pytest.mark.parametrize(("shuffled", "engines", "turns"), [(False, 1, 1), (True, 2, 1), (True, 1, 3)])
def test_a_quarter_of_the_memory_gives_nine_tenths_of_the_tokens(shuffled, engines, turns):
    """In whatever order prompts return, and wherever: packed texts take a twelfth of indexed ones."""
    training = Training(
        48, num_tokens=300, num_epochs=3, num_engines=engines, shuffled=shuffled, drift=0.05,
        num_turns=turns, rewrites=turns > 1,
    )  # fmt: skip
    results = simulate_budgets(training, (0.25, 0.5, 1.0))["results"]
    assert [row["max_index_mb"] for row in results[:3]] == [1, 3, 6]
    assert results[-1]["tokens_per_step"] > 3
    assert min(row["of_unlimited"] for row in results) > 0.9


def test_a_template_that_rewrites_leaves_reasoning_out_of_later_prompts():
    training = Training(8, num_tokens=200, num_epochs=3, num_turns=3)
    [request, *_] = requests_of([next(lines_of(training))], None)
    first, second, third = rewritten(request).turns
    for before, turn in ((first, second), (second, third)):
        answer = before.response[len(before.response) * 3 // 4 :]
        prompt = np.append(before.prompt_token_ids, answer)
        np.testing.assert_array_equal(turn.prompt_token_ids, prompt)
    each = [simulate_budgets(dataclasses.replace(training, rewrites=one), ()) for one in (False, True)]
    appended, measured = (record["results"][0]["tokens_per_step"] for record in each)
    assert appended != measured, "so it is what `simulate_budgets` serves"
