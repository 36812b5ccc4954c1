"""vLLM's scheduler with what drafting needs of it (vLLM's `scheduler_cls`).

It counts per request what was drafted and accepted, and tells the workers what they must all do alike.
"""

from collections import defaultdict
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from rollout_spec.metrics import RequestCounters
from rollout_spec.vllm.step_notes import Plan, attach, report_of

COUNTERS_KEY = "rollout_spec"  # a finished request's counts, in its `RequestOutput.kv_transfer_params`
CORE_KEY = "rollout_spec_core"  # beside them: the engine core that served it, its data-parallel rank
UNCOUNTED_KEY = "rollout_spec_uncounted"  # in `SamplingParams.extra_args`: it is not among `take_aborted`


class SpecScheduler(Scheduler):
    """Scheduling is vLLM's own; a finished request carries its counts in `kv_transfer_params[COUNTERS_KEY]`.

    vLLM has no output for the counts of an aborted request (which to the engine is also one that meets a stop
    string): `take_aborted` has their sums.

    `kv_transfer_params` is the only free-form field of a RequestOutput. vLLM's own counts, from 0.29 on, lack
    steps without a draft, and aborted requests.

    What the drafting worker chooses (`Report`) it tells every worker with the next step (`Plan`).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._request_counters: defaultdict[str, RequestCounters] = defaultdict(RequestCounters)
        self._aborted = RequestCounters()
        # Not data_parallel_rank: the engine cores of a dense model all have rank 0 of 1.
        self._core = self.parallel_config.data_parallel_index
        self._num_model_tokens: int | None = None

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = super().schedule(*args, **kwargs)
        attach(output, Plan(self._num_model_tokens))
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        report = report_of(model_runner_output)
        if report is not None:
            self._num_model_tokens = report.num_model_tokens
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_spec_decoding_stats(  # type: ignore[no-untyped-def]
        self, spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id
    ):
        counters = self._request_counters[request_id]
        num_verified = num_draft_tokens - (num_invalid_spec_tokens or {}).get(request_id, 0)
        if num_verified == 0:
            return spec_decoding_stats
        counters.num_drafts += 1
        counters.num_draft_tokens += num_verified
        counters.num_accepted_tokens += num_accepted_tokens
        return super().make_spec_decoding_stats(
            spec_decoding_stats, num_draft_tokens=num_draft_tokens, num_accepted_tokens=num_accepted_tokens,
            num_invalid_spec_tokens=num_invalid_spec_tokens, request_id=request_id,
        )  # fmt: skip

    def _update_request_with_output(self, request, *args, **kwargs):  # type: ignore[no-untyped-def]
        # The first token of a response comes from the prefill (also the one after a preemption's recompute,
        # which gives a further token and is counted as the decode step it replaces).
        is_decode = request.num_output_tokens > 0
        kept_token_ids, stopped = super()._update_request_with_output(request, *args, **kwargs)
        counters = self._request_counters[request.request_id]
        if is_decode and kept_token_ids:  # 0.24 throws tokens away that come after `reset_prefix_cache`
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
        return self._aborted.take()


class AsyncSpecScheduler(SpecScheduler, AsyncScheduler):
    """With asynchronous scheduling, of an engine without our drafter."""


def counters_of(output: Any) -> RequestCounters:
    """What was counted of a finished request, of its RequestOutput."""
    return RequestCounters(**output.kv_transfer_params[COUNTERS_KEY])
