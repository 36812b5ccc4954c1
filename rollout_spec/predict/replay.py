"""Replay recorded rollouts through the suffix index, with a simulated verifier and no model.

A draft token is accepted exactly when it equals the recorded token. The responses of one line of the trace
decode in lockstep, as siblings do in a rollout; of other lines the drafter has its history and what it has
learned of wording.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from rollout_spec.config import SpecConfig
from rollout_spec.drafting.history import History, group_key
from rollout_spec.drafting.index import ModelDrafts, StepResult, make_index
from rollout_spec.drafting.native import BudgetExceeded, Int32Array
from rollout_spec.trace import Rollout


class Replayed(NamedTuple):
    """What a replay counted for one response."""

    step: int | None
    """The training step."""
    num_tokens: int
    num_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int


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
    num_tail_steps: int = 0
    """Of num_steps, those with at most max(1, n // 4) of the n siblings running."""
    num_tail_tokens: int = 0
    num_proposed_rows: int = 0
    propose_seconds: float = 0.0
    responses: list[Replayed] = dataclasses.field(default_factory=list)

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
        return 1e6 * self.propose_seconds / self.num_proposed_rows if self.num_proposed_rows else 0.0

    @property
    def tail_tokens_per_step(self) -> float:
        return self.num_tail_tokens / self.num_tail_steps if self.num_tail_steps else 0.0

    def to_dict(self) -> dict[str, float]:
        names = (
            *("num_groups", "num_responses", "num_tokens", "num_steps", "tokens_per_step"),
            *("draft_tokens_per_step", "acceptance_rate", "mean_acceptance_length", "native_us_per_row"),
        )
        return {name: getattr(self, name) for name in names}


class Proposer(Protocol):
    """A drafter in a replay. The rollout of a line is start, one draft per decode step, finish."""

    def start(self, line: Rollout, earlier: Sequence[Int32Array]) -> None:
        """Begin a line's responses; `earlier` are responses to the same prompt."""
        return

    def draft(
        self, rows: Int32Array, token_ids: Int32Array, levels: Int32Array, max_draft_tokens: Int32Array
    ) -> tuple[Int32Array, Int32Array]:
        """Index what is new in n rows and draft for them.

        Args:
            rows: [n], rows of token_ids.
            token_ids: [num_rows, L], the prompt and the whole response of every row.
            levels: [n], the number of tokens that each row has so far.
            max_draft_tokens: [n], 0: index only.

        Returns:
            Draft tokens [n, >= longest draft], and their numbers [n].
        """

    def finish(self) -> None:
        return


class LineProposals:
    """What a line's model drafts, by rows and levels.

    Args:
        most_tokens: of a draft that are used.
    """

    def __init__(self, line: Rollout, most_tokens: int) -> None:
        self._prompt_len = len(line.prompt_token_ids)
        longest = max(map(len, line.responses))
        num_tokens = min(most_tokens, max(each.tokens.shape[1] for each in line.proposals))
        shape = (len(line.responses), longest + 1, num_tokens)
        self._tokens, self._log_odds = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
        for row, (tokens, log_odds) in enumerate(line.proposals[: shape[0]]):
            there = slice(len(tokens)), slice(tokens.shape[1])
            self._tokens[row][there] = tokens[:, :num_tokens]
            self._log_odds[row][there] = log_odds[:, :num_tokens]

    def at(self, rows: Int32Array, levels: Int32Array) -> ModelDrafts:
        """Of all rows of the line, nothing in those that are not named; levels: [n], of the rows."""
        num, _, num_tokens = self._tokens.shape
        tokens, log_odds = np.full((num, num_tokens), -1, np.int32), np.zeros((num, num_tokens), np.float32)
        tokens[rows] = self._tokens[rows, levels - self._prompt_len]
        log_odds[rows] = self._log_odds[rows, levels - self._prompt_len]
        return ModelDrafts(tokens, log_odds)


class IndexProposer:
    """The suffix index, one group a line, at the price `config.min_survival`.

    Args:
        mixes: take what a model drafts, where the line has it, as one more proposal.
    """

    def __init__(self, config: SpecConfig, *, mixes: bool = False) -> None:
        self.index, self.price, self._mixes = make_index(config), config.min_survival, mixes
        self.num_speculative_tokens = config.num_speculative_tokens
        self._group = -1
        self._sequences = np.empty(0, np.int32)
        self._model: LineProposals | None = None

    def start(self, line: Rollout, earlier: Sequence[Int32Array]) -> None:
        self._group = self.index.open_group(line.prompt_token_ids)
        for response in reversed(earlier):  # of continuations that are equally frequent the latest is drafted
            self.index.add_text(self._group, response)
        none, before = np.empty(0, np.int32), self.index.stats()
        self.index.index_and_draft(
            none, none[None], none, none, none, max_waiting_tokens=before.num_waiting_tokens
        )
        self._check_room(self.index.stats().num_tokens == before.num_tokens + before.num_waiting_tokens)
        sequences = [self.index.open_sequence(self._group) for _ in line.responses]
        self._sequences = np.array(sequences, np.int32)
        has_model = self._mixes and line.proposals
        self._model = LineProposals(line, self.num_speculative_tokens) if has_model else None

    def draft(
        self, rows: Int32Array, token_ids: Int32Array, levels: Int32Array, max_draft_tokens: Int32Array
    ) -> tuple[Int32Array, Int32Array]:
        result = self.propose(rows, token_ids, levels, max_draft_tokens)
        return result.draft_tokens, result.num_draft_tokens

    def propose(
        self, rows: Int32Array, token_ids: Int32Array, levels: Int32Array, max_draft_tokens: Int32Array
    ) -> StepResult:
        """`draft`, with the survivals."""
        model = self._model.at(rows, levels) if self._model is not None else None
        sequences = self._sequences[rows]
        result = self.index.index_and_draft(
            sequences, token_ids, rows, levels, max_draft_tokens, self.price, model_drafts=model
        )
        self._check_room(result.num_left_out == 0)
        return result

    def _check_room(self, has_room: bool) -> None:
        if not has_room:
            raise BudgetExceeded(f"max_bytes={self.index.max_bytes}: reached")

    def finish(self) -> None:
        for sequence in self._sequences:
            self.index.close_sequence(int(sequence))
        self.index.close_group(self._group)

    def close(self) -> None:
        self.index.close()


def replay(
    trace: Iterable[Rollout],
    config: SpecConfig,
) -> ReplayResult:
    """Replay a trace.

    Args:
        trace: the lines, in order; each is indexed afresh. With config.history the last so many responses of
            earlier lines with the same `group` are indexed first. What was learned of wording stays from line
            to line. A line's model drafts too.
        config: batch_threshold does not apply, every step drafts.
    """
    result = ReplayResult()
    history = History(config.history, config.max_index_bytes)
    with contextlib.closing(IndexProposer(config, mixes=True)) as proposer:
        for line in trace:
            key = group_key(line.group)
            replay_line(proposer, line, history.get(key), config.num_speculative_tokens, result)
            for response in line.responses if config.history else ():
                history.add(key, response)
    return result


def replay_line(
    proposer: Proposer,
    line: Rollout,
    earlier: Sequence[Int32Array],
    num_speculative_tokens: int,
    result: ReplayResult,
) -> None:
    """Decode the responses of one line in lockstep; adds to the result."""
    n, prompt_len = len(line.responses), len(line.prompt_token_ids)
    token_ids, ends = token_matrix(line, num_speculative_tokens)
    levels = np.minimum(prompt_len + 1, ends)
    result.num_groups += 1
    result.num_responses += n
    result.num_tokens += int((ends - prompt_len).sum())
    proposer.start(line, earlier)
    rows = np.arange(n, dtype=np.int32)
    counts = np.zeros((n, 3), np.int64)
    is_running = levels < ends
    while is_running.any():
        running = is_running[rows]
        budgets = np.where(running, num_speculative_tokens, 0).astype(np.int32)
        begin = time.perf_counter()
        drafts, numbers = proposer.draft(rows, token_ids, levels[rows], budgets)
        result.propose_seconds += time.perf_counter() - begin
        result.num_proposed_rows += len(rows)
        accepted = _num_accepted(drafts, numbers, token_ids, rows, levels[rows])
        gained = np.where(running, np.minimum(accepted + 1, ends[rows] - levels[rows]), 0)
        _count(result, n, int(running.sum()), numbers, accepted, int(gained.sum()))
        counts[rows] += np.stack([running, numbers, accepted], axis=1)
        levels[rows] += gained.astype(np.int32)
        # A row that ends in this step takes part in the next once more: its siblings see its last tokens.
        rows = np.flatnonzero(is_running).astype(np.int32)
        is_running = levels < ends
    result.responses += [
        Replayed(line.step, *row) for row in np.column_stack([ends - prompt_len, counts]).tolist()
    ]
    proposer.finish()


def token_matrix(line: Rollout, num_speculative_tokens: int) -> tuple[Int32Array, Int32Array]:
    """The rows of a line, [n, L], and how many tokens each has, [n]."""
    prompt_len = len(line.prompt_token_ids)
    lengths = np.array([len(response) for response in line.responses], np.int32)
    # What a draft is compared with behind the end of a response is no token at all.
    width = prompt_len + int(lengths.max()) + num_speculative_tokens
    token_ids = np.full((len(lengths), width), -1, np.int32)
    token_ids[:, :prompt_len] = line.prompt_token_ids
    for row, response in zip(token_ids, line.responses, strict=True):
        row[prompt_len : prompt_len + len(response)] = response
    return token_ids, prompt_len + lengths


def _num_accepted(
    drafts: Int32Array, numbers: Int32Array, token_ids: Int32Array, rows: Int32Array, levels: Int32Array
) -> np.ndarray:
    """Of each row's draft, the tokens up to the first that is not the recorded one, [n]."""
    offsets = np.arange(drafts.shape[1])
    # Rows that have ended draft nothing; clipping keeps their columns inside the matrix.
    columns = np.minimum(levels[:, None] + offsets, token_ids.shape[1] - 1)
    agrees = (drafts == token_ids[rows[:, None], columns]) & (offsets < numbers[:, None])
    return np.logical_and.accumulate(agrees, axis=1).sum(axis=1)


def _count(
    result: ReplayResult,
    num_siblings: int,
    num_running: int,
    numbers: np.ndarray,
    accepted: np.ndarray,
    num_gained: int,
) -> None:
    result.num_steps += num_running
    result.num_decoded_tokens += num_gained
    result.num_drafts += int(np.count_nonzero(numbers))
    result.num_draft_tokens += int(numbers.sum())
    result.num_accepted_tokens += int(accepted.sum())
    if num_running <= max(1, num_siblings // 4):
        result.num_tail_steps += num_running
        result.num_tail_tokens += num_gained
