"""What a rollout server asks of the drafter in each engine core, between two steps: texts and counts."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from vllm.logger import init_logger

from rollout_spec.drafting.drafter import Drafter
from rollout_spec.drafting.history_pieces import HistoryError
from rollout_spec.vllm.proposing.proposer import BatchProposer

logger = init_logger(f"vllm.{__name__}")


class Ended(NamedTuple):
    """What has ended since a drafter was told; requests by the names that their senders gave them.

    a request in | where `finished` is None | else
    aborted      | was aborted: it goes on under another name, with a prompt that may lack its last tokens
    finished     |                          | has finished, which vLLM says with its next step only
    neither      | has finished             | runs on
    """

    aborted: Collection[str] = ()
    finished: Collection[str] | None = None
    samples: Collection[str] = ()
    """Those that have said all: they need no place in the index any more."""


ALL_HAVE_ENDED, NONE_HAS_ENDED = Ended(), Ended(finished=())


class ProposerControl:
    """The calls, answered once the tokens that are still on their way have been taken in.

    Arguments and results are what vLLM can send between processes. An `Ended` comes as a list.
    """

    def __init__(self, proposer: BatchProposer) -> None:
        self._proposer = proposer
        self._pieces: Iterator[bytes] = iter(())  # of what was asked for last, still to be handed on

    @property
    def _drafter(self) -> Drafter | None:
        """None: drafting is off."""
        return self._proposer.drafter

    def take_counters(self) -> dict[str, Any]:
        """The fields of `EngineCounters`, counted since the last call."""
        return self._proposer.take_counters().to_dict()

    def note_new_weights(self, ended: Ended = ALL_HAVE_ENDED, training_step: int | None = None) -> None:
        """The target's weights have changed, to those of this training step; the texts stay."""
        self.note_ended(ended)
        if self._drafter is not None:
            self._drafter.note_new_weights(training_step)

    def end_samples(self, samples: Collection[str]) -> None:
        """Samples of these names have said all; their last tokens may still be on their way."""
        if self._drafter is not None:
            self._drafter.end_samples(samples)

    def note_ended(self, ended: Ended) -> None:
        """Take into the history what has ended."""
        self._proposer.index_arrivals()
        drafter, (aborted, finished, samples) = self._drafter, Ended(*ended)
        if drafter is None:
            return
        aborted = _known_as(aborted, drafter)
        leaving = set(drafter.request_ids) if finished is None else _known_as(finished, drafter) | aborted
        for request_id in [each for each in drafter.request_ids if each in leaving]:  # as they arrived
            drafter.remove(request_id, is_aborted=request_id in aborted)
        drafter.end_samples(samples)

    def take_history(self, ended: Ended = ALL_HAVE_ENDED) -> bytes | None:
        """The first piece of what this engine has kept since the last call; None where the drafter is off."""
        self.note_ended(ended)
        self._pieces = iter(()) if self._drafter is None else self._drafter.history.take_new()
        return self.next_piece()

    def pack_history(self, ended: Ended = ALL_HAVE_ENDED) -> bytes | None:
        """The first piece of all that this engine keeps; None, with a warning, where the drafter is off."""
        self.note_ended(ended)
        if self._drafter is None:
            logger.warning("rollout_spec: no history from this engine: drafting is off, see above")
        self._pieces = iter(()) if self._drafter is None else self._drafter.history.all_pieces()
        return self.next_piece()

    def next_piece(self) -> bytes | None:
        """The next piece of what was asked for last; None: there is no more."""
        return next(self._pieces, None)

    def add_history(self, contents: Sequence[bytes]) -> None:
        """Keep pieces that other engines gave."""
        drafter = self._drafter
        if drafter is None:
            return
        for content in contents:
            try:
                drafter.history.merge(content)
            except (HistoryError, MemoryError) as error:
                logger.warning("rollout_spec: training goes on without a part of the history: %r", error)


def _known_as(names: Collection[str], drafter: Drafter) -> set[str]:
    """The requests of these names that it knows: vLLM may have added a dash and eight characters."""
    names = set(names)
    known = drafter.request_ids
    return {each for each in known if each in names or (each[-9:-8] == "-" and each[:-9] in names)}
