"""The picture of a comparison: every measure over the training steps."""

from typing import Any

from rollout_spec.report.measures import Comparison, Measure
from rollout_spec.report.page import COLOURS, png
from rollout_spec.report.runs import ratio

MAX_MARKERS = 40


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
