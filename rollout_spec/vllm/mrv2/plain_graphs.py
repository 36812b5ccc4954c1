"""Full CUDA graphs for plain steps, as `cuda_graphs` has them on MRV1."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rollout_spec.vllm.cuda_graphs import has_plain_graphs


def capture_plain_steps_mrv2(runner: Any) -> None:
    """Capture full graphs for plain steps in an MRV2. After the capture `decode_query_len` has other uses.

    The dummy batch of a data-parallel rank without requests is a plain step too: else it would be of K + 1
    tokens, and no rank's plain step would have a full graph beside it.
    """
    if not has_plain_graphs(runner):
        return
    for name in ("initialize_kv_cache", "_dummy_run"):
        setattr(runner, name, _for_plain_steps(runner, getattr(runner, name)))


def _for_plain_steps(runner: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call_for_plain_steps(*args: Any, **kwargs: Any) -> Any:
        decode_query_len, runner.decode_query_len = runner.decode_query_len, 1
        try:
            return method(*args, **kwargs)
        finally:
            runner.decode_query_len = decode_query_len

    return call_for_plain_steps
