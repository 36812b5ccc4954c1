"""The drafters side by side: the same verifier as replay, the oracle is a bound, errors are clear."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rollout_spec.bench_drafters import Oracle, measure, measure_cost, measure_index
from rollout_spec.cli import main
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
    assert main(["bench", "drafters", str(TRACE), *options, "--output", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "drafters.json").read_text())
    assert [result["method"] for result in printed["results"]] == ["off", "sam"]
    assert (tmp_path / "drafters.png").stat().st_size > 10_000
    assert main(["bench", "drafters", str(TRACE), *options]) == 0
    assert "sam" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "magic"], "--methods magic: must be one of off, ngram"),
        (["--num-speculative-tokens", "65"], "--num-speculative-tokens 65: must be between 1 and 64"),
        (["--history", "-1"], "--history -1: must be between 0"),
        (["--min-token-prob", "2"], "--min-token-prob 2.0: must be between 0 and 1"),
    ],
)
def test_bad_options_are_one_line(options, message, capsys):
    assert main(["bench", "drafters", str(TRACE), *options]) == 2
    assert message in capsys.readouterr().err
