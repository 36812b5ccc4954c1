"""Siblings on one engine (`routing=group`) against verl's placing, in virtual time.

    python lab/rollout_spec_lab/studies/routing.py MATHS CHAINS CODE [--max-imbalance 8]

Recordings as `replay` reads them: of two training steps, of long chains of thought, and in groups of 16.
Every load is one rollout. Prints tokens per step and speed over those with verl's placing.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

from tqdm import tqdm

from rollout_spec.config import SpecConfig
from rollout_spec.predict import simulate as simulation
from rollout_spec.predict.simulate import Cluster, copied, rollouts_of, simulate
from rollout_spec.predict.step_times import StepTimes
from rollout_spec.trace import Rollout, read_trace

NUMS_ENGINES = (2, 8)
NUM_ROWS = 64  # at most, of an engine
STEP_TIMES = "1:0.02,64:0.0205,128:0.024,256:0.034,512:0.06,1024:0.11"


def loads(maths: Path, chains: Path, code: Path) -> Iterator[tuple[str, list[Rollout]]]:
    both = list(read_trace(maths))
    long = merged(read_trace(chains))
    yield "maths", merged(rollouts_of(both)[0])
    yield "maths, two steps as one", merged(both)
    yield "chains", long
    yield "chains x 3", copied(long, 3)
    yield "code", merged(read_trace(code))


def merged(lines: Iterable[Rollout]) -> list[Rollout]:
    """One rollout, in which a group has all its responses."""
    groups: dict[str, Rollout] = {}
    for line in lines:
        responses = (
            [*groups[line.group].responses, *line.responses] if line.group in groups else line.responses
        )
        groups[line.group] = dataclasses.replace(line, responses=responses, step=None)
    return list(groups.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("maths", "chains", "code"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--max-imbalance", type=int, default=simulation.MAX_IMBALANCE)
    arguments = parser.parse_args()
    simulation.MAX_IMBALANCE = arguments.max_imbalance
    recordings = (arguments.maths, arguments.chains, arguments.code)
    times = StepTimes.parse(STEP_TIMES)
    print("| engines | load | groups x responses | tokens per step | speed |\n|---|---|---|---|---|")
    for num_engines, (name, lines) in tqdm([*product(NUMS_ENGINES, loads(*recordings))]):
        verl, group = (
            simulate(lines, Cluster(num_engines, NUM_ROWS, None, by_group), SpecConfig(), times, tail_rows=8)
            for by_group in (False, True)
        )
        size = f"{len(lines)} x {max(len(line.responses) for line in lines)}"
        ratios = (f"{group[figure] / verl[figure]:.3f}" for figure in ("tokens_per_step", "tokens_per_s"))
        print(f"| {num_engines} | {name} | {size} |", " | ".join(ratios), "|", flush=True)


if __name__ == "__main__":
    main()
