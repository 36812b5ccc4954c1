"""`verify=coupled` with verl's `full_determinism`."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from tests.engine.conftest import OFF, new_engine
from tests.engine.serving import Request, num_accepted, sampling, serve
from tests.engine.test_engines import PROMPTS


def rollouts(llm: Any, **settings: Any) -> list[list[int]]:
    settings = {"temperature": 1.0, "max_tokens": 60} | settings
    asked = [Request(prompt, sampling(settings, key=[3, i])) for i, prompt in enumerate(PROMPTS)]
    return [one["tokens"] for one in serve(llm, asked)]


def deterministic_rollouts(model: str) -> tuple[list[list[int]], list[list[int]], int]:
    """Token ids without and with drafts, and the number of accepted ones, with full_determinism of verl."""
    import torch
    from verl.workers.engine.utils import enable_full_determinism
    from vllm import envs

    enable_full_determinism(seed=7)
    # verl hands every request of a replica the same seed; what tells siblings apart is the key.
    plain = rollouts(new_engine(model, **OFF), seed=7)
    llm = new_engine(model, {})
    drafted = rollouts(llm, seed=7)
    assert envs.VLLM_BATCH_INVARIANT and torch.are_deterministic_algorithms_enabled()
    return plain, drafted, num_accepted(llm)


def test_full_determinism_changes_nothing(
    make_engine: Any, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own: verl's settings stay. Of vLLM's batch invariance a CPU has the switch only."""
    expected = rollouts(make_engine(**OFF))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        plain, drafted, accepted = process.submit(deterministic_rollouts, tiny_model).result()
    assert plain == drafted == expected
    assert accepted > 0
