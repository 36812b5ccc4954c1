"""Pictures of what the benches measured; without pyplot, so no display and no global state."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot_drafters(results: list[dict[str, Any]], file: Path) -> None:
    """What `bench drafters` measured, per trace: tokens per step against draft tokens per step, with a line
    through the prices of a method."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    traces = list(dict.fromkeys(result["trace"] for result in results))
    methods = list(dict.fromkeys(result["method"] for result in results))
    colours = {method: colormaps["tab20"](i) for i, method in enumerate(methods)}
    figure = Figure(figsize=(7.2, 4 * len(traces)))
    axes = figure.subplots(len(traces), 1, squeeze=False)
    for trace, axis in zip(traces, axes[:, 0], strict=True):
        _plot_gains(axis, [result for result in results if result["trace"] == trace], colours)
        axis.set_title(trace)
        axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.text(0.01, 0.002, "Numbers: K. Squares: with the responses of earlier steps.", fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def _plot_gains(axis: Any, results: list[dict[str, Any]], colours: dict[str, Any]) -> None:
    lines: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    for result in results:
        line = (result["method"], result["num_speculative_tokens"], result["history"])
        point = (result["draft_tokens_per_step"], result["tokens_per_step"])
        lines.setdefault(line, []).append(point)
    for (method, k, history), points in lines.items():
        style = {"color": colours[method], "marker": "s" if history else "o", "linewidth": 1.0}
        is_named = method in axis.get_legend_handles_labels()[1]
        axis.plot(*zip(*sorted(points), strict=True), **style, label=None if is_named else method)
        axis.annotate(str(k), max(points), fontsize=7)
    axis.set(xlabel="draft tokens per step", ylabel="tokens per step")


def plot_rollouts(timelines: dict[str, dict[str, list]], threshold: int, file: Path) -> None:
    """Per method: the running requests over time, shaded where draft tokens were verified.

    Args:
        timelines: the columns of a `bench.timeline.Timeline` by method, all of one repeat.
        threshold: of running requests, where the tail begins.
    """
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.9 * len(timelines) + 0.6))
    axes = figure.subplots(len(timelines), 1, sharex=True, sharey=True, squeeze=False)
    for (method, columns), axis in zip(timelines.items(), axes[:, 0], strict=True):
        ends = np.cumsum(columns["seconds"])
        edges = np.concatenate([[0.0], ends])
        running = np.array(columns["num_running"])
        drafted = np.array(columns["num_draft_tokens"]) > 0
        axis.stairs(np.where(drafted, running, 0), edges, fill=True, color="#9dc3f2", label="drafts verified")
        axis.stairs(running, edges, color="#1b2a3d", linewidth=1.0, label="running requests")
        axis.axhline(threshold, color="#c0504d", linewidth=0.8, linestyle="--", label="tail below")
        tokens = sum(columns["num_tokens"])
        axis.set_title(
            f"{method}: {ends[-1]:.1f} s, {tokens / ends[-1]:.0f} tokens/s", fontsize=9, loc="left"
        )
        axis.set_ylabel("running")
    axes[0, 0].legend(fontsize=7, loc="upper right")
    axes[-1, 0].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def plot_specdecode(found: dict[str, list[dict[str, Any]]], methods: list[str], file: Path) -> None:
    """Tokens per step by set and method, as `bench specdecode --json` has them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axis = figure.subplots()
    width = 0.8 / len(methods)
    for i, method in enumerate(methods):
        heights = [
            next(each["tokens_per_step"] for each in results if each["method"] == method)
            for results in found.values()
        ]
        places = [place + width * (i - (len(methods) - 1) / 2) for place in range(len(found))]
        bars = axis.bar(places, heights, width, label=method)
        axis.bar_label(bars, fmt="%.1f", fontsize=6)
    axis.set_xticks(range(len(found)), list(found))
    axis.set(ylabel="tokens per step")
    axis.legend(fontsize=7)
    figure.savefig(file, dpi=110)
