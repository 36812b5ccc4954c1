"""`bench engine` on real engines: lengths are the same for every method, what is reported has happened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollout_spec.drafting.gate import HYSTERESIS_STEPS
from rollout_spec.measure.engine import Load, random_prompts
from rollout_spec.trace import trace_file
from tests.engine.conftest import VOCAB_SIZE

METHODS = ["off", "sam:4", "ngram"]
LOAD = {"group_size": 4, "median_tokens": 24.0, "max_tokens": 64}


def test_rollouts_without_and_with_drafts(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rollout_spec.cli import main

    options = ["--methods", ",".join(METHODS), "--load", "random", "--num-prompts", "3", "--group-size", "4"]
    options += ["--max-num-seqs", "6", "--tail-threshold", "4", "--median-tokens", "24", "--max-tokens", "64"]
    options += ["--repeats", "1", "--temperature", "0.3", "--dtype", "float32"]
    assert (
        main(["bench", "engine", "--model", tiny_model, *options, "--output", str(tmp_path), "--json"]) == 0
    )
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads((tmp_path / "engine.json").read_text())
    timelines = json.loads((tmp_path / "timelines.json").read_text())
    assert (tmp_path / "engine.png").stat().st_size > 10_000

    requests = Load(random_prompts(3, VOCAB_SIZE, 0), **LOAD).requests(0)
    expected = sum(request["max_tokens"] for request in requests)
    assert [result["method"] for result in record["results"]] == METHODS
    off, sam, ngram = record["results"]
    for result in record["results"]:
        [run] = result["repeats"]
        assert run["num_tokens"] == run["front_tokens"] + run["tail_tokens"] == expected
        assert run["num_decoded_tokens"] == expected - len(requests)
        assert run["makespan_s"] == pytest.approx(expected / result["tokens_per_s"])
        [line] = timelines[result["method"]]
        assert max(line["num_running"]) == 6 and sum(line["num_prefills"]) == len(requests)
    assert off["acceptance_rate"] is None and off["tokens_per_step"] == 1.0 and off["draft_cpu_s"] == 0
    assert 0.05 < sam["acceptance_rate"] <= 1 and sam["tokens_per_step"] > 1
    assert sam["makespan_s"] > sam["draft_cpu_s"] > 0
    counters = sam["repeats"][0]["counters"]
    assert counters["num_steps_off_threshold"] + counters["num_steps_on"] == counters["num_steps"] > 0
    assert 0 < ngram["acceptance_rate"] < 1 and ngram["share_on"] > 0.5

    # Drafts are verified one step after they were asked for, by at most 4 requests or a few steps longer.
    [line] = timelines["sam:4"]
    num_above = 0
    for running, drafted in zip(line["num_running"], line["num_draft_tokens"], strict=True):
        num_above = num_above + 1 if drafted and running > 4 else 0
        assert num_above <= HYSTERESIS_STEPS
    assert 0 < sam["share_on"] < 1
    assert {row["drafted"] for row in record["step_times"]} == {False, True}
    assert all(row["num_tokens"] > row["num_running"] for row in record["step_times"] if row["drafted"])

    trace, table = str(trace_file(tmp_path, 0)), str(tmp_path / "engine.json")
    assert main(["simulate", trace, "--step-times", table, "--max-num-seqs", "6", "--json"]) == 0
    [simulated] = json.loads(capsys.readouterr().out)["results"]
    assert simulated["runs"][0]["makespan_s"] > 0
    assert not record["engines"]["off"]["async_scheduling"] or record["engines"]["off"]["device"] != "cpu"
