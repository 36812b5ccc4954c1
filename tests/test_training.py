"""verl's own trainer with drafting and two rollout engines."""

from __future__ import annotations

import json
import pathlib
import sys
from itertools import groupby

import pytest

from rollout_spec.demo.data import make_data
from rollout_spec.demo.model import make_model
from rollout_spec.demo.processes import started
from rollout_spec.demo.runner import METRICS_FILE, TRACE_FOLDER, environment
from rollout_spec.replay import read_trace

NUM_STEPS = 2
RESPONSE_LENGTH = 48

# Serves the first step's requests again, by an engine without drafts, and counts what is the same.
REPLAY = """
import json, sys
from vllm import LLM, SamplingParams

requests = json.load(open(sys.argv[2]))
llm = LLM(
    sys.argv[1], dtype="float32", max_model_len=512, max_num_batched_tokens=512, enforce_eager=True,
    kv_cache_memory_bytes=1 << 28, additional_config={"rollout_spec": {"method": "off"}},
)
params = [
    SamplingParams(temperature=0.7, max_tokens=48, detokenize=False, extra_args={"rollout_spec_key": name})
    for name, _, _ in requests
]
outputs = llm.generate([{"prompt_token_ids": prompt} for _, prompt, _ in requests], params, use_tqdm=False)
json.dump([list(output.outputs[0].token_ids) for output in outputs], open(sys.argv[3], "w"))
"""

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of one run."""
    folder = tmp_path_factory.mktemp("training")
    train_file, _ = make_data(folder, num_train=8)
    model = make_model(pathlib.Path(".cache/models/smollm2-float32"), dtype="float32")
    overrides = [
        "+rollout_spec_demo=[cpu,grpo]",
        "+rollout.spec=sam",
        "rollout.spec.batch_threshold=64",
        "trainer.n_gpus_per_node=2",
        f"trainer.total_training_steps={NUM_STEPS}",
        f"trainer.default_local_dir={folder}",
        f"data.max_response_length={RESPONSE_LENGTH}",
        f"data.train_files={train_file}",
        f"actor_rollout_ref.model.path={model.absolute()}",
        "actor_rollout_ref.rollout.n=4",
        # Two engines and two trainers must fit into memory together.
        "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=268435456",
        f"hydra.run.dir={folder}/hydra",
    ]
    execute([sys.executable, "-m", "verl.trainer.main_ppo", *overrides], folder, "train.log")
    (folder / "model").symlink_to(model.absolute())
    return folder


def execute(command: list[str], folder: pathlib.Path, log: str) -> None:
    with started(command, folder / log, environment(folder, folder)) as process:
        code = process.wait(880)
    assert code == 0, (folder / log).read_text()[-5000:]


def test_samples_are_named_and_siblings_differ(run: pathlib.Path) -> None:
    """Named alike on every replica: seed, step, kind, prompt, occurrence, number in the group."""
    samples = [sample for step in range(1, NUM_STEPS + 1) for sample in recorded(run, step)]
    assert len({json.dumps(name) for name, _, _ in samples}) == len(samples) == NUM_STEPS * 2 * 4
    for _, group in groupby(sorted(samples), key=lambda sample: sample[0][:-1]):
        siblings = list(group)
        assert [name[-1] for name, _, _ in siblings] == [0, 1, 2, 3]
        assert len({tuple(prompt) for _, prompt, _ in siblings}) == 1
        assert len({tuple(response) for _, _, response in siblings}) > 1


def test_the_first_step_is_what_an_engine_without_drafts_samples(run: pathlib.Path) -> None:
    samples = recorded(run, 1)
    (run / "requests.json").write_text(json.dumps(samples))
    files = [str(run / name) for name in ("model", "requests.json", "responses.json")]
    execute([sys.executable, "-c", REPLAY, *files], run, "replay.log")
    plain = json.loads((run / "responses.json").read_text())
    # A near tie of float32 logits may part a response, once in tens of thousands of tokens.
    num_same = sum(tokens == response for tokens, (_, _, response) in zip(plain, samples, strict=True))
    assert num_same >= len(samples) - 1


def recorded(run: pathlib.Path, step: int) -> list[tuple[list, list[int], list[int]]]:
    """Name, prompt and response of each sample of a training step, on whatever replica."""
    return [
        (name, line["prompt_token_ids"], response)
        for file in (run / TRACE_FOLDER).glob("*.jsonl")
        for line in map(json.loads, file.read_text().splitlines())
        for name, response in zip(line["names"], line["responses"], strict=True)
        if name[1] == step
    ]


def test_every_engine_has_its_own_drafter(run: pathlib.Path) -> None:
    """A server that has decoded without its drafter fails the run, so it is enough that both have served."""
    for replica in range(2):
        traces = read_trace(run / TRACE_FOLDER / f"rollouts-{replica}.jsonl")
        assert any(len(response) > 1 for trace in traces for response in trace.responses)


def test_the_metrics_are_in_verls_stream(run: pathlib.Path) -> None:
    lines = (run / METRICS_FILE).read_text().splitlines()
    steps = [json.loads(line)["data"] for line in lines]
    assert len(steps) == NUM_STEPS
    for metrics in steps:
        spec = {name: value for name, value in metrics.items() if name.startswith("rollout/spec_")}
        assert spec["rollout/spec_num_draft_tokens"] > 0
        assert 0 < spec["rollout/spec_accept_rate"] <= 1
        assert spec["rollout/spec_accept_length"] >= 1
        assert spec["rollout/spec_tokens_per_step"] > 1
        assert spec["rollout/spec_share_on"] == 1
        assert spec["rollout/spec_num_failed_steps"] == 0
        assert spec["rollout/spec_rollout_seconds"] > 0
        assert metrics["timing_s/gen"] > 0
