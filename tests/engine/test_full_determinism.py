"""`verify=coupled` with verl's `full_determinism`."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from tests.engine.conftest import new_engine, proposer_of, token_ids
from tests.engine.test_coupled import OFF, PROMPTS, generate, params


def deterministic_rollouts(model: str) -> tuple[list[list[int]], list[list[int]], int, int]:
    """Token ids without and with drafts, draft tokens and accepted ones, with full_determinism of verl."""
    import torch
    from verl.workers.engine.utils import enable_full_determinism
    from vllm import envs

    enable_full_determinism(seed=7)
    # verl hands every request of a replica the same seed; what tells siblings apart is the key.
    sampling = [params({"temperature": 1.0, "seed": 7}, i) for i in range(len(PROMPTS))]
    plain = token_ids(generate(new_engine(model, **OFF), sampling))
    llm = new_engine(model, {})
    drafted = token_ids(generate(llm, sampling))
    assert envs.VLLM_BATCH_INVARIANT and torch.are_deterministic_algorithms_enabled()
    counters = proposer_of(llm).take_counters()
    return plain, drafted, counters.num_draft_tokens, counters.num_accepted_tokens


def test_full_determinism_changes_nothing(
    make_engine: Any, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own: verl's settings stay. Of vLLM's batch invariance a CPU has the switch only."""
    sampling = [params({"temperature": 1.0}, i) for i in range(len(PROMPTS))]
    expected = token_ids(generate(make_engine(**OFF), sampling))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        plain, drafted, num_drafted, num_accepted = process.submit(
            deterministic_rollouts, tiny_model
        ).result()
    assert plain == drafted == expected
    assert 0 < num_accepted < num_drafted
