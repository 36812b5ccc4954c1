"""The recipes: every size and device against verl's configuration and checks, the data."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow.parquet
import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils.reward_score import default_compute_score

from rollout_spec.config import SpecConfig
from rollout_spec.verl.check_config import check_config
from tests.configs import RECIPE_SIZES, RECIPES, ROOT, check_recipe, composed_recipe, recipe_layouts


def check_layout(rollout, num_devices, node_size):
    """As verl checks it when it launches an engine: engines divide the devices, and ranks their nodes."""
    tp, dp = rollout.tensor_model_parallel_size, rollout.data_parallel_size
    assert num_devices % (tp * dp) == 0
    assert tp * dp % min(node_size, tp * dp) == 0
    assert min(node_size, tp * dp) % tp == 0


@pytest.mark.parametrize(("recipe", "size", "device", "mode"), recipe_layouts())
@pytest.mark.filterwarnings("ignore:Disabled critic")
def test_every_size_composes_for_every_device_and_mode_of_the_trainer(recipe, size, device, mode):
    config = composed_recipe(recipe, size, f"rollout_spec_device={device}", f"trainer.v1.trainer_mode={mode}")
    check_recipe(config)
    assert check_config(config) == SpecConfig()
    assert (get_trainer_cls(mode)(config).replay_buffer.filter_groups_metric == "acc") == (recipe == "dapo")
    most = 1 + 2 * (size != RECIPE_SIZES[2])
    assert recipe != "dapo" or config.algorithm.filter_groups.max_inflight_gen_batches == most
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.checkpoint_engine.backend == "naive") == (mode != "separate_async")
    assert rollout.enforce_eager == (device == "npu")
    assert config.trainer.device == ("npu" if device == "npu" else "cuda")
    num_devices = config.trainer.nnodes * config.trainer.n_gpus_per_node
    check_layout(rollout, num_devices, config.trainer.n_gpus_per_node)
    check_layout(rollout, rollout.nnodes * rollout.n_gpus_per_node, rollout.n_gpus_per_node)
    # A prompt with its longest response must fit.
    assert rollout.max_model_len >= config.data.max_prompt_length + config.data.max_response_length
    assert config.data.train_batch_size * rollout.n % num_devices == 0


def run_script(*arguments, **env):
    command = [str(argument) for argument in arguments]
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **env}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(recipe, *arguments):
        monkeypatch.setattr(sys, "argv", ["prepare.py", *map(str, arguments)])
        runpy.run_path(str(ROOT / "recipes" / recipe / "prepare.py"), run_name="__main__")

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["qwen3_9b"], "size 'qwen3_9b': must be cpu, qwen3_8b, qwen3_32b or qwen3_235b"),
        (["qwen3_8b", "tpu"], "device 'tpu': must be gpu or npu"),
        (["cpu", "npu"], "device 'npu': size cpu takes none"),
        (["qwen3_8b", "npu", "a=b"], "train.parquet: not found; make it: python recipes/dapo/prepare.py"),
    ],
)
def test_a_wrong_launch_is_one_line(arguments, message, tmp_path):
    env = {"ROLLOUT_SPEC_DATA_DIR": str(tmp_path), "VERL_FILE_LOGGER_PATH": str(tmp_path / "metrics.jsonl")}
    done = run_script(ROOT / "recipes/dapo/run.sh", *arguments, **env)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert message in done.stderr


def test_the_smallest_size_without_the_laboratory_is_one_line(tmp_path):
    python = tmp_path / "python"  # with no package but its own
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    done = run_script(ROOT / "recipes/grpo/run.sh", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (done.returncode, done.stderr) == (2, "run.sh: size cpu needs the laboratory: pip install ./lab\n")


@pytest.mark.slow
def test_launch_reaches_verl_with_the_size_and_the_device(tmp_path):
    """Up to our own check of the configuration, which ends the run before Ray."""
    (tmp_path / "train.parquet").touch()
    given = "qwen3_235b", "npu", "actor_rollout_ref.rollout.name=sglang", f"hydra.run.dir={tmp_path}"
    done = run_script(
        ROOT / "recipes/dapo/run.sh", *given, ROLLOUT_SPEC_DATA_DIR=str(tmp_path),
        MODEL_PATH="/models/one, two", VERL_FILE_LOGGER_PATH=str(tmp_path / "metrics.jsonl"),
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("rollout_spec: actor_rollout_ref.rollout.name=sglang")
    assert "Started a local Ray instance" not in done.stdout + done.stderr
    config = OmegaConf.load(tmp_path / ".hydra/config.yaml")
    assert (config.trainer.device, config.trainer.nnodes) == ("npu", 8)
    # What a Ray that runs already could not read off this environment.
    assert config.data.train_files == f"{tmp_path}/train.parquet"
    assert config.data.val_files == f"{tmp_path}/val.parquet"
    assert config.actor_rollout_ref.model.path == "/models/one, two"
    env_vars = {"VERL_FILE_LOGGER_PATH": f"{tmp_path}/metrics.jsonl", "ROLLOUT_SPEC_ASKED": "1"}
    assert config.ray_kwargs.ray_init.runtime_env.env_vars == env_vars


COPIES = {
    "grpo": {"problem": "1 + 1?", "answer": "2", "solution": "two"},
    "dapo": {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": "1 + 1?"}],
        "reward_model": {"ground_truth": "2", "style": "rule"},
    },
}
RIGHT = {"grpo": "It is \\boxed{2}.", "dapo": "Answer: 2"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_copy_becomes_rows_that_verl_scores(recipe, tmp_path, prepare):
    copy = tmp_path / "copy.jsonl"
    copy.write_text(2 * (json.dumps(COPIES[recipe]) + "\n"))
    prepare(recipe, "--train", copy, "--val", copy, "--output", tmp_path / "data")
    [row] = pyarrow.parquet.read_table(tmp_path / "data/train.parquet").to_pylist()
    assert row["prompt"][0]["content"].startswith("1 + 1?")
    for text, right in ((RIGHT[recipe], True), (RIGHT[recipe].replace("2", "3"), False)):
        score = default_compute_score(row["data_source"], text, row["reward_model"]["ground_truth"])
        assert (score["acc"] if isinstance(score, dict) else score == 1.0) == right


NO_CHAT = "row 0: prompt must be a list of messages, each with role and content"


@pytest.mark.parametrize(
    ("recipe", "copy", "message"),
    [
        ("grpo", None, "cannot be reached at"),
        ("dapo", None, "cannot be reached at"),
        ("grpo", [{"question": "?"}], "no column problem, answer (found: question)"),
        ("grpo", [COPIES["grpo"], COPIES["grpo"] | {"problem": None}], "row 1: problem is null"),
        ("dapo", [COPIES["dapo"] | {"prompt": "1 + 1?"}], NO_CHAT),
        ("dapo", [COPIES["dapo"] | {"prompt": []}], NO_CHAT),
        ("dapo", [COPIES["dapo"] | {"prompt": [{"role": "user", "content": None}]}], NO_CHAT),
        ("dapo", [COPIES["dapo"] | {"prompt": ["1 + 1?"]}], NO_CHAT),
        ("grpo", [COPIES["grpo"]], "--output "),  # which is a file
    ],
)
def test_data_that_cannot_be_had_is_one_line(recipe, copy, message, tmp_path, prepare, capsys):
    file, output = tmp_path / "copy.json", tmp_path / "data"
    file.write_text(json.dumps(copy))
    if "--output" in message:
        output.write_text("a file")
    given = [] if copy is None else ["--train", file, "--val", file]
    with pytest.raises(SystemExit, match="2"):
        prepare(recipe, *given, "--output", output)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("prepare.py: ") and message in last
    assert not output.is_dir()
