"""Recorded rollouts: which files, how they are read; a model that drafts there."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_spec.cli.arguments import add_options, path
from rollout_spec.config import MAX_SPECULATIVE_TOKENS, UserError

if TYPE_CHECKING:
    from rollout_spec.trace import Rollout

MODEL_ACCEPTANCE = (  # for `add_options`; `with_model` reads it
    "--model-acceptance", str, "A,A,...", None,
    "simulate a draft model beside the index: how often its first, second, ... draft token is right where "
    "those before it are",
)  # fmt: skip


def add_rollouts_arguments(group: argparse._ActionsContainer) -> None:
    """Add the files, `--tokenizer` and `--columns`, which `read` takes."""
    group.add_argument(
        "traces", type=path, nargs="+", metavar="FILE_OR_FOLDER",
        help="rollouts: recordings, verl's dumps, or rows of prompts and responses",
    )  # fmt: skip
    add_options(
        group,
        ("--tokenizer", path, "DIR", None,
         "the policy's Hugging Face folder, or its tokenizer.json: needed where rollouts are texts"),
        ("--columns", str, "ROLE=NAME,...", None,
         "which fields are the prompt, response, group and step, where their names do not say it "
         "(step=: there is none)"),
    )  # fmt: skip


def read(args: argparse.Namespace, paths: Sequence[Path], limit: int | None = None) -> Iterator[Rollout]:
    """The rollouts of `add_rollouts_arguments`, or of some of its files, or only the first."""
    from rollout_spec.predict.rollout_files import read_rollouts
    from rollout_spec.predict.row_fields import NAMES

    columns = {}
    for pair in filter(None, (args.columns or "").split(",")):
        role, sign, columns[role] = pair.partition("=")
        if not sign or role not in NAMES:
            raise UserError(f"--columns {pair}: must be {', '.join(f'{role}=NAME' for role in NAMES)}")
    return read_rollouts(paths, args.tokenizer, columns, limit)


def check_steps(lines: Iterable[Rollout], trace: Path) -> None:
    """Refuse rollouts without a step: the prefill gives the first token of a response."""
    if all(len(response) < 2 for line in lines for response in line.responses):
        raise UserError(f"{trace}: no second token in any response, so there is no step to draft in")


def with_model(args: argparse.Namespace, lines: Iterable[Rollout]) -> Iterable[Rollout]:
    """The rollouts with the drafts of the simulated model, or as they are."""
    if args.model_acceptance is None:
        return lines
    from rollout_spec.predict.simulated_drafts import with_simulated_drafts

    try:
        acceptance = [float(part) for part in args.model_acceptance.split(",")]
    except ValueError:
        acceptance = []
    if not 0 < len(acceptance) <= MAX_SPECULATIVE_TOKENS or not all(0 <= share <= 1 for share in acceptance):
        wanted = f"numbers from 0 to 1, separated by commas, at most {MAX_SPECULATIVE_TOKENS}"
        raise UserError(f"--model-acceptance {args.model_acceptance}: must be {wanted}")
    return with_simulated_drafts(lines, acceptance)
