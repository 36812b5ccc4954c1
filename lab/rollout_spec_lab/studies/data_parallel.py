"""Data-parallel ranks of a mixture of experts, in virtual time: what should decide when every rank drafts?

    python lab/rollout_spec_lab/studies/data_parallel.py RECORDINGS --ranks 4 --rows 16 64 --limit-groups 48

A step takes as long as the slowest rank's. Speed is over the same ranks without drafts. The deciders:

- `alone`: every rank's automatic gate by itself, on the time that it measures;
- `auto`: as rollout_spec does it. Plain steps are the same ones on every rank, and costs are learned by the
  tokens of the rank that verified most, which vLLM tells every rank;
- `shared`: the same, and the ranks tell each other their rows and what their drafts promise, one step late:
  they choose one height, to which each fills its step;
- `threshold 8`: drafts while at most 8 requests of a rank decode.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from rollout_spec.config import SpecConfig
from rollout_spec.drafting.gate.costs import Step
from rollout_spec.drafting.gate.gate import AutoGate
from rollout_spec.predict.simulate import (
    Engine,
    Load,
    assign,
    requests_of,
    rollout,
    rollouts_of,
)
from rollout_spec.predict.step_times import StepTimes
from rollout_spec.metrics import EngineCounters
from rollout_spec.trace import Rollout, read_trace

_Floats = npt.NDArray[np.float64]

TABLES = {
    # As in record/gate.md.
    "gpu": "1:0.02,64:0.0205,128:0.024,256:0.034,512:0.06,1024:0.11",
    "cpu": "1:0.05,2:0.052,4:0.06,8:0.085,16:0.088,32:0.17,64:0.3,128:0.6,256:1.2",
    # Assumed: more tokens activate more experts, so that a step grows from the first token on.
    "experts": "1:0.012,4:0.015,8:0.018,16:0.022,32:0.026,64:0.03,128:0.034,256:0.045,512:0.075,1024:0.14",
}


class Alone(AutoGate):
    """Knows nothing of other ranks."""

    def begin(self, step: Step, counters: EngineCounters) -> float | None:
        return super().begin(step._replace(ranks=None), counters)


class Board:
    """What the ranks tell each other: their rows, and what their drafts promise, the likeliest first."""

    def __init__(self, num_ranks: int) -> None:
        self.rows = [0] * num_ranks
        self.promises: list[_Floats] = [np.zeros(0)] * num_ranks


class Shared(AutoGate):
    """One height for all ranks."""

    def __init__(self, board: Board, rank: int) -> None:
        super().__init__()
        self.board, self.rank = board, rank

    def _best_budget(self, survivals: _Floats) -> int:
        board, learned, last = self.board, self._costs, self._costs.step
        board.rows[self.rank], board.promises[self.rank] = last.num_rows, survivals
        rows = max(board.rows)
        heights = rows + np.arange(1 + max(map(len, board.promises)))
        promised = np.zeros(len(heights))
        for own, each in zip(board.rows, board.promises, strict=True):
            sums = np.concatenate([[0.0], np.cumsum(each)])
            promised += sums[np.clip(heights - own, 0, len(each))]
        plain = float(learned._plain.seconds(rows, last.num_context))
        costs = np.maximum(learned._drafted.seconds_from(rows, plain, heights, last.num_context), plain)
        best = int(np.argmax(promised - learned.gain * sum(board.rows) / plain * (costs - plain)))
        return min(len(survivals), int(heights[best]) - last.num_rows)


class Rank(Engine):
    def __init__(self, config: SpecConfig, times: StepTimes, num_rows: int, board: Board, rank: int) -> None:
        super().__init__(config, times, num_rows, num_rows)
        self.board, self.rank = board, rank

    def begin_step(self) -> Load:
        if not self.has_work:
            self.board.rows[self.rank], self.board.promises[self.rank] = 0, np.zeros(0)
        return super().begin_step()


AUTO = SpecConfig(history=0)
DECIDERS: dict[str, tuple[SpecConfig, Callable[[Board, int], AutoGate] | None]] = {
    "alone": (AUTO, lambda board, rank: Alone()),
    "auto": (AUTO, None),
    "shared": (AUTO, Shared),
    "threshold 8": (SpecConfig(history=0, batch_threshold=8), None),
}


def seconds_of(
    lines: Sequence[Rollout],
    args: argparse.Namespace,
    times: StepTimes,
    num_rows: int,
    config: SpecConfig,
    make_gate: Callable[[Board, int], AutoGate] | None,
) -> float:
    board = Board(args.ranks)
    ranks = [Rank(config, times, num_rows, board, rank) for rank in range(args.ranks)]
    for rank in ranks:
        if rank.drafter is not None and make_gate is not None:
            rank.drafter._gate = make_gate(board, rank.rank)
    return sum(
        rollout([ranks], [assign(requests_of(lines_of_step, None), args.ranks, args.by_group)])
        for lines_of_step in rollouts_of(lines)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recordings", type=Path, nargs="+")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64], help="most requests of a rank")
    parser.add_argument("--tables", nargs="+", default=list(TABLES))
    parser.add_argument("--limit-groups", type=int, default=48)
    parser.add_argument("--by-group", action="store_true", help="siblings on one rank")
    args = parser.parse_args()
    print("table", "rows", "recording", *DECIDERS, sep=" | ")
    for table, rows, path in tqdm(list(itertools.product(args.tables, args.rows, args.recordings))):
        lines = list(itertools.islice(read_trace(path), args.limit_groups))
        times = StepTimes.parse(TABLES[table])
        off = seconds_of(lines, args, times, rows, SpecConfig(method="off"), None)
        speeds = [off / seconds_of(lines, args, times, rows, *decider) for decider in DECIDERS.values()]
        name = path.name.split(".")[0]
        print(table, rows, name, *(f"{speed:.3f}" for speed in speeds), sep=" | ", flush=True)


if __name__ == "__main__":
    main()
