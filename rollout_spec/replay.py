"""Replay recorded rollouts through the suffix index, with a simulated verifier and no model.

A draft token is accepted exactly when it equals the recorded token. The responses of one line of the trace
decode in lockstep, as siblings do in a rollout; of other lines the drafter has its history and what mode sam
has learned.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from rollout_spec.config import SpecConfig
from rollout_spec.history import History, group_key, index_responses
from rollout_spec.index import Int32Array, SuffixIndex

_GZIP_MAGIC = b"\x1f\x8b"


class TraceError(ValueError):
    """A trace that cannot be read; the message names file, line and field."""


@dataclass(frozen=True)
class Rollout:
    """One line of a trace: the responses to one prompt, token ids as int32 vectors."""

    group: str
    step: int | None
    prompt_token_ids: Int32Array
    responses: list[Int32Array]


@dataclass
class ReplayResult:
    """What a replay counted. A step is a row-step: one sequence, one forward of the target."""

    num_groups: int = 0
    num_responses: int = 0
    num_tokens: int = 0
    """Response tokens, the first one of each included, which the prefill yields."""
    num_steps: int = 0
    num_decoded_tokens: int = 0
    """Response tokens that a step yielded: all but the first of each response."""
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_native_rows: int = 0
    native_seconds: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        return self.num_decoded_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def draft_tokens_per_step(self) -> float:
        return self.num_draft_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        return 1.0 + (self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0)

    @property
    def native_us_per_row(self) -> float:
        return 1e6 * self.native_seconds / self.num_native_rows if self.num_native_rows else 0.0

    def to_dict(self) -> dict[str, float]:
        names = (
            *("num_groups", "num_responses", "num_tokens", "num_steps", "tokens_per_step"),
            *("draft_tokens_per_step", "acceptance_rate", "mean_acceptance_length", "native_us_per_row"),
        )
        return {name: getattr(self, name) for name in names}


def read_trace(path: str | Path) -> Iterator[Rollout]:
    """Read a `.jsonl` or `.jsonl.gz` trace line by line, empty lines skipped.

    Raises:
        OSError: the file cannot be opened.
        TraceError: it is not such a trace.
    """
    path = Path(path)
    with open(path, "rb") as raw:
        compressed = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    file: IO[str]
    with gzip.open(path, "rt", encoding="utf-8") if compressed else open(path, encoding="utf-8") as file:
        number = 0
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _parse_line(line, f"{path}:{number}")
        except (gzip.BadGzipFile, EOFError, UnicodeDecodeError) as error:
            raise TraceError(f"{path}:{number + 1}: {error}") from error


def _parse_line(line: str, where: str) -> Rollout:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(f"{where}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise TraceError(f"{where}: must be a JSON object")
    for name in ("group", "prompt_token_ids", "responses"):
        if name not in fields:
            raise TraceError(f"{where}: {name}: is missing")
    group, step, responses = fields["group"], fields.get("step"), fields["responses"]
    if not isinstance(group, str):
        raise TraceError(f"{where}: group: must be a string")
    if step is not None and type(step) is not int:
        raise TraceError(f"{where}: step: must be an integer or null")
    if not isinstance(responses, list) or not responses:
        raise TraceError(f"{where}: responses: must be a list of at least one response")
    return Rollout(
        group=group,
        step=step,
        prompt_token_ids=_token_ids(fields["prompt_token_ids"], f"{where}: prompt_token_ids"),
        responses=[_token_ids(tokens, f"{where}: responses[{i}]") for i, tokens in enumerate(responses)],
    )


def _token_ids(value: Any, where: str) -> Int32Array:
    if not isinstance(value, list):
        raise TraceError(f"{where}: must be a list of token ids")
    for i, token in enumerate(value):
        if type(token) is not int or not 0 <= token < 2**31:
            raise TraceError(f"{where}[{i}]: {token!r} is not a token id")
    return np.array(value, np.int32)


def replay(
    trace: Iterator[Rollout] | Sequence[Rollout],
    config: SpecConfig,
    *,
    max_responses: int | None = None,
    limit_groups: int | None = None,
    on_group: Callable[[ReplayResult], None] | None = None,
) -> ReplayResult:
    """Replay a trace.

    Args:
        trace: the lines, in order; each is indexed afresh, with config.group_sharing as one index group,
            without as one index group per response. With config.history the last so many responses of
            earlier lines with the same `group` are indexed first. What mode sam has learned stays from
            line to line. config.batch_threshold does not apply.
        max_responses: at most the first so many responses of each line.
        limit_groups: at most the first so many lines.
        on_group: called with the counters so far after each line.
    """
    result = ReplayResult()
    history = History(config.history, config.max_index_mb << 20)
    with SuffixIndex.from_config(config) as index:
        for rollout in islice(trace, limit_groups):
            responses = rollout.responses[:max_responses]
            key = group_key(rollout.group)
            earlier = history.get(key)
            _replay_rollout(index, rollout.prompt_token_ids, responses, earlier, config, result)
            for response in responses if config.history else ():
                history.add(key, response)
            result.num_groups += 1
            if on_group is not None:
                on_group(result)
    return result


def _replay_rollout(
    index: SuffixIndex,
    prompt: Int32Array,
    responses: list[Int32Array],
    earlier: Sequence[Int32Array],
    config: SpecConfig,
    result: ReplayResult,
) -> None:
    n, prompt_len = len(responses), len(prompt)
    groups = [index.open_group(prompt) for _ in range(1 if config.group_sharing else n)]
    for group in groups:
        index_responses(index, group, prompt_len, earlier)
    sequences = np.array([index.open_sequence(groups[i % len(groups)]) for i in range(n)], np.int32)
    lengths = np.array([len(response) for response in responses], np.int32)
    # What a draft is compared with behind the end of a response is no token at all.
    width = prompt_len + int(lengths.max()) + config.num_speculative_tokens
    token_ids = np.full((n, width), -1, np.int32)
    token_ids[:, :prompt_len] = prompt
    for row, response in zip(token_ids, responses, strict=True):
        row[prompt_len : prompt_len + len(response)] = response
    result.num_responses += n
    result.num_tokens += int(lengths.sum())
    result.num_decoded_tokens += int(np.maximum(lengths - 1, 0).sum())

    ends = prompt_len + lengths
    levels = np.minimum(prompt_len + 1, ends)
    running = np.flatnonzero(levels < ends)
    entries = np.arange(n)
    while len(running):
        num_accepted = _step(index, sequences, token_ids, levels, ends, entries, config, result)
        # A row that ends in this step takes part in the next once more: its siblings see its last tokens.
        entries = running
        levels[running] = np.minimum(levels[running] + num_accepted[running] + 1, ends[running])
        running = running[levels[running] < ends[running]]
    for sequence in sequences:
        index.close_sequence(int(sequence))
    for group in groups:
        index.close_group(group)


def _step(
    index: SuffixIndex,
    sequences: Int32Array,
    token_ids: Int32Array,
    levels: Int32Array,
    ends: Int32Array,
    entries: np.ndarray,
    config: SpecConfig,
    result: ReplayResult,
) -> np.ndarray:
    """One step of the rows in `entries`; returns the accepted draft tokens of every row, [n]."""
    rows = entries.astype(np.int32)
    entry_levels = levels[entries]
    budgets = np.where(entry_levels < ends[entries], config.num_speculative_tokens, 0).astype(np.int32)
    begin = time.perf_counter()
    drafted = index.step(sequences[entries], token_ids, rows, entry_levels, budgets)
    result.native_seconds += time.perf_counter() - begin
    result.num_native_rows += len(entries)

    offsets = np.arange(config.num_speculative_tokens)
    # Rows that have ended draft nothing; clipping keeps their columns inside the matrix.
    columns = np.minimum(entry_levels[:, None] + offsets, token_ids.shape[1] - 1)
    agrees = drafted.draft_tokens == token_ids[entries[:, None], columns]
    agrees &= offsets < drafted.num_draft_tokens[:, None]
    accepted = np.zeros(len(sequences), np.int64)
    accepted[entries] = np.logical_and.accumulate(agrees, axis=1).sum(axis=1)
    result.num_steps += int(np.count_nonzero(budgets))
    result.num_drafts += int(np.count_nonzero(drafted.num_draft_tokens))
    result.num_draft_tokens += int(drafted.num_draft_tokens.sum())
    result.num_accepted_tokens += int(accepted.sum())
    return accepted
