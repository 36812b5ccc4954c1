"""vLLM's `suffix` beside ours, where ArcticInference is installed (README, next to `bench drafters`)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rollout_spec.bench_costs import Row, engine_call, make_batch, measure_index, measure_steps
from rollout_spec.bench_drafters import (
    Settings,
    Suffix,
    at_equal_drafts,
    equal_drafts,
    make_proposer,
    measure,
    over_baselines,
)
from rollout_spec.cli import main
from rollout_spec.history import Response
from rollout_spec.replay import Rollout, read_trace

SuffixDecodingCache = pytest.importorskip(
    "arctic_inference.suffix_decoding", reason="arctic-inference is not installed"
).SuffixDecodingCache

TRACE = Path(__file__).parent / "data" / "demo_trace.jsonl.gz"
# Of the demo's pretrained policy, by plain vLLM: 24 of the demo's prompts twice, 8 samples of at most 192
# tokens each, T = 0.6.
RECORDING = Path(__file__).parent / "data" / "policy_trace.jsonl.gz"
PROMPT = np.array([1, 2, 3], np.int32)
EARLIER = Response(np.array([4, 5, 6, 7, 8, 9], np.int32), 1)


@pytest.fixture(scope="module")
def lines():
    return list(read_trace(TRACE))


@pytest.fixture
def calls(monkeypatch):
    """What the cache is called with; it does its work."""
    seen = []
    for name in ("start_request", "add_active_response", "speculate", "stop_request"):
        original = getattr(SuffixDecodingCache, name)

        def spy(cache, request, *args, _name=name, _original=original, **kwargs):
            tokens = [list(map(int, args[0]))] if args else []
            seen.append((_name, request, *tokens))
            return _original(cache, request, *args, **kwargs)

        monkeypatch.setattr(SuffixDecodingCache, name, spy)
    return seen


def step(suffix, rows, token_ids, levels, budget=4):
    budgets = [budget] * len(rows)
    drafts, numbers = suffix.step(
        *(np.array(value, np.int32) for value in (rows, token_ids, levels, budgets))
    )
    return [draft[:number].tolist() for draft, number in zip(drafts, numbers, strict=True)]


def test_the_cache_is_called_as_vllms_proposer_does(calls):
    suffix = Suffix("suffix", Settings(4))
    suffix.start(PROMPT, 2, [EARLIER])
    assert calls == [
        ("start_request", "1", [1, 2, 3]),
        ("add_active_response", "1", [4, 5, 6, 7, 8, 9]),
        ("stop_request", "1"),
    ]
    calls.clear()
    token_ids = [[1, 2, 3, 4, 5, -1], [1, 2, 3, 6, 7, 8]]
    step(suffix, [0, 1], token_ids, [4, 4])
    step(suffix, [1], token_ids, [6])
    assert calls == [
        ("start_request", "2", [1, 2, 3]),
        ("add_active_response", "2", [4]),
        ("speculate", "2", [1, 2, 3, 4]),
        ("start_request", "3", [1, 2, 3]),
        ("add_active_response", "3", [6]),
        ("speculate", "3", [1, 2, 3, 6]),
        ("add_active_response", "3", [7, 8]),
        ("speculate", "3", [1, 2, 3, 6, 7, 8]),
    ]
    calls.clear()
    suffix.finish()
    assert sorted(calls) == [("stop_request", "2"), ("stop_request", "3")]
    assert not suffix.cache.active_requests


def drafts_after_a_match(method, settings, lines_before=(), earlier=()):
    """What two tokens of EARLIER are followed by, after other lines."""
    suffix = Suffix(method, settings)
    for response in lines_before:
        suffix.start(PROMPT, 1, ())
        step(suffix, [0], [[*PROMPT, *response]], [len(PROMPT) + len(response)])
        suffix.finish()
    suffix.start(PROMPT, 1, earlier)
    [draft] = step(suffix, [0], [[1, 2, 3, 5, 6]], [5])
    return draft


def test_earlier_responses_are_in_the_cache():
    # As many tokens as are matched: max_spec_factor is 1; 4 times as many in the tuned setting.
    assert drafts_after_a_match("suffix", Settings(4), earlier=[EARLIER]) == [7, 8]
    assert drafts_after_a_match("suffix_tuned", Settings(4), earlier=[EARLIER]) == [7, 8, 9]
    assert drafts_after_a_match("suffix", Settings(1), earlier=[EARLIER]) == [7]
    assert drafts_after_a_match("suffix", Settings(4)) == []


def test_only_a_server_keeps_the_lines_before_and_a_full_cache_forgets():
    before = [EARLIER.tokens]
    assert drafts_after_a_match("suffix", Settings(4), before) == []
    assert drafts_after_a_match("suffix_tuned", Settings(4), before) == []
    assert drafts_after_a_match("suffix_server", Settings(4), before) == [7, 8]
    assert drafts_after_a_match("suffix_server_tuned", Settings(4), before) == [7, 8, 9]
    before = [EARLIER.tokens, np.array([20, 21], np.int32)]
    assert drafts_after_a_match("suffix_server", Settings(4, max_cached_requests=3), before) == [7, 8]
    assert drafts_after_a_match("suffix_server", Settings(4, max_cached_requests=2), before) == []


def drafts_of_both(prompt, responses):
    """Pairs of drafts of `suffix` and of mode suffix_policy, at every token of the responses, up to the
    shortest one's end; where neither drafts there is none."""
    proposers = [make_proposer(method, Settings(8)) for method in ("suffix", "suffix_policy")]
    for proposer in proposers:
        proposer.start(prompt, len(responses), ())
    length = min(map(len, responses))
    token_ids = np.stack([np.concatenate([prompt, response[:length]]) for response in responses])
    rows = list(range(len(responses)))
    pairs = []
    for level in range(len(prompt) + 1, token_ids.shape[1] + 1):
        of_both = [step(proposer, rows, token_ids, [level] * len(rows), 8) for proposer in proposers]
        pairs += [pair for pair in zip(*of_both, strict=True) if any(pair)]
    return pairs


def share_of_equals(pairs):
    return sum(a == b for a, b in pairs) / len(pairs)


def test_mode_suffix_policy_drafts_the_same(lines):
    """One text: but where followers are equally frequent. With siblings also where the prompt, which is in
    our shared tree, says something else."""
    own: list = []
    together: list = []
    for line in lines:
        together += drafts_of_both(line.prompt_token_ids, line.responses)
        for response in line.responses:
            own += drafts_of_both(
                line.prompt_token_ids[:0], [np.concatenate([line.prompt_token_ids, response])]
            )
    assert len(own) > 2000 and len(together) > 1500
    assert share_of_equals(own) > 0.98
    assert share_of_equals(together) > 0.9


def test_counts_are_those_of_mode_suffix_policy(lines):
    suffix, policy = measure(lines, ["suffix", "suffix_policy"], [8], [0])
    for figure in ("tokens_per_step", "draft_tokens_per_step", "acceptance_rate"):
        assert suffix[figure] == pytest.approx(policy[figure], rel=0.05)
    assert (suffix["max_cached_requests"], policy["max_cached_requests"]) == (10_000, None)


def test_sam_is_above_every_baseline_at_its_default(lines):
    """On this trace; on the recordings of benchmarks/record/drafters.md likewise."""
    results = measure(lines, ["ngram", "earliest_single", "suffix", "sam"], [3, 8], [0, 8])
    for sam in (result for result in results if result["method"] == "sam"):
        setting = sam["num_speculative_tokens"], sam["history"]
        same = [r for r in results if (r["num_speculative_tokens"], r["history"]) == setting and r is not sam]
        assert len(same) == 3
        for other in same:
            assert sam["tokens_per_step"] > 1.02 * other["tokens_per_step"], (setting, other["method"])
        suffix = next(other for other in same if other["method"] == "suffix")
        if not sam["history"]:
            assert sam["draft_tokens_per_step"] <= suffix["draft_tokens_per_step"], setting


def test_what_sam_gains_on_a_recording():
    """What is asked of recordings; those of benchmarks/record/drafters.md are not in this repository."""
    methods = ["ngram", "suffix", "suffix_tuned", "earliest_single", "sam"]
    results = measure(list(read_trace(RECORDING)), methods, [8], [0, 8])
    for sam in (result for result in results if result["method"] == "sam"):
        same = {result["method"]: result for result in results if result["history"] == sam["history"]}
        for other in ("ngram", "earliest_single"):
            assert sam["tokens_per_step"] > 1.15 * same[other]["tokens_per_step"]
        ratios = over_baselines(sam, results)
        (tokens, drafted), (tokens_of_tuned, drafted_of_tuned) = ratios["suffix"], ratios["suffix_tuned"]
        if sam["history"]:
            assert tokens > 1.2 and tokens_of_tuned > 1.1 and drafted_of_tuned <= 1
        else:
            assert tokens > 1.1 and drafted <= 1 and tokens_of_tuned > 1 and drafted_of_tuned <= 2 / 3


def test_what_sam_costs_on_a_recording():
    """Asked: a tenth of the time, a quarter of the bytes; of the time a fifth, as other work goes on here."""
    lines = list(read_trace(RECORDING))
    _, sam = measure_steps(lines, [(method, Settings(8)) for method in ("suffix", "sam")], batches=(64,))
    assert sam["suffix_over_us_per_row"]["64"]["median"] > 5
    cost = measure_index(lines, ["suffix", "sam"], sizes=(2048, 32768))
    for size in ("2048", "32768"):
        suffix, sam = ({name: cost[method][name][size] for name in cost[method]} for method in cost)
        assert suffix["ns_per_indexed_token"] > 5 * sam["ns_per_indexed_token"]
        assert suffix["bytes_per_token"] > 4 * sam["bytes_per_token"]


def test_at_equal_drafts_sam_drafts_no_more(lines):
    results = measure(lines, ["suffix", "suffix_tuned", "suffix_policy"], [4], [8])
    wanted = equal_drafts(results)
    assert [(name, baseline["method"]) for name, baseline in wanted] == [
        ("suffix", "suffix"),
        ("2/3 suffix_tuned", "suffix_tuned"),
        ("suffix_tuned", "suffix_tuned"),
    ]
    for (name, baseline), share in zip(wanted, (1, 2 / 3, 1), strict=True):
        result = at_equal_drafts(lines, name, baseline)
        assert (result["method"], result["num_speculative_tokens"], result["history"]) == ("sam", 4, 8)
        most = share * baseline["draft_tokens_per_step"]
        assert 0.9 * most < result["draft_tokens_per_step"] <= most
        # It is a replay like any other.
        [same] = measure(lines, ["sam"], [4], [8], min_token_probs=[result["min_token_prob"]])
        assert result == same | {"equal_drafts": name}


def test_nothing_drafted_is_equalled_by_nothing():
    line = Rollout("g", None, PROMPT, [np.arange(10, 40, dtype=np.int32)])
    [suffix] = measure([line], ["suffix"], [4], [0])
    assert suffix["draft_tokens_per_step"] == 0
    assert at_equal_drafts([line], "suffix", suffix)["draft_tokens_per_step"] == 0


def test_the_command_adds_equal_drafts(capsys):
    command = ["bench", "drafters", str(TRACE), "--num-speculative-tokens", "4", "--limit-groups", "2"]
    command += ["--no-cost", "--equal-drafts", "--methods", "suffix,sam"]
    assert main([*command, "--json"]) == 0
    suffix, sam, equal = json.loads(capsys.readouterr().out)["results"]
    assert [(row["method"], row["equal_drafts"]) for row in (sam, equal)] == [
        ("sam", None),
        ("sam", "suffix"),
    ]
    assert equal["draft_tokens_per_step"] <= suffix["draft_tokens_per_step"]
    assert equal.keys() == sam.keys()
    assert main(command) == 0
    assert "sam as suffix" in capsys.readouterr().out


def test_what_is_timed_are_drafts():
    period = np.arange(10, 20, dtype=np.int32)
    rows = [Row(0, 3, np.concatenate([period[:3], np.tile(period, 8)])) for _ in range(3)]
    batch = make_batch(rows)
    propose = engine_call("suffix", Settings(4), batch, rows)
    batch.num_tokens_no_spec[:] = 63
    assert propose(batch, [row.token_ids[3:63].tolist() for row in rows]) == [[10, 11, 12, 13]] * 3


def test_ratios_are_of_the_same_steps(lines):
    runs = [(method, Settings(4)) for method in ("suffix", "sam")]
    suffix, sam = measure_steps(lines, runs, batches=(8,))
    assert suffix["suffix_over_us_per_row"]["8"] == {"median": 1.0, "p10": 1.0, "p90": 1.0}
    ratio = sam["suffix_over_us_per_row"]["8"]
    assert ratio["p10"] <= ratio["median"] <= ratio["p90"]
    medians = suffix["us_per_row"]["8"] / sam["us_per_row"]["8"]
    assert medians == pytest.approx(ratio["median"], rel=0.5)


def test_bytes_are_of_both_trees():
    line = Rollout("g", None, PROMPT, [np.arange(1024, dtype=np.int32)])
    cost = measure_index([line], ["suffix"], sizes=(1024,))["suffix"]["bytes_per_token"]["1024"]
    tree = SuffixDecodingCache(24, 1)
    tree.start_request("0", np.arange(1024, dtype=np.int32))
    one = tree._local_trees["0"].estimate_memory() / 1024
    assert cost == pytest.approx(2 * one, rel=0.05)
