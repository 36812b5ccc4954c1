"""A comparison into wandb: table, picture and figures in the summary of the second run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout_spec.config import UserError
from rollout_spec.report.comparison import table_columns, table_rows
from rollout_spec.report.logs import ONLINE, wandb_files, wandb_records
from rollout_spec.report.measures import Comparison


def publish(comparison: Comparison, run: Mapping[str, Any], picture: Path) -> str:
    """Add the comparison to the summary of its second run, of `run_of`; the run's history stays as it is.

    A run that was read offline goes on offline: wandb writes one more folder of the same run id. Returns
    where it went: the run's address, or the folder for `wandb sync`.

    Raises UserError: wandb does not take it.
    """
    import wandb

    figures = comparison.to_dict()
    added = {name: figures[name] for name in ("speedup", "drift") if figures[name] is not None}
    added["comparison"] = wandb.Table(columns=table_columns(comparison), data=table_rows(comparison))
    added["report"] = wandb.Image(str(picture))
    # The run keeps the commit, machine, program and packages that it was started with.
    settings = wandb.Settings(
        silent=True, console="off", host="", program="", disable_git=True, x_disable_meta=True,
        x_disable_stats=True, x_save_requirements=False,
    )  # fmt: skip
    try:
        with wandb.init(**run, settings=settings) as resumed:
            resumed.summary.update({f"rollout_spec/{name}": value for name, value in added.items()})
            return str(resumed.settings.sync_dir if resumed.offline else resumed.url)
    except wandb.Error as error:
        raise UserError(f"--wandb: {error}") from error
    finally:
        wandb.teardown()  # the end of a run does not wait until wandb's service has written its file


def run_of(source: Path) -> dict[str, Any]:
    """The run that a log is of (see `logs.read_log`), as arguments of `wandb.init`.

    Raises UserError: it is no run of wandb.
    """
    online = ONLINE.fullmatch(str(source))
    if online and not source.exists():
        entity, project, run_id = online.groups()
        return {"entity": entity, "project": project, "id": run_id, "mode": "online", "resume": "must"}
    files = wandb_files(source) if source.is_dir() else [source] if source.suffix == ".wandb" else []
    for record in wandb_records(files[0]) if len({file.name for file in files}) == 1 else ():
        if record.HasField("run"):
            of = {"entity": record.run.entity or None, "project": record.run.project}
            return {**of, "id": record.run.run_id, "mode": "offline", "resume": "allow"}
    fix = "give RUN_ON as its wandb folder or entity/project/run_id"
    raise UserError(f"--wandb: {source}: names no run of wandb; {fix}")
