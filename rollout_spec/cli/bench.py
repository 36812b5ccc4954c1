"""`rollout-spec bench`: measurements on this machine."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

HELP = "measure on this machine: the native core"
INDEX_LENGTHS = (2_048, 8_192, 32_768, 131_072)
# One decode step of a large rollout batch.
NUM_GROUPS, GROUP_SIZE, NUM_TOKENS, NUM_SPECULATIVE_TOKENS = 32, 8, 2_048, 8
NUM_STEPS = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="WHAT")
    native = kinds.add_parser("native", help="cost of indexing a token and of one engine step")
    native.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    result = bench_native()
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        _print(result)
    return 0


def bench_native() -> dict[str, Any]:
    """Indexing by length of text, and one batched step as seen from Python."""
    from rich.console import Console
    from rich.progress import track

    # Standard error, so that --json stays clean.
    console = Console(stderr=True)
    lengths = track(
        INDEX_LENGTHS, "indexing", console=console, transient=True, disable=not console.is_terminal
    )
    return {"indexing": [measure_indexing(length) for length in lengths], "step": measure_step()}


def measure_indexing(num_tokens: int, num_repeats: int = 5) -> dict[str, float]:
    """One sequence of `num_tokens` tokens indexed at once: best time of several, and memory."""
    import numpy as np

    matrix = make_text(num_tokens, seed=num_tokens)[None, :]
    zero, level = np.zeros(1, np.int32), np.array([num_tokens], np.int32)
    best = float("inf")
    for _ in range(num_repeats):
        with _new_index() as index:
            group = index.open_group(np.zeros(0, np.int32))
            sequence = np.array([index.open_sequence(group)], np.int32)
            began = time.perf_counter()
            index.step(sequence, matrix, zero, level, zero)
            best = min(best, time.perf_counter() - began)
            num_bytes = index.stats().num_bytes
    return {
        "num_tokens": num_tokens,
        "us_per_token": best / num_tokens * 1e6,
        "bytes_per_token": num_bytes / num_tokens,
    }


def measure_step() -> dict[str, float]:
    """The median step of a batch in which every row brings one new token and drafts."""
    import numpy as np

    num_rows = NUM_GROUPS * GROUP_SIZE
    texts = [
        make_text(NUM_TOKENS + NUM_STEPS, seed=row // GROUP_SIZE, variant=row) for row in range(num_rows)
    ]
    matrix = np.stack(texts)
    rows = np.arange(num_rows, dtype=np.int32)
    most = np.full(num_rows, NUM_SPECULATIVE_TOKENS, np.int32)
    times, num_drafting = [], 0
    with _new_index() as index:
        groups = [index.open_group(np.zeros(0, np.int32)) for _ in range(NUM_GROUPS)]
        sequences = np.array([index.open_sequence(groups[row // GROUP_SIZE]) for row in rows], np.int32)
        index.step(sequences, matrix, rows, np.full(num_rows, NUM_TOKENS, np.int32), most)
        for step in range(1, NUM_STEPS + 1):
            levels = np.full(num_rows, NUM_TOKENS + step, np.int32)
            began = time.perf_counter()
            result = index.step(sequences, matrix, rows, levels, most)
            times.append(time.perf_counter() - began)
            num_drafting += int((result.num_draft_tokens > 0).sum())
    return {
        "num_rows": num_rows,
        "share_drafting": num_drafting / (num_rows * NUM_STEPS),
        "median_ms": float(np.median(times)) * 1e3,
        "worst_ms": max(times) * 1e3,
    }


def make_text(num_tokens: int, seed: int, variant: int = 0) -> np.ndarray:
    """Text that repeats itself as rollouts do: new tokens between copies of stretches already there."""
    import numpy as np

    rng = np.random.default_rng((seed, variant))
    shared = np.random.default_rng(seed).zipf(1.3, size=256) % 32_000
    text = [int(token) for token in shared]
    while len(text) < num_tokens:
        start, length = int(rng.integers(len(text))), int(rng.integers(2, 40))
        text += text[start : start + length]
        text += [int(token) for token in rng.zipf(1.3, size=3) % 32_000]
    return np.array(text[:num_tokens], np.int32)


def _new_index() -> Any:
    from rollout_spec.index import SuffixIndex

    return SuffixIndex(num_speculative_tokens=NUM_SPECULATIVE_TOKENS)


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Indexing one sequence")
    for name in ("tokens", "us per token", "bytes per token"):
        table.add_column(name, justify="right")
    for row in result["indexing"]:
        table.add_row(f"{row['num_tokens']:,}", f"{row['us_per_token']:.3f}", f"{row['bytes_per_token']:.1f}")
    console = Console()
    console.print(table)
    step = result["step"]
    console.print(
        f"{step['num_rows']} rows ({step['share_drafting']:.0%} drafting, K={NUM_SPECULATIVE_TOKENS}): "
        f"{step['median_ms']:.3f} ms median, {step['worst_ms']:.3f} ms worst"
    )
