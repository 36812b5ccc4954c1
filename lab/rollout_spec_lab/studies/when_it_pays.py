"""The table and the picture of docs/when-it-pays.md: what drafts gain by policy, device, text and batch.

    python -m rollout_spec_lab.studies.when_it_pays FILE[:ROWS] ... --output docs/images/when_it_pays.png

Each FILE, a recording, is a text, and ROWS its largest batch, in requests. A figure is what `rollout-spec
simulate --batch-thresholds auto` says.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from rollout_spec.cli.console import counted
from rollout_spec.config import SpecConfig
from rollout_spec.files import write_files
from rollout_spec.predict.engine import Cluster
from rollout_spec.predict.simulate import simulate
from rollout_spec.report.page import png
from rollout_spec.trace import read_trace
from rollout_spec_lab.bench.load import first_rollout, one_rollout
from rollout_spec_lab.roofline.model import Model
from rollout_spec_lab.roofline.roofline import DEVICES, HOSTS, Roofline

ROWS = (1, 8, 64, 256)
DEVICES_SHOWN = ("h100", "910b")
_RECIPES = Path(__file__).parents[3] / "recipes" / "models"
POLICIES = {  # with the devices of an engine, tensor-parallel
    "1.5B": (Model(1536, 28, 12, 2, 128, 8960, 151936, ties_embeddings=True), {"h100": 1, "910b": 1}),
    "8B": (Model.read(_RECIPES / "qwen3_8b.json"), {"h100": 1, "910b": 1}),
    "32B": (Model.read(_RECIPES / "qwen3_32b.json"), {"h100": 4, "910b": 4}),
    "235B-A22B": (Model.read(_RECIPES / "qwen3_235b.json"), {"h100": 8, "910b": 16}),
}


class Cell(NamedTuple):
    policy: str
    device: str
    num_rows: int
    file: Path


def gains(cell: Cell) -> list[float]:
    """Of the rollout's speed without drafts: on MRV2 and on MRV1."""
    model, devices = POLICIES[cell.policy]
    lines = one_rollout(first_rollout(list(read_trace(cell.file)), None), cell.num_rows)
    has_experts = bool(model.num_experts)
    times = [
        Roofline(model, DEVICES[cell.device], devices[cell.device], expert_parallel=has_experts, host=host)
        for host in (HOSTS["mrv2"], HOSTS["mrv1"])
    ]
    cluster = Cluster(1, cell.num_rows, kv_tokens=times[0].kv_tokens)
    off = simulate(lines, cluster, SpecConfig(method="off"), times[0])["makespan_s"]
    return [off / simulate(lines, cluster, SpecConfig(), each)["makespan_s"] for each in times]


def draw(found: dict[Cell, list[float]], files: Sequence[Path]) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 + 2.3 * len(files), 5), layout="constrained")
    panels = figure.subplots(len(DEVICES_SHOWN), len(files), sharex=True, sharey=True, squeeze=False)
    for (i, device), (j, file) in itertools.product(enumerate(DEVICES_SHOWN), enumerate(files)):
        panel = panels[i][j]
        for policy in POLICIES:
            speeds = [found[cell][0] for n in ROWS if (cell := Cell(policy, device, n, file)) in found]
            panel.plot(ROWS[: len(speeds)], speeds, marker="o", ms=3, label=policy)
        panel.axhline(1.0, color="grey", lw=0.8)
        panel.set_xscale("log")
        panel.set_xticks(ROWS, [str(n) for n in ROWS])
        panel.minorticks_off()
        panel.set_title(f"{file.name.partition('.')[0]}, {device}", fontsize=9)
    figure.supylabel("times the speed without drafts")
    figure.supxlabel("requests that an engine runs at a time")
    figure.legend(*panels[0][0].get_legend_handles_labels(), title="policy", loc="outside right center")
    return png(figure, dpi=110)


def table(found: dict[Cell, list[float]], files: Sequence[Path]) -> Iterator[str]:
    """Markdown: the rows on MRV2, then those on MRV1."""
    yield f"| policy, devices | {' | '.join(map(str, ROWS))} |"
    yield "|---" * (1 + len(ROWS)) + "|"
    rows = dict.fromkeys((cell.policy, cell.device) for cell in found)
    for (place, runner), (policy, device) in itertools.product(enumerate(("", ", MRV1")), rows):
        cells = [[Cell(policy, device, n, file) for file in files] for n in ROWS]
        columns = [", ".join(f"{found[c][place]:.2f}" for c in each if c in found) or "-" for each in cells]
        yield f"| {policy}, {POLICIES[policy][1][device]} x {device}{runner} | {' | '.join(columns)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", metavar="FILE[:ROWS]")
    parser.add_argument("--output", type=Path, help="the picture, a PNG")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args(arguments)
    most = {Path(name): int(rows or ROWS[-1]) for name, _, rows in (one.partition(":") for one in args.files)}
    products = itertools.product(args.policies, DEVICES_SHOWN, ROWS, most)
    cells = [cell for cell in map(Cell._make, products) if cell.num_rows <= most[cell.file]]
    found: dict[Cell, list[float]] = {}
    with ProcessPoolExecutor(args.jobs) as pool, counted("cells", len(cells)) as advance:
        for cell, each in zip(cells, pool.map(gains, cells), strict=True):
            found[cell] = each
            advance(1)
    print(*table(found, list(most)), sep="\n")
    if args.output:
        write_files(args.output.parent, {args.output.name: draw(found, list(most))})


if __name__ == "__main__":
    main()
