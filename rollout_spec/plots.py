"""Pictures of what the benches measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot_drafters(results: list[dict[str, Any]], file: Path) -> None:
    """Per trace: tokens per step against draft tokens per step, acceptance along the response, and tokens per
    step against the history."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    traces = list(dict.fromkeys(result["trace"] for result in results))
    methods = list(dict.fromkeys(result["method"] for result in results))
    max_k = max(result["num_speculative_tokens"] for result in results)
    colours = {method: f"C{i}" for i, method in enumerate(methods)}
    figure, rows = pyplot.subplots(len(traces), 3, figsize=(16, 4 * len(traces)), squeeze=False)
    for trace, (pareto, along, by_history) in zip(traces, rows, strict=True):
        for result in (result for result in results if result["trace"] == trace):
            method, k, history = (result[key] for key in ("method", "num_speculative_tokens", "history"))
            pareto.scatter(
                result["draft_tokens_per_step"],
                result["tokens_per_step"],
                color=colours[method],
                marker="s" if history else "o",
                label=method if k == results[0]["num_speculative_tokens"] and not history else None,
            )
            pareto.annotate(str(k), (result["draft_tokens_per_step"], result["tokens_per_step"]), fontsize=7)
            curve = result["acceptance_by_position"]
            if curve and k == max_k and not history:
                along.plot(
                    [max(1, int(start)) for start in curve],
                    list(curve.values()),
                    color=colours[method],
                    label=method,
                )
        for method in methods:
            points = sorted(
                (result["history"], result["tokens_per_step"])
                for result in results
                if (result["trace"], result["method"]) == (trace, method)
                and result["num_speculative_tokens"] == max_k
            )
            by_history.plot(*zip(*points, strict=True), marker="o", color=colours[method], label=method)
        pareto.set(title=trace, xlabel="draft tokens per step", ylabel="tokens per step")
        along.set(title=trace, xlabel="position in the response", ylabel="acceptance rate", xscale="log")
        by_history.set(
            title=trace, xlabel="earlier responses of the prompt", ylabel=f"tokens per step, K = {max_k}"
        )
        pareto.legend(fontsize=7)
        along.legend(fontsize=7)
        by_history.legend(fontsize=7)
    figure.text(0.01, 0.002, "Numbers: K. Squares: with the responses of earlier steps.", fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


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
