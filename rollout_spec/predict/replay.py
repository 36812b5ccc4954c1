"""Replay recorded rollouts through the suffix index, without a model.

A draft token is accepted exactly when it equals the recorded token. The responses of one line decode in
lockstep, as siblings do in a rollout. Of other lines the drafter has its history, and the wording it learned.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from rollout_spec.config import SpecConfig
from rollout_spec.drafting.history import History, group_key
from rollout_spec.drafting.native import Int32Array
from rollout_spec.metrics import Counters
from rollout_spec.predict.replay_drafters import IndexDrafter, ReplayDrafter
from rollout_spec.trace import Rollout


@dataclasses.dataclass
class Counts(Counters):
    """Counts of one response, or of several. A step is one forward of the target for one response."""

    num_tokens: int = 0  # the first token of each response included, which the prefill gives
    num_decoded_tokens: int = 0  # tokens that steps gave
    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def tokens_per_step(self) -> float:
        return self.num_decoded_tokens / max(1, self.num_steps)

    @property
    def draft_tokens_per_step(self) -> float:
        return self.num_draft_tokens / max(1, self.num_steps)

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted_tokens / max(1, self.num_draft_tokens)


class Replayed(NamedTuple):
    step: int | None  # the training step
    counts: Counts


@dataclasses.dataclass
class ReplayResult(Counters):
    total: Counts = dataclasses.field(default_factory=Counts)
    num_groups: int = 0
    num_drafts: int = 0
    num_tail_steps: int = 0  # of the total, those with at most max(1, n // 4) of the n siblings running
    num_tail_tokens: int = 0  # tokens that these gave
    responses: list[Replayed] = dataclasses.field(default_factory=list)

    def to_dict(self) -> dict[str, float]:
        names = ("num_tokens", "num_steps", "tokens_per_step", "draft_tokens_per_step", "acceptance_rate")
        return {
            "num_groups": self.num_groups,
            "num_responses": len(self.responses),
            **{name: getattr(self.total, name) for name in names},
            "mean_acceptance_length": 1.0 + self.total.num_accepted_tokens / max(1, self.num_drafts),
            "tail_tokens_per_step": self.num_tail_tokens / max(1, self.num_tail_steps),
        }


def replay(trace: Iterable[Rollout], config: SpecConfig) -> ReplayResult:
    """Replay a recording, line by line. Every step drafts, whatever `batch_threshold` says.

    Each line is indexed afresh; with config.history, the last responses of earlier lines with the same
    `group` come first. If a line has a model's drafts, they are mixed in.
    """
    result = ReplayResult()
    history = History(config.history, config.max_index_bytes)
    drafter = IndexDrafter(config, mixes=True)
    for line in trace:
        key = group_key(line.group)
        result.add(replay_line(drafter, line, history.get(key), config.num_speculative_tokens))
        for response in line.responses if config.history else ():
            history.add(key, response)
    return result


def replay_line(
    drafter: ReplayDrafter, line: Rollout, earlier: Sequence[Int32Array], num_speculative_tokens: int
) -> ReplayResult:
    """Decode the responses of one line in lockstep; `earlier` are responses to the same prompt."""
    result = ReplayResult(num_groups=1)
    decoding = _Decoding(line, num_speculative_tokens)
    token_ids, levels, ends = decoding.token_ids, decoding.levels, decoding.ends
    n = len(levels)
    counts = np.zeros((n, 4), np.int64)  # all fields of `Counts` but the first
    drafter.start(line, earlier)
    rows = np.arange(n, dtype=np.int32)
    is_running = levels < ends
    while is_running.any():
        running = is_running[rows]
        budgets = np.where(running, num_speculative_tokens, 0).astype(np.int32)
        drafts, numbers = drafter.draft(rows, token_ids, levels[rows], budgets)
        result.num_drafts += int(np.count_nonzero(numbers))
        left = ends[rows] - levels[rows]
        accepted = np.minimum(_num_accepted(drafts, numbers, token_ids, rows, levels[rows]), left)
        gained = np.where(running, np.minimum(accepted + 1, left), 0)
        if running.sum() <= max(1, n // 4):
            result.num_tail_steps += int(running.sum())
            result.num_tail_tokens += int(gained.sum())
        counts[rows] += np.stack([gained, running, numbers, accepted], axis=1)
        decoding.advance(rows, gained)
        # A row that ends in this step takes part in the next once more: its siblings see its last tokens.
        rows = np.flatnonzero(is_running).astype(np.int32)
        is_running = levels < ends
    drafter.finish()
    for row in np.column_stack([line.num_generated, counts]).tolist():
        response = Counts(*row)
        result.responses.append(Replayed(line.step, response))
        result.total.add(response)
    return result


class _Decoding:
    """How far the responses of a line are: their levels, and where their turns end."""

    def __init__(self, line: Rollout, num_speculative_tokens: int) -> None:
        self.token_ids, self._lasts = token_matrix(line, num_speculative_tokens)
        self._prompt_len, num_rows = len(line.prompt_token_ids), len(self._lasts)
        self._turns = [iter(line.turns_of(row)) for row in range(num_rows)]
        self.levels, self.ends = np.zeros((2, num_rows), np.int32)
        for row in range(num_rows):
            self._begin_turn(row)

    def advance(self, rows: Int32Array, gained: np.ndarray) -> None:
        self.levels[rows] += gained.astype(np.int32)
        for row in rows[(self.levels[rows] >= self.ends[rows]) & (self.ends[rows] < self._lasts[rows])]:
            self._begin_turn(row)

    def _begin_turn(self, row: int) -> None:
        """Go on with the row's next turn that takes steps: the prefill gives the first token of each."""
        found = next((turn for turn in self._turns[row] if turn[1] - turn[0] > 1), None)
        self.levels[row] = self._lasts[row] if found is None else self._prompt_len + found[0] + 1
        self.ends[row] = self._lasts[row] if found is None else self._prompt_len + found[1]


def token_matrix(line: Rollout, num_speculative_tokens: int) -> tuple[Int32Array, Int32Array]:
    """The rows of a line, [n, L], and how many tokens each has in the end, [n]."""
    prompt_len = len(line.prompt_token_ids)
    lengths = np.array([len(response) for response in line.responses], np.int32)
    # A draft is compared with what stands after the end of a response too: that is no token.
    width = prompt_len + int(lengths.max()) + num_speculative_tokens
    token_ids = np.full((len(lengths), width), -1, np.int32)
    token_ids[:, :prompt_len] = line.prompt_token_ids
    for row, response in zip(token_ids, line.responses, strict=True):
        row[prompt_len : prompt_len + len(response)] = response
    return token_ids, prompt_len + lengths


def _num_accepted(
    drafts: Int32Array, numbers: Int32Array, token_ids: Int32Array, rows: Int32Array, levels: Int32Array
) -> np.ndarray:
    """How many tokens of each row's draft come before the first that is not the recorded one, [n]."""
    offsets = np.arange(drafts.shape[1])
    # Rows that have ended draft nothing; clipping keeps their columns inside the matrix.
    columns = np.minimum(levels[:, None] + offsets, token_ids.shape[1] - 1)
    agrees = (drafts == token_ids[rows[:, None], columns]) & (offsets < numbers[:, None])
    return np.logical_and.accumulate(agrees, axis=1).sum(axis=1)
