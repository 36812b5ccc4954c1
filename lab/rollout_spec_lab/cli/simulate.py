"""What the laboratory adds to `rollout-spec simulate`: step times from a device's roofline.

`pyproject.toml` gives it to the product, as an entry point.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rollout_spec.cli import rollouts
from rollout_spec.cli.arguments import MAX_ENGINES, add_options, number
from rollout_spec.config import SpecConfig, UserError
from rollout_spec.recurrent import DEFAULT_RECURRENT_TOKENS, check_settings
from rollout_spec_lab.cli import devices

if TYPE_CHECKING:
    from rollout_spec.predict.simulate import Simulated
    from rollout_spec.trace import Rollout
    from rollout_spec_lab.roofline.roofline import Roofline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("in place of --step-times: a device that you do not have")
    add_options(
        group,
        *devices.DEVICE,
        ("--dp", number(int, 1, MAX_ENGINES), "N", 1,
         "data-parallel ranks of an engine: they share the experts and step together"),
        ("--gpu-memory-utilization", number(float, 0.0, 1.0, above=True), "SHARE", 0.9,
         "share of the device's memory for weights and KV cache"),
        ("--longest-response", number(int, 1), "TOKENS", None,
         "stretch all texts, so that the longest response has TOKENS tokens"),
    )  # fmt: skip
    help_ = "each device holds whole experts, as always with --dp"
    group.add_argument("--expert-parallel", action="store_true", help=help_)
    help_ = "vLLM's model runner: with mrv2 only steps with drafts wait for the host"
    group.add_argument("--runner", choices=("mrv1", "mrv2"), default="mrv2", help=help_)
    add_options(group, rollouts.MODEL_ACCEPTANCE)


def simulated(args: argparse.Namespace, read_lines: Callable[[], list[Rollout]]) -> Simulated | None:
    """What is simulated where a device is named; else None."""
    from rollout_spec.predict.engine import SimulatedModel
    from rollout_spec.predict.simulate import Simulated

    named = (args.model_config, args.gpu, args.model_acceptance, args.longest_response, args.expert_parallel)
    if not any(named) and args.tp == args.dp == 1:
        return None
    if args.step_times is not None:
        raise UserError("--step-times: with --model-config and --gpu step times are predicted")
    if (most := max(args.replicas)) * args.dp > MAX_ENGINES:
        raise UserError(f"--replicas {most} --dp {args.dp}: at most {MAX_ENGINES} ranks in all")
    lines = list(rollouts.with_model(args, read_lines()))
    times = _times(args, lines)
    ks = _most_draft_tokens(args.num_speculative_tokens, times)
    _check_cache(args, lines, times, times.kv_tokens - max(map(times.row_tokens, ks)))
    num_tokens = max((said.tokens.shape[1] for line in lines for said in line.model_drafts), default=0)
    if num_tokens and args.dp > 1:
        raise UserError(f"--dp {args.dp}: engines refuse a draft model on ranks that share experts; use --tp")
    model = SimulatedModel(num_tokens, times.head) if num_tokens else None
    return Simulated(lines, times, ks, model, args.dp)


def _times(args: argparse.Namespace, lines: Sequence[Rollout]) -> Roofline:
    from rollout_spec_lab.roofline.roofline import HOSTS

    longest = max((len(response) for line in lines for response in line.responses), default=0)
    return devices.roofline(
        args.model_config, args.gpu, args.tp, data_parallel=args.dp, expert_parallel=args.expert_parallel,
        memory_share=args.gpu_memory_utilization, host=HOSTS[args.runner],
        stretch=args.longest_response / longest if args.longest_response and longest else 1.0,
    )  # fmt: skip


def _most_draft_tokens(given: Sequence[int], times: Roofline) -> Sequence[int]:
    """`--num-speculative-tokens`, or the default. Raises UserError: recurrent layers cannot have as many."""
    has_states = times.model.states is not None
    for k in given if has_states else ():
        check_settings(SpecConfig(num_speculative_tokens=k), None)
    return given or [DEFAULT_RECURRENT_TOKENS if has_states else SpecConfig.num_speculative_tokens]


def _check_cache(args: argparse.Namespace, lines: Sequence[Rollout], times: Roofline, room: float) -> None:
    """Refuse a KV cache that cannot hold one response to its end, as vLLM does when it starts."""
    from rollout_spec.predict.load import requests_of

    requests = requests_of(lines, max(args.group_size, default=None))
    longest = max((turn.num_tokens for request in requests for turn in request.turns), default=0)
    if longest > room:
        raise UserError(
            f"the KV cache of an engine holds {times.stretch * room:,.0f} tokens, the longest prompt with "
            f"its response has {times.stretch * longest:,.0f}: take more devices (--tp) or a smaller "
            "--longest-response"
        )
