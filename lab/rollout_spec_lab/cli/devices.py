"""What several commands take of a device that is not here, and the step times that follow from it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_spec.cli.arguments import number, path
from rollout_spec.config import UserError

if TYPE_CHECKING:
    from rollout_spec_lab.roofline.roofline import Roofline

# Options for `add_options`.
GPU = ("--gpu", str, "NAME", None, "predict also with its roofline: h100, h200, a100 or 910b")
DEVICE = (  # of `roofline`
    ("--model-config", path, "FILE", None,
     "the policy's config.json: with --gpu, step times are predicted by a roofline"),
    ("--gpu", str, "NAME", None, "h100, h200, a100 or 910b"),
    ("--tp", number(int, 1), "N", 1, "tensor-parallel devices of an engine"),
)  # fmt: skip


def roofline(config: Path | None, gpu: str | None, tp: int = 1, **further: Any) -> Roofline:
    """The step times of `DEVICE`; `further`: fields of a Roofline."""
    from rollout_spec_lab.roofline.model import Model
    from rollout_spec_lab.roofline.roofline import DEVICES, Roofline

    if config is None:
        raise UserError("--model-config: a prediction needs the policy's config.json")
    if gpu is None or gpu not in DEVICES:
        raise UserError(f"--gpu{f' {gpu}' if gpu else ''}: must be one of {', '.join(DEVICES)}")
    return Roofline(Model.read(config), DEVICES[gpu], tp, **further)


def rooflines(config: Path | None, gpu: str | None) -> dict[str, Roofline]:
    """A device's step times by model runner, for `engine.predict`; none where no device is named."""
    from rollout_spec_lab.roofline.roofline import HOSTS

    hosts = {} if gpu is None else HOSTS
    return {runner.upper(): roofline(config, gpu, host=host) for runner, host in hosts.items()}
