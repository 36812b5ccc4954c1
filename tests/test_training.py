"""verl's own trainer with drafting and two rollout engines: a step with siblings together, then, from its
checkpoint, one with them apart."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
from itertools import groupby
from typing import NamedTuple

import pytest

from rollout_spec import trace
from rollout_spec.drafting.history import group_key, read_file
from rollout_spec.trace import Rollout, read_trace, trace_file
from rollout_spec.verl.shared_history import FILE
from rollout_spec_lab.demo.data import make_data
from rollout_spec_lab.demo.model import make_model
from rollout_spec_lab.demo.runner import METRICS_FILE, environment
from rollout_spec_lab.processes import started
from tests.engine.conftest import close, new_engine, own_environment, token_ids
from tests.text import merged, tokens_per_step

ROOT = pathlib.Path(__file__).parents[1]
NUM_SAMPLES = 8
NUM_PROMPTS = 2
NUM_REPLICAS = 2
RESPONSE_LENGTH = 64

pytestmark = pytest.mark.timeout(900)


class Run(NamedTuple):
    """What each engine has served, and verl's metrics of the last step."""

    folder: pathlib.Path
    served: list[list[Rollout]]
    metrics: dict[str, float]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("training")


@pytest.fixture(scope="module")
def run(folder: pathlib.Path) -> Run:
    make_data(folder, num_train=NUM_PROMPTS)
    return train(folder, 1, "group")


@pytest.fixture(scope="module")
def resumed(run: Run) -> Run:
    """A second step, from the checkpoint of the first, with the same prompts."""
    return train(run.folder, 2, "verl")


def train(folder: pathlib.Path, num_steps: int, routing: str) -> Run:
    model = make_model(pathlib.Path(".cache/models/smollm2-float32"), dtype="float32")
    overrides = [
        "+rollout_spec_demo=[cpu,grpo]",
        "+rollout.spec=sam",
        "rollout.spec.batch_threshold=64",
        f"rollout.spec.history={2 * NUM_SAMPLES}",
        f"rollout.spec.routing={routing}",
        "trainer.resume_mode=auto",
        "trainer.save_freq=1",
        f"trainer.total_training_steps={num_steps}",
        f"trainer.n_gpus_per_node={NUM_REPLICAS}",
        f"trainer.default_local_dir={folder}",
        f"data.max_response_length={RESPONSE_LENGTH}",
        f"data.train_files={folder}/train.parquet",
        f"actor_rollout_ref.model.path={model.absolute()}",
        f"actor_rollout_ref.rollout.n={NUM_SAMPLES}",
        # Siblings that resemble each other, as those of a trained policy do.
        "actor_rollout_ref.rollout.temperature=0.3",
        # Two engines and two trainers must fit into memory together.
        "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=268435456",
        f"hydra.run.dir={folder}/hydra",
    ]
    execute([sys.executable, "-m", "verl.trainer.main_ppo", *overrides], folder, f"train-{num_steps}.log")
    [line] = (folder / METRICS_FILE).read_text().splitlines()
    assert json.loads(line)["step"] == num_steps
    (folder / "model").unlink(missing_ok=True)
    (folder / "model").symlink_to(model.absolute())
    files = [trace_file(folder / trace.FOLDER, replica) for replica in range(NUM_REPLICAS)]
    return Run(folder, [list(read_trace(file)) for file in files], json.loads(line)["data"])


def execute(command: list[str], folder: pathlib.Path, log: str) -> None:
    env = environment(folder, folder) | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    env.pop("OMP_NUM_THREADS", None)  # of this process; verl is to choose, as in a run of a user
    with started(command, folder / log, env) as process:
        code = process.wait(880)
    assert code == 0, (folder / log).read_text()[-20000:]


def test_every_engine_has_its_own_drafter(run: Run) -> None:
    """A server that has decoded without its drafter fails the run, so it is enough that both have served."""
    for served in run.served:
        assert any(len(response) > 1 for rollout in served for response in rollout.responses)


def test_the_metrics_are_in_verls_stream(run: Run) -> None:
    assert run.metrics["rollout/spec_num_draft_tokens"] > 0
    assert 0 < run.metrics["rollout/spec_accept_rate"] <= 1
    assert run.metrics["rollout/spec_accept_length"] >= 1
    assert run.metrics["rollout/spec_tokens_per_step"] > 1
    assert run.metrics["rollout/spec_share_on"] == 1
    assert run.metrics["rollout/spec_num_failed_steps"] == 0
    assert run.metrics["rollout/spec_rollout_seconds"] > 0
    assert 1 <= run.metrics["rollout/spec_load_imbalance"] <= NUM_REPLICAS
    assert run.metrics["timing_s/gen"] > 0


def test_a_checkpoint_has_what_every_engine_served(run: Run) -> None:
    """It is saved before the weight sync, when the engines still take their last requests for running."""
    assert [len(responses) for responses in saved(run, 1)] == [NUM_SAMPLES] * NUM_PROMPTS


def saved(run: Run, step: int) -> list[list[list[int]]]:
    """The responses in a checkpoint, for each group."""
    history = merged(read_file(run.folder / f"global_step_{step}" / FILE))
    groups = sorted({rollout.group for served in run.served for rollout in served})
    assert len(history) == len(groups) == NUM_PROMPTS
    return [[response.tolist() for response in history.get(group_key(group))] for group in groups]


def test_siblings_are_served_by_one_engine(run: Run) -> None:
    """Two groups for two engines: each gets one."""
    assert [len(served) for served in run.served] == [1] * NUM_REPLICAS
    assert all(len(group.responses) == NUM_SAMPLES for [group] in run.served)


def test_siblings_together_draft_better(run: Run) -> None:
    """On the text that the engines made, with its groups split and whole: there nothing is chance.

    Between two steps of real sampling a difference of a few percent is; lab/record/routing.md has it.
    """
    half = NUM_SAMPLES // 2
    parts = [slice(half), slice(half, NUM_SAMPLES)]
    split = [
        [dataclasses.replace(group, responses=group.responses[part]) for [group] in run.served]
        for part in parts
    ]
    apart, together = tokens_per_step(split), tokens_per_step(run.served)
    print(f"tokens per step of the same text: apart {apart:.3f}, together {together:.3f}")
    assert together > 1.02 * apart


def test_samples_are_named_and_siblings_differ(run: Run) -> None:
    """Alike on every replica: seed, step, kind, prompt, occurrence, number in the group; then the call."""
    samples = recorded(run, 1)
    assert len({json.dumps(name) for name, _, _ in samples}) == len(samples) == NUM_PROMPTS * NUM_SAMPLES
    for _, group in groupby(sorted(samples), key=lambda sample: sample[0][:-3]):
        siblings = list(group)
        assert [name[-3] for name, _, _ in siblings] == list(range(NUM_SAMPLES))
        assert {name[-1] for name, _, _ in siblings} == {0}  # each has made one call
        assert len({tuple(prompt) for _, prompt, _ in siblings}) == 1
        assert len({tuple(response) for _, _, response in siblings}) > 1


def test_the_first_step_is_what_an_engine_without_drafts_samples(run: Run) -> None:
    samples = recorded(run, 1)
    with own_environment():
        from vllm import SamplingParams

        off = {"rollout_spec": {"method": "off"}}
        llm = new_engine(str(run.folder / "model"), additional_config=off, kv_cache_memory_bytes=1 << 28)
        settings = {"temperature": 0.3, "max_tokens": RESPONSE_LENGTH, "detokenize": False}
        params = [SamplingParams(**settings, extra_args={"rollout_spec_key": name}) for name, _, _ in samples]
        prompts = [{"prompt_token_ids": prompt} for _, prompt, _ in samples]
        plain = token_ids(llm.generate(prompts, params, use_tqdm=False))
        close([llm])
    # A near tie of float32 logits may part a response, once in tens of thousands of tokens.
    num_same = sum(tokens == response for tokens, (_, _, response) in zip(plain, samples, strict=True))
    assert num_same >= len(samples) - 1


@pytest.mark.long
def test_a_resumed_run_has_the_history_of_its_checkpoint(run: Run, resumed: Run) -> None:
    """What it saves is what it loaded, and its own. verl's router places each request by load alone."""
    for earlier, later in zip(saved(run, 1), saved(resumed, 2), strict=True):
        assert later[:NUM_SAMPLES] == earlier
        assert len(later) == 2 * NUM_SAMPLES
    places = {(group.group, i) for i, served in enumerate(resumed.served) for group in served}
    assert len(places) > NUM_PROMPTS
    assert not {json.dumps(name) for name, _, _ in recorded(resumed, 2)} & {
        json.dumps(name) for name, _, _ in recorded(run, 1)
    }


def recorded(run: Run, step: int) -> list[tuple[list, list[int], list[int]]]:
    """Name, prompt and response of each sample of a training step, on whatever replica."""
    return [
        (name, line.prompt_token_ids.tolist(), response.tolist())
        for file in (run.folder / trace.FOLDER).glob("*.jsonl")
        for line in read_trace(file)
        for name, response in zip(line.names, line.responses, strict=True)
        if name[1] == step
    ]
