"""Pictures of what the benches measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot_drafters(results: list[dict[str, Any]], file: Path) -> None:
    """Per trace: tokens per step against draft tokens per step, and acceptance along the response."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    traces = list(dict.fromkeys(result["trace"] for result in results))
    methods = list(dict.fromkeys(result["method"] for result in results))
    colours = {method: f"C{i}" for i, method in enumerate(methods)}
    figure, rows = pyplot.subplots(len(traces), 2, figsize=(11, 4 * len(traces)), squeeze=False)
    for trace, (pareto, along) in zip(traces, rows, strict=True):
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
            if curve and k == max(other["num_speculative_tokens"] for other in results) and not history:
                along.plot(
                    [max(1, int(start)) for start in curve],
                    list(curve.values()),
                    color=colours[method],
                    label=method,
                )
        pareto.set(title=trace, xlabel="draft tokens per step", ylabel="tokens per step")
        along.set(title=trace, xlabel="position in the response", ylabel="acceptance rate", xscale="log")
        pareto.legend(fontsize=7)
        along.legend(fontsize=7)
    figure.text(0.01, 0.002, "Numbers: K. Squares: with the responses of earlier steps.", fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
