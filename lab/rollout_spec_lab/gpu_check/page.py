"""What `gpu-check` found as sentences, tables and a page; `record` is what its `--json` prints."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout_spec.files import as_json, write_files
from rollout_spec.report.certificate import environment_facts
from rollout_spec.report.certificate import sentences as of_certificate
from rollout_spec.report.page import Table, render
from rollout_spec_lab.bench import rollouts, waits
from rollout_spec_lab.bench.verify import sentences as verified
from rollout_spec_lab.gpu_check import ON_MRV2

FILES = {"json": "gpu-check.json", "html": "index.html"}
NAMES = {"sam": "rollout_spec", "model": "the model's drafts", "sam+model": "rollout_spec with the model"}
RIVALS = {"sam": ("suffix", "ngram"), "sam+model": ("sam", "model")}
PREDICTIONS = {"step_times": "these step times", "roofline": "the roofline"}
GROWTH = 1.25  # of a step's time, up to which its tokens are called cheap
_ratio = functools.partial(rollouts.ratio, shape="{:.2f}")


def write_check(record: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    """Write gpu-check.json and index.html, with the picture of the rollouts if `folder` has it."""
    paths = {kind: folder / name for kind, name in FILES.items()}
    picture = folder / "engine.png"
    page = render(
        "gpu-check", "What drafting does on this machine", record["verdict"], tables(record),
        facts(record), picture.read_bytes() if record["rollouts"] and picture.is_file() else None,
        "Running requests and drafting over one rollout, by method",
    )  # fmt: skip
    write_files(folder, {FILES["json"]: as_json(record), FILES["html"]: page})
    return paths


def verdict(record: Mapping[str, Any]) -> list[str]:
    """What was found, a sentence or two of each part; what was not, and why."""
    says: dict[str, Callable[[Mapping[str, Any]], Iterable[str]]] = {
        "doctor": _doctor, "latency": _latency, "start": _start, "verify": verified,
        "certify": lambda found: _certify(found, record["plan"]["batch_invariant"]),
        "rollouts": _rollouts, "steps": _steps,
    }  # fmt: skip
    found = [
        f"{sentence[:-1]}, on MRV2." if name.endswith(ON_MRV2) else sentence
        for part, say in says.items()
        for name in (part + ON_MRV2, part)
        if record.get(name)
        for sentence in say(record[name])
    ]
    return found + [
        f"{part['part']}: {part['status']}: {part['reason']}." for part in record["parts"] if part["reason"]
    ]


def _doctor(found: Mapping[str, Any]) -> Iterator[str]:
    failed = [check["name"] for check in found["checks"] if check["status"] == "fail"]
    yield f"Drafting cannot work here: {', '.join(failed)}." if failed else "Drafting can work here."


def _latency(found: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"Tokens are on the host after {found['copy']:.1f} us. A graph runs {found['flag']:.1f} us after the "
        f"host's flag, and {found['graph']:.1f} us after its launch (of it the host's part: "
        f"{found['launch']:.1f} us)."
    )


def _start(found: Mapping[str, Any]) -> Iterator[str]:
    for kind, engine in found["engines"].items():
        same = f"{engine['same']} of {engine['of']} tokens are the plain one's, with " if engine["of"] else ""
        drafts = f"{engine['num_draft_tokens']} draft tokens"
        yield f"An engine ({kind}) starts in {engine['seconds']:.0f} s; {same}{drafts}."


def _certify(found: Mapping[str, Any], is_invariant: bool) -> Iterator[str]:
    lossless = "Not lossless here" if found["verdict"] == "not certified" else "Lossless here"
    yield f"{lossless}: {found['verdict']}. {of_certificate(found)[0]}"
    if is_invariant:
        is_equal = not found["differences"] and not found["max_logprob_difference"]
        yield (
            "In vLLM's batch-invariant mode, tokens and log-probabilities are "
            f"{'' if is_equal else 'not '}equal bit for bit with drafts and without."
        )


def _rollouts(found: Mapping[str, Any]) -> Iterator[str]:
    results = {result["method"]: result for result in found["results"]}
    first, *others = results
    for method in others:
        ratios = results[method]["ratios"]
        whole, tail = (_ratio(ratios[name]) for name in ("tokens_per_s", "tail_tokens_per_s"))
        if method == "sam:0":
            yield f"With our drafter, never drafting: {whole} times the tokens per second of {first}."
        else:
            yield f"{_name(method)}: {whole} times the tokens per second of {first}; {tail} in the tail."
    for method in [one for one in others if one in RIVALS]:
        over = results[method]["tokens_per_s_over"]
        for other in [one for one in RIVALS[method] if one in over]:
            yield f"{_name(method)} over {_name(other)}: {_ratio(over[other])}."
    for method, result in results.items():
        if result["draft_cpu_s"]:
            num_steps = sum(run["num_steps"] for run in result["repeats"])
            milliseconds = 1e3 * result["draft_cpu_s"] * result["num_repeats"] / num_steps
            yield f"{_name(method)}: drafting takes the host {milliseconds:.2f} ms a step."
        for name, speed in result.get("predicted_tokens_per_s", {}).items():
            if speed is not None:
                yield (
                    f"{_name(method)}: by `simulate` with {PREDICTIONS[name]} "
                    f"{speed / result['tokens_per_s']:.2f} times as fast as measured."
                )
    if found["load"]["repeats"] < 3:
        yield "With less than three repeats no interval says much: give it more --minutes."


def _name(method: str) -> str:
    return NAMES.get(method, method)


def _steps(found: Mapping[str, Any]) -> Iterator[str]:
    yield waits.sentence(found["waits"], found["settings"]["model_runner"])
    for context in sorted({row["context"] for row in found["steps"]}):
        rows = [row for row in found["steps"] if row["context"] == context]
        largest = max(rows, key=_num_tokens)
        least = min(row["seconds"] for row in rows)
        growth = largest["seconds"] / least
        cheap = max(_num_tokens(row) for row in rows if row["seconds"] <= GROWTH * least)
        yield (
            f"Rows of {context:,} tokens: a step takes {1e3 * least:.2f} ms at least, up to {GROWTH} times "
            f"that with {cheap} tokens, and {growth:.1f} times that with {_num_tokens(largest)}."
        )
    if errors := [row["roofline_s"] / row["seconds"] for row in found["steps"] if "roofline_s" in row]:
        yield f"The roofline says {min(errors):.2f} to {max(errors):.2f} times these times."


def _num_tokens(row: Mapping[str, Any]) -> int:
    return row["num_rows"] * (1 + row["num_drafts"])


def tables(record: Mapping[str, Any]) -> Iterator[Table]:
    """Title, columns and rows of each table that has rows."""
    yield "Parts", ["part", "", "seconds", "reason"], [
        [part["part"], part["status"], f"{part['seconds']:.0f}" if part["seconds"] else "", part["reason"]]
        for part in record["parts"]
    ]  # fmt: skip
    if record["rollouts"]:
        yield from rollouts.tables(record["rollouts"])
    for runner in (ON_MRV2, ""):
        if found := record.get(f"steps{runner}"):
            yield f"A step{runner}, ms (the roofline)", *_by_drafts(found["steps"])


def _by_drafts(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """A line for each context and number of rows, a column for each number of draft tokens."""
    drafts = sorted({row["num_drafts"] for row in rows})
    cells: dict[tuple[int, int], dict[int, str]] = {}
    for row in rows:
        cells.setdefault((row["context"], row["num_rows"]), {})[row["num_drafts"]] = (
            f"{1e3 * row['seconds']:.2f}"
            + (f" ({1e3 * row['roofline_s']:.2f})" if "roofline_s" in row else "")
        )
    lines = [
        [f"{context:,}", str(num_rows), *(line.get(num, "") for num in drafts)]
        for (context, num_rows), line in cells.items()
    ]
    return ["context", "rows", *(f"{num} drafts" if num else "plain" for num in drafts)], lines


def facts(record: Mapping[str, Any]) -> dict[str, str]:
    plan = {name.replace("_", " "): str(value) for name, value in record["plan"].items()}
    return plan | environment_facts(record["environment"])
