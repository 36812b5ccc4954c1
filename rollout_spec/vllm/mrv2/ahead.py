"""Asynchronous scheduling on MRV2 with a drafter on the host: every step is scheduled ahead.

The scheduler does not know a step's drafts: they come when the tokens of the step before have come. It gives
each row room for them, as vLLM does for a model's drafts, and the worker takes away what stays empty.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor

from rollout_spec.config import ConfigError
from rollout_spec.vllm.options import SCHEDULER, drafts_with_model
from rollout_spec.vllm.scheduler import Counting

logger = init_logger(f"vllm.{__name__}")

AHEAD_SCHEDULER = "rollout_spec.vllm.mrv2.ahead.AheadScheduler"
AHEAD_KEY = "rollout_spec_ahead"  # an attribute of a `SchedulerOutput`: Ahead
FILLED_KEY = "rollout_spec_filled"  # of a `ModelRunnerOutput`: Filled


class Ahead(NamedTuple):
    """What an `AheadScheduler` tells the workers with a step."""

    num_in_flight: int
    """Earlier steps whose tokens it does not have yet."""
    room: int
    """Draft tokens for which each decoding row has room at most; 0: nobody waits for drafts."""


class Filled(NamedTuple):
    """What the workers tell an `AheadScheduler` with a step's tokens."""

    nums_drafts: dict[str, int]
    """Draft tokens that the step has verified, of each request that had some."""
    wants_room: bool
    """Whether drafts may pay in the steps that are scheduled from now on."""


class AheadScheduler(Counting, AsyncScheduler):
    """Asynchronous scheduling for a drafter on the host, with MRV2; it never waits for a step's tokens.

    While the drafter's gate is closed, rows have no room for drafts, and steps are those of an engine without
    a drafter. A step's output says whether it wants room, and that acts two steps later.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_in_flight = 0
        self._gives_room = False

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        told = Ahead(self._num_in_flight, self._room())
        for request in self.running:
            # vLLM makes the masks of a grammar before the drafts are there.
            has_room = not (request.is_prefill_chunk or request.use_structured_output)
            request.spec_token_ids = [-1] * (told.room * has_room)  # as vLLM's own placeholders
        output = super().schedule(*args, **kwargs)
        setattr(output, AHEAD_KEY, told)
        self._num_in_flight += output.total_num_scheduled_tokens > 0
        return output

    def _room(self) -> int:
        """Draft tokens for which each row gets room; half of a step's tokens is left for prompts."""
        if not self._gives_room:
            return 0
        return min(self.num_spec_tokens, self.max_num_scheduled_tokens // (2 * max(1, len(self.running))))

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM 0.24 discards one future step per awaited token of a request that it interrupts here."""
        done = super().reset_prefix_cache(*args, **kwargs)
        for request in self.requests.values():
            awaited = getattr(request, "async_tokens_to_discard", 0)
            if awaited > self._num_in_flight:  # with drafts, one step has several tokens
                request.async_tokens_to_discard = self._num_in_flight
        return done

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        for request_id in scheduler_output.num_scheduled_tokens:
            self.requests[request_id].spec_token_ids = []  # vLLM has placeholders there

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        filled: Filled | None = getattr(model_runner_output, FILLED_KEY, None)
        if filled is not None:
            self._gives_room = filled.wants_room
            self._count_filled(scheduler_output, filled)
        self._num_in_flight -= scheduler_output.total_num_scheduled_tokens > 0
        return super().update_from_output(scheduler_output, model_runner_output)

    def _count_filled(self, scheduler_output: SchedulerOutput, filled: Filled) -> None:
        """Count room that stayed empty as no drafts; but vLLM takes it back, as that of rejected ones."""
        rooms = scheduler_output.scheduled_spec_decode_tokens
        for request_id in list(rooms):
            # 0.24 would take back what is stale from a request that has begun anew in reset_prefix_cache.
            if getattr(self.requests.get(request_id), "async_tokens_to_discard", 0):
                del rooms[request_id]
        scheduler_output.num_invalid_spec_tokens = {
            request_id: len(room) - filled.nums_drafts.get(request_id, 0)
            for request_id, room in rooms.items()
        }


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
    elif getattr(vllm_config.model_config, "enable_return_routed_experts", False):  # 0.32 has it elsewhere
        reason = (
            "with enable_return_routed_experts, vLLM before 0.32 finds a token's experts by its scheduler's "
            "numbers of tokens"
        )
    if drafts_with_model(vllm_config) and scheduler.scheduler_cls is None:
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
