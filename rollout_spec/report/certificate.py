"""A certificate as sentences, tables and a page; `record` is what `certify --json` prints."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollout_spec.files import as_json, write_files
from rollout_spec.report.page import Table, render

# What each column of a table shows, and how.
_CONFIGURATIONS = {
    "K": ("num_speculative_tokens", "{}"),
    "threshold": ("batch_threshold", "{}"),
    "group": ("group_size", "{}"),
    "temperature": ("temperature", "{}"),
    "tokens compared": ("tokens_compared", "{:,}"),
    "identical": ("tokens_identical", "{:,}"),
    "drafts": ("num_drafts", "{:,}"),
    "draft tokens": ("num_draft_tokens", "{:,}"),
    "rejected": ("num_rejected_tokens", "{:,}"),
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
    write_files(folder, {"certificate.json": as_json(record), "certificate.html": render_html(record)})


def tables(record: Mapping[str, Any]) -> Iterator[Table]:
    """Title, columns and rows of each table that has rows."""
    for title, name, columns in (
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
    differ, unexplained = len(record["differences"]), record["unexplained_differences"]
    differences = "No response differs."
    if differ:
        explained = f"Rounding explains {differ - unexplained} of them: {_tolerance(record)}"
        differences = f"{differ} responses differ. {explained}. It does not explain {unexplained}."
    text = [
        f"{identical:,} of {compared:,} tokens are the same with drafts and without. A response counts up to "
        "its first difference.",
        differences,
        f"{record['num_draft_tokens']:,} tokens were drafted, and {record['num_rejected_tokens']:,} of them "
        f"were rejected. Log-probabilities differ by {record['max_logprob_difference']:.1e} at most and by "
        f"{record['mean_logprob_difference']:.1e} on average.",
    ]
    if record["tolerance"] == 0:
        text.append(
            "VLLM_BATCH_INVARIANT=1 promises the same bits in any batch. So one token or log-probability "
            "that differs fails."
        )
    runner, age = record["model_runner"], {"MRV1": "older", "MRV2": "newer"}[record["model_runner"]]
    text.append(f"All engines here had {runner}, the {age} of vLLM's model runners, as vLLM takes it here.")
    if record["untested"]:
        text.append(f"Not tested, and not in these counts: {'; '.join(record['untested'])}.")
    return text


def _tolerance(record: Mapping[str, Any]) -> str:
    if record["tolerance"] is not None:
        return f"the two tokens' scores are within {record['tolerance']:g} of each other"
    return (
        "the two tokens' scores are within 2 x the epsilon of "
        f"{record['plan']['dtype']} x the largest |logit| / T at that place"
    )


def facts(record: Mapping[str, Any]) -> dict[str, str]:
    """With what the record was made, for the page."""
    listed = {
        name.replace("_", " "): ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        for name, value in record["plan"].items()
        if name not in ("engine", "tolerance")
    }
    return listed | {"explained by rounding": _tolerance(record)} | environment_facts(record["environment"])


def environment_facts(environment: Mapping[str, Any]) -> dict[str, str]:
    """Versions, machine and date, of a record's environment."""
    others = dict(environment)
    device, cpu, num_cores, date = (others.pop(name) for name in ("device", "cpu", "num_cores", "date"))
    return {
        "versions": ", ".join(f"{name} {version}" for name, version in others.items()),
        "machine": f"{device}, {cpu}, {num_cores} cores",
        "date": date,
    }


def render_html(record: Mapping[str, Any]) -> str:
    return render("certify", record["verdict"], sentences(record), tables(record), facts(record))
