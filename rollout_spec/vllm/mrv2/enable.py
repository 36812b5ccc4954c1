"""Lets vLLM choose MRV2, and asynchronous scheduling, for an engine with our drafter. Imports no runner."""

from __future__ import annotations

import functools
from typing import Any

from rollout_spec.patches import Patch, guard_parameters, misfit, replace_function
from rollout_spec.vllm.options import count_ahead, has_our_drafter, names_our_drafter

_V2 = Patch(
    name="vllm-v2-custom-class",
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
_WAIT = Patch(
    name="vllm-wait-and-schedule",
    reason="an engine core that runs ahead waits for a step's tokens in a call that runs nothing. Behind "
    "it the core sleeps 1 ms, and a data-parallel rank of experts runs a dummy batch, with all others",
    upstream="vllm/v1/engine/core.py, EngineCore.step_with_batch_queue",
    until="a scheduler can say that it waits for a step's tokens",
)


def offer_mrv2() -> None:
    """Let vLLM take MRV2 with our drafter, as it would without, where the drafter fits it."""
    from vllm.config import VllmConfig

    name = "_get_v2_model_runner_unsupported_features"
    unsupported_features = getattr(VllmConfig, name, None)
    if unsupported_features is None:
        return  # a vLLM without a list has no MRV2 to offer

    @functools.wraps(unsupported_features)
    def with_our_drafter(self: Any) -> list[str]:
        from rollout_spec.vllm.checks import mrv2_misfits

        unsupported = unsupported_features(self)
        if not names_our_drafter(self):
            return unsupported
        others = [feature for feature in unsupported if "custom_class" not in feature]
        return others + mrv2_misfits(self)

    replace_function(VllmConfig, name, with_our_drafter, patch=_V2, expected_signature="(self) -> list[str]")


def decide_scheduling() -> None:
    """Decide on asynchronous scheduling where vLLM does: an engine core completes its configuration again."""
    from vllm.config import VllmConfig

    complete = VllmConfig.__post_init__

    @functools.wraps(complete)
    def complete_and_schedule_ahead(self: Any) -> None:
        if not has_our_drafter(self):
            complete(self)
            count_ahead(self.scheduler_config)
            return
        from rollout_spec.vllm.mrv2.ahead import schedule_ahead

        asked, self.scheduler_config.async_scheduling = self.scheduler_config.async_scheduling, False
        complete(self)
        schedule_ahead(self, asked)

    replace_function(
        VllmConfig, "__post_init__", complete_and_schedule_ahead, patch=_AHEAD, expected_signature="(self)"
    )


def wait_and_schedule(core: Any) -> None:
    """Let an engine core whose scheduler waits take a step's tokens and schedule the next one in one call."""
    name = "step_with_batch_queue"
    guard_parameters(_WAIT, core.EngineCore, name, ("self",))
    step: Any = getattr(core.EngineCore, name, None)

    @functools.wraps(step)
    def wait_and_step(self: Any) -> tuple[Any, bool]:
        waits = bool(self.batch_queue) and getattr(self.scheduler, "waits", False)
        outputs, has_run = step(self)
        if waits and not has_run and not self.batch_queue and self.scheduler.has_unfinished_requests():
            later, has_run = step(self)
            if later is not None:
                raise misfit(_WAIT, "a step gives tokens though the queue has room for what it schedules")
        return outputs, has_run

    replace_function(core.EngineCore, name, wait_and_step, patch=_WAIT)
