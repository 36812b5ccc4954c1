"""A comparison of two runs as sentences, a table, a picture, a page and JSON."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout_spec.files import as_json, write_files
from rollout_spec.report.measures import FIRM, Comparison, Estimate, Measure
from rollout_spec.report.page import COLOURS, png, render
from rollout_spec.report.runs import Run, ratio

MAX_MARKERS = 40  # of a line in the picture
FILES = {"json": "summary.json", "png": "report.png", "html": "report.html"}
MEASURED = {
    "rollout time": "From the first request of a training step to its last token, on the slowest server.",
    "speed": "Tokens per second and not seconds, because the runs write responses of different lengths.",
    "intervals": "95 %, by a bootstrap over training steps. A step is drawn in both runs at once: its "
    "prompts are the same.",
    "change": "The second run divided by the first (×), or minus the first (with a sign).",
    "training step time": "Includes a wait: verl looks every two seconds whether rollouts have ended.",
    "tokens per step": "Over every decode step of every response, steps without a draft included.",
    "acceptance rate": "Accepted draft tokens / draft tokens.",
}


def write_report(comparison: Comparison, folder: Path, facts: Mapping[str, str]) -> dict[str, Path]:
    """Write summary, picture and page into `folder`, and return their paths by kind: json, png, html. `facts`
    describe the runs in the page."""
    picture = draw(comparison)
    alt = f"Each measure over the training steps, {comparison.off.name} and {comparison.on.name}"
    tables = [("Means, with 95 % intervals", table_columns(comparison), table_rows(comparison))]
    facts = {**facts, **MEASURED}
    text = [*comparison.warnings, *sentences(comparison)]
    page = render("compare", headline(comparison), text, tables, facts, picture, alt, draw(comparison, 1))
    contents: dict[str, bytes | str] = {"json": as_json(comparison.to_dict()), "png": picture, "html": page}
    write_files(folder, {FILES[kind]: content for kind, content in contents.items()})
    return {kind: folder / name for kind, name in FILES.items()}


def headline(comparison: Comparison) -> str:
    """The speed-up, unless the machine has changed."""
    if comparison.has_drifted:
        return "The machine changed between the two runs: no ratio"
    return f"{_times(comparison.speedup.value)} tokens per second ({_interval_text(comparison)})"


def _interval_text(comparison: Comparison) -> str:
    num_steps = len(comparison.on.steps)
    if math.isnan(comparison.speedup.ci95[0]):
        return "one step gives no interval" if num_steps == 1 else "no interval"
    return interval(comparison.speedup.ci95, num_steps)


def interval(bounds: tuple[float, float], num_pairs: int) -> str:
    """What a bootstrap over so many pairs gives, by its name."""
    return f"{'95%' if num_pairs >= FIRM else 'rough'} interval {bounds[0]:.2f} to {bounds[1]:.2f}"


def sentences(comparison: Comparison, speed: Sequence[str] | None = None) -> list[str]:
    """What the numbers say, losses and doubts included. `speed` replaces the sentences on the speed-up."""
    off, on = comparison.off, comparison.on
    text = [
        *(_speed(comparison) if speed is None else speed),
        f"Rollouts took {_work(off)} and {_work(on)}.",
        *(
            f"Steps that only {name} has are left out: {', '.join(map(str, steps))}."
            for name, steps in comparison.left_out.items()
            if steps
        ),
        *_drafts(comparison),
    ]
    if not math.isnan(on.looping_share):
        text.append(
            f"Responses that repeat themselves: {_percent(off.looping_share)} with {off.name}, "
            f"{_percent(on.looping_share)} with {on.name}. Repetition is easy to draft, so a policy that "
            "repeats itself makes the speed-up look better than it is."
        )
    if comparison.agreement is None:
        text.append(
            "The rollouts were not recorded in both runs, so their tokens are not compared. Reward and "
            "response length can differ by chance."
        )
    else:
        same, compared = comparison.agreement.num_identical, comparison.agreement.num_tokens
        text.append(
            f"Before the first weight sync, {same:,} of {compared:,} tokens were the same in both runs; a "
            "response counts up to its first difference. From then on, rounding in the training makes the "
            "runs differ."
        )
    text += _asynchronous(off, on)
    if (num := len(on.steps)) < FIRM:
        few = f"An interval from {num} steps is rough" if num > 1 else "One step gives no interval"
        text.append(f"{few}; train longer for a firm figure.")
    return text


def _speed(comparison: Comparison) -> list[str]:
    """How fast the second run was, and whether the machine was the same for both, where that is known."""
    off, on, num_steps = comparison.off.name, comparison.on.name, len(comparison.on.steps)
    over = f"{_interval_text(comparison)}; {num_steps} step{'s' if num_steps > 1 else ''}"
    gain = f"{_times(comparison.speedup.value)} the generated tokens per second of {off} ({over})."
    took = f"took {comparison.drift:.2f}× as long per token with {on} as with {off}"
    if comparison.has_drifted:
        said = f"The machine changed: training without rollouts, which drafts do not touch, {took}."
        if comparison.disturbed is not None:
            run, step, times = comparison.disturbed
            said += f" Look at step {step} of {run.name}, which took {times:.1f}× as long as its others."
        return [said, f"So there is no ratio: run {off} and {on} again, with nothing beside them."]
    is_clear = comparison.verdict != "unclear"
    verdict = f"{on} was {comparison.verdict}" if is_clear else f"No clear difference between {on} and {off}"
    if math.isnan(comparison.drift):
        return [f"{verdict}: {gain}"]
    same = "The machine was as fast for both: training without rollouts, which drafts do not touch,"
    return [f"{verdict}: {gain}", f"{same} {took}."]


def _drafts(comparison: Comparison) -> list[str]:
    on, of = comparison.on, comparison.measures
    if on.total("num_drafts"):
        accepted, tokens = (of[name].on.value for name in ("acceptance_rate", "tokens_per_step"))
        gave = f"A decode step gave {_number(tokens, 2)} tokens; plain decoding gives 1."
        return [f"{_percent(accepted)} of the draft tokens were accepted. {gave}"]
    if not on.has_drafter:
        return []
    return [
        f"{on.name} drafted nothing, so this says nothing about drafting. If rollout/spec_share_off_cost is "
        "high, drafts cost more time than they save here. If rollout/spec_share_off_threshold is high, set "
        "rollout.spec.batch_threshold=auto."
    ]


def _asynchronous(off: Run, on: Run) -> list[str]:
    """How an asynchronous trainer changes the figures."""
    text = []
    interrupted = [run.total("num_interrupted") for run in (off, on)]
    if any(interrupted):
        text.append(
            f"The trainer was asynchronous: weight syncs interrupted {interrupted[0]:,.0f} requests with "
            f"{off.name} and {interrupted[1]:,.0f} with {on.name}, which went on afterwards. Rollouts ran "
            "beside the training, so look at the training step time for what the training gained."
        )
    empty = [sum(not step.generated_tokens for step in run.steps) for run in (off, on)]
    if any(empty):
        text.append(
            f"Steps without tokens of their own: {empty[0]} with {off.name}, {empty[1]} with {on.name}. "
            "Their batch was ready before the weights changed, so the step before counts its tokens."
        )
    return text


def _work(run: Run) -> str:
    seconds, tokens = run.total("rollout_seconds"), run.total("generated_tokens")
    return f"{seconds:,.1f} s for {tokens:,.0f} tokens with {run.name}"


def table_columns(comparison: Comparison) -> list[str]:
    return ["", comparison.off.name, comparison.on.name, "Change"]


def table_rows(comparison: Comparison, intervals: bool = True) -> list[list[str]]:
    """Every measure, with or without the 95 % intervals of the runs' values; then the totals."""
    rows = []
    for of in comparison.shown:
        measure = of.measure
        amount = f"{{:,.{measure.digits}f}}"
        change = "{:.2f}" if measure.is_ratio else "{:+.3f}"
        sides = (_estimate_text(side, amount, measure, intervals) for side in (of.off, of.on))
        sign = "×" if measure.is_ratio else ""
        rows.append([measure.label, *sides, _estimate_text(of.change, change, measure, sign=sign)])
    return rows + _totals(comparison)


def _estimate_text(
    estimate: Estimate, shape: str, measure: Measure, interval: bool = True, sign: str = ""
) -> str:
    """Without the unit, which the label names: 1.25× [1.10, 1.40], +0.012 [-0.003, +0.027]."""
    if not math.isfinite(estimate.value):
        return "–"
    scale = 100.0 if measure.unit == "%" else 1.0
    value, low, high = (shape.format(scale * bound) for bound in (estimate.value, *estimate.ci95))
    return value + sign + (f" [{low}, {high}]" if interval and math.isfinite(estimate.ci95[0]) else "")


def _totals(comparison: Comparison) -> list[list[str]]:
    runs = (comparison.off, comparison.on)
    titles = {"Generated tokens": "generated_tokens", "Drafts": "num_drafts"}
    if any(run.total("num_interrupted") for run in runs):
        titles["Interrupted requests"] = "num_interrupted"
    counts = {title: [_number(run.total(name), 0) for run in runs] for title, name in titles.items()}
    rows = [[f"{title}, all steps", *each, ""] for title, each in counts.items()]
    if not all(math.isnan(run.looping_share) for run in runs):
        rows.append(["Looping responses", *(_percent(run.looping_share) for run in runs), ""])
    return rows


def _times(ratio: float) -> str:
    return f"{_number(ratio, 2)}×"


def _number(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}" if math.isfinite(value) else "–"


def _percent(share: float) -> str:
    return f"{share:.1%}" if math.isfinite(share) else "–"


def draw(comparison: Comparison, num_columns: int = 2) -> bytes:
    """Every measure, step by step, both runs; a PNG with so many panels side by side."""
    from matplotlib.figure import Figure  # without pyplot, so no display and no global state

    measures = comparison.shown
    num_rows = -(-len(measures) // num_columns)
    figure = Figure(figsize=(4.4 * num_columns, 2.9 * num_rows), layout="constrained")
    panels = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
    for axes, compared in zip(panels, measures, strict=False):
        _panel(axes, comparison, compared.measure)
    for axes in panels[len(measures) :]:
        axes.set_visible(False)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=2, frameon=False, fontsize=11)
    return png(figure, dpi=160)


def _panel(axes: Any, comparison: Comparison, measure: Measure) -> None:
    scale = 100.0 if measure.unit == "%" else 1.0
    # The first run's dashes lie above the second run's line, so both are seen where they are equal.
    styles = zip((comparison.off, comparison.on), COLOURS, ("--", "-"), (3, 2), strict=True)
    for run, colour, dashes, order in styles:
        steps, amounts = run.column("step"), zip(*measure.amounts(run), strict=True)
        values = [scale * ratio(*of_step) for of_step in amounts]
        marker = "o" if len(steps) <= MAX_MARKERS else None
        look = {"color": colour, "marker": marker, "linestyle": dashes, "zorder": order}
        axes.plot(steps, values, markersize=4, linewidth=1.8, label=run.name, **look)
    axes.set_title(measure.label, loc="left", fontsize=11)
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
