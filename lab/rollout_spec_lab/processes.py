"""One training run as a tree of processes that is gone when we are done with it.

Ray's workers and vLLM's engines start sessions of their own, so no process group holds them all, and they
rewrite their titles, which wipes the environment that could have marked them. So this process becomes the
reaper of its descendants (prctl(2)): one whose parent dies is handed to us and stays in sight.
"""

import contextlib
import ctypes
import itertools
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

GRACE_SECONDS = 10.0
_PR_SET_CHILD_SUBREAPER = 36
_SHARED_MEMORY = Path("/dev/shm")
# Python's segments and semaphores, verl's weight sync, OpenMP's registration of itself.
_SEGMENTS = ("psm_*", "sem.mp-*", "verl_*", "__KMP_REGISTERED_LIB_*")

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_ACTOR = re.compile(r"^\([\w:]+ pid=\d+[^)]*\)\s?")
_ERROR = re.compile(r"^(rollout_spec: |\w[\w.]*(Error|Exception|Exit|Interrupt|Failure)\b:? )")
_KILLED = re.compile(r"killed due to (memory pressure|the node running low on memory)")
_MEMORY = f"{psutil.virtual_memory().total >> 30} GiB"
_NO_MEMORY = (
    f"Ray killed a process, because the memory of this machine ({_MEMORY}) was nearly full. A demo needs "
    "14 GB: end other programs, or take a larger machine. This led to: "
)


@contextlib.contextmanager
def started(command: Sequence[str], log: Path, env: Mapping[str, str]) -> Iterator[subprocess.Popen]:
    """Run `command` with its output in `log`; on leaving, nothing of it is left.

    Ray gets a private folder for its sockets and logs (their paths must be short, so not in the log's
    folder); the logs move beside `log` when the command has failed.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    others = descendants(os.getpid())
    began = time.time()
    ray = Path(tempfile.mkdtemp(prefix="rollout_spec_"))
    # Without a token of its own Ray would write one into the home folder.
    private = {"RAY_TMPDIR": str(ray), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    process: subprocess.Popen | None = None
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env={**env, **private}, start_new_session=True,
            )  # fmt: skip
        yield process
    finally:
        # A second signal must not leave half of it running.
        signals = signal.SIGINT, signal.SIGTERM
        before = [signal.signal(each, signal.SIG_IGN) for each in signals]
        try:
            # Also where Ctrl-C hit Popen: the process may run, though nobody has it.
            _end(process, others)
            _remove_segments(began)
            if process is not None and process.returncode:
                _keep_logs(ray, log.with_name("ray-logs"))
            shutil.rmtree(ray, ignore_errors=True)
        finally:
            for each, handler in zip(signals, before, strict=True):
                signal.signal(each, handler)


def _end(process: subprocess.Popen | None, others: set[int]) -> None:
    """Terminate, wait, kill: first the trainer, which stops Ray by itself, then whatever is still there."""
    if process is not None and process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    for sign in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + GRACE_SECONDS
        for pid in descendants(os.getpid()) - others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sign)
        while (left := descendants(os.getpid()) - others) and time.monotonic() < deadline:
            if process is not None:
                process.poll()
            for pid in left - {process.pid if process is not None else 0}:  # whose exit code is `process`'s
                with contextlib.suppress(ChildProcessError):  # the others are their own parent's to reap
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.1)


def descendants(ancestor: int) -> set[int]:
    """The processes below `ancestor`, zombies included."""
    return {process.pid for process in psutil.Process(ancestor).children(recursive=True)}


def _remove_segments(began: float) -> None:
    """Delete shared memory that a killed engine left behind: ours, made since `began`, used by nobody."""
    found = {}
    for file in itertools.chain.from_iterable(map(_SHARED_MEMORY.glob, _SEGMENTS)):
        with contextlib.suppress(FileNotFoundError):
            status = file.stat()
            if status.st_uid == os.getuid() and status.st_ctime >= began:
                found[file] = status.st_ino
    # Only now: another run of the same user may be making segments all the time.
    used = _used_segments() if found else set()
    for file, inode in found.items():
        if inode not in used:
            file.unlink(missing_ok=True)


def _used_segments() -> set[int]:
    """The inodes of shared memory that a process has open or mapped.

    What is open is read first: a process maps a segment, and only then closes it. Names do not do: a
    semaphore has lost the name under which it is mapped.
    """
    used: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(descriptor).startswith("/dev/shm/"):
                        used.add(descriptor.stat().st_ino)
        with contextlib.suppress(OSError):
            lines = (process / "maps").read_text().splitlines()
            # address, permissions, offset, device, inode, path
            used.update(int(line.split()[4]) for line in lines if "/dev/shm/" in line)
    return used


def _keep_logs(ray: Path, target: Path) -> None:
    for logs in ray.glob("ray/session_*/logs"):
        if not logs.parent.is_symlink():
            shutil.copytree(logs, target, dirs_exist_ok=True, ignore_dangling_symlinks=True)


def last_error(log: Path, num_lines: int = 400) -> str:
    """The last line that names an error, without colours and actor prefixes; else the last line.

    Ray names an actor that has died in the next lines. That memory was the cause, it says somewhere before,
    in a line that is no error: this comes first.
    """
    with log.open(errors="replace") as file:
        cause = _NO_MEMORY if any(map(_KILLED.search, file)) else ""
        file.seek(0)
        lines = [_ACTOR.sub("", _ANSI.sub("", line)).strip() for line in deque(file, num_lines)]
    lines = [line for line in lines if line] or ["no output"]
    numbers = [number for number, line in enumerate(lines) if _ERROR.match(line)]
    last = numbers[-1] if numbers else len(lines) - 1
    names = [line for line in lines[last + 1 : last + 6] if line.startswith(("class_name: ", "name: "))]
    return cause + " ".join([lines[last], *names])[:500]
