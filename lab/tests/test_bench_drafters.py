"""The drafters side by side: the same verifier as replay, errors are clear.

What compares with vLLM's `suffix` needs ArcticInference (lab/bench.md).
"""

import importlib.util
import json
import math
import sys
from itertools import islice

import numpy as np
import pytest

from lab.tests.conftest import DATA
from rollout_spec.config import SpecConfig
from rollout_spec.predict.replay import replay
from rollout_spec.predict.simulated_drafts import with_simulated_drafts
from rollout_spec.trace import Rollout, read_trace, to_line
from rollout_spec_lab.bench.drafters import FIGURES, Suffix, all_runs, over_baselines, replay_all
from rollout_spec_lab.bench.tables import drafters_tables
from rollout_spec_lab.cli import main
from rollout_spec_lab.cli.bench_drafters import METHODS

TRACE = DATA / "demo_trace.jsonl.gz"
# Rollouts of the demo's pretrained policy by plain vLLM: 24 of its prompts twice, 8 samples of at most 192
# tokens each, T = 0.6.
RECORDING = DATA / "policy_trace.jsonl.gz"
PROMPT = np.array([1, 2, 3], np.int32)
EARLIER = np.array([4, 5, 6, 7, 8, 9], np.int32)
CONFIG = SpecConfig(num_speculative_tokens=8)
HAS_ARCTIC = importlib.util.find_spec("arctic_inference") is not None
needs_arctic = pytest.mark.skipif(
    not HAS_ARCTIC, reason="no arctic-inference, which `make test` builds where a compiler for C++20 is"
)


@pytest.fixture(scope="module")
def lines():
    return list(read_trace(TRACE))


@pytest.fixture(scope="module")
def results(lines):
    runs = all_runs(("ngram", "sam"), SpecConfig(), [4], [0, 8], [0.6, 0.05])
    return replay_all(lines, runs)


def group_of(num_responses):
    return Rollout("a", None, PROMPT, [PROMPT] * num_responses)


def only(results, **wanted):
    return [result for result in results if all(result[name] == wanted[name] for name in wanted)]


def test_every_price_of_sam_is_a_result_of_its_own_and_a_replay(lines, results):
    of_first = [(result["method"], result["min_survival"]) for result in results[:3]]
    assert of_first == [("ngram", None), ("sam", 0.6), ("sam", 0.05)]
    for history in (0, 8):
        dear, cheap = only(results, method="sam", history=history)
        assert dear["draft_tokens_per_step"] < cheap["draft_tokens_per_step"]
        same = replay(lines, SpecConfig(num_speculative_tokens=4, history=history, min_survival=0.05))
        assert all(cheap[figure] == same.to_dict()[figure] for figure in FIGURES)


def test_the_command_prints_what_it_writes(tmp_path, capsys, caplog):
    options = ["--methods", "ngram,sam", "--num-speculative-tokens", "4", "--limit-groups", "2"]
    options += ["--history", "0", "8", "--min-survival", "0.2", "0.05", "--spec", f"corpus={TRACE}"]
    command = ["bench", "drafters", str(TRACE), *options]
    assert main([*command, "--output", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "drafters.json").read_text())
    assert [result["method"] for result in printed["results"]] == 2 * ["ngram", "sam", "sam"]
    assert all(result["tokens_per_step"] > 1 for result in printed["results"])
    [table] = drafters_tables(printed)
    assert len(table[1]) == 8 and len(table[2]) == 6
    assert f"{TRACE} holds 16 of 16 responses" in caplog.text


@pytest.fixture
def without_arctic_inference(monkeypatch):
    monkeypatch.setitem(sys.modules, "arctic_inference", None)
    monkeypatch.delitem(sys.modules, "arctic_inference.suffix_decoding", raising=False)


def test_by_default_what_is_not_installed_is_left_out_with_one_line(without_arctic_inference, capsys):
    options = ["--num-speculative-tokens", "4", "--limit-groups", "1", "--json"]
    assert main(["bench", "drafters", str(TRACE), *options]) == 0
    out, err = capsys.readouterr()
    [line] = [line for line in err.splitlines() if "suffix" in line]
    assert line.startswith("rollout-spec-lab bench drafters: without suffix_server, suffix_server_tuned: ")
    assert "arctic-inference==0.1.1" in line
    found = [result["method"] for result in json.loads(out)["results"]]
    assert found == [method for method in METHODS if "suffix" not in method]


def test_what_is_named_must_be_installed(without_arctic_inference, capsys):
    assert main(["bench", "drafters", str(TRACE), "--methods", "sam,suffix_server"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "arctic-inference==0.1.1" in line


@pytest.mark.parametrize(
    ("num_tokens", "options", "message"),
    [
        (1, ["--methods=sam"], "{}: no second token in any response, so there is no step to draft in"),
        (
            30_000,
            ["--methods=sam", "--spec", "max_index_mb=1"],
            "max_index_mb=1: one prompt with its responses needs more",
        ),
    ],
)
def test_a_trace_that_cannot_be_measured_is_one_line(num_tokens, options, message, tmp_path, capsys):
    response = np.random.default_rng(0).integers(0, 50_000, num_tokens).tolist()
    trace = tmp_path / "trace.jsonl"
    trace.write_text(to_line("g", None, [1], [response, [2]]))
    assert main(["bench", "drafters", str(trace), *options]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message.format(trace) in line


def test_a_simulated_model_is_right_as_often_as_asked():
    """After right tokens, and oftener where the index is right; the same each time."""
    lines = list(islice(read_trace(RECORDING), 12))
    modelled, again = (list(with_simulated_drafts(lines, (0.8, 0.5, 0.5))) for _ in range(2))
    num_right, num_tried = np.zeros(3), np.zeros(3)
    for line, same in zip(modelled, again, strict=True):
        for response, said, other in zip(line.responses, line.model_drafts, same.model_drafts, strict=True):
            assert (said.tokens == other.tokens).all()
            for i in range(len(response) - 2):
                is_right = said.tokens[i] == response[i : i + 3]
                agrees = np.logical_and.accumulate(is_right)
                assert (is_right == agrees).all()
                num_right += agrees
                num_tried += [1, *agrees[:-1]]
            assert said.tokens[-1].tolist()[1:] == [-1, -1]
    assert num_right / num_tried == pytest.approx([0.8, 0.5, 0.5], abs=0.07)
    assert said.log_odds[0] == pytest.approx([math.log(4), 0, 0], abs=1e-6)


def test_a_model_as_one_more_expert_beats_the_better_of_both_in_each_step():
    lines = list(with_simulated_drafts(islice(read_trace(RECORDING), 12), (0.8, 0.8, 0.8)))
    runs = all_runs(("sam", "model", "sam+model"), SpecConfig(), [8], [0], [0.1])
    suffix, model, both = (result["tokens_per_step"] for result in replay_all(lines, runs))
    assert both > 1.05 * max(suffix, model)
    config = SpecConfig(num_speculative_tokens=8, history=0, min_survival=0.1)
    assert replay(lines, config).total.tokens_per_step == both
    for short in replay_all(lines, all_runs(("model", "sam+model"), SpecConfig(), [1], [0], [0.1])):
        assert 0 < short["draft_tokens_per_step"] <= 1.0  # K is less than the model's


def step(suffix, rows, token_ids, levels, budget=4):
    budgets = [budget] * len(rows)
    arrays = (np.array(value, np.int32) for value in (rows, token_ids, levels, budgets))
    drafts, numbers = suffix.draft(*arrays)
    return [draft[:number].tolist() for draft, number in zip(drafts, numbers, strict=True)]


def drafts_after_a_match(method, k, lines_before=()):
    """What two tokens of EARLIER are followed by, after other lines."""
    suffix = Suffix(method, k)
    for response in lines_before:
        suffix.start(group_of(1), ())
        step(suffix, [0], [[*PROMPT, *response]], [len(PROMPT) + len(response)])
        suffix.finish()
    suffix.start(group_of(1), ())
    [draft] = step(suffix, [0], [[1, 2, 3, 5, 6]], [5])
    return draft


@needs_arctic
def test_a_server_keeps_the_lines_before():
    """As many tokens as are matched: max_spec_factor is 1; 4 times as many in the tuned setting."""
    assert drafts_after_a_match("suffix_server", 4) == []
    assert drafts_after_a_match("suffix_server", 4, [EARLIER]) == [7, 8]
    assert drafts_after_a_match("suffix_server", 1, [EARLIER]) == [7]
    assert drafts_after_a_match("suffix_server_tuned", 4, [EARLIER]) == [7, 8, 9]


@needs_arctic
def test_what_sam_gains_on_a_recording():
    """Against a cache for all prompts, with fewer draft tokens; and by what prompts were answered before.

    Measured: 1.09 times the tokens per step of suffix_server with as many draft tokens, 1.06 times
    those of suffix_server_tuned with 0.81 of them; 1.02 times the tokens with history.
    """
    lines = list(read_trace(RECORDING))
    runs = all_runs(["suffix_server", "suffix_server_tuned"], CONFIG, [8], [8], [0.0])
    runs += all_runs(["sam"], CONFIG, [8], [8], [0.115, 0.02])
    runs += all_runs(["sam"], CONFIG, [8], [0], [0.115])
    *baselines, sam, cheap, without = replay_all(lines, runs)
    tokens, drafted = over_baselines(sam, baselines)["suffix_server"]
    assert tokens > 1.06 and drafted <= 1
    tokens, drafted = over_baselines(cheap, baselines)["suffix_server_tuned"]
    assert tokens > 1.03 and drafted < 0.9
    assert sam["tokens_per_step"] > 1.01 * without["tokens_per_step"]


@needs_arctic
def test_the_command_adds_equal_drafts_and_ratios(capsys):
    command = ["bench", "drafters", str(TRACE), "--num-speculative-tokens", "4", "--limit-groups", "2"]
    command += ["--equal-drafts", "--methods", "suffix_server,sam"]
    assert main([*command, "--json"]) == 0
    suffix, sam, equal = json.loads(capsys.readouterr().out)["results"]
    assert (sam["equal_drafts"], equal["equal_drafts"]) == (None, "suffix_server")
    assert equal["draft_tokens_per_step"] <= suffix["draft_tokens_per_step"]
    assert list(equal["over"]) == ["suffix_server"] and equal.keys() == sam.keys()
    assert main(command) == 0
    assert "sam over vLLM's suffix" in capsys.readouterr().out
