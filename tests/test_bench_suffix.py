"""vLLM's `suffix` beside ours, where ArcticInference is installed (README, next to `bench drafters`)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rollout_spec.cli import main
from rollout_spec.config import SpecConfig
from rollout_spec.measure.drafter_costs import Row, engine_call, make_batch, time_indexing, time_steps
from rollout_spec.measure.drafters import Suffix, all_runs, at_equal_drafts, measure, over_baselines
from rollout_spec.measure.replay import Rollout, read_trace

SuffixDecodingCache = pytest.importorskip(
    "arctic_inference.suffix_decoding", reason="arctic-inference is not installed"
).SuffixDecodingCache

TRACE = Path(__file__).parent / "data" / "demo_trace.jsonl.gz"
# Of the demo's pretrained policy, by plain vLLM: 24 of the demo's prompts twice, 8 samples of at most 192
# tokens each, T = 0.6.
RECORDING = Path(__file__).parent / "data" / "policy_trace.jsonl.gz"
PROMPT = np.array([1, 2, 3], np.int32)
EARLIER = np.array([4, 5, 6, 7, 8, 9], np.int32)
CONFIG = SpecConfig(num_speculative_tokens=8)


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
    suffix = Suffix("suffix", 4)
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


def drafts_after_a_match(method, k, lines_before=(), earlier=()):
    """What two tokens of EARLIER are followed by, after other lines."""
    suffix = Suffix(method, k)
    for response in lines_before:
        suffix.start(PROMPT, 1, ())
        step(suffix, [0], [[*PROMPT, *response]], [len(PROMPT) + len(response)])
        suffix.finish()
    suffix.start(PROMPT, 1, earlier)
    [draft] = step(suffix, [0], [[1, 2, 3, 5, 6]], [5])
    return draft


def test_earlier_responses_are_in_the_cache():
    # As many tokens as are matched: max_spec_factor is 1; 4 times as many in the tuned setting.
    assert drafts_after_a_match("suffix", 4, earlier=[EARLIER]) == [7, 8]
    assert drafts_after_a_match("suffix_tuned", 4, earlier=[EARLIER]) == [7, 8, 9]
    assert drafts_after_a_match("suffix", 1, earlier=[EARLIER]) == [7]
    assert drafts_after_a_match("suffix", 4) == []


def test_only_a_server_keeps_the_lines_before():
    before = [EARLIER]
    assert drafts_after_a_match("suffix", 4, before) == []
    assert drafts_after_a_match("suffix_tuned", 4, before) == []
    assert drafts_after_a_match("suffix_server", 4, before) == [7, 8]
    assert drafts_after_a_match("suffix_server_tuned", 4, before) == [7, 8, 9]


def test_what_sam_gains_on_a_recording():
    """Against a cache for all prompts, with fewer draft tokens; and by what prompts were answered before.

    Measured: 1.09 times the tokens per step of suffix_server with as many draft tokens, 1.06 times
    those of suffix_server_tuned with 0.82 of them; 1.02 times the tokens with history.
    """
    lines = list(read_trace(RECORDING))
    runs = all_runs(["suffix_server", "suffix_server_tuned"], CONFIG, [8], [8], [0.0])
    runs += all_runs(["sam"], CONFIG, [8], [8], [0.095, 0.012])
    runs += all_runs(["sam"], CONFIG, [8], [0], [0.095])
    *baselines, sam, cheap, without = measure(lines, runs)
    tokens, drafted = over_baselines(sam, baselines)["suffix_server"]
    assert tokens > 1.06 and drafted <= 1
    tokens, drafted = over_baselines(cheap, baselines)["suffix_server_tuned"]
    assert tokens > 1.03 and drafted < 0.9
    assert sam["tokens_per_step"] > 1.01 * without["tokens_per_step"]


def test_what_sam_costs_on_a_recording():
    """Asked: a tenth of the time, a quarter of the bytes; of the time a fifth, as other work goes on here."""
    lines = list(read_trace(RECORDING))
    suffix, sam = time_steps(lines, ["suffix", "sam"], CONFIG, 64)
    assert suffix > 5 * sam
    for size in (2048, 32768):
        suffix_costs, sam_costs = time_indexing(lines, ["suffix", "sam"], CONFIG, size, 32768)
        assert suffix_costs[0] > 5 * sam_costs[0] and suffix_costs[1] > 4 * sam_costs[1]


def test_at_equal_drafts_sam_drafts_no_more(lines):
    [server] = measure(lines, all_runs(["suffix_server"], CONFIG, [4], [8], [0.0]))
    result = at_equal_drafts(lines, CONFIG, server)
    assert [result[name] for name in ("method", "num_speculative_tokens", "history")] == ["sam", 4, 8]
    assert 0.9 * server["draft_tokens_per_step"] < result["draft_tokens_per_step"]
    assert result["draft_tokens_per_step"] <= server["draft_tokens_per_step"]
    # It is a replay like any other.
    [same] = measure(lines, all_runs(["sam"], CONFIG, [4], [8], [result["min_token_prob"]]))
    assert result == same | {"equal_drafts": "suffix_server"}


def test_nothing_drafted_is_equalled_by_nothing():
    line = Rollout("g", None, PROMPT, [np.arange(10, 40, dtype=np.int32)])
    [suffix] = measure([line], [("suffix", CONFIG)])
    assert suffix["draft_tokens_per_step"] == 0
    assert at_equal_drafts([line], CONFIG, suffix)["draft_tokens_per_step"] == 0


def test_the_command_adds_equal_drafts_and_ratios(capsys):
    command = ["bench", "drafters", str(TRACE), "--num-speculative-tokens", "4", "--limit-groups", "2"]
    command += ["--no-cost", "--equal-drafts", "--methods", "suffix_server,sam"]
    assert main([*command, "--json"]) == 0
    suffix, sam, equal = json.loads(capsys.readouterr().out)["results"]
    assert (sam["equal_drafts"], equal["equal_drafts"]) == (None, "suffix_server")
    assert equal["draft_tokens_per_step"] <= suffix["draft_tokens_per_step"]
    assert list(equal["over"]) == ["suffix_server"] and equal.keys() == sam.keys()
    assert main(command) == 0
    assert "sam over vLLM's suffix" in capsys.readouterr().out


def test_what_is_timed_are_drafts():
    period = np.arange(10, 20, dtype=np.int32)
    rows = [Row(0, 3, np.concatenate([period[:3], np.tile(period, 8)])) for _ in range(3)]
    batch = make_batch(rows)
    propose = engine_call("suffix", SpecConfig(num_speculative_tokens=4), batch, rows)
    batch.num_tokens_no_spec[:] = 63
    assert propose(batch, [row.token_ids[3:63].tolist() for row in rows]) == [[10, 11, 12, 13]] * 3


def test_bytes_are_of_both_trees():
    line = Rollout("g", None, PROMPT, [np.arange(1024, dtype=np.int32)])
    [(_, num_bytes)] = time_indexing([line], ["suffix"], CONFIG, 1024, 1024)
    tree = SuffixDecodingCache(24, 1)
    tree.start_request("0", np.arange(1024, dtype=np.int32))
    one = tree._local_trees["0"].estimate_memory() / 1024
    assert num_bytes == pytest.approx(2 * one, rel=0.05)
