"""Records what a rollout server has served, where `ROLLOUT_SPEC_TRACE_DIR` names a folder."""

import dataclasses
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.logger import init_logger

from rollout_spec import trace
from rollout_spec.verl.sample_calls import group_by_prompt, prompt_digest
from rollout_spec.vllm.keys import NAME_KEY, read_names

logger = init_logger(f"vllm.{__name__}")


@dataclasses.dataclass
class _Chain:
    """Calls of a sample of which each begins with all that was said before: one text."""

    number: int  # of its first call in the sample
    name: Any  # of that call
    tokens: npt.NDArray[np.int32]
    turns: list[tuple[int, int]]  # where the responses begin and end

    def goes_on(self, tokens: npt.NDArray[np.int32], begin: int) -> bool:
        """Whether a call of these tokens, of which the response begins there, goes on after this text."""
        return len(self.tokens) <= begin and np.array_equal(tokens[: len(self.tokens)], self.tokens)

    @property
    def prompt(self) -> tuple[int, ...]:
        return tuple(self.tokens[: self.turns[0][0]].tolist())

    @property
    def parts(self) -> list[tuple[list[int], list[int]]]:
        """What was said before each response, and the response."""
        ends, tokens = [self.turns[0][0], *(end for _, end in self.turns)], self.tokens.tolist()
        pairs = zip(ends, self.turns, strict=False)
        return [(tokens[before:begin], tokens[begin:end]) for before, (begin, end) in pairs]


class Recorder:
    """Writes responses to the file of a replica, for `rollout-spec replay`.

    A sample is written when it has ended: an agent's may take many weight syncs. If the file cannot be
    written (a full disk), it warns and records no more.
    """

    def __init__(self, replica_rank: int) -> None:
        folder = os.environ.get(trace.DIR_VARIABLE)
        self._file = trace.trace_file(Path(folder), replica_rank) if folder else None
        # Of samples, by group and name; those without a name, of one call, by a number.
        self._chains: defaultdict[tuple[str, str | int], list[_Chain]] = defaultdict(list)
        self._ended = set[str]()  # since the last flush
        self._num_added = 0

    def add(self, prompt_ids: Sequence[int], token_ids: Sequence[int], named: Mapping[str, Any]) -> None:
        """A response has ended. What it had said before an interruption is a part of it, and stands in
        `prompt_ids` after the turn's prompt. `named`: the request's `extra_args` (`vllm.keys`)."""
        if self._file is None:
            return
        names = read_names(named)
        begin = len(prompt_ids) if names.num_call_tokens is None else names.num_call_tokens
        tokens = np.concatenate([np.asarray(part, np.int32) for part in (prompt_ids, token_ids)])
        if begin >= len(tokens):
            return
        self._num_added += 1
        group = (
            group_by_prompt(prompt_digest(tokens[:begin].tolist())) if names.group is None else names.group
        )
        chains = self._chains[group, self._num_added if names.sample is None else names.sample]
        for chain in chains:
            if chain.goes_on(tokens, begin):
                chain.tokens = tokens
                chain.turns.append((begin, len(tokens)))
                return
        name = _plain(named.get(NAME_KEY))
        chains.append(_Chain(names.call or 0, name, tokens, [(begin, len(tokens))]))

    def end(self, sample: str) -> None:
        """The sample of this name makes no more calls."""
        if self._file is not None:
            self._ended.add(sample)

    def flush(self, step: int | None) -> None:
        """Write the samples that have ended, as of this training step."""
        if self._file is None:
            return
        texts: dict[tuple[str, tuple[int, ...]], list[_Chain]] = defaultdict(list)
        for (group, name), chains in list(self._chains.items()):
            if isinstance(name, int) or name in self._ended:
                del self._chains[group, name]
                for chain in _joined(chains):
                    texts[group, chain.prompt].append(chain)
        self._ended.clear()
        lines = [_line(group, step, prompt, found) for (group, prompt), found in texts.items()]
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            trace.append_lines(self._file, lines)
        except OSError as error:
            logger.warning("rollout_spec: stopped recording rollouts: %s", error)
            self._file = None
            self._chains.clear()


def _line(group: str, step: int | None, prompt: tuple[int, ...], chains: Iterable[_Chain]) -> str:
    names, turns = [each.name for each in chains], [each.parts for each in chains]
    if any(len(each) > 1 for each in turns):
        return trace.to_line(group, step, prompt, names=names, samples=turns)
    return trace.to_line(group, step, prompt, [response for ((_, response),) in turns], names)


def _joined(chains: list[_Chain]) -> list[_Chain]:
    """Calls may have ended in another order than they began. The chains are not used any more."""
    joined: list[_Chain] = []
    for chain in sorted(chains, key=lambda each: each.number):
        if joined and joined[-1].goes_on(chain.tokens, chain.turns[0][0]):
            joined[-1].tokens = chain.tokens
            joined[-1].turns += chain.turns
        else:
            joined.append(chain)
    return joined


def _plain(name: Any) -> Any:
    """The name as JSON can hold it; a caller may send anything."""
    try:
        return json.loads(json.dumps(name))
    except (TypeError, ValueError, RecursionError):
        return repr(name)
