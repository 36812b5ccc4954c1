"""When does drafting pay? Predicted gains by policy, device, text and number of requests at a time.

    python -m rollout_spec_lab.studies.when_it_pays RECORDINGS --output docs/images/when_it_pays.png

RECORDINGS holds the files that TEXTS names. Prints the table of docs/when-it-pays.md and draws its picture.
Each figure is `simulate`'s: one engine, step times of the roofline with the host's, the drafter's
defaults. The load of a figure is `load.one_rollout`.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from tqdm import tqdm

from rollout_spec.config import SpecConfig
from rollout_spec.predict.load import one_rollout
from rollout_spec.predict.model import Model
from rollout_spec.predict.roofline import DEVICES, HOSTS, Roofline
from rollout_spec.predict.simulate import Cluster, simulate
from rollout_spec.trace import read_trace

_RECIPES = Path(__file__).parents[3] / "recipes" / "models"
QWEN2_5_1_5B = Model(1536, 28, 12, 2, 128, 8960, 151936, ties_embeddings=True)
TEXTS = {
    "short code": "code_short.jsonl.gz",
    "maths": "rl_steps_amc23.jsonl.gz",
    "tools": "tool_use_airline.jsonl.gz",
    "long thoughts": "long_cot.jsonl.gz",
}
ROWS = (1, 8, 64, 256)
MOST_ROWS = {"h100": (256, 256, 64, 8), "910b": (64, 64, 64, 8)}
"""Of each text. Cells with more are left out: they take minutes each."""


class Policy(NamedTuple):
    name: str
    model: Model
    devices: dict[str, int]
    """How many of each kind hold an engine, tensor-parallel."""


POLICIES = (
    Policy("1.5B", QWEN2_5_1_5B, {"h100": 1, "910b": 1}),
    Policy("8B", Model.read(_RECIPES / "qwen3_8b.json"), {"h100": 1, "910b": 1}),
    Policy("32B", Model.read(_RECIPES / "qwen3_32b.json"), {"h100": 4, "910b": 4}),
    Policy("235B-A22B", Model.read(_RECIPES / "qwen3_235b.json"), {"h100": 8, "910b": 16}),
)


class Gain(NamedTuple):
    policy: str
    device: str
    text: str
    rows: int
    times_off: dict[str, float]
    """Of the rollout's speed without drafts, by model runner."""


def gains(recordings: Path) -> Iterator[Gain]:
    texts = {text: list(read_trace(recordings / name)) for text, name in TEXTS.items()}
    off, on = SpecConfig(method="off"), SpecConfig()
    cells = [
        (policy, device, text, rows)
        for policy, device in itertools.product(POLICIES, MOST_ROWS)
        for text, most in zip(TEXTS, MOST_ROWS[device], strict=True)
        for rows in ROWS
        if rows <= most
    ]
    for policy, device, text, rows in tqdm(cells):
        lines = one_rollout(texts[text], rows)
        times = {
            runner: Roofline(
                policy.model, DEVICES[device], policy.devices[device],
                expert_parallel=bool(policy.model.num_experts), host=host,
            )
            for runner, host in HOSTS.items()
        }  # fmt: skip
        v2 = times["v2"]
        cluster = Cluster(1, rows, kv_tokens=v2.kv_tokens)

        def seconds(config: SpecConfig, times: Roofline, lines: Any = lines, cluster: Any = cluster) -> float:
            return simulate(lines, cluster, config, times)["makespan_s"]

        plain = seconds(off, v2)
        speeds = {runner: plain / seconds(on, each) for runner, each in times.items()}
        yield Gain(policy.name, device, text, rows, speeds)


def table(found: Sequence[Gain]) -> str:
    """Markdown: on MRV2, and in brackets on MRV1."""
    lines = [f"| policy | device | text | {' | '.join(map(str, ROWS))} |", "|---" * (3 + len(ROWS)) + "|"]
    for (policy, device, text), cells in itertools.groupby(found, lambda gain: gain[:3]):
        number = next(each for each in POLICIES if each.name == policy).devices[device]
        figures = [f"{cell.times_off['v2']:.2f} ({cell.times_off['v1']:.2f})" for cell in cells]
        figures += ["–"] * (len(ROWS) - len(figures))
        lines.append(f"| {policy} | {number} x {device} | {text} | {' | '.join(figures)} |")
    return "\n".join(lines)


def draw(found: Sequence[Gain], path: Path) -> None:
    figure = Figure(figsize=(11, 5), layout="constrained")
    panels = figure.subplots(2, len(TEXTS), sharex=True, sharey=True)
    for axes, device in zip(panels, MOST_ROWS, strict=True):
        for panel, text in zip(axes, TEXTS, strict=True):
            for policy in POLICIES:
                cells = [gain for gain in found if gain[:3] == (policy.name, device, text)]
                speeds = [cell.times_off["v2"] for cell in cells]
                panel.plot(ROWS[: len(speeds)], speeds, marker="o", ms=3, label=policy.name)
            panel.axhline(1.0, color="grey", lw=0.8)
            panel.set_xscale("log")
            panel.set_xticks(ROWS, [f"{rows}" for rows in ROWS])
            panel.minorticks_off()
            panel.set_title(f"{text}, {device}", fontsize=9)
    panels[0][0].set_ylabel("times the speed without drafts")
    panels[1][0].set_ylabel("times the speed without drafts")
    figure.supxlabel("requests that an engine runs at a time")
    figure.legend(*panels[0][0].get_legend_handles_labels(), title="policy", loc="outside right center")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="the picture, a PNG")
    args = parser.parse_args()
    found = list(gains(args.recordings))
    print(table(found))
    draw(found, args.output)


if __name__ == "__main__":
    main()
