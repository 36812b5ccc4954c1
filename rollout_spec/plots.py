"""Pictures of what the benches measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot_drafters(results: list[dict[str, Any]], file: Path) -> None:
    """Per trace: tokens per step against draft tokens per step, with a line through the prices of a method;
    acceptance along the response, and tokens per step against the history, both at the first price."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    traces = list(dict.fromkeys(result["trace"] for result in results))
    methods = list(dict.fromkeys(result["method"] for result in results))
    colours = {method: pyplot.get_cmap("tab20")(i) for i, method in enumerate(methods)}
    figure, rows = pyplot.subplots(len(traces), 3, figsize=(16, 4 * len(traces)), squeeze=False)
    for trace, (pareto, along, by_history) in zip(traces, rows, strict=True):
        of_trace = [result for result in results if result["trace"] == trace]
        _plot_pareto(pareto, of_trace, colours)
        _plot_curves(along, by_history, of_trace, colours)
        for axis in (pareto, along, by_history):
            axis.set_title(trace)
            axis.legend(fontsize=7)
    figure.text(0.01, 0.002, "Numbers: K. Squares: with the responses of earlier steps.", fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _plot_pareto(axis: Any, results: list[dict[str, Any]], colours: dict[str, Any]) -> None:
    prices_of: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    for result in results:
        series = (result["method"], result["num_speculative_tokens"], result["history"])
        point = (result["draft_tokens_per_step"], result["tokens_per_step"])
        prices_of.setdefault(series, []).append(point)
    labelled: set[str] = set()
    for (method, k, history), points in prices_of.items():
        axis.plot(
            *zip(*sorted(points), strict=True),
            color=colours[method],
            marker="s" if history else "o",
            linewidth=1.0,
            label=None if method in labelled else method,
        )
        labelled.add(method)
        axis.annotate(str(k), max(points), fontsize=7)
    axis.set(xlabel="draft tokens per step", ylabel="tokens per step")


def _plot_curves(along: Any, by_history: Any, results: list[dict[str, Any]], colours: dict[str, Any]) -> None:
    first: dict[tuple[str, int, int], dict[str, Any]] = {}
    for result in results:
        first.setdefault((result["method"], result["num_speculative_tokens"], result["history"]), result)
    max_k = max(k for _, k, _ in first)
    history_k = max((k for _, k, history in first if history), default=max_k)
    for (method, k, history), result in first.items():
        curve = result["acceptance_by_position"]
        if curve and k == max_k and not history:
            starts = [max(1, int(start)) for start in curve]
            along.plot(starts, list(curve.values()), color=colours[method], label=method)
    for method in dict.fromkeys(method for method, k, _ in first if k == history_k):
        points = sorted(
            (history, result["tokens_per_step"])
            for (name, k, history), result in first.items()
            if (name, k) == (method, history_k)
        )
        by_history.plot(*zip(*points, strict=True), marker="o", color=colours[method], label=method)
    along.set(xlabel="position in the response", ylabel=f"acceptance rate, K = {max_k}", xscale="log")
    by_history.set(xlabel="earlier responses of the prompt", ylabel=f"tokens per step, K = {history_k}")


def plot_rollouts(timelines: dict[str, dict[str, list]], threshold: int, file: Path) -> None:
    """Per method: the running requests over time, shaded where draft tokens were verified.

    Args:
        timelines: the columns of a `bench_engine.Timeline` by method, all of one repeat.
        threshold: of running requests, where the tail begins.
    """
    import matplotlib

    matplotlib.use("Agg")
    import numpy as np
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(timelines), 1, figsize=(10, 1.9 * len(timelines) + 0.6), sharex=True, sharey=True, squeeze=False
    )
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
    pyplot.close(figure)
