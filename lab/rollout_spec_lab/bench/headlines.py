"""What a reader needs of a measurement, in one sentence; a record is what the command prints with --json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def drafters_headline(record: Mapping[str, Any]) -> str:
    """Of `bench drafters`: ours beside the best of the others, on the first trace and at the first K."""
    first = record["results"][0]
    same = [
        result
        for result in record["results"]
        if all(result[name] == first[name] for name in ("trace", "num_speculative_tokens", "history"))
        and result["method"] != "oracle"
        and result["equal_drafts"] is None
    ]
    ours = [result for result in same if result["method"] == "sam"]
    others = [result for result in same if result["method"] != "sam"]
    best = [max(group, key=lambda one: one["tokens_per_step"]) for group in (ours, others) if group]
    found = ", ".join(
        f"{one['method']} gives {one['tokens_per_step']:.2f} tokens per step with "
        f"{one['draft_tokens_per_step']:.2f} draft tokens"
        for one in best or [first]
    )
    return f"{first['trace']}, K = {first['num_speculative_tokens']}: {found}."


def engine_headline(record: Mapping[str, Any]) -> str:
    """Of `bench engine`: each method over the first."""
    first, *others = record["results"]
    if not others:
        return f"{first['method']} gives {first['tokens_per_s']:,.0f} tokens per second."
    ratios = ", ".join(f"{one['method']} {one['ratios']['tokens_per_s']['value']:.2f}" for one in others)
    return f"Times the tokens per second of {first['method']}: {ratios}."


def host_headline(record: Mapping[str, Any]) -> str:
    """Of `bench host`: the steps per second that each method keeps of the first's, at worst and at best."""
    first, *others = record["plan"]["methods"]
    if not others:
        return f"{first} takes {record['results'][0]['host_ms']:.2f} ms of the host for a step."
    kept = []
    for method in others:
        ratios = [
            row["ratios"]["steps_per_s"]["value"] for row in record["results"] if row["method"] == method
        ]
        kept.append(f"{method} {min(ratios):.2f} to {max(ratios):.2f}")
    return f"Times the steps per second of {first}: {', '.join(kept)}."


def native_headline(record: Mapping[str, Any]) -> str:
    """Of `bench native`: what a step takes."""
    step = record["step"]
    return f"A step of {step['rows']} rows takes {step['step_ms']:.2f} ms of one core."
