"""Transfers of weights between four processes: `python -m lab.tests.transfers`, for `test_checkpoint_engine`.

The parent imports verl once and forks before anything runs threads.
"""

import asyncio
import json
import multiprocessing
import os

import torch

from rollout_spec_lab.verl_cpu.checkpoint_engine import GlooCheckpointEngine as Engine

context = multiprocessing.get_context("fork")
SHAPES = [
    ((3,), torch.int8), ((1000, 7), torch.float32), ((), torch.float64), ((5,), torch.bfloat16),
    ((0,), torch.float32), ((300, 100), torch.bfloat16), ((17,), torch.int64), ((2000,), torch.float32),
]  # fmt: skip


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
    assert not expected


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
    rows: list[dict] = []
    for group in (actors, engines):
        rows += (dict(zip(group, row, strict=True)) for row in zip(*group.values(), strict=True))
    who = {"fails": 0, "raises": 2, "dies": 2}.get(case)
    barrier, num_syncs = context.Barrier(4), 2 if who is None else 1
    for i in range(4):
        engine = Engine(0, is_master=i == 0, timeout_s=120)
        arguments = (i, engine, rows[i], case if i == who else None, endpoints, barrier, results, num_syncs)
        context.Process(target=run, args=arguments, daemon=True).start()
    reports = [results.get(timeout=60) for i in range(4) if (case, i) != ("dies", who)]
    return dict(reports)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({case: transfer(case) for case in ("well", "fails", "raises", "dies")}))
