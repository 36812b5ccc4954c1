"""Records what a rollout server has served, where `ROLLOUT_SPEC_TRACE_DIR` names a folder."""

import dataclasses
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm.logger import init_logger

from rollout_spec import trace
from rollout_spec.vllm.keys import NAME_KEY, names_of

logger = init_logger(f"vllm.{__name__}")


class _Call(NamedTuple):
    number: int  # in its sample
    prompt: tuple[int, ...]
    response: list[int]
    name: Any


@dataclasses.dataclass
class _Sample:
    prompt: tuple[int, ...]
    name: Any  # of its first call
    turns: list[tuple[list[int], list[int]]]  # what was said before each, and its response
    text: tuple[int, ...]  # all of it


class Recorder:
    """Writes responses to the file of a replica, for `rollout-spec replay`.

    If it cannot write (a full disk), it warns and records no more.
    """

    def __init__(self, replica_rank: int) -> None:
        folder = os.environ.get(trace.DIR_VARIABLE)
        self._file = trace.trace_file(Path(folder), replica_rank) if folder else None
        # By group and sample: of each call its number, its prompt, its response and its name.
        self._calls: dict[tuple[str, str | int], list[_Call]] = defaultdict(list)

    def add(self, prompt_ids: Sequence[int], token_ids: Sequence[int], named: Mapping[str, Any]) -> None:
        """A response has ended. What it had said before an interruption is a part of it, and stands in
        `prompt_ids` after the turn's prompt. `named`: the request's `extra_args` (`vllm.keys`)."""
        if self._file is None:
            return
        names = names_of(named)
        num_turn_tokens = len(prompt_ids) if names.num_turn_tokens is None else names.num_turn_tokens
        prompt, before = tuple(map(int, prompt_ids[:num_turn_tokens])), prompt_ids[num_turn_tokens:]
        response = [*map(int, before), *map(int, token_ids)]
        if response:
            group = names.group if names.group is not None else str(hash(prompt))
            sample = names.sample if names.sample is not None else len(self._calls)
            call = _Call(names.turn or 0, prompt, response, _plain(named.get(NAME_KEY)))
            self._calls[group, sample].append(call)

    def flush(self, step: int | None) -> None:
        """Write what has been added, as of this training step."""
        if self._file is None:
            return
        samples: dict[tuple[str, tuple[int, ...]], list[_Sample]] = defaultdict(list)
        for (group, _), calls in self._calls.items():
            for sample in _joined(calls):
                samples[group, sample.prompt].append(sample)
        lines = [_line(group, step, prompt, found) for (group, prompt), found in samples.items()]
        self._calls.clear()
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            trace.append_lines(self._file, lines)
        except OSError as error:
            logger.warning("rollout_spec: stopped recording rollouts: %s", error)
            self._file = None


def _line(group: str, step: int | None, prompt: tuple[int, ...], samples: list[_Sample]) -> str:
    names, turns = [each.name for each in samples], [each.turns for each in samples]
    if any(len(each) > 1 for each in turns):
        return trace.to_line(group, step, prompt, names=names, samples=turns)
    return trace.to_line(group, step, prompt, [response for ((_, response),) in turns], names)


def _joined(calls: list[_Call]) -> Iterator[_Sample]:
    """The calls of a sample as one text each, as long as a prompt begins with all that was said before."""
    sample: _Sample | None = None
    for call in sorted(calls, key=lambda call: call.number):
        if sample is not None and call.prompt[: len(sample.text)] == sample.text:
            sample.turns.append(([*call.prompt[len(sample.text) :]], call.response))
        else:
            if sample is not None:
                yield sample
            sample = _Sample(call.prompt, call.name, [([], call.response)], ())
        sample.text = (*call.prompt, *call.response)
    if sample is not None:
        yield sample


def _plain(name: Any) -> Any:
    """The name as JSON can hold it; a caller may send anything."""
    try:
        return json.loads(json.dumps(name))
    except (TypeError, ValueError, RecursionError):
        return repr(name)
