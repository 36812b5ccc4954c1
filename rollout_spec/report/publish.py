"""A comparison into wandb: figures, table and picture, in the summary of the second run."""

from __future__ import annotations

import math
from pathlib import Path

from rollout_spec.report.comparison import table_columns, table_rows
from rollout_spec.report.logs import RunError
from rollout_spec.report.measures import Comparison

PREFIX = "rollout_spec/"


def figures(comparison: Comparison) -> dict[str, float]:
    """What is published beside table and picture, by its name in the summary; nothing that is not known."""
    names = ("speedup", "drift", "corrected_speedup")
    found = {PREFIX + name: getattr(comparison, name) for name in names}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def publish(comparison: Comparison, picture: Path) -> str:
    """Add the comparison to the summary of the second run, which its history does not notice.

    A run that was read offline is continued offline: a further folder in wandb's (WANDB_DIR) with the same
    run id, which `wandb sync` puts together with the first.

    Args:
        comparison: its second run must have been logged by wandb.
        picture: the PNG that `write_report` wrote.

    Returns:
        Where it went: the run's address, or the folder to sync.

    Raises:
        RunError: wandb knows nothing of the second run, or does not take it.
    """
    import wandb

    of = comparison.on.wandb
    if of is None:
        raise RunError(
            f"--wandb: the log of {comparison.on.name} does not say which run of wandb it is; compare with "
            "the run's wandb folder, or with entity/project/run_id"
        )
    try:
        run = wandb.init(
            id=of.run_id,
            project=of.project,
            entity=of.entity or None,
            mode="online" if of.online else "offline",
            resume="must" if of.online else "allow",
            # The run's own commit, machine and command stay what they were.
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, x_disable_meta=True, x_disable_stats=True
            ),
        )
        rows = [list(row) for row in table_rows(comparison)]
        run.summary.update(figures(comparison))
        run.summary[PREFIX + "comparison"] = wandb.Table(columns=table_columns(comparison), data=rows)
        run.summary[PREFIX + "charts"] = wandb.Image(str(picture))
        run.finish()
    except wandb.Error as error:
        raise RunError(f"--wandb: {error}") from error
    return str(run.url if of.online else Path(run.settings.sync_dir))
