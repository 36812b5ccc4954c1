"""verl's asynchronous trainers with drafting, on one engine and two: samples are interrupted and go on."""

import json

import pytest

from tests.trainings import NUM_PROMPTS, Run, command, execute, hook, responses_of, smollm2

NUM_STEPS = 3
NUM_SAMPLES = 8
LENGTH = 48
NUM_REPLICAS = 2

pytestmark = pytest.mark.timeout(1800)


def train(folder, mode, *overrides, until=(NUM_STEPS,)):
    """Train up to each of these steps, from the checkpoint of the one before."""
    options = [
        "rollout.spec.history=100",  # more than a prompt gets
        f"data.max_response_length={LENGTH}",
        "actor_rollout_ref.rollout.temperature=0.3",
        # Not even a batch fits at once, so that a weight sync finds some at work.
        "actor_rollout_ref.rollout.max_num_seqs=6",
        *overrides,
    ]
    metrics, own = {}, {"mode": mode, "num_samples": NUM_SAMPLES}
    for last in until:
        training = command(folder, smollm2(), *options, **own, num_steps=last)
        metrics |= execute(training, folder, f"train-{last}.log")
    return Run(folder, metrics, responses_of(folder), until)


@pytest.fixture(scope="module")
def colocated(tmp_path_factory):
    options = ["trainer.test_freq=2", f"trainer.n_gpus_per_node={NUM_REPLICAS}"]
    return train(tmp_path_factory.mktemp("colocated"), "colocate_async", *options)


@pytest.fixture(scope="module")
def separate(tmp_path_factory):
    """The trainer's own engine serves at first, and from each validation to the next step."""
    options = [
        "trainer.v1.separate_async.hybrid_rollout.enable_switch=true",
        # So many that the trainer's own engine is still at work when the first batch is there.
        "trainer.v1.separate_async.num_warmup_batches=6",
        "rollout.spec.routing=group",
        "trainer.resume_mode=auto",
        "trainer.save_freq=1",
        "trainer.test_freq=1",
    ]
    return train(tmp_path_factory.mktemp("separate"), "separate_async", *options, until=(2, NUM_STEPS))


@pytest.fixture(scope="module", params=["colocated", "separate", "colocate_async", "separate_async"])
def run(request, tmp_path_factory):
    """With two engines; and with one, where the trainer's own serves until the first step only."""
    if request.param in ("colocated", "separate"):
        return request.getfixturevalue(request.param)
    folder, work = tmp_path_factory.mktemp("alone"), []
    if request.param == "separate_async":
        hook(folder, '__import__("tests.agents").agents.wait_for_work(it)', after="rollout_spec.verl.server")
        (folder / "agents.yaml").write_text("[{name: talking, _target_: tests.agents.UntilInterrupted}]")
        work = [
            "trainer.v1.separate_async.num_warmup_batches=6",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={folder}/agents.yaml",
            "actor_rollout_ref.rollout.agent.default_agent_loop=talking",
        ]
    return train(folder, request.param, *work)


def test_every_step_drafts_and_logs_it(run):
    assert sorted(run.metrics) == list(range(1, NUM_STEPS + 1))
    for metrics in run.metrics.values():
        if not metrics["rollout/spec_generated_tokens"]:  # all of the step was served before
            continue
        assert metrics["rollout/spec_num_draft_tokens"] > 0
        assert metrics["rollout/spec_tokens_per_step"] > 1
        assert metrics["rollout/spec_num_failed_steps"] == 0
        assert metrics["rollout/spec_rollout_seconds"] > 0
        assert 1 <= metrics.get("rollout/spec_load_imbalance", 1) <= NUM_REPLICAS


def test_samples_are_interrupted_and_go_on(run, request):
    """Those of an engine that goes do so on the other one, which may have no text of theirs."""
    assert run.total("num_interrupted") > 0
    assert run.total("num_resumed") > 0 or request.node.callspec.id == "separate"


def test_the_trainer_trains_on_samples_of_two_versions(colocated):
    spans = [metrics["training/off_policy/trajectory_spans/max"] for metrics in colocated.metrics.values()]
    assert max(spans) > 1


def test_no_response_is_lost_or_there_twice(run):
    names = [json.dumps(response.name) for response in run.responses]
    assert len(set(names)) == len(names)
    assert all(0 < len(response.tokens) <= LENGTH for response in run.responses)
    assert len(run.ended("train")) >= NUM_STEPS * NUM_PROMPTS * NUM_SAMPLES, "all that was trained on"


def test_the_tokens_that_the_steps_log_are_those_of_the_responses(run, request):
    """But for those that had been interrupted and not ended when their process did, and for what it served
    after its last step, of which no step logs the counts. An agent that talks on may have said much then."""
    ended = run.ended("train")
    difference = run.total("generated_tokens") - sum(len(response.tokens) for response in ended)
    unlogged = sum(len(response.tokens) for response in ended if response.version in run.last_steps)
    assert -unlogged <= difference
    if request.node.callspec.id != "separate_async":
        assert difference <= LENGTH * run.total("num_interrupted")


@pytest.mark.parametrize("run", ["colocated", "separate"], indirect=True)
def test_a_validation_is_served_and_neither_counted_nor_recorded(run):
    assert any("val-core" in name for metrics in run.metrics.values() for name in metrics)
    assert not run.ended("val"), "nor recorded"


def test_the_trainers_own_engine_serves_beside_the_other(separate):
    assert {response.replica for response in separate.ended("train")} == {0, 1}


def test_a_run_that_resumes_has_the_history_of_its_checkpoint(separate):
    before, after = (separate.saved(step) for step in (2, 3))
    first = [response for response in separate.responses if response.version == 0]
    for group in {response.group for response in first}:
        num_ended = sum(response.group == group for response in first)
        assert len(before[group]) >= num_ended, "what had ended at the weight sync before"
        for response in before[group]:
            after[group].remove(response)
