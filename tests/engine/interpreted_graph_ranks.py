"""Two ranks that go the ways of CUDA, beside eager ones; as `interpreted_ranks`."""

# ruff: noqa: I001 (what is imported depends on what comes before)
from tests.engine import interpreted_cuda

import asyncio

from tests.engine.interpreted_ranks import plain, ranks, tensor_parallel

GRAPHS = interpreted_cuda.with_graphs("FULL_AND_PIECEWISE")


def main(model, kind):
    if kind == "tensor-parallel":
        return {"plain": tensor_parallel(model, None), "drafted": tensor_parallel(model, {}, **GRAPHS)}
    return {"plain": plain(model), "ranks": asyncio.run(ranks(model, **GRAPHS))}
