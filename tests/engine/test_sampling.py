"""Sampled output with drafts follows plain vLLM's distribution; a thinking budget follows its request."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency  # type: ignore[import-untyped]
from vllm.v1.sample import thinking_budget_state
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality

from rollout_spec.vllm.upstream import thinking_budget
from tests.engine.conftest import proposer_of, token_ids
from tests.engine.serving import sampling

FALSE_ALARM_RATE = 1e-5  # of one comparison
NUM_SAMPLES = 1000
NUM_TOKENS = 6
PROMPT = [5, 6, 7, 8] * 4
PENALTIES = {
    "temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.6, "frequency_penalty": 0.6,
}  # fmt: skip
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0}, {"temperature": 0.6, "top_k": 5}, {"temperature": 1.0, "top_p": 0.7}, PENALTIES
]  # fmt: skip


def sample(llm, seed, **settings):
    torch.manual_seed(seed)
    params = sampling(settings | {"max_tokens": NUM_TOKENS, "detokenize": False, "extra_args": None})
    return token_ids(llm.generate([{"prompt_token_ids": PROMPT}] * NUM_SAMPLES, params, use_tqdm=False))


def p_values(one, other):
    """Of homogeneity, at each position but the first, which is the prefill's; rare tokens are one class."""
    values = []
    for columns in [*zip(zip(*one, strict=True), zip(*other, strict=True), strict=True)][1:]:
        counts = [Counter(column) for column in columns]
        common = [token for token, count in (counts[0] + counts[1]).items() if count >= 20]
        rows = [[count[token] for token in common] for count in counts]
        table = np.array([[*row, NUM_SAMPLES - sum(row)] for row in rows])
        values.append(chi2_contingency(table[:, table.any(axis=0)], correction=False).pvalue)
    return values


def test_drafts_leave_the_distribution(make_engine):
    plain = make_engine(max_num_seqs=64)
    coupled = make_engine({"num_speculative_tokens": 3}, max_num_seqs=64)
    values: list[float] = []
    for i, setting in enumerate(SETTINGS):
        expected = sample(plain, i, **setting)
        values += p_values(expected, sample(coupled, 100 + i, **setting))
    counters = proposer_of(coupled).take_counters()
    assert 0.05 < counters.num_accepted_tokens / counters.num_draft_tokens < 0.95, "both must occur"
    assert min(values) > FALSE_ALARM_RATE / len(values), values
    # The comparison would notice penalties that are lost or that do not see the draft's own tokens.
    for lost in (("repetition_penalty",), ("presence_penalty", "frequency_penalty")):
        kept = {name: value for name, value in PENALTIES.items() if name not in lost}
        assert min(p_values(expected, sample(coupled, 8, **kept))) < 1e-8


@pytest.mark.parametrize("budgets", [{0: 7}, {1: 7}, {0: 7, 1: 9}], ids=str)
def test_a_thinking_budget_follows_its_request(budgets):
    """Where two rows are swapped, and then one takes the place of a request with a budget that has ended."""
    thinking_budget.fix(thinking_budget_state)
    marks = SimpleNamespace(reasoning_start_token_ids=[1], reasoning_end_token_ids=[2])
    holder = thinking_budget_state.ThinkingBudgetStateHolder(marks, 4, 8, None, False)
    holder._state.update(budgets)
    swap, move = (0, 1, MoveDirectionality.SWAP), (1, 2, MoveDirectionality.UNIDIRECTIONAL)
    holder.sync_batch(BatchUpdate(batch_size=4, removed=[], added=[], moved=[swap]))
    assert holder._state == {1 - row: budget for row, budget in budgets.items()}
    holder._state[2] = 5
    # vLLM's input batch does not name a place as removed that is taken again.
    holder.sync_batch(BatchUpdate(batch_size=4, removed=[], added=[], moved=[move]))
    assert holder._state == {2 - 2 * row: budget for row, budget in budgets.items()}
