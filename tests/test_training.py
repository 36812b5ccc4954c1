"""verl's own trainer with drafting and two rollout engines."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest

from rollout_spec.demo.data import make_data
from rollout_spec.demo.model import make_model
from rollout_spec.demo.processes import started
from rollout_spec.demo.runner import METRICS_FILE, TRACE_FOLDER, environment
from rollout_spec.replay import read_trace

NUM_STEPS = 2
RESPONSE_LENGTH = 48

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
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides]
    with started(command, folder / "train.log", environment(folder, folder)) as process:
        code = process.wait(880)
    assert code == 0, (folder / "train.log").read_text()[-5000:]
    return folder


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
