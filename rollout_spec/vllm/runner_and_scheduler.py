"""Which model runner and which scheduler an engine gets, as vLLM completes its configuration.

`refusals.checks` says what MRV2 cannot do, and `mrv2.ahead` which engines schedule ahead. Imports no runner.
"""

from typing import Any

from vllm.config import VllmConfig

from rollout_spec.patches import Patch, wrap
from rollout_spec.vllm import options

_OFFER = Patch(
    name="vllm-mrv2-custom-class",
    reason="MRV2 refuses every custom_class, so engines with our drafter would have MRV1, which "
    "schedules synchronously",
    upstream="vllm/config/vllm.py, VllmConfig._get_v2_model_runner_unsupported_features",
    until="MRV2 takes a custom_class",
)
_AHEAD = Patch(
    name="vllm-schedule-ahead",
    reason="vLLM refuses asynchronous scheduling for every custom_class, so the device waits for the host "
    "between two steps; and it takes a scheduler_cls as it is, whether it schedules asynchronously or not",
    upstream="vllm/config/vllm.py, VllmConfig.__post_init__",
    until="vLLM schedules asynchronously with a custom_class",
)


def offer_mrv2() -> None:
    """Let vLLM take MRV2 with our drafter, as it would without, where the drafter fits it."""
    name = "_get_v2_model_runner_unsupported_features"
    if not hasattr(VllmConfig, name):
        return  # a vLLM without a list has no MRV2 to offer

    @wrap(VllmConfig, name, _OFFER)
    def with_our_drafter(unsupported_features: Any, self: Any) -> list[str]:
        from rollout_spec.vllm.refusals.checks import unsupported_on_mrv2

        unsupported: list[str] = unsupported_features(self)
        if not options.names_our_proposer(self):
            return unsupported
        others = [feature for feature in unsupported if "custom_class" not in feature]
        return others + unsupported_on_mrv2(self)


def choose_scheduler() -> None:
    """Let every engine have `scheduler_of` it. An engine core completes its configuration again."""

    @wrap(VllmConfig, "__post_init__", _AHEAD)
    def complete_and_schedule(complete: Any, self: Any) -> None:
        if options.has_our_drafter(self):
            from rollout_spec.vllm.mrv2.ahead import schedules_ahead

            asked, self.scheduler_config.async_scheduling = self.scheduler_config.async_scheduling, False
            complete(self)
            self.scheduler_config.async_scheduling = schedules_ahead(self, asked)
        else:
            complete(self)
        self.scheduler_config.scheduler_cls = scheduler_of(self)


def scheduler_of(vllm_config: VllmConfig) -> Any:
    """The scheduler class of an engine of which it is decided whether it schedules asynchronously.

    our drafter | asynchronously | a model drafts | asked for     | gets
    yes         | yes            |                |               | AheadScheduler
    yes         | no             | yes            | nothing       | SpecScheduler: vLLM's own tells a model
                |                |                |               | no number of tokens
    no          | yes            |                | SpecScheduler | AsyncSpecScheduler: it counts, too
    all others                                                    | what is asked for
    """
    settings = vllm_config.scheduler_config
    asked, is_asynchronous = settings.scheduler_cls, settings.async_scheduling
    if options.has_our_drafter(vllm_config):
        if is_asynchronous:
            return options.AHEAD_SCHEDULER
        return options.SCHEDULER if asked is None and options.drafts_with_model(vllm_config) else asked
    return options.ASYNC_SCHEDULER if asked == options.SCHEDULER and is_asynchronous else asked
