"""The drafter and the verification inside a vLLM engine: mostly hooks.

In: vLLM's configuration, batches and sampling metadata. Out: drafts, sampled tokens, counts per request.
May import: `config`, `environment`, `metrics`, `patches`, `recurrent`, `drafting`, `verification`, numpy,
pydantic, vllm. It never imports verl, and changes vLLM through `patches` only.

DESIGN.md tells a token's way. `runner_and_scheduler` has an engine get MRV1 or MRV2, and its scheduler.
`plugin` has `mrv1.runner` or `mrv2.runner` stand before a worker's model runner, which asks `proposing` for
drafts; `both_runners` has what they share. `keys` names each row's noise. `refusals` stops what cannot work,
`upstream` fixes vLLM's faults.

What a class of ours adds to an object of vLLM's stands in its `put_before`, and what vLLM reads there of
ours in a `bind`; a runner's proposer is `rollout_spec_proposer`.
"""

from typing import Any, NoReturn

from rollout_spec.vllm.options import OPTIONS_KEY, PROPOSER, SCHEDULER, speculative_config

__all__ = ["OPTIONS_KEY", "PROPOSER", "SCHEDULER", "SuffixProposer", "speculative_config"]


class SuffixProposer:
    """The class that `speculative_config={"method": "custom_class", "model": PROPOSER, ...}` names.

    vLLM makes one with a model runner of MRV1, and hands it no more than its configuration. Before the model
    is loaded the plugin puts a `BatchProposer`, which knows the runner, in its place.
    """

    def __init__(self, vllm_config: Any) -> None: ...

    def propose(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            "rollout_spec: vLLM did not load the plugin 'rollout_spec' in this process, so the drafter "
            "does not know the requests of its rows. Let VLLM_PLUGINS name it or leave that variable "
            "unset, and run `rollout-spec doctor`."
        )

    load_model = propose
