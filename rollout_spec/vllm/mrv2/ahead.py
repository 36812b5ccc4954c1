"""Asynchronous scheduling on MRV2 with a drafter on the host: while nothing is drafted, steps run ahead."""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import DraftTokenIds

from rollout_spec.config import ConfigError
from rollout_spec.vllm.options import SCHEDULER, is_hybrid
from rollout_spec.vllm.scheduler import Counting

logger = init_logger(f"vllm.{__name__}")

AHEAD_SCHEDULER = "rollout_spec.vllm.mrv2.ahead.AheadScheduler"
AHEAD_KEY = "rollout_spec_ahead"  # an attribute of a `SchedulerOutput`
DRAFTS_KEY = "rollout_spec_drafts"  # of a `ModelRunnerOutput`: DraftTokenIds, if the next step waits for them


class Ahead(NamedTuple):
    """What an `AheadScheduler` tells the workers with a step."""

    num_in_flight: int
    """Earlier steps whose tokens it does not have yet."""
    waits: bool
    """Whether it waits for this step's drafts before it schedules the next one."""


class AheadScheduler(Counting, AsyncScheduler):
    """Asynchronous scheduling for a drafter on the host, with MRV2.

    While the drafter's gate is closed it schedules ahead, as without a drafter. While it is open each step
    waits for the tokens and drafts of the one before. What says so comes with a step's output, in DRAFTS_KEY.

    Attributes:
        waits: whether the next step's tokens are waited for before another one is scheduled.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_in_flight = 0
        self.waits = False

    def has_requests(self) -> bool:
        """False also while a step's tokens are waited for: an engine core takes them then."""
        return not (self.waits and self._num_in_flight) and super().has_requests()

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        told = Ahead(self._num_in_flight, self.waits)
        output = super().schedule(*args, **kwargs)
        setattr(output, AHEAD_KEY, told)
        self._num_in_flight += output.total_num_scheduled_tokens > 0
        return output

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's. Of a request that it interrupts, 0.24 drops as many coming steps as it awaits tokens."""
        done = super().reset_prefix_cache(*args, **kwargs)
        for request in self.requests.values():
            awaited = getattr(request, "async_tokens_to_discard", 0)
            if awaited > self._num_in_flight:  # a step with drafts has several
                request.async_tokens_to_discard = self._num_in_flight
        return done

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        for request_id in scheduler_output.num_scheduled_tokens:
            self.requests[request_id].spec_token_ids = []  # vLLM has placeholders there

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if scheduler_output.total_num_scheduled_tokens > 0:
            self._num_in_flight -= 1
            drafts: DraftTokenIds | None = getattr(model_runner_output, DRAFTS_KEY, None)
            self.waits = drafts is not None
            if drafts is not None and not self._num_in_flight:
                self.update_draft_token_ids(drafts)
        return outputs


def schedule_ahead(vllm_config: VllmConfig, asked: bool | None) -> None:
    """Have an engine with our drafter schedule asynchronously where it would without: with MRV2.

    Args:
        vllm_config: changed in place.
        asked: the user's `async_scheduling`.

    Raises:
        ConfigError: it is asked for and cannot be had.
    """
    scheduler = vllm_config.scheduler_config
    reason = None
    if not vllm_config.use_v2_model_runner:
        reason = "needs vLLM's MRV2 together with the drafter, which this engine does not have"
    elif scheduler.scheduler_cls not in (None, SCHEDULER, AHEAD_SCHEDULER):
        reason = f"scheduler_cls={scheduler.scheduler_cls!r} does not know the drafter"
    elif not Executor.get_class(vllm_config).supports_async_scheduling():
        backend = vllm_config.parallel_config.distributed_executor_backend
        reason = f"distributed_executor_backend={backend!r} does not support it"
    if is_hybrid(vllm_config) and scheduler.scheduler_cls is None:
        scheduler.scheduler_cls = SCHEDULER  # vLLM's own would not tell the workers what a model is to draft
    wanted = not current_platform.is_cpu() if asked is None else asked  # vLLM does not by itself on CPUs
    if not wanted:
        return
    if reason is None:
        scheduler.async_scheduling, scheduler.scheduler_cls = True, AHEAD_SCHEDULER
    elif asked:
        raise ConfigError(f"async_scheduling: {reason}")
    else:
        logger.warning_once(
            "rollout_spec: steps are scheduled one by one, so the device waits for the host between them; "
            "async_scheduling: %s", reason,
        )  # fmt: skip
