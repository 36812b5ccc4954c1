"""The drafter and the verification inside a vLLM engine: mostly hooks.

In: vLLM's configuration, batches and sampling metadata. Out: drafts, sampled tokens, counts per request.
May import: `config`, `environment`, `metrics`, `patches`, `recurrent`, `drafting`, `verification`, numpy,
pydantic, vllm. It never imports verl, and changes vLLM through `patches` only.

DESIGN.md tells a token's way. `plugin` has `mrv1.runner` or `mrv2.runner` stand before a worker's model
runner; `proposer` hands its batch to the drafter and the drafts back; `keys` names each row's noise. Between
steps a rollout server asks by `control` for texts and counts. `upstream` fixes vLLM's faults, `checks`
refuses what cannot work, by the table of `refusals`.

What a class of ours adds to an object of vLLM's stands in its `put_before`. What no such class declares is
named `rollout_spec_...`: a runner's proposer, a graph manager's step, prompt and state.
"""

from typing import Any

from rollout_spec.vllm.options import OPTIONS_KEY, PROPOSER, SCHEDULER, speculative_config

__all__ = ["OPTIONS_KEY", "PROPOSER", "SCHEDULER", "SuffixProposer", "speculative_config"]


def __getattr__(name: str) -> Any:
    # Lazy: vLLM imports this package in every process, before it has chosen a platform.
    if name == "SuffixProposer":
        from rollout_spec.vllm.proposer import SuffixProposer

        return SuffixProposer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
