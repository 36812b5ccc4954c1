"""vLLM's scheduler, counting per request what was drafted and accepted (vLLM's `scheduler_cls`)."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus

from rollout_spec.config import ConfigError
from rollout_spec.metrics import RequestCounters
from rollout_spec.vllm.options import SCHEDULER, is_hybrid

logger = init_logger(f"vllm.{__name__}")

COUNTERS_KEY = "rollout_spec"  # a finished request's counts, in its `RequestOutput.kv_transfer_params`
CORE_KEY = "rollout_spec_core"  # beside them: the engine core that served it, its data-parallel rank
UNCOUNTED_KEY = "rollout_spec_uncounted"  # in `SamplingParams.extra_args`: it is not among `take_aborted`
AHEAD_SCHEDULER = "rollout_spec.vllm.scheduler.AheadScheduler"
AHEAD_KEY = "rollout_spec_ahead"  # an attribute of a `SchedulerOutput`
DRAFTS_KEY = "rollout_spec_drafts"  # of a `ModelRunnerOutput`: DraftTokenIds, if the next step waits for them
# Of a `ModelRunnerOutput`, and of the next `SchedulerOutput`: how many tokens a model drafts in that step
MODEL_TOKENS_KEY = "rollout_spec_model_tokens"


class _Counting(Scheduler):
    """Scheduling is vLLM's own; a finished request carries its counts in `kv_transfer_params[COUNTERS_KEY]`.

    vLLM has no output for the counts of an aborted request (which to the engine is also one that meets a stop
    string): `take_aborted` has their sums.

    That dict is the one free-form field of a RequestOutput. What vLLM counts from 0.29 on
    (`versions.counts_drafts`) lacks what verl's servers need besides: steps without a draft, and the requests
    that were aborted.

    Of a model that drafts it tells all workers what the one with the drafter has chosen (MODEL_TOKENS_KEY).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._request_counters: defaultdict[str, RequestCounters] = defaultdict(RequestCounters)
        self._aborted = RequestCounters()
        # Not data_parallel_rank: the engine cores of a dense model all have rank 0 of 1.
        self._core = self.parallel_config.data_parallel_index
        self._model_tokens: int | None = None

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = super().schedule(*args, **kwargs)
        setattr(output, MODEL_TOKENS_KEY, self._model_tokens)
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        self._model_tokens = getattr(model_runner_output, MODEL_TOKENS_KEY, self._model_tokens)
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_spec_decoding_stats(  # type: ignore[no-untyped-def]
        self, spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id
    ):
        counters = self._request_counters[request_id]
        counters.num_drafts += 1
        counters.num_draft_tokens += num_draft_tokens
        counters.num_accepted_tokens += num_accepted_tokens
        return super().make_spec_decoding_stats(
            spec_decoding_stats,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted_tokens,
            num_invalid_spec_tokens=num_invalid_spec_tokens,
            request_id=request_id,
        )

    def _update_request_with_output(self, request, *args, **kwargs):  # type: ignore[no-untyped-def]
        # The first token of a response comes from the prefill (also the one behind a preemption's recompute,
        # which gives a further token and is counted as the decode step it replaces).
        is_decode = request.num_output_tokens > 0
        kept_token_ids, stopped = super()._update_request_with_output(request, *args, **kwargs)
        counters = self._request_counters[request.request_id]
        if is_decode:
            counters.num_decoded_tokens += len(kept_token_ids)
            counters.num_decode_steps += 1
        return kept_token_ids, stopped

    def _free_request(self, request, *args, **kwargs):  # type: ignore[no-untyped-def]
        freed = super()._free_request(request, *args, **kwargs)
        # From vLLM 0.26 on the first of two: the other is of an encoder's cache.
        params, *others = freed if isinstance(freed, tuple) else (freed,)
        counters = self._request_counters.pop(request.request_id, RequestCounters())
        if request.status != RequestStatus.FINISHED_ABORTED:
            params = {**(params or {}), COUNTERS_KEY: counters.to_dict(), CORE_KEY: self._core}
        elif UNCOUNTED_KEY not in (getattr(request.sampling_params, "extra_args", None) or ()):
            self._aborted.add(counters)
        return (params, *others) if isinstance(freed, tuple) else params

    def take_aborted(self) -> RequestCounters:
        """The sums over the requests aborted since the last call."""
        taken, self._aborted = self._aborted, RequestCounters()
        return taken


class CountingScheduler(_Counting):
    """With synchronous scheduling."""


class AsyncCountingScheduler(_Counting, AsyncScheduler):
    """With asynchronous scheduling, of an engine without our drafter."""


class Ahead(NamedTuple):
    """What an `AheadScheduler` tells the workers with a step."""

    num_in_flight: int
    """Earlier steps whose tokens it does not have yet."""
    waits: bool
    """Whether it waits for this step's drafts before it schedules the next one."""


class AheadScheduler(_Counting, AsyncScheduler):
    """Asynchronous scheduling for a drafter on the host, with model runner V2.

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
    """Have an engine with our drafter schedule asynchronously where it would without: with model runner V2.

    Args:
        vllm_config: changed in place.
        asked: the user's `async_scheduling`.

    Raises:
        ConfigError: it is asked for and cannot be had.
    """
    scheduler = vllm_config.scheduler_config
    reason = None
    if not vllm_config.use_v2_model_runner:
        reason = "needs vLLM's model runner V2 together with the drafter, which this engine does not have"
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
