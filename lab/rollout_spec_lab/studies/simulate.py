"""Is what `rollout-spec simulate` predicts what `bench engine` measured?

    rollout-spec-lab bench engine --methods off:coupled,sam:auto --output DIR
    python lab/rollout_spec_lab/studies/simulate.py DIR

Each repeat's rollout, as recorded of the first method, is simulated with the step times of all other repeats.
Prints seconds predicted over seconds measured.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rollout_spec.config import SpecConfig
from rollout_spec.predict.simulate import Cluster, simulate
from rollout_spec.predict.step_times import StepTimes
from rollout_spec.trace import read_trace, trace_file
from rollout_spec_lab.bench.timeline import Timeline, step_times

WANTED = 0.15  # of what was measured


def config_of(method: str, record: dict[str, Any]) -> SpecConfig:
    """Of `off`, `sam` or `sam:THRESHOLD`, with the options that were measured."""
    return SpecConfig.from_mapping(record["engines"][method]["options"] or {"method": "off"})


def times_without(repeat: int, timelines: dict[str, list[dict[str, Any]]]) -> StepTimes:
    others = [Timeline(**line) for lines in timelines.values() for i, line in enumerate(lines) if i != repeat]
    curves: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
    for row in step_times(others):
        curves[row["drafted"]].append((row["num_tokens"], row["seconds"], row["num_steps"]))
    return StepTimes(curves[False], curves[True])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of `bench engine --output`")
    folder = parser.parse_args().folder
    record = json.loads((folder / "engine.json").read_text())
    measured = {
        result["method"]: [run["makespan_s"] for run in result["repeats"]]
        for result in record["results"]
        if result["method"].split(":")[0] in ("off", "sam")
    }
    configs = {method: config_of(method, record) for method in measured}
    timelines = json.loads((folder / "timelines.json").read_text())
    timelines = {method: timelines[method] for method in measured}
    ratios: dict[str, list[float]] = {method: [] for method in measured}
    cluster = Cluster(1, record["load"]["max_num_seqs"], None)
    for repeat in tqdm(range(record["load"]["repeats"])):
        lines = list(read_trace(trace_file(folder, repeat)))
        times = times_without(repeat, timelines)
        for method, seconds in measured.items():
            predicted = simulate(lines, cluster, configs[method], times, record["load"]["tail_threshold"])
            ratios[method].append(predicted["makespan_s"] / seconds[repeat])
    for method, values in ratios.items():
        num_near = sum(abs(ratio - 1) <= WANTED for ratio in values)
        print(f"{method}: {num_near} of {len(values)} within {WANTED:.0%}:", *(f"{r:.2f}" for r in values))


if __name__ == "__main__":
    main()
