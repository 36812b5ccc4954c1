"""Which scheduler counts the drafts of an engine."""

from __future__ import annotations

import pytest

from rollout_spec.vllm import SCHEDULER
from rollout_spec.vllm.mrv2 import enable


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("asked", [None, SCHEDULER, "vllm.v1.core.sched.scheduler.Scheduler"])
def test_what_counts_schedules_as_vllm_has_decided(asked, is_asynchronous, monkeypatch):
    from vllm.config import SchedulerConfig, VllmConfig
    from vllm.platforms import current_platform
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from rollout_spec.vllm.mrv2.ahead import AheadScheduler
    from rollout_spec.vllm.scheduler import Counting, CountingScheduler

    # That of CPUs switches asynchronous scheduling off.
    monkeypatch.setattr(type(current_platform), "check_and_update_config", classmethod(lambda *_: None))
    enable.decide_scheduling()
    settings = SchedulerConfig.default_factory(scheduler_cls=asked, async_scheduling=is_asynchronous)
    decided = VllmConfig(scheduler_config=settings).scheduler_config
    assert decided.async_scheduling == is_asynchronous
    if asked != SCHEDULER:
        assert decided.scheduler_cls == asked
        return
    chosen = decided.get_scheduler_cls()
    assert issubclass(chosen, Counting) and not issubclass(chosen, AheadScheduler)
    assert issubclass(chosen, AsyncScheduler) == is_asynchronous != (chosen is CountingScheduler)
