"""Weights over gloo, between processes as verl has them: an actor that sends, another one, two engines."""

import json
import subprocess
import sys
from typing import Any

import pytest

# The parent imports verl once and forks before anything runs threads.
_SCRIPT = """
import asyncio, json, multiprocessing, os
import torch
from rollout_spec_lab.verl_cpu.checkpoint_engine import GlooCheckpointEngine as Engine

torch.set_num_threads(1)
context = multiprocessing.get_context("fork")
SHAPES = [((3,), torch.int8), ((1000, 7), torch.float32), ((), torch.float64), ((5,), torch.bfloat16),
          ((0,), torch.float32), ((300, 100), torch.bfloat16), ((17,), torch.int64), ((2000,), torch.float32)]

def weights(seed):
    torch.manual_seed(seed)
    for i, (shape, dtype) in enumerate(SHAPES):
        yield f"w{i}", (torch.randn(shape) * 50).to(dtype)

def failing():
    yield from list(weights(0))[:3]
    raise ValueError("no such shard")

async def receive(engine, seed, how):
    expected = dict(weights(seed))
    async for name, weight in engine.receive_weights():
        if how == "raises":
            raise KeyError("no parameter of this name")
        if how == "dies":
            os._exit(1)
        assert weight.dtype == expected[name].dtype and weight.shape == expected[name].shape
        assert torch.equal(weight, expected.pop(name)), name
    assert list(expected) == ["w4"], "an empty tensor has no bytes to send"

def run(i, engine, row, how, endpoints, barrier, results, num_syncs):
    error = None
    try:
        for seed in range(num_syncs):  # everything is made anew for each
            if i == 0:
                endpoint = engine.prepare()
                for queue in endpoints:
                    queue.put(endpoint)
            engine.init_process_group(**{**row, "endpoint": endpoints[i].get()})
            if i > 1:
                asyncio.run(receive(engine, seed, how))
            else:
                asyncio.run(engine.send_weights(failing() if how == "fails" else weights(seed)))
            barrier.wait(60)  # verl finalizes when all are done
            engine.finalize()
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
        barrier.abort()
    results.put((i, error))

def transfer(case):
    results, endpoints = context.Queue(), [context.Queue() for _ in range(4)]
    actors, engines = Engine.build_topology(2, 2, [None] * 4)
    rows = [dict(zip(group, row)) for group in (actors, engines) for row in zip(*group.values())]
    who = {"fails": 0, "raises": 2, "dies": 2}.get(case)
    barrier, num_syncs = context.Barrier(4), 2 if who is None else 1
    for i in range(4):
        engine = Engine(8192, is_master=i == 0, timeout_s=120)
        arguments = (i, engine, rows[i], case if i == who else None, endpoints, barrier, results, num_syncs)
        context.Process(target=run, args=arguments, daemon=True).start()
    reports = [results.get(timeout=60) for i in range(4) if (case, i) != ("dies", who)]
    return dict(reports)

print(json.dumps({case: transfer(case) for case in ("well", "fails", "raises", "dies")}))
"""


@pytest.fixture(scope="module")
def reports() -> dict[str, dict[str, str | None]]:
    """By case, the error of each process. 0 sends, 2 and 3 receive.

    Nobody waits for a time-out, which is longer than a report is waited for.
    """
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_engine_gets_every_weight_in_every_sync(reports: Any) -> None:
    assert reports["well"] == dict.fromkeys("0123")


@pytest.mark.parametrize(
    ("case", "messages"),
    [
        ("fails", {"0": "ValueError: no such shard", "2": "no such shard", "3": "no such shard"}),
        ("raises", {"0": "broke off at rank 0", "2": "KeyError", "3": "broke off at rank 2"}),
        ("dies", {"0": "broke off at rank 0", "3": "broke off at rank 2"}),
    ],
)
def test_who_fails_fails_all_the_others_at_once(case: str, messages: dict[str, str], reports: Any) -> None:
    for process, message in messages.items():
        error = reports[case][process]
        assert error is not None and message in error, (process, error)
