"""What an engine's drafting counts, and what it says in the engine's log."""

from vllm.logger import init_logger

from rollout_spec.drafting.drafter import Drafter
from rollout_spec.metrics import EngineCounters, engine_summary

LOG_EVERY = 1000  # engine steps in which rows decoded

logger = init_logger(f"vllm.{__name__}")


class KeptCounters:
    """The counters of a drafter that may fail and end; each fault is said once."""

    def __init__(self) -> None:
        self._kept = EngineCounters()  # not taken yet, and no longer the drafter's
        self._warned = set[str]()

    def take(self, drafter: Drafter | None) -> EngineCounters:
        """The counts since the last call."""
        self.keep(drafter)
        return self._kept.take()

    def keep(self, drafter: Drafter | None) -> None:
        """Take over what the drafter has counted."""
        if drafter is not None:
            self._kept.add(drafter.take_counters())

    def count_failed_step(self) -> None:
        self._kept.num_failed_steps += 1

    def log(self, drafter: Drafter) -> None:
        """Say every so often how drafting does, unless the counters are taken before (as with verl)."""
        if drafter.counters.num_steps >= LOG_EVERY:
            counters = drafter.take_counters()
            self._kept.add(counters)
            logger.info("rollout_spec: the last %d steps: %s", counters.num_steps, engine_summary(counters))

    def warn(self, kind: str, message: str) -> None:
        """Say what is wrong, with the exception that is handled; once for each kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            logger.exception(
                "rollout_spec: %s. Said once; the metric spec_num_failed_steps counts on.", message
            )
