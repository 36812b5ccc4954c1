"""Step times of the roofline beside published ones.

    python -m rollout_spec_lab.studies.roofline [--sweeps DIR] [--products DIR]

Prints, for every pair of a model and a device, milliseconds of decoding steps: published, and predicted.
published_step_times.json has the published ones, and the shape of each model that no recipe has. Of a step it
has the rows, the mean length of a row while it decodes, and the milliseconds; a fourth number is that of the
prompt's tokens, whose prefill is a 2,048th part of the milliseconds. Of a step with drafts it has the rows,
the draft tokens of each, the context of each, and the milliseconds.

DIR are checkouts of others, of whose measurements it prints the errors by numbers of tokens: --sweeps
github.com/furiosa-ai/EfficientRollout, steps with and without drafts on an A100; --products
github.com/microsoft/vidur, matrix products of a layer on H100 and A100.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rollout_spec.predict.model import Model
from rollout_spec.predict.roofline import DEVICES, Roofline

_PUBLISHED = json.loads(Path(__file__).with_name("published_step_times.json").read_text())
MODELS = {path.stem: Model.read(path) for path in Path(__file__).parents[3].glob("recipes/models/*.json")} | {
    name: Model(**shape) for name, shape in _PUBLISHED["models"].items()
}


class Step(NamedTuple):
    rows: int
    context: float
    milliseconds: float
    num_prompt: int = 0
    num_drafted: int = 0  # in each row

    @property
    def num_tokens(self) -> int:
        return self.rows * (1 + self.num_drafted)


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
VERIFIED = [
    Pair(
        **pair | {"tp": 1, "expert_parallel": False},
        steps=[Step(rows, context, ms, 0, drafted) for rows, drafted, context, ms in steps],
    )
    for pair in _PUBLISHED["verified"]
    for steps in [pair.pop("steps")]
]


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
        seconds = roofline.seconds(step.num_tokens, False, int(step.rows * step.context))
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


SWEEPS = {"qwen257b": "qwen2_5_7b", "qwen2514b": "qwen2_5_14b", "llama318binstruct": "llama_3_1_8b"}
PRODUCTS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")


class Cell(NamedTuple):
    """A published time of so many tokens, in milliseconds, and ours."""

    num_tokens: int
    milliseconds: float
    predicted: float


def sweep(root: Path, name: str) -> list[Cell]:
    """All median step times of a model on an A100; `gamma` draft tokens in each of `batch` rows."""
    roofline = Roofline(MODELS[SWEEPS[name]], DEVICES["a100"])
    found = []
    for row in csv.DictReader((root / f"sd_toggle/configs/sweep_a100_tp1_{name}.csv").open()):
        rows, context, drafted = int(row["batch"]), int(row["seq"]), int(row["gamma"])
        if rows and row["mode"] in ("target_decode", "target_verify"):
            num_tokens = rows * (1 + drafted)
            seconds = roofline.seconds(num_tokens, drafted > 0, rows * context)
            found.append(Cell(num_tokens, float(row["median_ms"]), 1e3 * seconds))
    return found


def layer_products(file: Path, device: str) -> list[Cell]:
    """A layer's four products, with half of a layer's floor; from 1 to 2,048 tokens."""
    found = []
    for row in csv.DictReader(file.open()):
        hidden, wide, heads, kv_heads, tp, num_tokens = (
            int(row[name])
            for name in (
                *("n_embd", "n_expanded_embd", "n_head", "n_kv_head"),
                *("num_tensor_parallel_workers", "num_tokens"),
            )
        )
        if num_tokens in TOKENS and kv_heads % tp == 0:
            attention = hidden * hidden * 2 * (heads + kv_heads) // heads
            params = (attention + (3 if row["use_gated_mlp"] == "True" else 2) * hidden * wide) / tp
            one = Model(hidden, 1, heads, kv_heads, hidden // heads, wide, 1)
            seconds = Roofline(one, DEVICES[device])._product_seconds(params, num_tokens * params)
            seconds += DEVICES[device].launch_s / 2
            measured = sum(float(row[f"time_stats.{product}.median"]) for product in PRODUCTS)
            found.append(Cell(num_tokens, measured, 1e3 * seconds))
    return found


TOKENS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
RANGES = (1, 9, 65, 129, 257, 513, 2049)


def print_errors(title: str, found: Sequence[Cell]) -> None:
    """By number of tokens, mean and mean absolute errors, and of all."""
    cells = []
    for low, high in (*itertools.pairwise(RANGES), (1, 1 << 30)):
        of_range = [
            cell.predicted / cell.milliseconds - 1.0 for cell in found if low <= cell.num_tokens < high
        ]
        cells.append(f"{np.mean(of_range):+.0%} ({np.mean(np.abs(of_range)):.0%})")
    print(f"| {title} | {len(found)} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweeps", type=Path, help="a checkout of furiosa-ai/EfficientRollout")
    parser.add_argument("--products", type=Path, help="a checkout of microsoft/vidur")
    args = parser.parse_args()
    print_pairs("Calibration", CALIBRATION)
    print_pairs("Check", CHECK)
    print("\n## By number of tokens\n")
    ranges = [f"{low} to {high - 1}" for low, high in itertools.pairwise(RANGES)]
    print(f"| what | times | {' | '.join(ranges)} | all |")
    print("|---" * (3 + len(ranges)) + "|")
    for name in SWEEPS if args.sweeps else ():
        print_errors(f"steps of {SWEEPS[name]}, a100", sweep(args.sweeps, name))
    for file in (
        sorted(args.products.glob("data/profiling/compute/*100/*/*/mlp.csv")) if args.products else ()
    ):
        device = file.parts[-4]
        print_errors(f"products of {file.parent.name}, {device}", layer_products(file, device))


if __name__ == "__main__":
    main()
