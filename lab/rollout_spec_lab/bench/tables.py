"""What `bench` measured as tables: title, columns and rows of each, as `report` makes them."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from rollout_spec.report.page import Table
from rollout_spec_lab.bench.drafters import FIGURES

SETTING = ("method", "P", "K", "history")


def drafters_tables(record: dict[str, Any]) -> Iterator[Table]:
    """What `bench drafters` measured: for each trace the drafters, and `sam` over vLLM's suffix."""
    for trace, of_trace in groupby(record["results"], key=lambda row: row["trace"]):
        results = list(of_trace)
        baselines = list(dict.fromkeys(name for row in results for name in row["over"]))
        title = f"{trace}; sam over vLLM's suffix: tokens per step @ draft tokens per step" * bool(baselines)
        yield title or trace, [*SETTING, *FIGURES.values(), *(f"over {name}" for name in baselines)], [
            [*_setting(row), *(f"{row[figure]:.3f}" for figure in FIGURES),
             *(_over(row, name) for name in baselines)]
            for row in results
        ]  # fmt: skip


def _setting(row: dict[str, Any]) -> tuple[str, ...]:
    price, other = row["min_survival"], row["equal_drafts"]
    method = row["method"] if other is None else f"{row['method']} as {other}"
    figures = str(row["num_speculative_tokens"]), str(row["history"])
    return method, "" if price is None else f"{price:.3g}", *figures


def _over(row: dict[str, Any], baseline: str) -> str:
    ratios = row["over"].get(baseline) if row["method"] == "sam" else None
    return "" if ratios is None else f"{ratios[0]:.3f} @ {ratios[1]:.3f}"


def gate_table(record: dict[str, Any]) -> Table:
    columns = ["scenario", "gate / plain", "gate / oracle", "oracle / plain", "full, gate", "full, oracle"]
    found = map(dict.values, record["results"])
    rows = [[name, *(f"{figure:.3f}" for figure in figures)] for name, *figures in found]
    return "Tokens per second; full: the share of steps with a full batch that have drafts", columns, rows


def host_tables(record: dict[str, Any]) -> Iterator[Table]:
    """What `bench host` measured: a row for each number of rows, device and method."""
    first = record["plan"]["methods"][0]
    columns = ["rows", "device", "method", "steps/s", f"/ {first}", "tokens/s", f"/ {first}", "vLLM ms",
               "drafter ms", "drafted", "accepted"]  # fmt: skip
    rows = []
    for row in record["results"]:
        steps, tokens = (row["ratios"][name] for name in ("steps_per_s", "tokens_per_s"))
        acceptance = row["acceptance_rate"]
        rows.append([
            str(row["rows"]), row["step"], row["method"], f"{row['steps_per_s']:.1f}",
            f"{steps['value']:.3f}", f"{row['tokens_per_s']:,.0f}", f"{tokens['value']:.3f}",
            f"{row['vllm_ms']:.2f}", f"{row['drafter_ms']:.2f}", f"{row['draft_tokens_per_step']:.1f}",
            "" if acceptance is None else f"{acceptance:.2f}",
        ])  # fmt: skip
    yield "Steps on a simulated device, and the host's time in one", columns, rows


def verify_tables(record: dict[str, Any]) -> Iterator[Table]:
    names = list(record["cells"][0]["ms"])
    rows = []
    for cell in record["cells"]:
        nums = {name: "" if waits is None else f" ({len(waits)})" for name, waits in cell["waits"].items()}
        figures = (f"{ms:.3f}{nums[name]}" for name, ms in cell["ms"].items())
        rows.append([str(cell["rows"]), str(cell["k"]), *figures])
    yield f"Verification on {record['device']}, ms (waits of the host)", ["rows", "drafts", *names], rows


def native_tables(record: dict[str, Any]) -> Iterator[Table]:
    step, whole, targets = record["step"], record["whole_steps"], record["targets"]
    figures = {
        f"{name} at {size}": figures[name]
        for name in ("us_per_token", "bytes_per_token")
        for size, figures in record["sizes"].items()
    }
    figures |= {name: step[name] for name in ("step_ms", "draft_tokens_per_row", "share_of_rows_drafting")}
    figures |= {name: whole[name] for name in ("median_ms", "p99_ms", "whole_step_p99_over_median")}
    title = f"synthetic text, {record['environment']['cpu']}; step: the index's, {step['rows']} rows; "
    title += f"whole step: the drafter's, {whole['rows']} rows, requests come and go, groups are evicted"
    yield title, ["", "here", "at most"], [
        [name.replace("_", " "), f"{value:.3f}", f"{targets[name]:g}" if name in targets else ""]
        for name, value in figures.items()
    ]  # fmt: skip


def memory_table(record: dict[str, Any]) -> Table:
    rows = [
        ["memory to spare" if row["share"] is None else f"{row['share']:.0%}", str(row["max_index_mb"]),
         f"{row['tokens_per_step']:.2f}", f"{row['of_unlimited']:.3f}"]
        for row in record["results"]
    ]  # fmt: skip
    return "budgets", ["of all texts", "max_index_mb", "tokens per step", "of unlimited"], rows
