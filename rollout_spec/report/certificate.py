"""A certificate as sentences, tables and a page; `record` is what `certify --json` prints."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

# Of each table: what a column shows, and how.
_COUNTS = {
    "tokens compared": ("tokens_compared", "{:,}"),
    "identical": ("tokens_identical", "{:,}"),
    "drafts": ("num_drafts", "{:,}"),
    "draft tokens": ("num_draft_tokens", "{:,}"),
    "rejected": ("num_rejected_tokens", "{:,}"),
}
_TEMPERATURES = {
    "temperature": ("temperature", "{}"),
    "reference tokens": ("reference_tokens", "{:,}"),
} | _COUNTS
_CONFIGURATIONS = {
    "K": ("num_speculative_tokens", "{}"),
    "threshold": ("batch_threshold", "{}"),
    "group": ("group_size", "{}"),
    "temperature": ("temperature", "{}"),
    **_COUNTS,
    "per step": ("tokens_per_step", "{:.2f}"),
}
_DIFFERENCES = {
    "prompt": ("prompt", "{}"),
    "sample": ("number", "{}"),
    "temperature": ("temperature", "{}"),
    "K": ("num_speculative_tokens", "{}"),
    "threshold": ("batch_threshold", "{}"),
    "position": ("position", "{}"),
    "gap": ("logit_gap", "{:.1e}"),
    "tolerance": ("tolerance", "{:.1e}"),
    "explained": ("explained", "{}"),
}


def write_certificate(record: Mapping[str, Any], folder: Path) -> None:
    """certificate.json and certificate.html."""
    (folder / "certificate.json").write_text(json.dumps(record, indent=2, allow_nan=False) + "\n")
    (folder / "certificate.html").write_text(render_html(record))


def tables(record: Mapping[str, Any]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Title, columns and rows of each table that has rows."""
    for title, name, columns in (
        ("By temperature", "temperatures", _TEMPERATURES),
        ("By configuration", "configurations", _CONFIGURATIONS),
        ("First differences", "differences", _DIFFERENCES),
    ):
        if record[name]:
            rows = [[_cell(row[key], shape) for key, shape in columns.values()] for row in record[name]]
            yield title, list(columns), rows


def _cell(value: Any, shape: str) -> str:
    """JSON has null for a gap that is not finite."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "inf" if value is None else shape.format(value)


def sentences(record: Mapping[str, Any]) -> list[str]:
    compared, identical = record["tokens_compared"], record["tokens_identical"]
    text = [
        f"{identical:,} of {compared:,} tokens are the same with drafts and without; a response is compared "
        f"up to its first difference. {record['reference_tokens']:,} different tokens of the run without "
        "drafts were compared, each in one configuration or several.",
        f"{len(record['differences'])} responses differ, untested configurations included; "
        f"{record['unexplained_differences']} of the differences are not explained by numerics: "
        f"{_tolerance(record)}.",
        f"{record['num_draft_tokens']:,} tokens were drafted, {record['num_rejected_tokens']:,} of them "
        f"rejected. Log-probabilities differ by {record['max_logprob_difference']:.1e} at most, "
        f"{record['mean_logprob_difference']:.1e} on average.",
    ]
    if record["untested"]:
        text.append(f"Not tested, and not counted: {'; '.join(record['untested'])}.")
    return [*text, _distribution(record["distribution"], record["plan"])]


def _tolerance(record: Mapping[str, Any]) -> str:
    if record["tolerance"] is not None:
        return f"scores within {record['tolerance']:g} of each other"
    return f"scores within 2 x {record['plan']['dtype']}'s epsilon x the largest |logit| / T there"


def _distribution(distribution: dict[str, Any] | None, plan: dict[str, Any]) -> str:
    if distribution is None:
        why = "nothing is random at temperature 0" if plan["distribution_samples"] else "0 samples"
        return f"verify=standard: its distribution was not tested ({why})."
    return (
        f"verify=standard: the smallest of {distribution['num_tests']} p-values over "
        f"{distribution['num_samples']:,} samples at temperature {distribution['temperature']:g} is "
        f"{distribution['smallest_p_value']:.2g}; false-alarm rate {distribution['false_alarm_rate']:g}: "
        f"{'passed' if distribution['passed'] else 'failed'}."
    )


def facts(record: Mapping[str, Any]) -> dict[str, str]:
    """What the page says about the run besides its numbers."""
    listed = {
        name.replace("_", " "): ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        for name, value in record["plan"].items()
        if name not in ("engine", "tolerance")
    }
    return listed | {"explained by numerics": _tolerance(record)} | where(record["environment"])


def where(environment: Mapping[str, Any]) -> dict[str, str]:
    """The same of a record's environment."""
    others = dict(environment)
    device, cpu, num_cores, date = (others.pop(name) for name in ("device", "cpu", "num_cores", "date"))
    return {
        "versions": ", ".join(f"{name} {version}" for name, version in others.items()),
        "machine": f"{device}, {cpu}, {num_cores} cores",
        "date": date,
    }


def render_html(record: Mapping[str, Any]) -> str:
    """The page; everything it shows is inside it."""
    return render("certify", record["verdict"], sentences(record), tables(record), facts(record))


def render(
    command: str,
    verdict: str,
    sentences: Iterable[str],
    tables: Iterable[tuple[str, list[str], list[list[str]]]],
    facts: Mapping[str, str],
    picture: bytes | None = None,
    alt: str = "Running requests and drafting over one rollout, by method",
) -> str:
    """A command's record as a page: its verdict, what it found, and of what.

    Args:
        picture: a PNG.
        alt: what it shows.
    """
    from jinja2 import Environment

    template = resources.files("rollout_spec.report").joinpath("record.html.j2").read_text()
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template)
    return page.render(
        command=command, verdict=verdict, sentences=sentences, tables=tables, facts=facts, alt=alt,
        picture=picture and base64.b64encode(picture).decode(),
    )  # fmt: skip
