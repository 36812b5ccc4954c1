"""The methods that several commands compare: `--methods`, and the options of these."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout_spec.cli import models
from rollout_spec.cli.arguments import add_options, add_spec_argument, number, spec_options
from rollout_spec.config import SpecConfig, UserError
from rollout_spec_lab.bench.drafters import MissingError
from rollout_spec_lab.bench.engine import Method, require

NO_MODEL = "no model drafts here"


def add_compared_arguments(
    parser: argparse.ArgumentParser, known: str, methods: Sequence[str], models: str = ""
) -> argparse._ArgumentGroup:
    """Add the methods, by default these, and their options, which `compared` reads; returns their group.

    known: the help of --methods says which there are; models: how one that drafts is given, if it is.
    """
    refused = {
        "num_speculative_tokens": "--num-speculative-tokens sets it",
        "model_tokens": models or NO_MODEL,
    }
    compared = parser.add_argument_group("what is compared")
    compared.set_defaults(default_methods=methods)
    default = f"({','.join(methods)}, without what is not installed)"
    add_options(
        compared,
        ("--methods", str, "M,M", None, f"each is compared with the first: {known} {default}"),
        ("--num-speculative-tokens", number(int, 1), "K", None,
         "of every method (each method's own default: ngram 8, suffix what vLLM takes, "
         f"sam {SpecConfig.num_speculative_tokens})"),
    )  # fmt: skip
    add_spec_argument(compared, "an option of rollout.spec for sam; as often as needed", refused)
    add_options(compared, ("--repeats", number(int, 1), "N", 3, "turns of each method"))
    return compared


def compared(
    args: argparse.Namespace, command: str, drafting: Callable[[str], str] = str
) -> tuple[list[str], dict[str, Any]]:
    """`--methods`, as `checked_methods` reads them, and `--spec` with `--num-speculative-tokens`."""
    spec = spec_options(args)
    if args.num_speculative_tokens is not None:
        spec["num_speculative_tokens"] = args.num_speculative_tokens
    methods = checked_methods(command, args.default_methods, args.methods, spec, drafting)
    if NO_MODEL in args.refused.values() and any(Method(drafting(label)).has_model for label in methods):
        raise UserError(f"--methods {args.methods}: {NO_MODEL}")
    return methods, spec


def checked_methods(
    command: str, methods: Sequence[str], given: str | None, spec: Mapping[str, Any],
    drafting: Callable[[str], str] = str,
) -> list[str]:  # fmt: skip
    """`--methods`, or those of `methods` that are installed; `drafting`: of a label what `Method` knows.

    Raises UserError: there is no such method, one is named twice, or misses a package.
    """
    labels = installed(command, methods, require) if given is None else given.split(",")
    if len(set(labels)) < len(labels):
        raise UserError(f"--methods {given}: a method is named twice")
    for method in map(Method, map(drafting, labels)):
        if method.is_ours:
            method.options(spec)
        require(method.name)
    return labels


def installed(command: str, methods: Sequence[str], require: Callable[[str], None]) -> list[str]:
    """The methods whose packages are installed: `require` raises no MissingError. A line on standard error
    says why others are left out."""
    found: list[str] = []
    left_out: dict[str, list[str]] = {}
    for method in methods:
        try:
            require(method)
            found.append(method)
        except MissingError as error:
            left_out.setdefault(" ".join(str(error).split()), []).append(method)
    for reason, names in left_out.items():
        print(f"rollout-spec-lab {command}: without {', '.join(names)}: {reason}", file=sys.stderr)
    return found


def needed_model_drafter(text: str | None, labels: Sequence[str], most: int) -> dict[str, Any] | None:
    """`--model-drafter` for `--methods`, as `model_drafter` reads it; most: draft tokens of a row.

    Raises UserError: it is no drafter; a method needs one; nothing uses it.
    """
    drafter = models.model_drafter(text, most) if text else None
    using = [label for label in labels if Method(label).has_model]
    if using and drafter is None:
        raise UserError(f"--methods {','.join(labels)}: {using[0]} needs --model-drafter")
    if drafter and not using:
        raise UserError("--model-drafter: no method uses it: name model or sam+model in --methods")
    return drafter
