"""A comparison of two runs as a table, a picture, a page and JSON."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_spec.runs import Comparison, Run

if TYPE_CHECKING:
    from rich.table import Table

COLOURS = ("#8a94a3", "#1463d8")
PANELS = (
    ("rollout_seconds", "Rollout time", "s"),
    ("tokens_per_second", "Generated tokens per second", ""),
    ("tokens_per_step", "Tokens per step", ""),
    ("acceptance_rate", "Acceptance rate", "%"),
    ("reward", "Reward", ""),
    ("response_length", "Response length", "tokens"),
)
FILES = {"json": "demo-summary.json", "png": "report.png", "html": "report.html"}


def write_report(comparison: Comparison, folder: Path, facts: Mapping[str, str]) -> dict[str, Path]:
    """Write the summary, the picture and the page into `folder`; `facts` describe the runs in the page.

    Returns:
        The path of each file, by kind: json, png, html.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = {kind: folder / name for kind, name in FILES.items()}
    paths["json"].write_text(json.dumps(comparison.to_dict(), indent=2, allow_nan=False) + "\n")
    picture = draw(comparison)
    paths["png"].write_bytes(picture)
    paths["html"].write_text(render_html(comparison, facts, picture))
    return paths


def headline(comparison: Comparison) -> str:
    return f"{_number(comparison.speedup, 2)}×"


def interval(comparison: Comparison) -> str:
    low, high = comparison.speedup_ci95
    if math.isnan(low):
        return "one step gives no interval"
    return f"95% interval {low:.2f} to {high:.2f}"


def sentences(comparison: Comparison) -> list[str]:
    """What the numbers say, losses and doubts included."""
    off, on = comparison.off, comparison.on
    times = f"{headline(comparison)} the generated tokens per second of {off.name}"
    num_steps = len(on.steps)
    over = f"({interval(comparison)}; {num_steps} step{'s' if num_steps > 1 else ''})"
    said = {
        "faster": f"{on.name} was faster: {times} {over}.",
        "slower": f"{on.name} was slower here: {times} {over}.",
        "unclear": f"No clear difference between {on.name} and {off.name}: {times} {over}.",
    }
    text = [
        said[comparison.verdict],
        f"Rollouts took {off.rollout_seconds:,.1f} s for {off.generated_tokens:,.0f} tokens with {off.name} "
        f"and {on.rollout_seconds:,.1f} s for {on.generated_tokens:,.0f} tokens with {on.name}.",
    ]
    if on.num_drafts:
        text.append(
            f"{_percent(on.acceptance_rate)} of the draft tokens were accepted, and a decode step gave "
            f"{_number(on.tokens_per_step, 2)} tokens where plain decoding gives 1."
        )
    else:
        text.append(
            f"{on.name} drafted nothing, so this says nothing about drafting. "
            "Was the batch larger than rollout.spec.batch_threshold throughout?"
        )
    if not math.isnan(on.looping_share):
        text.append(
            f"Responses that repeat themselves: {_percent(off.looping_share)} with {off.name}, "
            f"{_percent(on.looping_share)} with {on.name}. Repetition is easy to draft, "
            "so a policy that loops flatters the speed-up."
        )
    if comparison.agreement is None:
        text.append(
            "Both runs sample from the same distribution but not the same tokens, "
            "so reward and response length differ by chance."
        )
    else:
        same, compared = comparison.agreement.num_identical, comparison.agreement.num_tokens
        text.append(
            f"In the first step {same:,} of {compared:,} tokens were the same in both runs, each response "
            "counted up to its first difference; training's own numerics part the runs from there."
        )
    if num_steps < 8:
        text.append(f"An interval from {num_steps} steps is rough; train longer for a firm figure.")
    return text


def summary_table(comparison: Comparison) -> Table:
    from rich.table import Table

    table = Table(title=f"{headline(comparison)} tokens per second ({interval(comparison)})")
    table.add_column("")
    for run in (comparison.off, comparison.on):
        table.add_column(run.name, justify="right")
    for label, off, on in zip(_LABELS, _totals(comparison.off), _totals(comparison.on), strict=True):
        table.add_row(label, off, on)
    return table


_LABELS = (
    "rollout seconds per step",
    "generated tokens",
    "generated tokens per second",
    "tokens per step",
    "acceptance rate",
    "drafts",
    "reward",
    "response length",
    "looping responses",
)


def _totals(run: Run) -> list[str]:
    return [
        _number(_mean(run.column("rollout_seconds")), 1),
        _number(run.generated_tokens, 0),
        _number(run.tokens_per_second, 1),
        _number(run.tokens_per_step, 2),
        _percent(run.acceptance_rate),
        _number(run.num_drafts, 0),
        _number(_mean(run.column("reward")), 3),
        _number(_mean(run.column("response_length")), 1),
        _percent(run.looping_share),
    ]


def draw(comparison: Comparison, kind: str = "png") -> bytes:
    """One small chart per measure, step by step, both runs."""
    from matplotlib.figure import Figure  # without pyplot, so no display and no global state

    figure = Figure(figsize=(11, 6.2), layout="constrained")
    for axes, (name, title, unit) in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
        _panel(axes, comparison, name, title, unit)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=2, frameon=False, fontsize=11)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=160)
    return buffer.getvalue()


def _panel(axes: Any, comparison: Comparison, name: str, title: str, unit: str) -> None:
    scale = 100.0 if unit == "%" else 1.0
    for run, colour, shift in zip((comparison.off, comparison.on), COLOURS, (-0.2, 0.2), strict=True):
        steps = run.column("step")
        values = [scale * value for value in run.column(name)]
        if name in ("rollout_seconds", "tokens_per_second"):
            axes.bar([step + shift for step in steps], values, width=0.38, color=colour, label=run.name)
        elif any(math.isfinite(value) for value in values):
            axes.plot(steps, values, color=colour, marker="o", markersize=4, linewidth=1.8, label=run.name)
    axes.set_title(title + (f" ({unit})" if unit else ""), loc="left", fontsize=11)
    axes.set_xlabel("training step", fontsize=9, color="#555b66")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.tick_params(labelsize=9, colors="#555b66", length=0)
    axes.grid(axis="y", color="#e4e7ec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#c3c8d0")
    # A reward may be negative; anything else starts at 0 and leaves room above its highest point.
    if name != "reward" and axes.dataLim.y1 > 0:
        axes.set_ylim(0, 1.12 * axes.dataLim.y1)


def render_html(comparison: Comparison, facts: Mapping[str, str], picture: bytes) -> str:
    """The page; everything it shows is inside it."""
    from jinja2 import Environment

    template = resources.files("rollout_spec").joinpath("report.html.j2").read_text()
    off, on = comparison.off, comparison.on
    text = sentences(comparison)
    return (
        Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        .from_string(template)
        .render(
            headline=headline(comparison),
            interval=interval(comparison),
            verdict=comparison.verdict,
            lead=text[0],
            sentences=text[1:],
            names=(off.name, on.name),
            totals=list(zip(_LABELS, _totals(off), _totals(on), strict=True)),
            rows=[_step_cells(*pair) for pair in zip(off.steps, on.steps, strict=True)],
            picture=base64.b64encode(picture).decode(),
            facts=facts,
        )
    )


def _step_cells(off: Any, on: Any) -> list[str]:
    cells = [str(on.step)]
    for step in (off, on):
        cells += [_number(step.rollout_seconds, 1), _number(step.generated_tokens, 0)]
        cells += [_number(step.tokens_per_second, 1), _number(step.tokens_per_step, 2)]
        cells += [_percent(step.acceptance_rate), _number(step.reward, 3), _number(step.response_length, 1)]
    return cells


def _mean(values: list[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


def _number(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}" if math.isfinite(value) else "–"


def _percent(share: float) -> str:
    return f"{share:.1%}" if math.isfinite(share) else "–"
