"""Hooks into verl's V1 trainer: it names rows, watches its servers, logs metrics, and keeps the history."""

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import ray

from rollout_spec.metrics import rollout_metrics
from rollout_spec.patches import PatchError, when_imported, wrap
from rollout_spec.verl import trainer_history as history
from rollout_spec.verl.changes import DEATHS, TRAINER
from rollout_spec.verl.samples import RowNames
from rollout_spec.verl.settings import ROLLOUT, value
from rollout_spec.verl.trainer_history import servers

POLL_S = 5.0  # between two looks at the servers
_ANSWER_S = 1.0  # for which a look waits

logger = logging.getLogger(f"verl.{__name__}")  # which verl shows in its trainer


def install() -> None:
    """Called in the trainer's process, when it asks for its replica class."""
    _watch_servers()
    _wrap_trainer()
    when_imported("uni_agent.framework.entry", _name_sessions)


def _name_sessions(_: Any) -> None:
    """uni-agent is here; one that does not fit costs the rows' names."""
    try:
        from rollout_spec.verl import uni_agent

        uni_agent.install()
    except (PatchError, ImportError, AttributeError) as error:
        logger.warning("rollout_spec: uni-agent's sessions are named by their first prompts: %s", error)


def _watch_servers() -> None:
    from verl.checkpoint_engine.base import CheckpointEngineManager
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    @wrap(CheckpointEngineManager, "update_weights", DEATHS)
    def update_weights(update: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        replicas = [each for each in self.replicas if getattr(each, "is_watched", False)]
        handles = [server for replica in replicas for server in replica.servers]
        call = functools.partial(update, self, *args, **kwargs)
        return call_and_watch(handles, call) if handles else call()

    @wrap(ReplayBuffer, "_wait_for_next_poll", DEATHS)
    def wait_and_watch(wait: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        """Where a trainer waits for samples. Not in a thread: an agent loop manager may be asked for more."""
        if (watch := getattr(self, "rollout_spec_watch", None)) is not None:
            watch.check()
        return wait(self, *args, **kwargs)


def _wrap_trainer() -> None:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    @wrap(PPOTrainer, "_compute_metrics", TRAINER)
    def compute_metrics(
        compute: Any, self: Any, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        result = compute(self, batch, metrics, *args, **kwargs)
        if reports := ray.get([handle.take_rollout_report.remote() for handle in servers(self)]):
            metrics.update(rollout_metrics(reports))
            _say_uncounted(self, metrics)
        history.share_history(self)
        return result

    @wrap(PPOTrainer, "_validate", TRAINER)
    def validate_apart(validate: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        """Servers do not count its requests towards a step."""
        handles = servers(self)
        ray.get([handle.begin_validation.remote() for handle in handles])
        try:
            return validate(self, *args, **kwargs)
        finally:
            ray.get([handle.end_validation.remote() for handle in handles])

    @wrap(PPOTrainer, "_save_checkpoint", TRAINER)
    def save_checkpoint(save: Any, self: Any) -> None:
        history.save_history(self)  # first, because verl's last act is to declare the checkpoint complete
        save(self)
        history.remove_orphans(self)

    @wrap(PPOTrainer, "fit", TRAINER)
    def fit_with_names(fit: Any, self: Any, agent_loop_manager: Any, *args: Any, **kwargs: Any) -> None:
        if handles := servers(self):
            _name_rows(agent_loop_manager, RowNames(value(self.config, f"{ROLLOUT}.seed")))
            self.replay_buffer.rollout_spec_watch, self.rollout_spec_is_new = Watch(handles), True
        history.load_history(self)  # not when verl loads the checkpoint: separate engines start after that
        history.share_history(self)  # there is nothing yet; it tells the servers to collect from now on
        fit(self, agent_loop_manager, *args, **kwargs)


def _name_rows(manager: Any, names: RowNames) -> None:
    """Let an agent loop manager of any class get batches whose rows have names."""
    generate = manager.generate_sequences
    manager.generate_sequences = lambda prompts, *args, **more: generate(names.add_to(prompts), *args, **more)


def _say_uncounted(trainer: Any, metrics: dict[str, Any]) -> None:
    """After the first step, whose responses somebody has made."""
    if vars(trainer).pop("rollout_spec_is_new", False) and not metrics["rollout/spec_generated_tokens"]:
        logger.warning(
            "rollout_spec: verl's rollout servers have seen no request of the first step, so rollout/spec_* "
            "stay empty: the agent loop manager sends its requests past them, as through a proxy"
        )


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
