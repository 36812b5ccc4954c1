"""The drafters side by side: the same verifier as replay, the oracle is a bound, errors are clear."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rollout_spec.bench_drafters import Oracle, measure, measure_cost, measure_index, over_baselines
from rollout_spec.cli import main
from rollout_spec.cli.bench import _print_drafters
from rollout_spec.plots import plot_drafters
from rollout_spec.replay import read_trace

TRACE = Path(__file__).parent / "data" / "demo_trace.jsonl.gz"
OURS = ("earliest", "frequent", "sam")


@pytest.fixture(scope="module")
def lines():
    return list(read_trace(TRACE))


@pytest.fixture(scope="module")
def results(lines):
    methods = ("off", *OURS, "suffix_policy", "oracle")
    found = measure(lines, methods, [4], [0, 8])
    return {(result["method"], result["history"]): result for result in found}


def test_the_oracle_wastes_nothing_and_bounds_what_copies_the_groups_text(results):
    for history in (0, 8):
        oracle = results["oracle", history]
        assert oracle["acceptance_rate"] == 1.0
        for method in ("earliest", "frequent", "suffix_policy"):
            assert oracle["tokens_per_step"] > results[method, history]["tokens_per_step"]
    assert results["oracle", 8]["tokens_per_step"] > results["oracle", 0]["tokens_per_step"]
    off = results["off", 0]
    assert (off["tokens_per_step"], off["draft_tokens_per_step"]) == (1.0, 0.0)


def test_the_oracles_grams_are_those_of_the_text():
    oracle = Oracle(3)
    oracle.start(np.array([1, 2, 3], np.int32), 1, ())
    token_ids = np.array([[1, 2, 3, 1, 2, 3, 1, 9, -1, -1, -1]], np.int32)
    drafts, numbers = oracle.step(*(np.array(value, np.int32) for value in ([0], token_ids, [4], [3])))
    # After 1 the text has 2 3, and 2 3 1 once position 3 is indexed.
    assert drafts[0, : numbers[0]].tolist() == [2, 3, 1]
    drafts, numbers = oracle.step(*(np.array(value, np.int32) for value in ([0], token_ids, [7], [3])))
    assert numbers.tolist() == [0]


def test_costs_are_measured_for_every_batch(lines):
    cost = measure_cost(lines, "sam", 4, (1, 8), repeats=1, num_steps=8)
    assert set(cost["us_per_row"]) == {"1", "8"}
    assert all(value > 0 for value in (*cost["us_per_row"].values(), *cost["p99_over_median"].values()))
    index = measure_index(lines, "frequent", sizes=(1024,))
    assert 0 < index["bytes_per_token"]["1024"] < 200
    assert index["ns_per_indexed_token"]["1024"] > 0
    assert measure_index(lines, "off", sizes=(1024,)) == {}


def test_vllms_ngram_runs_beside_ours(lines):
    [ngram] = measure(lines[:2], ["ngram"], [4], [0])
    assert ngram["draft_tokens_per_step"] > 0
    assert ngram["tokens_per_step"] > 1


def test_the_command_writes_json_and_picture(tmp_path, capsys):
    options = ["--methods", "off,sam", "--num-speculative-tokens", "4", "--limit-groups", "2"]
    options += ["--min-token-prob", "0.2", "0.05"]
    assert main(["bench", "drafters", str(TRACE), *options, "--output", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "drafters.json").read_text())
    assert [result["method"] for result in printed["results"]] == ["off", "sam", "sam"]
    assert [result["min_token_prob"] for result in printed["results"]] == [None, 0.2, 0.05]
    assert (tmp_path / "drafters.png").stat().st_size > 10_000
    assert main(["bench", "drafters", str(TRACE), *options]) == 0
    assert "sam" in capsys.readouterr().out


def test_every_price_is_a_result_of_its_own(lines, results):
    found = measure(lines, ["earliest", "sam"], [4], [0], min_token_probs=[0.6, 0.2, 0.05])
    assert [(result["method"], result["min_token_prob"]) for result in found] == [
        *[("earliest", None), ("sam", 0.6), ("sam", 0.2), ("sam", 0.05)]
    ]
    drafted = [result["draft_tokens_per_step"] for result in found[1:]]
    assert drafted == sorted(set(drafted))
    assert found[2] == results["sam", 0]  # the default, as in a run of its own


def test_ratios_are_to_the_baselines_of_the_same_setting():
    def result(method, k, tokens, drafted):
        figures = {"tokens_per_step": tokens, "draft_tokens_per_step": drafted}
        return {"method": method, "num_speculative_tokens": k, "history": 0, **figures}

    sam = result("sam", 8, 3.0, 2.0)
    others = [result("suffix", 8, 2.0, 4.0), result("suffix", 3, 1.0, 1.0), result("ngram", 8, 1.0, 1.0)]
    assert over_baselines(sam, [sam, *others]) == {"suffix": (1.5, 0.5)}
    tuned = result("suffix_tuned", 8, 4.0, 8.0)
    assert over_baselines(sam, [*others, tuned]) == {"suffix": (1.5, 0.5), "suffix_tuned": (0.75, 0.25)}
    assert over_baselines(sam, [result("suffix", 8, 1.0, 0.0)]) == {}


def test_the_command_compares_with_suffix_below_its_table(capsys):
    record = {"tail_tokens_per_step": 1.0, "acceptance_rate": 0.5, "trace": "t", "history": 0}
    record |= {"num_speculative_tokens": 8, "min_token_prob": None}
    suffix = record | {"method": "suffix", "tokens_per_step": 2.0, "draft_tokens_per_step": 4.0}
    sam = record | {
        "method": "sam",
        "tokens_per_step": 2.5,
        "draft_tokens_per_step": 3.0,
        "min_token_prob": 0.3,
    }
    _print_drafters([suffix, sam])
    printed = capsys.readouterr().out
    assert "1.250" in printed and "0.750" in printed
    _print_drafters([sam])
    assert "over" not in capsys.readouterr().out


def drawn(results, tmp_path, monkeypatch):
    """The axes of the picture, by what they show."""
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    plot_drafters(results, tmp_path / "drafters.png")
    axes = pyplot.gcf().axes
    monkeypatch.undo()
    pyplot.close("all")
    return {(axis.get_xlabel(), axis.get_ylabel()): axis for axis in axes}


def test_acceptance_is_drawn_against_the_history(lines, tmp_path, monkeypatch):
    found = measure(lines, ["off", "earliest", "sam"], [4], [0, 8], min_token_probs=[0.2, 0.05])
    axes = drawn([{"trace": "t", **result} for result in found], tmp_path, monkeypatch)
    curves = {}
    for figure in ("acceptance rate", "tokens per step"):
        axis = axes["earlier responses of the prompt", f"{figure}, K = 4"]
        curves[figure] = {line.get_label(): line.get_xydata().tolist() for line in axis.lines}
    for name, method, price in (
        ("earliest",) * 2 + (None,),
        ("sam 0.2", "sam", 0.2),
        ("sam 0.05", "sam", 0.05),
    ):
        for figure, curve in curves.items():
            assert curve[name] == [
                [result["history"], result[figure.replace(" ", "_")]]
                for result in found
                if (result["method"], result["min_token_prob"]) == (method, price)
            ]
    assert set(curves["acceptance rate"]) - {"off"} == {"earliest", "sam 0.2", "sam 0.05"}


def test_one_size_of_the_history_is_no_curve(lines, tmp_path, monkeypatch):
    found = measure(lines, ["sam"], [4], [8])
    axes = drawn([{"trace": "t", **result} for result in found], tmp_path, monkeypatch)
    assert [x for x, _ in axes] == ["draft tokens per step", "position in the response"]
    assert all(axis.lines for axis in axes.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "magic"], "--methods magic: must be one of off, ngram"),
        (["--num-speculative-tokens", "65"], "--num-speculative-tokens 65: must be between 1 and 64"),
        (["--history", "-1"], "--history -1: must be between 0"),
        (["--min-token-prob", "0.1", "2"], "--min-token-prob 0.1 2.0: must be between 0 and 1"),
    ],
)
def test_bad_options_are_one_line(options, message, capsys):
    assert main(["bench", "drafters", str(TRACE), *options]) == 2
    assert message in capsys.readouterr().err
