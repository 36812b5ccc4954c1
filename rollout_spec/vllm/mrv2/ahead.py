"""Asynchronous scheduling on MRV2 with a drafter on the host: every step is scheduled ahead.

The scheduler does not know a step's drafts: they come when the tokens of the step before have come. It gives
each row room for them, as vLLM does for a model's drafts, and the worker takes away what stays empty.

    device      | step 0        | step 1        | step 2        | step 3
    scheduler       schedules 1     schedules 2     schedules 3, as step 1 reported
    worker                      | tokens of 0, drafts for 1, report of 1
                                                | tokens of 1, drafts for 2, report of 2

A step with room waits for the tokens of the step before, and drafts after them; one without waits for
nothing. A step's report says `drafts_wanted`, and two steps later there is room. A step that the gate
measures must have none, so the gate foresees it that far ahead (`probe_in_two`). `schedules_ahead` decides
which engines have this scheduler.
"""

from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor

from rollout_spec.config import ConfigError
from rollout_spec.vllm.options import AHEAD_SCHEDULER, SCHEDULER
from rollout_spec.vllm.scheduler import SpecScheduler
from rollout_spec.vllm.step_notes import attach, plan_of, report_of
from rollout_spec.vllm.versions import frees_keys_early, is_before

logger = init_logger(f"vllm.{__name__}")

_BY_COUNT = "by its scheduler's numbers of tokens"  # which are ahead of those that rows have
_CORRUPTING = "deepep_high_throughput"  # vLLM refuses it on ROCm with asynchronous scheduling


class AheadScheduler(SpecScheduler, AsyncScheduler):
    """Asynchronous scheduling for a drafter on the host, with MRV2; it never waits for a step's tokens.

    While the drafter wants none, rows have no room for drafts, and steps are those of an engine without a
    drafter.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_in_flight = 0
        self._drafts_wanted = False  # by the drafting worker

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        room = self._room_for_drafts()
        for request in self.running:
            # vLLM makes the masks of a grammar before the drafts are there.
            takes_drafts = not (request.is_prefill_chunk or request.use_structured_output)
            # As vLLM's own placeholders.
            request.spec_token_ids = [-1] * room if takes_drafts else []
        output = super().schedule(*args, **kwargs)
        # In its plan this step is not in flight yet.
        attach(output, plan_of(output)._replace(num_in_flight=self._num_in_flight, room=room))
        if output.total_num_scheduled_tokens > 0:
            self._num_in_flight += 1
        return output

    def _room_for_drafts(self) -> int:
        """Draft tokens for which each row gets room; half of a step's tokens is left for prompts."""
        if not self._drafts_wanted:
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
        drop_padding(scheduler_output)
        super()._update_after_schedule(scheduler_output)
        for request_id in scheduler_output.num_scheduled_tokens:
            self.requests[request_id].spec_token_ids = []  # vLLM has placeholders there

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        report = report_of(model_runner_output)
        if report is not None and report.nums_drafts is not None:
            self._drafts_wanted = report.drafts_wanted
            self._count_drafts_in_room(scheduler_output, report.nums_drafts)
        if scheduler_output.total_num_scheduled_tokens > 0:
            self._num_in_flight -= 1
        return super().update_from_output(scheduler_output, model_runner_output)

    def _count_drafts_in_room(self, scheduler_output: SchedulerOutput, nums_drafts: dict[str, int]) -> None:
        """Let vLLM count no drafts in the room that stayed empty; it takes the room's tokens back anyway."""
        room = scheduler_output.scheduled_spec_decode_tokens  # of each request that has some
        for request_id in list(room):
            # Not from a request that reset_prefix_cache has restarted since: that is a fault of vLLM 0.24.
            if getattr(self.requests.get(request_id), "async_tokens_to_discard", 0):
                del room[request_id]
        scheduler_output.num_invalid_spec_tokens = {
            request_id: len(places) - nums_drafts.get(request_id, 0) for request_id, places in room.items()
        }


def drop_padding(scheduler_output: SchedulerOutput) -> None:
    """Take away the placeholders of requests that join: no draft is meant for them.

    From 0.29 on vLLM gives a request that joins with one token left K of them, for the graphs of its own
    drafters. Beside a grammar they would stay, and be verified as token 0.
    """
    joining = [request.req_id for request in scheduler_output.scheduled_new_reqs]
    for name in (*joining, *scheduler_output.scheduled_cached_reqs.resumed_req_ids):
        num = len(scheduler_output.scheduled_spec_decode_tokens.pop(name, ()))
        scheduler_output.num_scheduled_tokens[name] -= num
        scheduler_output.total_num_scheduled_tokens -= num


def schedules_ahead(vllm_config: VllmConfig, asked: bool | None) -> bool:
    """Whether an engine with our drafter schedules asynchronously: where it would without, with MRV2.

    Raises ConfigError: the user's `async_scheduling` (`asked`) is True, and it cannot be had.
    """
    wanted = not current_platform.is_cpu() if asked is None else asked  # vLLM does not by itself on CPUs
    reason = _why_not_ahead(vllm_config) if wanted else None
    if reason is None:
        return wanted
    if asked:
        raise ConfigError(f"async_scheduling: {reason}")
    logger.warning_once(
        "rollout_spec: steps are scheduled one by one, so the device waits for the host between them; "
        "async_scheduling: %s", reason,
    )  # fmt: skip
    return False


def _why_not_ahead(vllm_config: VllmConfig) -> str | None:
    """Why an engine with our drafter cannot schedule ahead; None: it can."""
    scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
    # What returns experts is an option of the model before vLLM 0.32, of `aux_output_config` from then on.
    owners = vllm_config.model_config, getattr(vllm_config, "aux_output_config", None)
    if not vllm_config.use_v2_model_runner:
        return "needs vLLM's MRV2 together with the drafter, which this engine does not have"
    if scheduler.scheduler_cls not in (None, SCHEDULER, AHEAD_SCHEDULER):
        return f"scheduler_cls={scheduler.scheduler_cls!r} does not know the drafter"
    if not Executor.get_class(vllm_config).supports_async_scheduling():
        backend = parallel.distributed_executor_backend
        return f"distributed_executor_backend={backend!r} does not support it"
    if current_platform.is_rocm() and parallel.enable_dbo and parallel.all2all_backend == _CORRUPTING:
        return f"with enable_dbo and all2all_backend={_CORRUPTING!r}, tokens can be wrong on ROCm"
    if any(getattr(owner, "enable_return_routed_experts", False) for owner in owners):
        return f"with enable_return_routed_experts, vLLM finds a token's experts {_BY_COUNT}"
    if frees_keys_early(vllm_config.model_config):
        return f"vLLM before 0.29 frees keys behind a window {_BY_COUNT}"
    policy = vllm_config.model_config.architecture
    if policy == "DeepseekV4ForCausalLM" and is_before(32):
        return f"vLLM before 0.32 compresses the KV cache of {policy} {_BY_COUNT}"
    return None
