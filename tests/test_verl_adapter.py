"""verl's side without Ray: the configuration group, its checks, and the server's small parts."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import pytest
import verl  # noqa: F401 - loads the plugin, which puts our groups on Hydra's search path
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from rollout_spec.config import ConfigError, SpecConfig
from rollout_spec.verl_config import check_config
from rollout_spec.vllm_proposer import CLASS_PATH

VLLM = "actor_rollout_ref.rollout.name=vllm"
ENGINE = "actor_rollout_ref.rollout.engine_kwargs.vllm"


def composed(*overrides: str) -> Any:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [VLLM, *overrides])


def test_the_group_is_a_mapping_and_reaches_the_engine() -> None:
    config = composed("+rollout.spec=sam", "rollout.spec.num_speculative_tokens=4")
    assert OmegaConf.is_dict(config.rollout.spec)
    engine = OmegaConf.to_container(config.actor_rollout_ref.rollout.engine_kwargs.vllm, resolve=True)
    assert engine["speculative_config"] == {
        "method": "custom_class",
        "model": CLASS_PATH,
        "num_speculative_tokens": 4,
    }
    assert engine["additional_config"]["rollout_spec"]["num_speculative_tokens"] == 4
    assert check_config(config) == SpecConfig(num_speculative_tokens=4)


def test_the_yaml_holds_every_field_with_its_default() -> None:
    assert OmegaConf.to_container(composed("+rollout.spec=sam").rollout.spec) == SpecConfig().to_dict()


def test_off_asks_for_no_drafter() -> None:
    config = composed("+rollout.spec=off")
    assert check_config(config) == SpecConfig(method="off")
    assert "speculative_config" not in config.actor_rollout_ref.rollout.engine_kwargs.vllm


def test_routing_names_the_router_in_verls_own_option() -> None:
    assert composed("+rollout.spec=sam").actor_rollout_ref.rollout.router_config_path is None
    config = composed("+rollout.spec=sam", "rollout.spec.routing=group")
    assert check_config(config) == SpecConfig(routing="group")
    path = pathlib.Path(config.actor_rollout_ref.rollout.router_config_path)
    assert OmegaConf.load(path).router_class == "rollout_spec.verl_router.GroupRouter"


def test_the_default_routing_leaves_a_users_router_alone() -> None:
    own = "actor_rollout_ref.rollout.router_config_path=mine.yaml"
    config = composed("+rollout.spec=sam", own)
    assert check_config(config).routing == "default"
    assert config.actor_rollout_ref.rollout.router_config_path == "mine.yaml"
    with pytest.raises(ConfigError, match=r"routing=group: does not go together with another"):
        check_config(composed("+rollout.spec=sam", "rollout.spec.routing=group", own))


def test_group_routing_and_full_determinism_are_refused() -> None:
    override = "actor_rollout_ref.rollout.full_determinism=true"
    with pytest.raises(ConfigError, match=r"full_determinism needs rollout\.spec\.routing=default"):
        check_config(composed("+rollout.spec=sam", "rollout.spec.routing=group", override))


CONFLICTS = {
    "rollout.spec.num_speculative_tokens=0": r"rollout\.spec\.num_speculative_tokens=0: must be between 1",
    "+rollout.spec.colour=red": r"rollout\.spec\.colour: unknown field",
    f"{ENGINE}.speculative_config.method=ngram": "speculative_config.method='ngram'",
    f"+{ENGINE}.speculative_config.num_speculative_tokens_per_batch_size=2": "batch_threshold instead",
    f"{ENGINE}.scheduler_cls=my.Scheduler": "scheduler_cls",
    f"+{ENGINE}.logits_processors=[my.Processor]": "logits_processors",
    f"+{ENGINE}.override_generation_config.min_p=0.1": "min_p",
    "actor_rollout_ref.rollout.name=sglang": "needs vllm",
    "+rollout_spec_sampler=bounded": "max_num_gen_batches=0: must be at least 1",
    "trainer.use_v1=false": "V1 trainer",
    "trainer.v1.trainer_mode=separate_async": "supports sync only",
    "trainer.v1.trainer_mode=colocate_async": "supports sync only",
    "actor_rollout_ref.rollout.data_parallel_size=2": "must be 1",
    f"{ENGINE}.additional_config.rollout_spec={{method: sam, batch_threshold: 3}}": "leave it alone",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=delta_sharded": "delta weight transfer",
    "actor_rollout_ref.rollout.pipeline_model_parallel_size=2": "must be 1",
    "actor_rollout_ref.rollout.disaggregation.enabled=true": "disaggregated prefill",
}


@pytest.mark.parametrize("override", CONFLICTS)
def test_what_does_not_go_together_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=CONFLICTS[override]):
        check_config(composed("+rollout.spec=sam", override))


def test_mtp_is_refused() -> None:
    config = composed("+rollout.spec=sam")
    OmegaConf.update(config, "actor_rollout_ref.model.mtp.enable", True)
    OmegaConf.update(config, "actor_rollout_ref.model.mtp.enable_rollout", True)
    with pytest.raises(ConfigError, match="MTP drafts already"):
        check_config(config)


def test_off_with_another_drafter_is_refused() -> None:
    with pytest.raises(ConfigError, match="remove it"):
        check_config(composed("+rollout.spec=off", f"+{ENGINE}.speculative_config.method=ngram"))


def test_a_plain_string_is_refused() -> None:
    config = OmegaConf.create({"rollout": {"spec": "sam"}})
    with pytest.raises(ConfigError, match="not a configuration group"):
        check_config(config)


def test_the_command_ends_before_ray_starts(tmp_path: pathlib.Path) -> None:
    """The real entry point: one line, exit code 2, nothing launched."""
    overrides = ["+rollout.spec=sam", "rollout.spec.min_token_prob=1.5", VLLM, f"hydra.run.dir={tmp_path}"]
    result = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *overrides],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "RAY_TMPDIR": str(tmp_path)},
    )
    assert result.returncode == 2
    last = result.stderr.strip().splitlines()[-1]
    assert last == "rollout_spec: rollout.spec.min_token_prob=1.5: must be between 0 and 1"
    assert "Started a local Ray instance" not in result.stdout + result.stderr
    assert not (tmp_path / "ray").exists()


def test_first_turns_name_the_group() -> None:
    from rollout_spec.verl_server import FirstTurns

    turns = FirstTurns()
    first = turns.group([1, 2, 3])
    assert turns.group([1, 2, 3]) == first
    assert turns.group([1, 2, 3, 9, 9, 4]) == first, "a later turn or a resumed request"
    assert turns.group([1, 2, 4]) != first
    assert FirstTurns().group([1, 2, 3]) == first, "the same on every replica"


def test_first_turns_forget_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout_spec import verl_server

    monkeypatch.setattr(verl_server, "MAX_FIRST_TURNS", 2)
    turns = verl_server.FirstTurns()
    old = turns.group([1])
    turns.group([2, 2])
    turns.group([3, 3, 3])
    assert turns.group([1, 5]) != old
    assert turns.group([3, 3, 3, 1]) == turns.group([3, 3, 3])


def test_the_busy_clock_counts_overlapping_requests_once() -> None:
    from rollout_spec.verl_server import BusyClock

    clock = BusyClock()
    with clock.request():
        with clock.request():
            time.sleep(0.05)
        time.sleep(0.05)
    time.sleep(0.2)
    assert 0.1 <= clock.take_seconds() < 0.2
    assert clock.take_seconds() == 0
    with clock.request():
        time.sleep(0.05)
        assert clock.take_seconds() >= 0.05


def test_the_trace_is_what_replay_reads(tmp_path: pathlib.Path) -> None:
    from rollout_spec.verl_server import TraceWriter

    writer = TraceWriter(tmp_path / "traces", replica_rank=1)
    writer.add([1, 2], [3])
    writer.add([5], [6, 7])
    writer.add([1, 2], [4, 4])
    writer.flush(step=3)
    writer.flush(step=4)
    lines = [json.loads(line) for line in (tmp_path / "traces/rollouts-1.jsonl").read_text().splitlines()]
    assert [(line["step"], line["prompt_token_ids"], line["responses"]) for line in lines] == [
        (3, [1, 2], [[3], [4, 4]]),
        (3, [5], [[6, 7]]),
    ]
