"""The drafters side by side: the same verifier as replay, the oracle is a bound, errors are clear."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from rollout_spec.bench_costs import (
    NUM_STEPS,
    Row,
    endless,
    engine_call,
    long_text,
    make_batch,
    measure_index,
    measure_steps,
    rows_of,
)
from rollout_spec.bench_drafters import FIGURES, Oracle, Settings, measure, over_baselines
from rollout_spec.cli import main
from rollout_spec.cli.bench import DEFAULT_METHODS, _print_drafters
from rollout_spec.config import AUTO, SpecConfig
from rollout_spec.plots import plot_drafters
from rollout_spec.replay import Rollout, read_trace, replay

TRACE = Path(__file__).parent / "data" / "demo_trace.jsonl.gz"
OURS = ("earliest", "frequent", "sam")
BATCHES = ["1", "8", "64", "256"]
SIZES = ["2048", "32768", "131072"]


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


def test_a_step_is_timed_for_every_batch_and_method(lines):
    sam, off = measure_steps(lines, [("sam", Settings(4)), ("off", Settings(4))], batches=(1, 8))
    for name in ("us_per_row", "p99_over_median"):
        assert list(sam[name]) == list(off[name]) == ["1", "8"]
        assert all(value > 0 for value in sam[name].values())
        assert set(off[name].values()) == {None}
    assert sam["suffix_over_us_per_row"] == {"1": None, "8": None}  # without `suffix` there is no ratio


def test_rows_are_siblings_and_no_text_comes_twice(lines):
    num_responses = sum(len(response) > NUM_STEPS for line in lines for response in line.responses)
    rows = list(islice(rows_of(lines), 2 * num_responses))
    first, *_ = lines
    long = [response for response in first.responses if len(response) > NUM_STEPS]
    texts = [np.concatenate([first.prompt_token_ids, response]) for response in long]
    for row, text in zip(rows, texts, strict=False):
        assert (row.line, row.num_prompt_tokens) == (0, len(first.prompt_token_ids))
        assert np.array_equal(row.token_ids, text)
    for row, later in zip(rows, rows[num_responses:], strict=False):
        assert len(row.token_ids) == len(later.token_ids)
        assert (row.token_ids == later.token_ids).mean() < 0.1
        # Other tokens, but as repetitive: each occurs as often as the one that it stands for.
        counts = [np.sort(np.unique(r.token_ids, return_counts=True)[1]) for r in (row, later)]
        assert np.array_equal(*counts)


def test_siblings_stay_alike_where_tokens_are_permuted():
    prompt, response = np.array([5, 6], np.int32), np.array([7, 8, 7, 9], np.int32)
    line = Rollout("g", None, prompt, [response, response[:3]])
    _, again = islice(endless([line]), 2)
    assert np.array_equal(again.responses[0][:3], again.responses[1])
    assert again.responses[0][0] == again.responses[0][2]
    assert set(again.prompt_token_ids) | set(again.responses[0]) == {5, 6, 7, 8, 9}


@pytest.mark.parametrize("method", ["ngram", "earliest", "frequent", "sam", "suffix_policy"])
def test_what_is_timed_are_drafts(method):
    period = np.arange(10, 20, dtype=np.int32)
    rows = [Row(0, 3, np.concatenate([period[:3], np.tile(period, 8)])) for _ in range(3)]
    batch = make_batch(rows)
    propose = engine_call(method, Settings(4), batch, rows)
    batch.num_tokens_no_spec[:] = 63
    drafts = propose(batch, [row.token_ids[3:63].tolist() for row in rows])
    assert drafts == [[10, 11, 12, 13]] * 3
    batch.num_tokens_no_spec[:] = 64
    assert propose(batch, [[10]] * 3) == [[11, 12, 13, 14]] * 3


def test_a_token_in_the_index_costs_time_and_bytes_at_every_size(lines):
    cost = measure_index(lines, ["off", "ngram", "frequent", "sam"], sizes=(1024, 8192))
    num_tokens = sum(len(response) for line in lines for response in line.responses)
    assert num_tokens < 8192  # so that text is made
    for method in ("frequent", "sam"):
        assert all(value > 0 for value in cost[method]["ns_per_indexed_token"].values())
    of_frequent, of_sam = (list(cost[method]["bytes_per_token"].values()) for method in ("frequent", "sam"))
    assert 16 < of_frequent[1] <= of_frequent[0] < 200
    assert of_sam[0] - of_frequent[0] > 25  # what it learns is held besides
    for method in ("off", "ngram"):
        nothing = dict.fromkeys(["1024", "8192"])
        assert cost[method] == {"ns_per_indexed_token": nothing, "bytes_per_token": nothing}


def test_made_text_does_not_repeat():
    line = Rollout("g", None, np.zeros(1, np.int32), [np.arange(1000, dtype=np.int32)])
    text = long_text([line], 65536)
    assert len(text) == 65536 and np.array_equal(text[:1000], line.responses[0])
    assert len(np.unique(np.stack([text[:-1], text[1:]]), axis=1).T) > 0.9 * len(text)


def test_vllms_ngram_runs_beside_ours(lines):
    [ngram] = measure(lines[:2], ["ngram"], [4], [0])
    assert ngram["draft_tokens_per_step"] > 0
    assert ngram["tokens_per_step"] > 1


def test_every_result_has_every_key(tmp_path, capsys):
    methods = ["off", "ngram", "earliest", "sam", "oracle"]
    options = ["--methods", ",".join(methods), "--num-speculative-tokens", "4", "--limit-groups", "2"]
    options += ["--history", "0", "8", "--min-token-prob", "0.2", "0.05"]
    assert main(["bench", "drafters", str(TRACE), *options, "--output", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "drafters.json").read_text())
    results = printed["results"]
    assert [result["method"] for result in results] == 2 * [
        "off",
        "ngram",
        "earliest",
        "sam",
        "sam",
        "oracle",
    ]
    assert [result["min_token_prob"] for result in results[:6]] == [None, None, None, 0.2, 0.05, None]
    for result in results:
        assert isinstance(result["num_speculative_tokens"], int) and isinstance(result["history"], int)
        for name in ("tokens_per_step", "draft_tokens_per_step", "acceptance_rate", "tail_tokens_per_step"):
            assert isinstance(result[name], float)
        is_called, is_index = result["method"] not in ("off", "oracle"), result["method"] in OURS
        for name, keys, is_measured in (
            ("us_per_row", BATCHES, is_called),
            ("us_per_row_by_length", SIZES, is_called),
            ("ns_per_indexed_token", SIZES, is_index),
            ("bytes_per_token", SIZES, is_index),
        ):
            assert list(result[name]) == keys
            assert all(isinstance(value, float) == is_measured for value in result[name].values())
    assert (tmp_path / "drafters.png").stat().st_size > 10_000


def test_tables_are_printed_and_costs_can_be_left_out(capsys):
    command = ["bench", "drafters", str(TRACE), "--num-speculative-tokens", "4", "--limit-groups", "2"]
    assert main([*command, "--methods", "off,sam"]) == 0
    printed = capsys.readouterr().out
    assert "microseconds per row" in printed and "131 k" not in printed and "bytes, 128 k" in printed
    assert "p99: of a step over its" in printed
    assert main([*command, "--methods", "off,sam", "--no-cost"]) == 0
    printed = capsys.readouterr().out
    assert "sam" in printed and "microseconds" not in printed


@pytest.fixture
def without_arctic_inference(monkeypatch):
    monkeypatch.setitem(sys.modules, "arctic_inference", None)
    monkeypatch.delitem(sys.modules, "arctic_inference.suffix_decoding", raising=False)


def test_by_default_what_is_not_installed_is_left_out_with_one_line(without_arctic_inference, capsys):
    options = ["--num-speculative-tokens", "4", "--limit-groups", "1", "--no-cost", "--json"]
    assert main(["bench", "drafters", str(TRACE), *options]) == 0
    out, err = capsys.readouterr()
    [line] = [line for line in err.splitlines() if "suffix" in line]
    assert line.startswith("rollout-spec bench drafters: without suffix, suffix_tuned: ")
    assert "arctic-inference==0.1.1" in line
    found = [result["method"] for result in json.loads(out)["results"]]
    assert found == [method for method in DEFAULT_METHODS if method not in ("suffix", "suffix_tuned")]


def test_without_vllm_its_methods_are_left_out(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "vllm.v1.spec_decode.ngram_proposer", None)
    monkeypatch.delitem(sys.modules, "rollout_spec.vllm_drafters", raising=False)
    options = ["--num-speculative-tokens", "4", "--limit-groups", "1", "--no-cost", "--json"]
    assert main(["bench", "drafters", str(TRACE), *options]) == 0
    out, err = capsys.readouterr()
    assert "without ngram" in err and "pip install vllm" in err
    assert not any(result["method"] == "ngram" for result in json.loads(out)["results"])


@pytest.mark.parametrize("method", ["suffix", "suffix_tuned", "suffix_server", "suffix_server_tuned"])
def test_what_is_named_must_be_installed(method, without_arctic_inference, capsys):
    assert main(["bench", "drafters", str(TRACE), "--methods", f"off,{method}"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "arctic-inference==0.1.1" in line


def test_a_trace_too_short_for_costs_is_one_line(tmp_path, capsys):
    trace = tmp_path / "short.jsonl"
    trace.write_text(json.dumps({"group": "g", "prompt_token_ids": [1], "responses": [[1, 2, 3]]}) + "\n")
    command = ["bench", "drafters", str(trace), "--methods", "sam", "--num-speculative-tokens", "4"]
    assert main(command) == 2
    assert f"no response has the {NUM_STEPS + 1} tokens" in capsys.readouterr().err
    assert main([*command, "--no-cost"]) == 0


def test_every_price_is_a_result_of_its_own(lines, results):
    found = measure(lines, ["earliest", "sam"], [4], [0], min_token_probs=[0.6, 0.2, 0.05])
    assert [(result["method"], result["min_token_prob"]) for result in found] == [
        *[("earliest", None), ("sam", 0.6), ("sam", 0.2), ("sam", 0.05)]
    ]
    drafted = [result["draft_tokens_per_step"] for result in found[1:]]
    assert drafted == sorted(set(drafted))
    [default] = measure(lines, ["sam"], [4], [0])
    assert default == results["sam", 0]  # as in a run of its own
    assert default["min_token_prob"] == AUTO and default not in found


def test_the_lines_with_earlier_responses_are_counted_apart():
    """A prompt comes twice; the second time its responses are much like the first ones."""
    lines = returning_prompts(6, 100)
    first = lines[: len(lines) // 2]
    assert len({line.group for line in first}) == len(first) == len({line.group for line in lines})
    [all_lines] = measure(lines, ["off"], [4], [2])
    [before] = measure(first, ["off"], [4], [2])
    assert before["with_earlier"] is None
    assert measure(lines, ["off"], [4], [0])[0]["with_earlier"] is None
    assert all_lines["with_earlier"]["tokens_per_step"] == 1.0
    [told] = measure(lines, ["frequent"], [4], [2])
    [untold] = measure(first, ["frequent"], [4], [2])
    assert told["with_earlier"]["tokens_per_step"] > told["tokens_per_step"] > untold["tokens_per_step"]
    assert told["with_earlier"].keys() == set(FIGURES)


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
    part = {"tokens_per_step": 4.0, "draft_tokens_per_step": 1.0}
    others = [result("suffix", 8, 2.0, 4.0) | {"with_earlier": part}, tuned | {"with_earlier": None}]
    sam["with_earlier"] = {"tokens_per_step": 6.0, "draft_tokens_per_step": 3.0}
    assert over_baselines(sam, others, with_earlier=True) == {"suffix": (1.5, 3.0)}
    assert (
        over_baselines(tuned | {"with_earlier": None}, [tuned | {"with_earlier": None}], with_earlier=True)
        == {}
    )


def test_the_command_compares_with_suffix_below_its_table(capsys):
    record = {
        "tail_tokens_per_step": 1.0,
        "acceptance_rate": 0.5,
        "trace": "t",
        "history": 0,
        "with_earlier": None,
    }
    record |= {"num_speculative_tokens": 8, "min_token_prob": None, "equal_drafts": None}
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


def test_the_default_price_heeds_the_history_and_is_one_curve(lines, tmp_path, monkeypatch):
    found = measure(lines, ["earliest", "frequent", "sam"], [4], [0, 8])
    for result in found[1:]:
        if result["method"] == "frequent":
            price = SpecConfig(history=result["history"]).least_survival
            [fixed] = measure(lines, ["frequent"], [4], [result["history"]], min_token_probs=[price])
            assert fixed | {"min_token_prob": AUTO} == result
    found = [result for result in found if result["method"] != "frequent"]
    axes = drawn([{"trace": "t", **result} for result in found], tmp_path, monkeypatch)
    curves = axes["earlier responses of the prompt", "tokens per step, K = 4"].lines
    assert [(line.get_label(), len(line.get_xydata())) for line in curves] == [("earliest", 2), ("sam", 2)]


def test_results_at_equal_drafts_are_a_curve_of_their_own(lines, tmp_path, monkeypatch):
    found = measure(lines, ["earliest", "sam"], [4], [0, 8])
    found += [result | {"equal_drafts": "suffix"} for result in found if result["method"] == "sam"]
    axes = drawn([{"trace": "t", **result} for result in found], tmp_path, monkeypatch)
    curves = axes["earlier responses of the prompt", "tokens per step, K = 4"].lines
    assert [line.get_label() for line in curves] == ["earliest", "sam", "sam as suffix"]


def test_the_policy_ages_from_step_to_step():
    """Two old responses outvote a later one where all are of one policy, and only there."""
    said = [np.array([1, 5, token, 90 + i], np.int32) for i, token in enumerate([6, 6, 7, 8, 8])]

    def accepted(steps):
        trace = [
            Rollout("g", step, np.array([1], np.int32), [text[1:]])
            for step, text in zip(steps, said, strict=True)
        ]
        config = SpecConfig(mode="frequent", history=8, min_token_prob=0.01, num_speculative_tokens=2)
        [measured] = measure(trace, ["frequent"], [2], [8], min_token_probs=[0.01])
        replayed = replay(trace, config)
        assert measured["acceptance_rate"] == replayed.acceptance_rate
        return replayed.num_accepted_tokens

    assert accepted([1, 1, 2, 5, 6]) == accepted([1] * 5) + 1
    assert accepted([5, 4, 3, 2, 1]) == accepted([None] * 5) == accepted([1] * 5)


def returning_prompts(num_prompts, length):
    """Lines whose prompts come back once, with responses that say much of what they said before."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 50_000, (num_prompts, 8)).astype(np.int32)
    first = rng.integers(0, 50_000, (num_prompts, 2, length)).astype(np.int32)
    second = np.where(rng.random(first.shape) < 0.1, rng.integers(0, 50_000, first.shape), first)
    return [
        Rollout(f"g{i}", step, prompts[i], list(texts[i].astype(np.int32)))
        for step, texts in enumerate((first, second))
        for i in range(num_prompts)
    ]


def test_history_pays_within_a_budget_that_binds():
    """One that the table of contexts alone would exceed."""
    lines = returning_prompts(12, 800)
    found = [
        measure(lines, ["sam"], [8], [history], max_index_mb=max_index_mb)[0]
        for history, max_index_mb in ((2, 1024), (2, 1), (0, 1))
    ]
    free, bound, without = (result["tokens_per_step"] for result in found)
    assert [result["max_index_mb"] for result in found] == [1024, 1, 1]
    assert free > bound > without + 0.9 * (free - without) and free > 1.4 * without


def test_a_line_that_the_budget_does_not_hold_is_one_line(tmp_path, capsys):
    response = np.random.default_rng(0).integers(0, 50_000, 30_000).tolist()
    line = {"group": "g", "prompt_token_ids": [1], "responses": [response]}
    (tmp_path / "long.jsonl").write_text(json.dumps(line) + "\n")
    command = f"bench drafters {tmp_path}/long.jsonl --methods sam --max-index-mb 1 --no-cost"
    assert main(command.split()) == 2
    assert "--max-index-mb 1: a line needs more" in capsys.readouterr().err


def test_traces_of_one_name_are_drawn(lines, tmp_path, monkeypatch):
    found = measure(lines, ["off", "earliest"], [4], [0])
    axes = drawn([{"trace": "rollouts-0.jsonl", **result} for result in found * 2], tmp_path, monkeypatch)
    assert len(axes["position in the response", "acceptance rate, K = 4"].lines) == 2


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
        (
            ["--equal-drafts", "--methods", "sam"],
            "--equal-drafts: needs one of suffix, suffix_tuned, suffix_s",
        ),
    ],
)
def test_bad_options_are_one_line(options, message, capsys):
    assert main(["bench", "drafters", str(TRACE), *options]) == 2
    assert message in capsys.readouterr().err
