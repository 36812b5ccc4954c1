"""Which engines with our drafter schedule ahead, and what the others say."""

import logging
import re

import pytest
from vllm.config import ModelConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from rollout_spec.config import ConfigError, SpecConfig
from rollout_spec.vllm import versions
from rollout_spec.vllm.mrv2.ahead import schedules_ahead
from rollout_spec.vllm.options import AHEAD_SCHEDULER
from rollout_spec.vllm.refusals import checks
from rollout_spec.vllm.runner_and_scheduler import scheduler_of
from tests.engine.conftest import configured

WITHOUT_IT = type("Executor", (UniProcExecutor,), {"supports_async_scheduling": lambda: False})
OTHER_SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"


@pytest.fixture
def decided(tiny_model):
    def decide(
        asked, is_cpu=False, has_v2=True, returns_experts=False, overlaps=False, policy=None, old=None,
        **arguments,
    ):  # fmt: skip
        config = configured(tiny_model, {}, **arguments)
        assert not config.scheduler_config.async_scheduling, "this is a CPU, without Triton"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(current_platform, "is_cpu", lambda: is_cpu)
            patch.setattr(VllmConfig, "use_v2_model_runner", has_v2)
            owner = getattr(config, "aux_output_config", config.model_config)  # from 0.32 on, and before
            patch.setattr(owner, "enable_return_routed_experts", returns_experts)
            patch.setattr(current_platform, "is_rocm", lambda: overlaps)
            patch.setattr(config.parallel_config, "enable_dbo", overlaps)
            if policy is not None:
                patch.setattr(ModelConfig, "architecture", policy)
            if old is not None:
                patch.setattr(versions, "version", lambda: old)
            config.scheduler_config.async_scheduling = schedules_ahead(config, asked)
        config.scheduler_config.scheduler_cls = scheduler_of(config)
        return config.scheduler_config

    return decide


@pytest.mark.parametrize("is_cpu", [False, True])
@pytest.mark.parametrize("asked", [None, False, True])
def test_an_engine_with_v2_schedules_ahead_where_vllm_would(decided, asked, is_cpu):
    settings, expected = decided(asked, is_cpu), not is_cpu if asked is None else asked
    assert settings.async_scheduling == expected
    assert settings.scheduler_cls == (AHEAD_SCHEDULER if expected else None)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"has_v2": False}, "needs vLLM's MRV2 together with the drafter"),
        ({"scheduler_cls": OTHER_SCHEDULER}, f"scheduler_cls='{OTHER_SCHEDULER}' does not know"),
        ({"distributed_executor_backend": WITHOUT_IT}, "distributed_executor_backend=.* does not support it"),
        ({"overlaps": True, "all2all_backend": "deepep_high_throughput"}, "with enable_dbo and all2all_back"),
        ({"returns_experts": True}, "with enable_return_routed_experts, vLLM finds"),
        ({"policy": "DeepseekV4ForCausalLM", "old": "0.29.0"}, "vLLM before 0.32 compresses the KV cache"),
        ({"hf_overrides": {"sliding_window": 32}, "old": "0.24.0"}, "vLLM before 0.29 frees keys behind a"),
    ],
)
def test_an_engine_that_cannot_says_why(decided, arguments, reason, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with pytest.raises(ConfigError, match=f"^async_scheduling: {reason}"):
        decided(True, **arguments)
    assert not decided(False, **arguments).async_scheduling
    assert "one by one" not in caplog.text
    assert not decided(None, **arguments).async_scheduling
    [message] = {message for message in caplog.messages if "one by one" in message}
    assert re.search(f"the device waits for the host between them; async_scheduling: {reason}", message)


@pytest.mark.parametrize(
    ("release", "window", "refusal"),
    [
        ("0.24.0", None, None),
        ("0.24.0", "sliding_window", "a sliding window before vLLM 0.29"),
        ("0.24.0", "attention_chunk_size", "a sliding window before vLLM 0.29"),
        ("0.29.0", "sliding_window", None),
    ],
)
def test_drafts_ahead_are_refused_where_keys_go_early(tiny_model, monkeypatch, release, window, refusal):
    config = configured(tiny_model, {}, hf_overrides={window: 32} if window else {})
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)
    monkeypatch.setattr(versions, "version", lambda: release)
    monkeypatch.setattr(config.scheduler_config, "async_scheduling", True)
    assert (checks._facts_of_any_drafts(config, SpecConfig(), None)["ahead"] or None) == refusal
