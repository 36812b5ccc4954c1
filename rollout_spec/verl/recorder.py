"""Records what a rollout server has served, where `ROLLOUT_SPEC_TRACE_DIR` names a folder."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from rollout_spec import trace
from rollout_spec.vllm.keys import KEY, names_of

logger = init_logger(f"vllm.{__name__}")


class Recorder:
    """Writes responses to the file of a replica, for `rollout-spec replay`.

    If it cannot write (a full disk), it warns and records no more.
    """

    def __init__(self, replica_rank: int) -> None:
        folder = os.environ.get(trace.DIR_VARIABLE)
        self._file = trace.trace_file(Path(folder), replica_rank) if folder else None
        # By group and prompt: each response, and its call's name.
        self._responses: dict[tuple[str, tuple[int, ...]], list[tuple[list[int], Any]]] = defaultdict(list)

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
            self._responses[group, prompt].append((response, _plain(named.get(KEY))))

    def flush(self, step: int | None) -> None:
        """Write what has been added, as of this training step."""
        if self._file is None:
            return
        lines = [
            trace.to_line(group, step, prompt, *zip(*samples, strict=True))
            for (group, prompt), samples in self._responses.items()
        ]
        self._responses.clear()
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            trace.append_lines(self._file, lines)
        except OSError as error:
            logger.warning("rollout_spec: stopped recording rollouts: %s", error)
            self._file = None


def _plain(name: Any) -> Any:
    """The name as JSON can hold it; a caller may send anything."""
    try:
        return json.loads(json.dumps(name))
    except (TypeError, ValueError, RecursionError):
        return repr(name)
