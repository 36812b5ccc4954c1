"""Processes that a command starts: nothing of them is left, whatever ends them."""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rollout_spec_lab import processes


def test_the_last_error_of_a_log_is_found_under_colours_and_actor_names(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(
        "Traceback (most recent call last):\n"
        "ValueError: an early one\n"
        "\x1b[36m(TaskRunnerV1 pid=77)\x1b[0m RuntimeError: the engine did not draft\n"
        "\x1b[36m(TaskRunnerV1 pid=77)\x1b[0m closing down\n"
    )
    assert processes.last_error(log) == "RuntimeError: the engine did not draft"
    with log.open("a") as file:
        file.write(
            "ray.exceptions.ActorDiedError: It died.\n\tclass_name: Server\n\tpid: 7\n\tname: server_0\n"
        )
    died = "ray.exceptions.ActorDiedError: It died. class_name: Server name: server_0"
    assert processes.last_error(log) == died
    killed = "(raylet) 1 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed\n"
    log.write_text(killed + 500 * "step\n" + log.read_text())
    assert re.fullmatch(rf"Ray killed .* needs 14 GB: .* This led to: {died}", processes.last_error(log))


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
    deadline = time.monotonic() + 120
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


def test_ctrl_c_while_a_process_starts_leaves_nothing(tmp_path, monkeypatch):
    """As Python does it: the child runs, and nobody has been given it."""
    before = processes.descendants(os.getpid())

    class Interrupted(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            raise KeyboardInterrupt

    monkeypatch.setattr(processes.subprocess, "Popen", Interrupted)
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(KeyboardInterrupt), processes.started(command, tmp_path / "log", dict(os.environ)):
        pass
    assert not processes.descendants(os.getpid()) - before


@pytest.mark.parametrize(
    ("command", "log"), [(["/no/such/program"], "log"), ([sys.executable, "-c", ""], "no/such/folder/log")]
)
def test_a_process_that_cannot_start_leaves_no_folder(tmp_path, monkeypatch, command, log):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(FileNotFoundError), processes.started(command, tmp_path / log, dict(os.environ)):
        pass
    assert not list(tmp_path.glob("rollout_spec_*"))


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
