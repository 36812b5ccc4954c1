"""The drafter and the verification inside a vLLM engine.

In: vLLM's configuration, batches and sampling metadata. Out: drafts, sampled tokens, counts per request.
May import: `config`, `metrics`, `patches`, `drafting`, `verification`, numpy, torch, vllm. `plugin` is the
entry point; it loads first.
"""

from __future__ import annotations

from typing import Any

OPTIONS_KEY = "rollout_spec"  # in vLLM's `additional_config`
PROPOSER = "rollout_spec.vllm.SuffixProposer"
SCHEDULER = "rollout_spec.vllm.scheduler.CountingScheduler"


def speculative_config(num_speculative_tokens: int) -> dict[str, Any]:
    """vLLM's option of this name, for our proposer."""
    return {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": num_speculative_tokens}


def __getattr__(name: str) -> Any:
    # Lazy: vLLM imports this package in every process, before it has chosen a platform.
    if name == "SuffixProposer":
        from rollout_spec.vllm.proposer import SuffixProposer

        return SuffixProposer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
