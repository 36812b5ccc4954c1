"""Trainings of other kinds than the demo's, two steps each."""

import json
import pathlib

import pytest

from rollout_spec.report.responses import first_step_agreement
from tests.engine.tiny_heads import make_mtp
from tests.tiny_vl import make_tiny_vl
from tests.trainings import LENGTH, NUM_PROMPTS, NUM_SAMPLES, TOOLS, hook, make_image_data, train

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
SAME_TOKENS = {"off": ["rollout.spec.method=keyed"], "sam": []}  # what a run's group needs for that


def test_a_tool_agent_of_several_turns_and_two_samples_in_validations(policy, tmp_path):
    """What a validation generates differs from sample to sample, and is not counted."""
    options = [
        "agent.default_agent_loop=tool_agent",
        "multi_turn.enable=true",
        "multi_turn.max_assistant_turns=3",
        "multi_turn.format=always",
        f"multi_turn.function_tool_path={TOOLS}",
        "val_kwargs.n=2",
        "val_kwargs.do_sample=true",
        "val_kwargs.temperature=1.0",
    ]
    _, steps = train_without_and_with(
        tmp_path,
        policy,
        "data.max_response_length=240",
        "trainer.test_freq=1",
        f"trainer.validation_data_dir={tmp_path}/validation",
        *(f"actor_rollout_ref.rollout.{option}" for option in options),
    )
    for metrics in steps:
        assert metrics["num_turns/max"] == 6, "three of the policy, two of the tool, and the prompt"
        assert metrics["rollout/spec_generated_tokens"] <= NUM_PROMPTS * NUM_SAMPLES * 240
        assert metrics["rollout/spec_num_resumed"] >= 2 * NUM_PROMPTS * NUM_SAMPLES, "two turns of each"
    files = list((tmp_path / "validation").glob("*.jsonl"))
    assert len(files) == len(steps)
    for file in files:
        said = [json.loads(line)["output"] for line in file.read_text().splitlines()]
        assert len(said) == len(set(said)) == 2 * NUM_PROMPTS


def test_lora_adapters_a_critic_and_one_sample_a_prompt(policy, tmp_path):
    """The weight sync brings adapters, not weights: an engine without them has other probabilities."""
    steps = train(
        tmp_path,
        policy,
        "actor_rollout_ref.model.lora_rank=8",
        "actor_rollout_ref.model.lora_alpha=16",
        "actor_rollout_ref.rollout.load_format=safetensors",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        "actor_rollout_ref.actor.optim.lr=0.1",
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.rollout.n=1",
        f"critic.model.path={policy}",
        "critic.ppo_micro_batch_size_per_gpu=2",
    )
    for metrics in steps:
        assert metrics["critic/vf_loss"] > 0
        assert metrics["rollout/spec_generated_tokens"] <= NUM_PROMPTS * LENGTH
        assert metrics["training/rollout_probs_diff_mean"] < 1e-3


def test_prompts_with_images(tmp_path):
    rewards = []
    for method in ("off", "sam"):
        folder = tmp_path / method
        folder.mkdir()
        images = make_image_data(folder)
        model = pathlib.Path(make_tiny_vl(folder / "vl"))
        options = [*SAME_TOKENS[method], f"data.train_files={images}", f"data.val_files={images}"]
        first, _ = train(folder, model, *options, "data.image_key=images", method=method)
        rewards.append(first["critic/rewards/mean"])
    assert rewards[0] == pytest.approx(rewards[1], abs=1e-6)


def train_without_and_with(folder, policy, *options, drafter=()):
    """The steps of two trainings, of which the second drafts; of the first step the tokens are the same."""
    folders = [folder / method for method in ("off", "sam")]
    runs = []
    for own, given in zip(folders, ((), drafter), strict=True):
        own.mkdir()
        runs.append(train(own, policy, *SAME_TOKENS[own.name], *options, *given, method=own.name))
    same = first_step_agreement(*folders)
    assert same is not None and same.num_identical == same.num_tokens > NUM_SAMPLES * LENGTH / 2
    rewards = [steps[0]["critic/rewards/mean"] for steps in runs]
    assert rewards[1] == pytest.approx(rewards[0], abs=1e-6)
    return runs


@pytest.mark.parametrize("kind", ["draft_model", "mtp"])
def test_a_model_drafts_beside_the_text(kind, policy, tmp_path):
    """It is the policy of the first step, and no weight sync makes it that of the second."""
    drafter = [f"rollout.spec.model_drafter={{method: draft_model, model: {policy}}}"]
    if kind == "mtp":
        drafter = [f"actor_rollout_ref.model.mtp.{name}=True" for name in ("enable", "enable_rollout")]
        make_mtp(tmp_path / "mtp", str(policy))
        policy = tmp_path / "mtp"
        (tmp_path / "right.safetensors").replace(policy / "model.safetensors")
    options = ["actor_rollout_ref.rollout.load_format=auto", "actor_rollout_ref.actor.optim.lr=1e-2"]
    _, (first, second) = train_without_and_with(tmp_path, policy, *options, drafter=drafter)
    rates = [step["rollout/spec_model_acceptance_rate"] for step in (first, second)]
    assert rates[0] > 0.9 and rates[1] < rates[0] - 0.02
    first_line, *_ = (tmp_path / "sam/train.log").read_text().splitlines()  # the trainer's own comes later
    assert "this drafter is not trained" in first_line


def test_model_runner_v2(policy, tmp_path, monkeypatch):
    """verl's weight syncs and log-probabilities; an engine with MRV1 would draw with other noise than MRV2.

    The gate is closed for five samples at once, and open for the three after them.
    """
    # Before a process uses vLLM, Triton interprets its kernels.
    hook(tmp_path, '__import__("tests.engine.interpreted_triton")', after="vllm")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    options = [
        "rollout.spec.batch_threshold=3",
        "actor_rollout_ref.rollout.max_num_seqs=5",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        "actor_rollout_ref.actor.optim.lr=1e-3",  # so that a policy which has missed a sync has other ones
        # vLLM refuses it with drafts on MRV1.
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.async_scheduling=true",
    ]
    off, sam = train_without_and_with(tmp_path, policy, *options)
    for metrics in sam:
        assert 0 < metrics["rollout/spec_share_on"] < 1
    for metrics in (*off, *sam):
        # The trainer has its own log-probabilities, from weights that are not rounded to bfloat16.
        assert metrics["training/rollout_probs_diff_mean"] < 0.05
