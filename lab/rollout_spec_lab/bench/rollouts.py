"""Rollouts in real engines as tables, files and a picture; `record` is what `bench engine --json` prints."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout_spec.files import as_json, write_files
from rollout_spec.report.page import Table, png
from rollout_spec.trace import to_line, trace_file
from rollout_spec_lab.bench.load import Load

_FIGURES = {  # of the table: what is shown of a result, and how
    "seconds": ("makespan_s", "{:.1f}"),
    "tokens/s": ("tokens_per_s", "{:.0f}"),
    "front": ("front_tokens_per_s", "{:.0f}"),
    "tail": ("tail_tokens_per_s", "{:.0f}"),
    "accepted": ("acceptance_rate", "{:.1%}"),
    "per step": ("tokens_per_step", "{:.2f}"),
    "CPU, s": ("draft_cpu_s", "{:.2f}"),
}
_TITLES = {  # of methods in the picture
    "off": "off, plain vLLM",
    "keyed": "keyed, our random numbers without drafts",
    "sam": "sam, our drafts",
    "suffix": "suffix, vLLM's own drafter",
}


def write_rollouts(
    record: Mapping[str, Any], served: Mapping[str, Sequence[Mapping[str, Any]]], load: Load, folder: Path
) -> None:
    """engine.json, timelines.json, engine.png, and the first method's rollouts-*.jsonl for `simulate`."""
    timelines = {method: [one["timeline"] for one in repeats] for method, repeats in served.items()}
    files: dict[str, bytes | str] = {
        "engine.json": as_json(record),
        "timelines.json": json.dumps(timelines) + "\n",
    }
    first = {method: lines[0] for method, lines in timelines.items()}
    with contextlib.suppress(ModuleNotFoundError):  # a machine without matplotlib gets no picture
        files["engine.png"] = _plot(first, record["load"]["tail_threshold"])
    for repeat, one in enumerate(next(iter(served.values()))):
        files[trace_file(folder, repeat).name] = "".join(
            to_line(
                line.group, None, line.prompt_token_ids.tolist(), [each.tolist() for each in line.responses]
            )
            for line in load.lines(repeat, one["responses"])
        )
    write_files(folder, files)


def _plot(timelines: dict[str, dict[str, list]], threshold: int) -> bytes:
    """A PNG of one repeat's timelines: the running requests, shaded where draft tokens were verified."""
    from matplotlib.figure import Figure  # without pyplot, so no display and no global state

    figure = Figure(figsize=(5.5, 1.5 * len(timelines) + 0.6))  # its text can be read on a phone
    axes = figure.subplots(len(timelines), 1, sharex=True, sharey=True, squeeze=False)
    for (method, columns), axis in zip(timelines.items(), axes[:, 0], strict=True):
        ends = np.cumsum(columns["seconds"])
        edges = np.concatenate([[0.0], ends])
        running = np.array(columns["num_running"])
        drafted = np.array(columns["num_draft_tokens"]) > 0
        axis.stairs(np.where(drafted, running, 0), edges, fill=True, color="#9dc3f2", label="drafts verified")
        axis.stairs(running, edges, color="#1b2a3d", linewidth=1.0, label="running requests")
        axis.axhline(threshold, color="#c0504d", linewidth=0.8, linestyle="--", label="tail below")
        tokens = sum(columns["num_tokens"])
        title = f"{_TITLES.get(method, method)}: {ends[-1]:.1f} s, {tokens / ends[-1]:.0f} tokens/s"
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_ylabel("requests")
    axes[0, 0].legend(fontsize=8, loc="upper right")
    axes[-1, 0].set_xlabel("time (s)")
    figure.tight_layout()
    return png(figure, 150)


def tables(record: Mapping[str, Any]) -> Iterator[Table]:
    """The figures, the ratios to the first method, of three or more those of every pair, and predictions."""
    results, load = record["results"], record["load"]
    first, *others = (result["method"] for result in results)
    title = (
        f"{load['num_requests']} responses to {load['num_prompts']} prompts, {load['max_num_seqs']} at a "
        f"time, {load['repeats']} repeats; tail: after the last step with more than "
        f"{load['tail_threshold']} running requests; CPU: drafting"
    )
    yield title, ["method", *_FIGURES], [
        [result["method"], *(_cell(result[name], shape) for name, shape in _FIGURES.values())]
        for result in results
    ]  # fmt: skip
    yield f"times {first}, with 95 % intervals", ["method", "tokens/s", "front", "tail"], [
        [result["method"], *map(ratio, result["ratios"].values())] for result in results
    ]  # fmt: skip
    if len(others) > 1:
        title = "tokens/s of a row's method over a column's, with 95 % intervals"
        yield title, ["method", *others], [
            [result["method"], *(ratio(result["tokens_per_s_over"].get(other)) for other in others)]
            for result in results
        ]  # fmt: skip
    title = "tokens/s, measured and as `simulate` predicts them"
    predicted = [
        (result, [result["tokens_per_s"], *result["predicted_tokens_per_s"].values()])
        for result in results
        if "predicted_tokens_per_s" in result
    ]
    yield title, ["method", "measured", "these step times", "roofline"], [
        [result["method"], *(_cell(speed, "{:.0f}") for speed in speeds)] for result, speeds in predicted
    ]  # fmt: skip


def _cell(value: float | None, shape: str) -> str:
    return "–" if value is None else shape.format(value)


def ratio(found: Mapping[str, Any] | None, shape: str = "{:.3f}") -> str:
    """A ratio with its interval, if it has one; nothing of a method over itself."""
    if found is None:
        return ""
    value, low, high = (_cell(number, shape) for number in (found["value"], *found["ci95"]))
    return value if found["ci95"][0] is None else f"{value} ({low} to {high})"
