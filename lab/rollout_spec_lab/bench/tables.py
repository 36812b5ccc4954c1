"""Tables of what `bench` measured, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from rich.table import Table

from rollout_spec.cli.console import make_table

FIGURES = {
    "tokens/step": "tokens_per_step",
    "drafted/step": "draft_tokens_per_step",
    "acceptance": "acceptance_rate",
    "tail": "tail_tokens_per_step",
}
SETTING = ("method", "P", "K", "history")


def drafters_tables(record: dict[str, Any]) -> Iterator[Table]:
    """Of each trace in what `bench drafters` measured: the drafters, and `sam` over vLLM's suffix."""
    for make in (_figures, _ratios):
        for trace, of_trace in groupby(record["results"], key=lambda row: row["trace"]):
            table = make(trace, list(of_trace))
            if table.row_count:
                yield table


def _setting(row: dict[str, Any]) -> tuple[str, ...]:
    price = row["min_survival"]
    return (
        row["method"] if row["equal_drafts"] is None else f"{row['method']} as {row['equal_drafts']}",
        "" if price is None else f"{price:.3g}",
        str(row["num_speculative_tokens"]),
        str(row["history"]),
    )


def _figures(trace: str, results: list[dict[str, Any]]) -> Table:
    table = make_table(trace, *SETTING, *FIGURES)
    for row in results:
        table.add_row(*_setting(row), *(f"{row[figure]:.3f}" for figure in FIGURES.values()))
    return table


def _ratios(trace: str, results: list[dict[str, Any]]) -> Table:
    """A column for each baseline: tokens per step over its @ draft tokens per step over its."""
    rows = [row for row in results if row["method"] == "sam" and row["over"]]
    baselines = list(dict.fromkeys(name for row in rows for name in row["over"]))
    table = make_table(
        f"{trace}: sam over vLLM's suffix, tokens per step @ draft tokens per step", *SETTING, *baselines
    )
    for row in rows:
        pairs = [row["over"].get(name) for name in baselines]
        cells = ("" if pair is None else f"{pair[0]:.3f} @ {pair[1]:.3f}" for pair in pairs)
        table.add_row(*_setting(row), *cells)
    return table


def host_table(record: dict[str, Any]) -> Table:
    """What `bench host` measured: a row for each number of rows, device and method."""
    first = record["plan"]["methods"][0]
    columns = ("device", "method", "steps/s", f"/ {first}", "tokens/s", f"/ {first}", "vLLM ms", "drafter ms",
               "drafted", "accepted")  # fmt: skip
    table = make_table("Steps on a simulated device, and the host's time in one", "rows", *columns)
    for _, cell in groupby(record["results"], key=lambda row: (row["rows"], row["step"])):
        for row in cell:
            steps, tokens = (row["ratios"][name] for name in ("steps_per_s", "tokens_per_s"))
            acceptance = row["acceptance_rate"]
            table.add_row(
                str(row["rows"]), row["step"], row["method"],
                f"{row['steps_per_s']:.1f}", f"{steps['value']:.3f}", f"{row['tokens_per_s']:,.0f}",
                f"{tokens['value']:.3f}", f"{row['vllm_ms']:.2f}",
                f"{row['drafter_ms']:.2f}", f"{row['draft_tokens_per_step']:.1f}",
                "" if acceptance is None else f"{acceptance:.2f}",
            )  # fmt: skip
        table.add_section()
    return table


def verify_table(record: dict[str, Any]) -> Table:
    """What `bench verify` measured: a row for each cell; the caption says what the comparison found."""
    compared = record["comparison"]
    caption = (
        f"noise against the CPU: {compared['noise_that_differs']} of {compared['words']:,} numbers differ, "
        f"by {compared['noise_largest_ulps']} units in the last place at most"
    )
    for name in ("peaked", "flat"):
        found = compared[name]
        caption += (
            f"; {name} logits: {found['differ_from_cpu']} of {found['tokens']} tokens differ (largest "
            f"shortfall {found['largest_shortfall']:.2g}), alone and in a batch {found['differ_alone']}"
        )
    names = list(record["cells"][0]["ms"])
    table = make_table(
        f"Verification on {record['device']}, ms (waits of the host)",
        "rows",
        "drafts",
        *names,
        caption=caption,
    )
    for cell in record["cells"]:
        shown = (
            f"{ms:.3f}" + ("" if cell["waits"][name] is None else f" ({len(cell['waits'][name])})")
            for name, ms in cell["ms"].items()
        )
        table.add_row(str(cell["rows"]), str(cell["k"]), *shown)
    return table
