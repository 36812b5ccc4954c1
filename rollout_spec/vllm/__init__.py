"""The drafter and the verification inside a vLLM engine.

In: vLLM's configuration, batches and sampling metadata. Out: drafts, sampled tokens, counts per request.
May import: `config`, `metrics`, `patches`, `drafting`, `verification`, numpy, pydantic, vllm. `plugin`
is the entry point; it loads first.
"""

from __future__ import annotations

from typing import Any

from rollout_spec.vllm.options import OPTIONS_KEY, PROPOSER, SCHEDULER, speculative_config

__all__ = ["OPTIONS_KEY", "PROPOSER", "SCHEDULER", "SuffixProposer", "speculative_config"]


def __getattr__(name: str) -> Any:
    # Lazy: vLLM imports this package in every process, before it has chosen a platform.
    if name == "SuffixProposer":
        from rollout_spec.vllm.proposer import SuffixProposer

        return SuffixProposer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
