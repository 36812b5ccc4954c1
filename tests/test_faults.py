"""Something dies in a training, in each of verl's modes: the run ends, says what, and leaves nothing."""

import contextlib
import os
import pathlib
import re
import time
from types import SimpleNamespace

import pytest

from rollout_spec_lab.processes import descendants, last_error, started
from rollout_spec_lab.verl_cpu.checkpoint_engine import SYNC_TIMEOUT_S
from tests import faults
from tests.trainings import GIVEN, command, environment_of, managed_by

MODES = ("sync", "colocate_async", "separate_async")
DEATHS = ("engine", "server", "engine")  # in these modes, with another manager than verl's
GRACE_SECONDS = 60  # for processes that have lost their parent

pytestmark = pytest.mark.timeout(900)


def train(folder, model, mode, fault, *overrides):
    """Train until the fault (of `tests/faults.py`) ends it; `seconds`: from the fault to the end."""
    options = [
        "data.max_response_length=300",
        # Not even a batch fits at once: when the first ones end, others run and wait.
        "actor_rollout_ref.rollout.max_num_seqs=6",
        f"reward.custom_reward_function.path={faults.__file__}",
        *overrides,
    ]
    log, others, memory = folder / "train.log", descendants(os.getpid()), set(os.listdir("/dev/shm"))
    env = environment_of(folder) | {faults.FAULT: fault}
    training = command(folder, model, *options, mode=mode, num_steps=3, num_samples=8)
    with started(training, log, env) as process:
        began = time.monotonic()
        while process.poll() is None:
            if faults.MARK not in log.read_text():
                began = time.monotonic()
            time.sleep(0.5)
        seconds = time.monotonic() - began
        end = time.monotonic() + GRACE_SECONDS
        while (running := titles(descendants(os.getpid()) - others)) and time.monotonic() < end:
            time.sleep(1)
        left = {"running": running, "shared_memory": set(os.listdir("/dev/shm")) - memory}
    said = {"error": last_error(log), "log": log.read_text()}
    return SimpleNamespace(code=process.returncode, seconds=seconds, **left, **said)


def titles(pids):
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            found.append(pathlib.Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200])
    return [title for title in found if title]  # that of a zombie is empty


TRANSFER = [
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=tests.faults",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=breaks",
]
ERRORS = {  # a gateway of uni-agent has them in JSON
    "server": r"ActorDiedError.*class_name: SpecHttpServer.*name: vllm_server_\d_0",
    "engine": r"EngineDeadError: EngineCore encountered an issue",
    "actor": r"ActorDiedError.* class_name: .*WorkerDict name: ",
    "transfer": r"ValueError: \S+ does not fit",
    "disk": r"inline_container|iostream|No space left",  # torch's words for it
}


@pytest.mark.parametrize(
    ("mode", "fault", "manager"),
    [
        *((mode, fault, "verls") for mode in MODES for fault in ("server", "engine", "actor")),
        *((mode, fault, other) for other in GIVEN[1:] for mode, fault in zip(MODES, DEATHS, strict=True)),
        ("separate_async", "transfer", "verls"),
        *((mode, "disk", "verls") for mode in MODES),
    ],
)
@pytest.mark.parametrize("small_disk", ["2m"], indirect=True)  # for what a step has served, not for the model
def test_a_run_ends_says_what_died_and_leaves_nothing(mode, fault, manager, policy, small_disk, tmp_path):
    disk = ["trainer.save_freq=1", f"trainer.default_local_dir={small_disk}"]
    options = {"transfer": TRANSFER, "disk": disk}
    own = managed_by(manager, mode, tmp_path)
    end = train(tmp_path, policy, mode, fault, *own, *options.get(fault, []))
    left = f"{end.running} {end.shared_memory}"
    print(f"{manager}, {mode}, {fault}: {end.seconds:.0f} s; {end.error}; left: {left}")
    assert end.code == 1
    assert re.search(ERRORS[fault], end.error), end.log[-20000:]
    assert end.seconds < SYNC_TIMEOUT_S
    assert end.running == []
    # A process that is killed cannot remove vLLM's queues, verl's buffer of weights and OpenMP's
    # registrations. `started` removes them.
    names = ("psm_", "sem.mp-", "verl_weights_", "__KMP_")
    assert all(name.startswith(names) for name in end.shared_memory)
