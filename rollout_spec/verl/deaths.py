"""A rollout server or engine that dies while verl sends weights: verl would wait for it forever."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import ray

POLL_S = 5.0


def call_and_watch(servers: Sequence[Any], call: Callable[[], Any]) -> Any:
    """What `call` returns, which may wait for these `SpecHttpServer`s: they are watched meanwhile.

    Raises:
        ActorDiedError, EngineDeadError: a server, or the engine of one, has died. `call` goes on in a thread.
        Exception: that of `call`, or of a server's worker that could not take what it was sent.
    """
    result: Future[Any] = Future()
    threading.Thread(target=_keep_result, args=(call, result), daemon=True).start()
    asked: list[Any] = []
    while not wait([result], timeout=POLL_S).done:
        asked = asked or [server.require_engine.remote() for server in servers]
        answered, asked = ray.wait(asked, num_returns=len(asked), timeout=1)
        ray.get(answered)
    return result.result()


def _keep_result(call: Callable[[], Any], result: Future[Any]) -> None:
    try:
        result.set_result(call())
    except BaseException as error:
        result.set_exception(error)
