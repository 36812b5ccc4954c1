"""Simulated rollouts as a sentence and a table; `results` are those that `simulate --json` prints."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollout_spec.report.page import Table

COLUMNS = ["engines", "rows", "group", "drafts", "threshold", "K", "makespan s"]
COLUMNS += ["speedup", "tail share", "tokens/step", "acceptance"]  # as in _FIGURES
_FIGURES = ("speedup", "tail_share", "tokens_per_step", "acceptance_rate")


def headline(results: Sequence[Mapping[str, Any]]) -> str:
    """What a reader needs, in one sentence."""
    speedups = [max(figures["speedup"] for figures in result["runs"]) for result in results]
    low, high = (f"{of(speedups):.2f}" for of in (min, max))
    if high == "1.00":
        return "Drafts would save no time here."
    best = results[speedups.index(max(speedups))]
    gain = f"would make these rollouts {low if low == high else f'{low} to {high}'} times as fast"
    if best["best_drafter"] == "model":
        return f"The model's drafts alone {gain}."
    of = {"sam": "Drafts", "sam+model": "The model's drafts and the index's together"}
    threshold, k = best["best_threshold"], best["best_num_speculative_tokens"]
    setting = f"batch_threshold={threshold} and num_speculative_tokens={k}"
    return f"{of[best['best_drafter']]} {gain}, with {setting}."


def table(title: str, results: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each run, and a line below those of each cluster."""
    rows = [row for result in results for row in (*_rows(result), [])]
    return f"{title}: simulated rollouts (* the fastest)", COLUMNS, rows


def _rows(result: Mapping[str, Any]) -> Iterator[list[str]]:
    fastest = [result[f"best_{name}"] for name in ("threshold", "num_speculative_tokens", "drafter")]
    for figures in result["runs"]:
        settings = [figures["batch_threshold"], figures["num_speculative_tokens"]]
        row = (
            *(result["replicas"], result["max_num_seqs"], result["group_size"] or "all"),
            figures["drafter"] + (" *" if [*settings, figures["drafter"]] == fastest else ""),
            *(settings if settings[1] else ("", "")),
            f"{figures['makespan_s']:,.1f}",
            *(f"{figures[name]:.2f}" for name in _FIGURES),
        )
        yield [*map(str, row)]
