"""Time and memory of the native index, seen from Python.

Every time is the least of several runs of the same step: on a shared machine the least is what the code
costs. Without a trace the text is synthetic: tokens by Zipf's law, between runs of earlier text.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_spec.index import Int32Array, SuffixIndex
from rollout_spec.replay import read_trace

Int64Array = npt.NDArray[np.int64]

NUM_SPECULATIVE_TOKENS = 8
SIZES = (2048, 8192, 32768, 131072)
MODES = ("sam", "frequent", "earliest")
TARGETS = {
    "us_per_token at 32768": 0.2,
    "bytes_per_token at 32768": 64.0,
    "flatness 2048..131072": 1.5,
    "step_ms": 0.5,
}


def synthetic_text(num_tokens: int, seed: int = 0) -> Int32Array:
    """Text as repetitive as a chain of thought: about half of it copies runs of what came before."""
    rng = np.random.default_rng(seed)
    text = np.minimum(rng.zipf(1.3, num_tokens), 50_000).astype(np.int32)
    at = 200
    while at < num_tokens:
        length = int(rng.integers(4, 24))
        begin = int(rng.integers(0, at - length))
        text[at : at + length] = text[begin : begin + length][: num_tokens - at]
        at += length + int(rng.integers(4, 24))
    return text


def load_text(trace: Path | None, num_tokens: int) -> Int32Array:
    """The first num_tokens tokens of the trace's responses, one after the other."""
    if trace is None:
        return synthetic_text(num_tokens)
    responses = [response for rollout in read_trace(trace) for response in rollout.responses]
    return np.concatenate(responses)[:num_tokens]


def index_text(text: Int32Array, mode: str, chunk: int = 512) -> tuple[Int64Array, float]:
    """Nanoseconds of each step that indexes `chunk` tokens of one text, [steps], and bytes per token."""
    zero = np.zeros(1, np.int32)
    token_ids = text[None, :]
    nanoseconds = []
    with SuffixIndex(num_speculative_tokens=NUM_SPECULATIVE_TOKENS, mode=mode) as index:
        sequence = np.array([index.open_sequence(index.open_group(text[:0]))], np.int32)
        for level in range(chunk, len(text) + 1, chunk):
            levels = np.array([level], np.int32)
            begin = time.perf_counter_ns()
            index.step(sequence, token_ids, zero, levels, zero)
            nanoseconds.append(time.perf_counter_ns() - begin)
        stats = index.stats()
    return np.array(nanoseconds), stats.num_bytes / stats.num_tokens


def measure_sizes(text: Int32Array, mode: str, repeats: int) -> dict[str, Any]:
    sizes: dict[str, Any] = {}
    for size in (size for size in SIZES if size <= len(text)):
        # Several texts of the small sizes, so that they are not one lucky passage.
        parts = [text[i * size : (i + 1) * size] for i in range(min(4, len(text) // size))]
        runs = [[index_text(part, mode) for _ in range(repeats)] for part in parts]
        times = [np.min([nanoseconds for nanoseconds, _ in part_runs], axis=0).sum() for part_runs in runs]
        sizes[str(size)] = {
            "us_per_token": float(np.sum(times)) / 1e3 / (size * len(parts)),
            "bytes_per_token": float(np.mean([part_runs[0][1] for part_runs in runs])),
        }
    return sizes


def measure_step(text: Int32Array, mode: str, repeats: int, tokens_per_row: int = 2048) -> dict[str, Any]:
    """Milliseconds of one step for 256 rows, 32 groups of 8, one new token a row, every row drafting."""
    num_groups, group_size, num_steps = 32, 8, 64
    n = num_groups * group_size
    rng = np.random.default_rng(0)
    width = tokens_per_row + num_steps
    token_ids = np.empty((n, width), np.int32)
    for row in token_ids:
        begin = int(rng.integers(0, len(text) - width))
        row[:] = text[begin : begin + width]
    rows, budgets = np.arange(n, dtype=np.int32), np.full(n, NUM_SPECULATIVE_TOKENS, np.int32)
    best, drafted, share = float("inf"), 0.0, 0.0
    for _ in range(repeats):
        with SuffixIndex(num_speculative_tokens=NUM_SPECULATIVE_TOKENS, mode=mode, min_match_len=1) as index:
            sequences = np.empty(n, np.int32)
            for group_rows in rows.reshape(num_groups, group_size):
                group = index.open_group(token_ids[0, :0])
                sequences[group_rows] = [index.open_sequence(group) for _ in group_rows]
            index.step(sequences, token_ids, rows, np.full(n, tokens_per_row, np.int32), budgets)
            for level in range(tokens_per_row + 1, width + 1):
                levels = np.full(n, level, np.int32)
                begin_time = time.perf_counter()
                result = index.step(sequences, token_ids, rows, levels, budgets)
                seconds = time.perf_counter() - begin_time
                if seconds < best:
                    best = seconds
                    drafted = float(result.num_draft_tokens.mean())
                    share = float((result.num_draft_tokens > 0).mean())
            bytes_per_token = index.stats().num_bytes / index.stats().num_tokens
    return {
        "step_ms": 1e3 * best,
        "rows": n,
        "draft_tokens_per_row": drafted,
        "share_of_rows_drafting": share,
        "bytes_per_token": bytes_per_token,
    }


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def measure(trace: Path | None, repeats: int, modes: Iterable[str] = MODES) -> dict[str, Any]:
    """Everything, with what is needed to read the figures later."""
    text = load_text(trace, 4 * max(SIZES))
    return {
        "text": trace.name if trace else "synthetic",
        "cpu": cpu_name(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "platform": platform.platform(),
        "targets": TARGETS,
        "modes": {mode: _measure_mode(text, mode, repeats) for mode in modes},
    }


def _measure_mode(text: Int32Array, mode: str, repeats: int) -> dict[str, Any]:
    sizes = measure_sizes(text, mode, repeats)
    costs = [size["us_per_token"] for size in sizes.values()]
    return {
        "sizes": sizes,
        "flatness": max(costs) / min(costs),
        "step": measure_step(text, mode, repeats),
    }
