"""Which scheduler counts the drafts of an engine."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import SchedulerConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from rollout_spec.metrics import RequestCounters
from rollout_spec.vllm import OPTIONS_KEY, PROPOSER, SCHEDULER
from rollout_spec.vllm.mrv2.ahead import AheadScheduler, drop_padding
from rollout_spec.vllm.options import AHEAD_SCHEDULER, ASYNC_SCHEDULER
from rollout_spec.vllm.runner_and_scheduler import choose_scheduler, scheduler_of
from rollout_spec.vllm.scheduler import AsyncSpecScheduler, SpecScheduler


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("asked", [None, SCHEDULER, "vllm.v1.core.sched.scheduler.Scheduler"])
def test_what_counts_schedules_as_vllm_has_decided(asked, is_asynchronous, monkeypatch):
    # That of CPUs switches asynchronous scheduling off.
    monkeypatch.setattr(type(current_platform), "check_and_update_config", classmethod(lambda *_: None))
    choose_scheduler()
    settings = SchedulerConfig.default_factory(scheduler_cls=asked, async_scheduling=is_asynchronous)
    decided = VllmConfig(scheduler_config=settings).scheduler_config
    assert decided.async_scheduling == is_asynchronous
    if asked != SCHEDULER:
        assert decided.scheduler_cls == asked
        return
    chosen = decided.get_scheduler_cls()
    assert issubclass(chosen, SpecScheduler) and not issubclass(chosen, AheadScheduler)
    assert issubclass(chosen, AsyncScheduler) == is_asynchronous != (chosen is SpecScheduler)


@pytest.mark.parametrize(
    ("drafts", "asked", "is_asynchronous", "given"),
    [
        ("custom_class", None, True, AHEAD_SCHEDULER),
        ("custom_class", SCHEDULER, True, AHEAD_SCHEDULER),
        ("custom_class", None, False, None),
        ("custom_class", SCHEDULER, False, SCHEDULER),
        ("mtp", None, True, AHEAD_SCHEDULER),
        ("mtp", None, False, SCHEDULER),
        ("mtp", "my.Scheduler", False, "my.Scheduler"),
        (None, SCHEDULER, True, ASYNC_SCHEDULER),
        (None, SCHEDULER, False, SCHEDULER),
        (None, None, True, None),
    ],
)
def test_who_gets_which_scheduler(drafts, asked, is_asynchronous, given):
    speculative = SimpleNamespace(method=drafts, model=PROPOSER if drafts == "custom_class" else None)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(scheduler_cls=asked, async_scheduling=is_asynchronous),
        speculative_config=drafts and speculative, additional_config={OPTIONS_KEY: {}},
    )  # fmt: skip
    assert scheduler_of(config) == given


@pytest.mark.parametrize(
    ("asks", "num_rows", "room"),
    [(False, 1, 0), (True, 1, 15), (True, 64, 15), (True, 256, 4), (True, 1025, 0)],
)
def test_room_for_drafts_leaves_half_of_a_step_for_prompts(asks, num_rows, room):
    scheduler = AheadScheduler.__new__(AheadScheduler)
    scheduler._drafts_wanted, scheduler.num_spec_tokens = asks, 15
    scheduler.max_num_scheduled_tokens = 2048
    scheduler.running = [None] * num_rows
    assert scheduler._room_for_drafts() == room


def test_room_that_stays_empty_is_no_draft():
    scheduler, request = AheadScheduler.__new__(AheadScheduler), SimpleNamespace()
    scheduler._request_counters, scheduler.log_stats = defaultdict(RequestCounters), False
    scheduler.requests = {"a": request, "b": request, "stale": SimpleNamespace(async_tokens_to_discard=1)}
    output = SimpleNamespace(scheduled_spec_decode_tokens={name: [-1] * 4 for name in ("a", "b", "stale")})
    scheduler._count_drafts_in_room(output, {"a": 3})
    assert output.num_invalid_spec_tokens == {"a": 1, "b": 4}
    for name, room in output.scheduled_spec_decode_tokens.items():
        num_accepted, invalid = 2 * (name == "a"), output.num_invalid_spec_tokens
        scheduler.make_spec_decoding_stats(None, len(room), num_accepted, invalid, name)
    counted = RequestCounters(num_drafts=1, num_draft_tokens=3, num_accepted_tokens=2)
    assert scheduler._request_counters == {"a": counted, "b": RequestCounters()}


def test_tokens_that_are_thrown_away_are_no_step():
    """vLLM 0.24 discards those of a step that was in flight when `reset_prefix_cache` came."""
    scheduler = AsyncSpecScheduler.__new__(AsyncSpecScheduler)
    scheduler._request_counters = defaultdict(RequestCounters)
    request = SimpleNamespace(request_id="a", num_output_tokens=3, async_tokens_to_discard=1)
    assert scheduler._update_request_with_output(request, [7, 8]) == ([], False)
    assert scheduler._request_counters["a"] == RequestCounters()


def test_requests_that_join_have_no_placeholders():
    output: Any = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="new"), SimpleNamespace(req_id="prompt")],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids={"resumed"}),
        scheduled_spec_decode_tokens={"new": [-1] * 4, "resumed": [-1] * 4, "runs": [-1] * 4},
        num_scheduled_tokens={"new": 5, "prompt": 9, "resumed": 5, "runs": 5},
        total_num_scheduled_tokens=24,
    )
    drop_padding(output)
    assert output.scheduled_spec_decode_tokens == {"runs": [-1] * 4}
    assert output.num_scheduled_tokens == {"new": 1, "prompt": 9, "resumed": 1, "runs": 5}
    assert output.total_num_scheduled_tokens == 16
