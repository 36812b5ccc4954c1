"""verl's own trainer with drafting and two rollout engines: a step with siblings together."""

import dataclasses
import json
from itertools import groupby

import pytest

from rollout_spec import trace
from rollout_spec.trace import read_trace, trace_file
from tests.engine.conftest import close, new_engine, own_environment, token_ids
from tests.text import tokens_per_step
from tests.trainings import LENGTH, NUM_PROMPTS, Run, command, execute, responses_of, smollm2

NUM_SAMPLES = 8
NUM_REPLICAS = 2

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    overrides = [
        f"rollout.spec.history={2 * NUM_SAMPLES}",
        "rollout.spec.routing=group",
        "trainer.save_freq=1",
        f"trainer.n_gpus_per_node={NUM_REPLICAS}",
        # Siblings that resemble each other, as those of a trained policy do.
        "actor_rollout_ref.rollout.temperature=0.3",
    ]
    sizes = {"num_train": NUM_PROMPTS, "num_steps": 1, "num_samples": NUM_SAMPLES}
    metrics = execute(command(folder, smollm2(), *overrides, **sizes), folder)
    assert [*metrics] == [1]
    return Run(folder, metrics, responses_of(folder))


def test_a_step_drafts_and_says_so_in_verls_stream(run):
    """A server that has decoded without its drafter fails the run."""
    metrics = {name.removeprefix("rollout/spec_"): value for name, value in run.metrics[1].items()}
    assert metrics["num_draft_tokens"] > 0 == metrics["num_failed_steps"]
    assert 0 < metrics["acceptance_rate"] <= 1
    assert metrics["tokens_per_step"] > 1 == metrics["share_on"]
    assert metrics["rollout_seconds"] > 0 and metrics["timing_s/gen"] > 0
    assert 1 <= metrics["load_imbalance"] <= NUM_REPLICAS


def test_siblings_are_served_by_one_engine_and_draft_better_for_it(run):
    """It is saved before the weight sync, when the engines still take their last requests for running."""
    files = [trace_file(run.folder / trace.FOLDER, replica) for replica in range(NUM_REPLICAS)]
    served = [list(read_trace(file)) for file in files]
    assert [len(groups) for groups in served] == [1] * NUM_REPLICAS, "two groups for two engines"
    assert all(len(group.responses) == NUM_SAMPLES for [group] in served)
    assert [len(responses) for responses in run.saved(1).values()] == [NUM_SAMPLES] * NUM_PROMPTS
    half = NUM_SAMPLES // 2  # on the text that the engines made, split and whole: there nothing is chance
    split = [
        [dataclasses.replace(group, responses=group.responses[part]) for [group] in served]
        for part in (slice(half), slice(half, NUM_SAMPLES))
    ]
    assert tokens_per_step(served) > 1.02 * tokens_per_step(split)


def test_samples_are_named_and_siblings_differ(run):
    """Alike on every replica: seed, step, kind, prompt, occurrence, number in the group; then the call."""
    names = {json.dumps(response.name) for response in run.responses}
    assert len(names) == len(run.responses) == NUM_PROMPTS * NUM_SAMPLES
    ordered = sorted(run.responses, key=lambda response: response.name)
    for _, group in groupby(ordered, key=lambda response: response.name[:-3]):
        siblings = list(group)
        assert [response.name[-3] for response in siblings] == list(range(NUM_SAMPLES))
        assert {response.name[-1] for response in siblings} == {0}  # each has made one call
        assert len({tuple(response.prompt) for response in siblings}) == 1
        assert len({tuple(response.tokens) for response in siblings}) > 1


def test_the_first_step_is_what_an_engine_without_drafts_samples(run):
    with own_environment():
        from vllm import SamplingParams

        keyed = {"rollout_spec": {"method": "keyed"}}
        llm = new_engine(str(smollm2()), additional_config=keyed, kv_cache_memory_bytes=1 << 28)
        settings = {"temperature": 0.3, "max_tokens": LENGTH, "detokenize": False}
        names = [{"rollout_spec_key": each.name} for each in run.responses]
        params = [SamplingParams(**settings, extra_args=name) for name in names]
        prompts = [{"prompt_token_ids": response.prompt} for response in run.responses]
        plain = token_ids(llm.generate(prompts, params, use_tqdm=False))
        close([llm])
    # A near tie of float32 logits may part a response, once in tens of thousands of tokens.
    num_same = sum(tokens == each.tokens for tokens, each in zip(plain, run.responses, strict=True))
    assert num_same >= len(run.responses) - 1
