"""A trainer's rollout servers, and whether they and their engines live."""

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import ray

from rollout_spec.patches import wrap
from rollout_spec.verl.changes import DEATHS
from rollout_spec.verl.settings import value

POLL_S = 5.0  # between two looks at the servers
_ANSWER_S = 1.0  # for which a look waits


def servers(trainer: Any) -> list[Any]:
    """Handles of the rollout servers, `SpecHttpServer`s, one for each replica; [] without rollout.spec."""
    if value(trainer.config, "rollout.spec.method") is None:
        return []
    return [handle for manager in trainer._rollout_server_managers() for handle in manager.server_handles]


def watch_servers() -> None:
    """Let a trainer see dead servers where it waits for them: to take weights, and for samples."""
    from verl.checkpoint_engine.base import CheckpointEngineManager
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    @wrap(CheckpointEngineManager, "update_weights", DEATHS)
    def update_weights(update: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        replicas = [each for each in self.replicas if getattr(each, "has_spec_servers", False)]
        handles = [server for replica in replicas for server in replica.servers]
        call = functools.partial(update, self, *args, **kwargs)
        return call_and_watch(handles, call) if handles else call()

    @wrap(ReplayBuffer, "_wait_for_next_poll", DEATHS)
    def wait_and_watch(wait: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        """Where a trainer waits for samples. Not in a thread: an agent loop manager may be asked for more."""
        if (watch := getattr(self, "rollout_spec_watch", None)) is not None:
            watch.check()
        return wait(self, *args, **kwargs)


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
        self._asked = self._asked or [server.raise_if_dead.remote() for server in self._servers]
        answered, self._asked = ray.wait(self._asked, num_returns=len(self._asked), timeout=_ANSWER_S)
        ray.get(answered)


def call_and_watch(handles: Sequence[Any], call: Callable[[], Any]) -> Any:
    """What `call` returns, which may wait for these servers: they are watched meanwhile.

    Raises what `Watch.check` does, while `call` goes on in a thread; or what `call` raises.
    """
    result, watch = Future[Any](), Watch(handles)

    def keep_result() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=keep_result, daemon=True).start()
    while not wait([result], timeout=POLL_S).done:
        watch.check()
    return result.result()
