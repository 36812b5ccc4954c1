"""Step times of a model on a device, predicted: `--model-config`, `--gpu` and `--tp`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rollout_spec.cli.arguments import MAX_ENGINES, add_options, number, path
from rollout_spec.config import UserError

if TYPE_CHECKING:
    from rollout_spec.predict.roofline import Roofline


def add_device_arguments(group: Any, model_group: Any = None) -> None:
    """Add `--model-config`, to `model_group` if it is another, `--gpu` and `--tp`: what `roofline` takes."""
    (model_group or group).add_argument(
        "--model-config", type=path, metavar="FILE",
        help="the policy's config.json: with --gpu, step times are predicted by a roofline",
    )  # fmt: skip
    add_options(
        group,
        ("--gpu", str, "NAME", None, "h100, h200, a100 or 910b"),
        ("--tp", number(int, 1, MAX_ENGINES), "N", None, "tensor-parallel devices of an engine (1)"),
    )


def roofline(args: argparse.Namespace, **further: Any) -> Roofline:
    """The step times of `add_device_arguments`; `further`: fields of a Roofline."""
    from rollout_spec.predict.model import Model
    from rollout_spec.predict.roofline import DEVICES, Roofline

    if args.model_config is None:
        raise UserError("--model-config: a prediction needs the policy's config.json")
    if args.gpu not in DEVICES:
        name = "--gpu" if args.gpu is None else f"--gpu {args.gpu}"
        raise UserError(f"{name}: must be one of {', '.join(DEVICES)}")
    return Roofline(Model.read(args.model_config), DEVICES[args.gpu], args.tp or 1, **further)
