"""Pictures of what the benches measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def plot_drafters(results: list[dict[str, Any]], file: Path) -> None:
    """Per trace: tokens per step against draft tokens per step, with a line through the prices of a method;
    acceptance along the response; and, if there are several, acceptance and tokens per step against the
    sizes of the history. All but the first are of the largest K, with a line for each price."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    traces = list(dict.fromkeys(result["trace"] for result in results))
    methods = list(dict.fromkeys(result["method"] for result in results))
    colours = {method: pyplot.get_cmap("tab20")(i) for i, method in enumerate(methods)}
    has_histories = len({result["history"] for result in results}) > 1
    num_columns = 4 if has_histories else 2
    figure, rows = pyplot.subplots(
        len(traces), num_columns, figsize=(5.4 * num_columns, 4 * len(traces)), squeeze=False
    )
    for trace, axes in zip(traces, rows, strict=True):
        of_trace = [result for result in results if result["trace"] == trace]
        _plot_pareto(axes[0], of_trace, colours)
        _plot_along(axes[1], of_trace, colours)
        if has_histories:
            _plot_by_history(axes[2], of_trace, "acceptance_rate", colours)
            _plot_by_history(axes[3], of_trace, "tokens_per_step", colours)
        for axis in axes:
            axis.set_title(trace)
        for axis in axes[2:]:
            axis.set_visible(len({result["history"] for result in of_trace}) > 1)
        _add_legend(axes)
    figure.text(0.01, 0.002, "Numbers: K. Squares: with the responses of earlier steps.", fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _add_legend(axes: Any) -> None:
    """One for all axes of a row, beside the last that is seen."""
    seen = [axis for axis in axes if axis.get_visible()]
    handles = {label: h for axis in seen for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    seen[-1].legend(handles.values(), handles, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))


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


def _plot_along(axis: Any, results: list[dict[str, Any]], colours: dict[str, Any]) -> None:
    """With the least history that there is."""
    k = max(result["num_speculative_tokens"] for result in results)
    history = min(result["history"] for result in results)
    for style, series in _series(results, k, colours):
        for result in series:
            curve = result["acceptance_by_position"]
            if curve and result["history"] == history:
                axis.plot([max(1, int(start)) for start in curve], list(curve.values()), **style)
    axis.set(xlabel="position in the response", ylabel=f"acceptance rate, K = {k}", xscale="log")


def _plot_by_history(axis: Any, results: list[dict[str, Any]], figure: str, colours: dict[str, Any]) -> None:
    k = max(result["num_speculative_tokens"] for result in results)
    for style, series in _series(results, k, colours):
        drafting = [result for result in series if result["draft_tokens_per_step"]]
        points = sorted((result["history"], result[figure]) for result in drafting)
        if len(points) > 1:
            axis.plot(*zip(*points, strict=True), marker="o", **style)
    axis.set(xlabel="earlier responses of the prompt", ylabel=f"{figure.replace('_', ' ')}, K = {k}")


def _series(
    results: list[dict[str, Any]], k: int, colours: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """The results with this K, by method and price, and how each such line looks.

    A price that was found by trial, for equal draft tokens, is another one for each history: one line.
    """
    lines: dict[tuple[str, Any, Any], list[dict[str, Any]]] = {}
    for result in results:
        if result["num_speculative_tokens"] == k:
            method, equal = result["method"], result["equal_drafts"]
            price = result["min_token_prob"] if equal is None else None
            lines.setdefault((method, equal, price), []).append(result)
    num_prices = Counter((method, equal) for method, equal, _ in lines)
    seen: Counter[str] = Counter()
    for (method, equal, price), series in lines.items():
        style = ("-", "--", "-.", ":")[seen[method] % 4]
        seen[method] += 1
        label = method if equal is None else f"{method} as {equal}"
        label += f" {price}" if num_prices[method, equal] > 1 else ""
        yield {"color": colours[method], "linestyle": style, "label": label}, series


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
