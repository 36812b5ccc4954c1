"""Step times of the roofline beside published ones.

    python -m rollout_spec_lab.studies.roofline

Prints, for every pair of a model and a device, milliseconds of decoding steps: published, and predicted.
published_step_times.json has the published ones, and the shape of each model that no recipe has. Of a step it
has the rows, the mean length of a row while it decodes, and the milliseconds; a fourth number is that of the
prompt's tokens, whose prefill is a 2,048th part of the milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rollout_spec.predict.roofline import DEVICES, Model, Roofline

_PUBLISHED = json.loads(Path(__file__).with_name("published_step_times.json").read_text())
MODELS = {path.stem: Model.read(path) for path in Path(__file__).parents[3].glob("recipes/models/*.json")} | {
    name: Model(**shape) for name, shape in _PUBLISHED["models"].items()
}


class Step(NamedTuple):
    rows: int
    context: float
    milliseconds: float
    num_prompt: int = 0


class Pair(NamedTuple):
    model: str
    gpu: str
    tp: int
    expert_parallel: bool
    source: str
    steps: list[Step]


CALIBRATION, CHECK = (
    [Pair(**pair | {"steps": [Step(*step) for step in pair["steps"]]}) for pair in _PUBLISHED[kind]]
    for kind in ("calibration", "check")
)


def errors(pair: Pair) -> Iterator[tuple[Step, float, float]]:
    """Each step, its predicted milliseconds, and the error as a share of what was published."""
    roofline = Roofline(
        MODELS[pair.model],
        DEVICES[pair.gpu],
        pair.tp,
        expert_parallel=pair.expert_parallel,
        memory_share=0.99,
    )
    for step in pair.steps:
        seconds = roofline.seconds(step.rows, False, int(step.rows * step.context))
        if step.num_prompt:
            seconds += roofline.seconds(step.num_prompt, False) / 2048
        yield step, 1e3 * seconds, 1e3 * seconds / step.milliseconds - 1.0


def print_pairs(title: str, pairs: list[Pair]) -> None:
    print(f"\n## {title}\n")
    print("| model | devices | rows x context: published > predicted, ms | mean error | source |")
    print("|---|---|---|---|---|")
    found: list[float] = []
    for pair in pairs:
        layout = f"{pair.tp} {pair.gpu}" + (", expert parallel" if pair.expert_parallel else "")
        results = list(errors(pair))
        steps = ", ".join(
            f"{step.rows} x {step.context:.0f}: {step.milliseconds:.1f} > {predicted:.1f}"
            for step, predicted, _ in results
        )
        found += (of_pair := [error for _, _, error in results])
        print(f"| {pair.model} | {layout} | {steps} | {np.mean(np.abs(of_pair)):.0%} | {pair.source} |")
    absolute = np.abs(found)
    print(
        f"\n{len(found)} step times: mean error {absolute.mean():.1%}, median {np.median(absolute):.1%}, "
        f"from {min(found):+.0%} to {max(found):+.0%}"
    )


if __name__ == "__main__":
    print_pairs("Calibration", CALIBRATION)
    print_pairs("Check", CHECK)
