"""What drafts would give somebody's rollouts, as sentences, tables, a picture and a page. `record` is what
`replay --json` prints; `headline` makes the headline that is in it."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout_spec.files import as_json, write_files
from rollout_spec.report.page import COLOURS, Table, png, render

MAX_ROWS = 12  # that a table shows
MAX_SIBLINGS = 64  # more are hardly of one prompt
_COLUMNS = ("responses", "tokens", "tokens per step", "accepted")


def headline(record: Mapping[str, Any]) -> str:
    """What a reader needs, in one sentence."""
    tokens = f"{record['tokens_per_step']:.2f}"
    if tokens == "1.00":
        return "Drafts would change nothing: a step of a response gives 1.00 tokens, as plain decoding does."
    gain = f"Drafts would give {tokens} tokens per step of a response, plain decoding 1."
    rows, share = record["batch"]["tail_rows"], f"{record['tail_share']:.0%}"
    if share == "0%":
        return f"{gain} More than {rows} requests run in almost every step; drafts help less there."
    return f"{gain} At most {rows} requests run in {share} of an engine's steps; drafts help most there."


def sentences(record: Mapping[str, Any]) -> list[str]:
    """The sentences after `headline`."""
    lengths, batch = record["lengths"], record["batch"]
    gain, in_tail = f"{record['tokens_per_step']:.2f} tokens per step", record["tail_tokens_per_step"]
    if in_tail > 0:
        gain += f"; {in_tail:.2f} near the end of a prompt, when a quarter of its responses are left"
    engines = "one engine" if batch["replicas"] == 1 else f"{batch['replicas']} engines"
    return [
        f"{gain}. {record['acceptance_rate']:.0%} of the draft tokens are accepted.",
        f"Groups: {record['num_groups']:,}, responses: {record['num_responses']:,}.{_doubt(record)}",
        f"Half of the responses have at most {lengths['median']:,.0f} tokens, the longest tenth has "
        f"{lengths['longest_tenth']:,.0f} to {lengths['longest']:,}.",
        f"On {engines} with up to {batch['max_num_seqs']:,} requests at a time, {record['tail_share']:.0%} "
        f"of the steps without drafts are the tail: at most {batch['tail_rows']} requests run.",
        "These are counts; `rollout-spec simulate` predicts time.",
    ]


def _doubt(record: Mapping[str, Any]) -> str:
    """Why the groups may be wrong, and the figures with them; empty if nothing speaks for that."""
    if record["num_responses"] < 1.1 * record["num_groups"]:
        return (
            " Almost no prompt has two responses, so this leaves out drafts from siblings, which give most "
            "of the gain in a rollout."
        )
    if record["num_groups"] == 1 and record["num_responses"] > MAX_SIBLINGS:
        return " Where prompts of one text differ, by their images, --columns group=NAME tells them apart."
    return ""


def tables(record: Mapping[str, Any]) -> Iterator[Table]:
    """Title, columns and rows of each table."""
    if len(record["by_step"]) > 1:
        rows = [[str(row["step"]), *_cells(row)] for row in _some(record["by_step"])]
        yield "By training step", ["step", *_COLUMNS], rows
    rows = [[f"{row['from']:,} to {row['to']:,}", *_cells(row)] for row in record["by_length"]]
    yield "By length of the response", ["tokens", *_COLUMNS], rows


def _some(rows: Sequence[Any]) -> list[Any]:
    """The first, the last, and as many between them as a table holds."""
    places = range(min(len(rows), MAX_ROWS))
    return [rows[round(i * (len(rows) - 1) / max(1, len(places) - 1))] for i in places]


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        f"{row['num_responses']:,}", f"{row['num_tokens']:,}", f"{row['tokens_per_step']:.2f}",
        f"{row['acceptance_rate']:.0%}",
    ]  # fmt: skip


def write_replay(record: Mapping[str, Any], facts: Mapping[str, str], folder: Path) -> Path:
    """Write replay.json, replay.png and replay.html, and return the page's path."""
    picture = draw(record)
    alt = "Tokens per step by training step, and running requests"
    text = [*record["doubts"], *sentences(record)]
    page = render("replay", record["headline"], text, tables(record), facts, picture, alt)
    write_files(folder, {"replay.json": as_json(record), "replay.png": picture, "replay.html": page})
    return folder / "replay.html"


def draw(record: Mapping[str, Any]) -> bytes:
    """A PNG: what drafts give over the training steps, where there are several; and how a batch runs out."""
    from matplotlib.figure import Figure

    panels = ([_draw_steps] if len(record["by_step"]) > 1 else []) + [_draw_running]
    figure = Figure(figsize=(4.8, 2.8 * len(panels)), layout="constrained")  # below one another, for phones
    for axes, panel in zip(figure.subplots(len(panels), 1, squeeze=False).flat, panels, strict=True):
        panel(axes, record)
        axes.tick_params(labelsize=8, length=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(9)
    return png(figure, dpi=170)


def _draw_steps(axes: Any, record: Mapping[str, Any]) -> None:
    steps, values = zip(*((row["step"], row["tokens_per_step"]) for row in record["by_step"]), strict=True)
    without, with_drafts = COLOURS
    axes.plot(steps, values, color=with_drafts, marker=".")
    axes.axhline(1, color=without, linewidth=0.8)
    axes.set(
        title="By training step (1: no drafts)", xlabel="training step", ylabel="tokens per step",
        ylim=(0, 1.1 * max(1.0, *values)),
    )  # fmt: skip
    axes.xaxis.get_major_locator().set_params(integer=True)


def _draw_running(axes: Any, record: Mapping[str, Any]) -> None:
    running, rows = record["running"], record["batch"]["tail_rows"]
    axes.axvspan(sum(number > rows for number in running), len(running), color="#cfe0f7")
    axes.stairs(running, color="#1b2a3d")
    share, of_all = np.mean(np.array(running) <= rows), record["tail_share"]
    title = (
        "The longest rollout: running requests, without drafts\n"
        f"(shaded: at most {rows}, {share:.0%} of its steps; of all rollouts' {of_all:.0%})"
    )
    axes.set(title=title, xlabel="engine step", ylabel="requests", ylim=(0, None))
