"""What a rollout server asks of the drafter in each engine core, between two steps: texts and counts."""

from collections.abc import Collection, Sequence
from typing import Any

from vllm.logger import init_logger

from rollout_spec.drafting.drafter import Drafter
from rollout_spec.drafting.history import HistoryError
from rollout_spec.vllm.proposer import SuffixProposer

logger = init_logger(f"vllm.{__name__}")


class ProposerControl:
    """The calls, answered once the tokens that are still on their way have been taken in.

    Arguments and results are what vLLM can send between processes. `aborted` and `finished` are requests, by
    the name that their sender gave them. The aborted go on under other names, so the history does not keep
    what they have said so far. `samples`, by name, have said all.
    """

    def __init__(self, proposer: SuffixProposer) -> None:
        self._proposer = proposer

    def take_counters(self) -> dict[str, Any]:
        """The fields of `EngineCounters`, counted since the last call."""
        return self._proposer.take_counters().to_dict()

    def note_new_weights(self, *ended: Any) -> None:
        """The target's weights have changed; the texts stay. `ended` as of `note_ended`."""
        self.note_ended(*ended)
        if self._proposer.drafter is not None:
            self._proposer.drafter.note_new_weights()

    def note_ended(
        self,
        aborted: Collection[str] = (),
        finished: Collection[str] | None = None,
        samples: Collection[str] = (),
    ) -> None:
        """Take into the history what has ended.

        Args:
            aborted: those that were aborted.
            finished: those that have come to their end, which vLLM itself names with its next step only; by
                default all others. Those in neither of the two run on.
            samples: those that have said all.
        """
        self._proposer.receive()
        drafter = self._proposer.drafter
        if drafter is None:
            return
        aborted = _known_as(aborted, drafter)
        leaving = set(drafter.request_ids) if finished is None else _known_as(finished, drafter) | aborted
        for request_id in [each for each in drafter.request_ids if each in leaving]:  # as they arrived
            drafter.remove(request_id, remember=request_id not in aborted)
        drafter.end_samples(samples)

    def take_history(self, *ended: Any) -> bytes | None:
        """The first piece of what this engine has kept since the last call; None where the drafter is off.

        Args:
            ended: as of `note_ended`.
        """
        self.note_ended(*ended)
        if self._proposer.drafter is not None:
            self._proposer.drafter.history.pieces = self._proposer.drafter.history.take_new()
        return self.next_piece()

    def pack_history(self, *ended: Any) -> bytes | None:
        """The first piece of all responses that this engine keeps; None, with a warning, where the drafter is
        off. `ended` as of `note_ended`.
        """
        self.note_ended(*ended)
        if self._proposer.drafter is None:
            logger.warning("rollout_spec: no history from this engine: drafting is off, see above")
        else:
            self._proposer.drafter.history.pieces = self._proposer.drafter.history.pack()
        return self.next_piece()

    def next_piece(self) -> bytes | None:
        """Of what was asked for last; None: there is no more."""
        drafter = self._proposer.drafter
        return None if drafter is None else next(drafter.history.pieces, None)

    def add_history(self, contents: Sequence[bytes]) -> None:
        """Keep pieces that other engines gave."""
        drafter = self._proposer.drafter
        if drafter is None:
            return
        for content in contents:
            try:
                drafter.history.merge(content)
            except (HistoryError, MemoryError) as error:
                logger.warning("rollout_spec: training goes on without a part of the history: %r", error)


def _known_as(names: Collection[str], drafter: Drafter) -> set[str]:
    """The requests of these names that it knows: vLLM adds a dash and eight characters to each."""
    names = set(names)
    return {each for each in drafter.request_ids if each in names or each.rpartition("-")[0] in names}
