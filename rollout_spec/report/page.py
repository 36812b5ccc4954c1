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

from rollout_spec.report.runs import Compared, Comparison, Estimate, Measure, Run

if TYPE_CHECKING:
    from rich.table import Table

COLOURS = ("#8a94a3", "#1463d8")
BARS = ("rollout_seconds", "step_seconds", "tokens_per_second")
MAX_BARS = 40
FILES = {"json": "summary.json", "png": "report.png", "html": "report.html"}
CHARTS_FOLDER = "charts"


def write_report(comparison: Comparison, folder: Path, facts: Mapping[str, str]) -> dict[str, Path]:
    """Write summary, pictures and page into `folder`; `facts` describe the runs in the page.

    Returns:
        The path of each file, by kind: json, png (all charts), html, charts (folder of one PNG a measure).
    """
    charts = {compared.measure.name: draw_chart(compared, comparison) for compared in shown(comparison)}
    paths = {kind: folder / name for kind, name in FILES.items()} | {"charts": folder / CHARTS_FOLDER}
    paths["charts"].mkdir(parents=True, exist_ok=True)
    for name, picture in charts.items():
        (paths["charts"] / f"{name}.png").write_bytes(picture)
    paths["json"].write_text(json.dumps(comparison.to_dict(), indent=2, allow_nan=False) + "\n")
    paths["png"].write_bytes(draw_all(comparison))
    paths["html"].write_text(render_html(comparison, facts, charts))
    return paths


def shown(comparison: Comparison) -> list[Compared]:
    """The measures that at least one of the runs has."""
    return [
        compared
        for compared in comparison.measures.values()
        if math.isfinite(compared.off.value) or math.isfinite(compared.on.value)
    ]


def headline(comparison: Comparison) -> str:
    """The speedup; where the machine has drifted, the corrected one beside it."""
    if not (comparison.has_drifted and math.isfinite(comparison.corrected_speedup)):
        return _times(comparison.speedup)
    return f"{_times(comparison.speedup)} (corrected {_times(comparison.corrected_speedup)})"


def interval(comparison: Comparison) -> str:
    low, high = comparison.speedup_ci95
    if math.isnan(low):
        return "one step gives no interval" if len(comparison.on.steps) == 1 else "no interval"
    return f"95% interval {low:.2f} to {high:.2f}"


def sentences(comparison: Comparison) -> list[str]:
    """What the numbers say, losses and doubts included."""
    off, on, of = comparison.off, comparison.on, comparison.measures
    times = f"{_times(comparison.speedup)} the generated tokens per second of {off.name}"
    num_steps = len(on.steps)
    over = f"({interval(comparison)}; {num_steps} step{'s' if num_steps > 1 else ''})"
    verdicts = {
        "faster": f"{on.name} was faster: {times} {over}.",
        "slower": f"{on.name} was slower here: {times} {over}.",
        "unclear": f"No clear difference between {on.name} and {off.name}: {times} {over}.",
    }
    first = [verdicts[comparison.verdict], *_drift(comparison)]
    if comparison.has_drifted:
        first = [*_drift(comparison), f"As measured, {on.name} had {times} {over}."]
    text = [
        *first,
        f"Rollouts took {_work(off)} and {_work(on)}.",
        *(
            f"Steps that only {name} has are left out: {', '.join(map(str, steps))}."
            for name, steps in comparison.left_out.items()
            if steps
        ),
    ]
    if on.total("num_drafts"):
        accepted, tokens = (of[name].on.value for name in ("acceptance_rate", "tokens_per_step"))
        text.append(
            f"{_percent(accepted)} of the draft tokens were accepted, and a decode step gave "
            f"{_number(tokens, 2)} tokens where plain decoding gives 1."
        )
    else:
        text.append(
            f"{on.name} drafted nothing, so this says nothing about drafting. "
            "High rollout/spec_share_off_cost: drafts cost more time than they save, as with many requests "
            "at a time. High rollout/spec_share_off_threshold: take rollout.spec.batch_threshold=auto."
        )
    if not math.isnan(on.looping_share):
        text.append(
            f"Responses that repeat themselves: {_percent(off.looping_share)} with {off.name}, "
            f"{_percent(on.looping_share)} with {on.name}. Repetition is easy to draft, "
            "so a policy that loops flatters the speed-up."
        )
    if comparison.agreement is None:
        text.append(
            "Which tokens agree was not recorded; where they do not, reward and response length differ "
            "by chance."
        )
    else:
        same, compared = comparison.agreement.num_identical, comparison.agreement.num_tokens
        text.append(
            f"Before the first weight sync {same:,} of {compared:,} tokens were the same in both runs, each "
            "response counted up to its first difference; training's own numerics part the runs from there."
        )
    interrupted = [run.total("num_interrupted") for run in (off, on)]
    if any(interrupted):
        text.append(
            f"The trainer was asynchronous: weight syncs interrupted {interrupted[0]:,.0f} requests with "
            f"{off.name} and {interrupted[1]:,.0f} with {on.name}, which went on behind them. Rollouts ran "
            "beside the training: what training gains is in the time of its steps."
        )
    empty = [sum(not step.generated_tokens for step in run.steps) for run in (off, on)]
    if any(empty):
        text.append(
            f"Steps without tokens of their own: {empty[0]} with {off.name}, {empty[1]} with {on.name}. "
            "Their batch was there before the weights changed, so the step before counts its tokens."
        )
    if num_steps < 8:
        few = (
            f"An interval from {num_steps} steps is rough" if num_steps > 1 else "One step gives no interval"
        )
        text.append(f"{few}; train longer for a firm figure.")
    return text


def _drift(comparison: Comparison) -> list[str]:
    """Whether the machine was the same for both runs, where that is known."""
    if math.isnan(comparison.drift):
        return []
    work = (
        f"Training without rollouts, which drafts do not touch, took {comparison.drift:.2f}× as long a token "
        f"with {comparison.on.name} as with {comparison.off.name}"
    )
    if not comparison.has_drifted:
        return [f"The machine was as fast for both: {work[0].lower()}{work[1:]}."]
    said = f"Do not trust this ratio: the machine itself changed. {work}."
    if math.isfinite(comparison.corrected_speedup):
        said += f" Corrected by that, the ratio is {_times(comparison.corrected_speedup)}."
    return [said]


def _work(run: Run) -> str:
    seconds, tokens = run.total("rollout_seconds"), run.total("generated_tokens")
    return f"{seconds:,.1f} s for {tokens:,.0f} tokens with {run.name}"


def table_columns(comparison: Comparison) -> list[str]:
    return ["", comparison.off.name, comparison.on.name, "Change"]


def table_rows(comparison: Comparison, intervals: bool = True) -> list[list[str]]:
    """Every measure, with or without the 95 % intervals of the runs' values; then the totals."""
    value = _with_interval if intervals else _value
    return [
        [_label(of.measure), value(of.measure, of.off), value(of.measure, of.on), _change(of)]
        for of in shown(comparison)
    ] + _totals(comparison)


def summary_table(comparison: Comparison) -> Table:
    """For a terminal: intervals of the changes only."""
    from rollout_spec.cli.console import make_table

    title = f"{headline(comparison)} tokens per second ({interval(comparison)})"
    table = make_table(title, *table_columns(comparison)[:-1], "change [95% interval]")
    for row in table_rows(comparison, intervals=False):
        table.add_row(*row)
    return table


def _label(measure: Measure) -> str:
    return measure.title + (f" ({measure.unit})" if measure.unit else "")


_DIGITS = {"reward": 3, "entropy": 3, "tokens_per_step": 2, "training_ms": 3, "draft_ms": 2, "model_ms": 2}


def _value(measure: Measure, estimate: Estimate) -> str:
    """Without the unit, which the label names."""
    return _scaled(measure, estimate.value)


def _with_interval(measure: Measure, estimate: Estimate) -> str:
    low, high = (_scaled(measure, bound) for bound in estimate.ci95)
    return _value(measure, estimate) + (f" [{low}, {high}]" if low != "–" else "")


def _scaled(measure: Measure, value: float) -> str:
    scale = 100.0 if measure.unit == "%" else 1.0
    return _number(scale * value, _DIGITS.get(measure.name, 1))


def _change(compared: Compared) -> str:
    """1.25× [1.10, 1.40] of a ratio, +0.012 [-0.003, +0.027] of a difference."""
    change = compared.change
    if not math.isfinite(change.value):
        return "–"
    scale = 100.0 if compared.measure.unit == "%" else 1.0
    shape = "{:.2f}" if compared.measure.is_ratio else "{:+.3f}"
    value, low, high = (shape.format(scale * bound) for bound in (change.value, *change.ci95))
    sign = "×" if compared.measure.is_ratio else ""
    return f"{value}{sign}" + (f" [{low}, {high}]" if math.isfinite(change.ci95[0]) else "")


def _totals(comparison: Comparison) -> list[list[str]]:
    runs = (comparison.off, comparison.on)
    rows = [
        ["Generated tokens, all steps", *(_number(run.total("generated_tokens"), 0) for run in runs), ""],
        ["Drafts, all steps", *(_number(run.total("num_drafts"), 0) for run in runs), ""],
    ]
    if any(run.total("num_interrupted") for run in runs):
        counts = (_number(run.total("num_interrupted"), 0) for run in runs)
        rows.append(["Interrupted requests, all steps", *counts, ""])
    if not all(math.isnan(run.looping_share) for run in runs):
        rows.append(["Looping responses", *(_percent(run.looping_share) for run in runs), ""])
    return rows


def draw_chart(compared: Compared, comparison: Comparison) -> bytes:
    """One measure, step by step, both runs; a PNG."""
    from matplotlib.figure import Figure  # without pyplot, so no display and no global state

    figure = Figure(figsize=(5.4, 3.2), layout="constrained")
    axes = figure.subplots()
    _panel(axes, comparison, compared.measure)
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper right", bbox_to_anchor=(1.0, 1.14))
    return _png(figure)


def draw_all(comparison: Comparison) -> bytes:
    """The same charts in one PNG."""
    from matplotlib.figure import Figure

    measures = shown(comparison)
    num_columns = min(4, len(measures))
    num_rows = -(-len(measures) // num_columns)
    figure = Figure(figsize=(3.7 * num_columns, 3.1 * num_rows), layout="constrained")
    panels = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
    for axes, compared in zip(panels, measures, strict=False):
        _panel(axes, comparison, compared.measure)
    for axes in panels[len(measures) :]:
        axes.set_visible(False)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=2, frameon=False, fontsize=11)
    return _png(figure)


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    return buffer.getvalue()


def _panel(axes: Any, comparison: Comparison, measure: Measure) -> None:
    scale = 100.0 if measure.unit == "%" else 1.0
    for run, colour, shift in zip((comparison.off, comparison.on), COLOURS, (-0.2, 0.2), strict=True):
        steps = run.column("step")
        values = [scale * value for value in run.column(measure.name)]
        if measure.name in BARS and len(steps) <= MAX_BARS:
            axes.bar([step + shift for step in steps], values, width=0.38, color=colour, label=run.name)
        elif any(math.isfinite(value) for value in values):
            marker = "o" if len(steps) <= MAX_BARS else None
            axes.plot(steps, values, color=colour, marker=marker, markersize=4, linewidth=1.8, label=run.name)
    axes.set_title(_label(measure), loc="left", fontsize=11)
    axes.set_xlabel("training step", fontsize=9, color="#555b66")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.tick_params(labelsize=9, colors="#555b66", length=0)
    axes.grid(axis="y", color="#e4e7ec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#c3c8d0")
    # A reward may be negative; anything else starts at 0 and leaves room above its highest point.
    if measure.name != "reward" and axes.dataLim.y1 > 0:
        axes.set_ylim(0, 1.12 * axes.dataLim.y1)


def render_html(comparison: Comparison, facts: Mapping[str, str], charts: Mapping[str, bytes]) -> str:
    """The page; everything it shows is inside it. `charts`: a PNG by a measure's name."""
    from jinja2 import Environment

    template = resources.files("rollout_spec.report").joinpath("report.html.j2").read_text()
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
            columns=table_columns(comparison),
            table=table_rows(comparison),
            rows=[_step_cells(*pair) for pair in zip(off.steps, on.steps, strict=True)],
            charts=[
                (name, comparison.measures[name].measure.title, base64.b64encode(picture).decode())
                for name, picture in charts.items()
            ],
            facts=facts,
        )
    )


def _step_cells(off: Any, on: Any) -> list[str]:
    cells = [str(on.step)]
    for step in (off, on):
        cells += [_number(step.rollout_seconds, 1), _number(step.step_seconds, 1)]
        cells += [_number(step.generated_tokens, 0)]
        cells += [_number(step.tokens_per_second, 1), _number(step.tokens_per_step, 2)]
        cells += [_percent(step.acceptance_rate), _number(step.reward, 3), _number(step.response_length, 1)]
        cells.append(_number(step.entropy, 3))
    return cells


def _times(ratio: float) -> str:
    return f"{_number(ratio, 2)}×"


def _number(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}" if math.isfinite(value) else "–"


def _percent(share: float) -> str:
    return f"{share:.1%}" if math.isfinite(share) else "–"
