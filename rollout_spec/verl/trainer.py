"""What verl's trainer asks its rollout servers, and tells them: counts, validations, whether they live."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any

import ray

from rollout_spec.metrics import RolloutReport
from rollout_spec.verl.settings import value

POLL_S = 5.0
_ANSWER_S = 1.0


def servers(trainer: Any) -> list[Any]:
    """Handles of the rollout servers, `SpecHttpServer`s, one for each replica; [] without rollout.spec."""
    if value(trainer.config, "rollout.spec.method") is None:
        return []
    return [handle for manager in trainer._rollout_server_managers() for handle in manager.server_handles]


def take_reports(trainer: Any) -> list[RolloutReport]:
    """From each rollout server, the windows that have ended since the last call."""
    return ray.get([handle.take_rollout_report.remote() for handle in servers(trainer)])


@contextlib.contextmanager
def validation(trainer: Any) -> Iterator[None]:
    """Tell every rollout server that a validation begins, and that it has ended."""
    handles = servers(trainer)
    ray.get([handle.begin_validation.remote() for handle in handles])
    try:
        yield
    finally:
        ray.get([handle.end_validation.remote() for handle in handles])


class Watch:
    """Asks rollout servers whether they and their engines live."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self._servers, self._asked = handles, list[Any]()

    def check(self) -> None:
        """Ask, or see who has answered. A server may be too busy to answer at once.

        Raises:
            ActorDiedError, EngineDeadError: a server, or the engine of one, has died.
            Exception: that of a server's worker which could not take what it was sent.
        """
        self._asked = self._asked or [server.require_engine.remote() for server in self._servers]
        answered, self._asked = ray.wait(self._asked, num_returns=len(self._asked), timeout=_ANSWER_S)
        ray.get(answered)


def call_and_watch(handles: Sequence[Any], call: Callable[[], Any]) -> Any:
    """What `call` returns, which may wait for these servers: they are watched meanwhile.

    Raises what `Watch.check` does, while `call` goes on in a thread; or what `call` raises.
    """
    result: Future[Any] = Future()
    threading.Thread(target=_keep_result, args=(call, result), daemon=True).start()
    watch = Watch(handles)
    while not wait([result], timeout=POLL_S).done:
        watch.check()
    return result.result()


def _keep_result(call: Callable[[], Any], result: Future[Any]) -> None:
    try:
        result.set_result(call())
    except BaseException as error:
        result.set_exception(error)
