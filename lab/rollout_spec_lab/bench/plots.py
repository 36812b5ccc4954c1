"""The picture of what `bench engine` measured; without pyplot, so no display and no global state."""

from __future__ import annotations

from pathlib import Path


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
