"""What goes wrong in tests/test_faults.py, amid a rollout, through verl's own extension points."""

import os
import signal
import threading
from pathlib import Path

import ray
from verl.checkpoint_engine.base import CheckpointEngineRegistry

from rollout_spec_lab.processes import descendants
from rollout_spec_lab.verl_cpu.checkpoint_engine import GlooCheckpointEngine

FAULT = "ROLLOUT_SPEC_TEST_FAULT"  # the environment variable that names it
MARK = "The fault:"  # in the log
_killed: list[int] = []
_lock = threading.Lock()


def compute_score(solution_str, **_):
    kill()
    return float(len(solution_str) % 7)


def kill():
    """Once, the process of a training that its fault names."""
    with _lock:  # scores are computed in several threads
        if os.environ[FAULT] in ("server", "engine", "actor") and not _killed:
            _killed.append(process(os.environ[FAULT]))
            print(f"{MARK} {_killed[0]} is killed", flush=True)
            os.kill(_killed[0], signal.SIGKILL)


def process(name):
    """The process of the rollout server that serves last in all modes, of its engine, or of a trainer."""
    if name == "actor":
        return _child(os.getppid(), "ray::WorkerDict")
    for number in (1, 0):  # the trainer's own engine is the first one
        try:
            server = ray.get_actor(f"vllm_server_{number}_0")
        except ValueError:
            continue
        pid = ray.get(server.__ray_call__.remote(lambda _: os.getpid()), timeout=30)
        return pid if name == "server" else _child(pid, "VLLM::EngineCor")
    raise AssertionError("no rollout server")


def _child(parent, title):
    titles = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in descendants(parent)}
    found = [pid for pid, own in titles.items() if own.startswith(title)]
    assert found, f"no {title} among {titles}"
    return found[0]


@CheckpointEngineRegistry.register("breaks")
class BreakingCheckpointEngine(GlooCheckpointEngine):
    """The second weights that it receives, after those at the start, it cannot load."""

    _num_syncs = 0

    async def receive_weights(self, global_steps=None):
        self._num_syncs += 1
        async for named in super().receive_weights(global_steps):
            if self._num_syncs == 2:
                print(f"{MARK} {named[0]}", flush=True)
                raise ValueError(f"{named[0]} does not fit")
            yield named
