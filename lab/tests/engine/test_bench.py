"""`bench engine` on real engines: lengths are the same for every method, what is reported has happened."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.tests.engine.interpreted_tools import PROMPTS, RECORDED, job_of, recorded_load
from rollout_spec.cli import main as product
from rollout_spec.config import SpecConfig
from rollout_spec.drafting.native import Int32Array
from rollout_spec.predict.replay import replay_line
from rollout_spec.predict.replay_drafters import IndexDrafter
from rollout_spec.trace import Rollout, read_trace, to_line, trace_file
from rollout_spec_lab.bench import engine, engine_worker
from rollout_spec_lab.bench.jobs import EngineJob
from rollout_spec_lab.bench.load import Load, random_prompts
from rollout_spec_lab.cli import main
from tests.engine.conftest import VOCAB_SIZE
from tests.engine.interpreting import interpreted

SMALL = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines start in seconds here; in processes of their own: test_turns.py, test_offline.py."""

    def answers(worker: str, job: EngineJob, *_: Any) -> list[dict[str, Any]]:
        read = EngineJob(**json.loads(json.dumps(asdict(job))))
        return [json.loads(json.dumps(engine_worker.run(read)))]

    monkeypatch.setattr(engine, "answers", answers)


class KnownEnds(IndexDrafter):
    """`replay` does not know where a response ends. An engine does, by `max_tokens`: no draft goes beyond."""

    def draft(
        self, rows: Int32Array, token_ids: Int32Array, levels: Int32Array, max_draft_tokens: Int32Array
    ) -> tuple[Int32Array, Int32Array]:
        ends = len(PROMPTS[0]) + np.array([len(RECORDED[row]) for row in rows], np.int32)
        return super().draft(rows, token_ids, levels, np.clip(ends - 1 - levels, 0, max_draft_tokens))


def assert_recorded(found: dict[str, Any]) -> None:
    """The recording came, token for token, with the drafts and the acceptance of `replay`."""
    assert found["responses"] == RECORDED
    prompt, *responses = (np.array(each, np.int32) for each in (PROMPTS[0], *RECORDED))
    drafter = KnownEnds(SpecConfig(num_speculative_tokens=4, history=0))
    said = replay_line(drafter, Rollout("g", None, prompt, responses), [], 4)
    counters = found["counters"]
    assert counters["num_accepted_tokens"] == said.total.num_accepted_tokens > 20
    assert counters["num_draft_tokens"] == said.total.num_draft_tokens
    assert counters["num_drafts"] == said.num_drafts


def test_a_recording_comes_in_the_place_of_what_is_sampled(tiny_model: str) -> None:
    """On MRV1; on MRV2: below."""
    assert_recorded(engine_worker.run(job_of(tiny_model, "sam:64", recorded_load())))


def test_the_first_responses_of_a_recording_at_a_time(
    tiny_model: str, tmp_path: Path, in_this_process: None
) -> None:
    """Each of several numbers is served by itself."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(to_line(str(i), 1, PROMPTS[i], RECORDED[i:]) for i in range(2)))
    command = ["bench", "rollout", str(trace), "--model-config", f"{tiny_model}/config.json"]
    command += ["--methods", "sam:64", "--rows", "1", "6", "--repeats", "1", "--dtype", "float32"]
    assert main([*command, "--engine", json.dumps(SMALL), "--output", str(tmp_path)]) == 0
    for rows, served in ((1, [RECORDED[:1]]), (6, [RECORDED, RECORDED[1:3]])):
        [result] = json.loads((tmp_path / f"rows-{rows}/engine.json").read_text())["results"]
        assert result["repeats"][0]["num_tokens"] == sum(len(each) for line in served for each in line)
        [timeline] = json.loads((tmp_path / f"rows-{rows}/timelines.json").read_text())["sam:64"]
        assert timeline["num_running"][0] == timeline["num_prefills"][0] == rows
        written = read_trace(trace_file(tmp_path / f"rows-{rows}", 0))
        assert [[each.tolist() for each in line.responses] for line in written] == served


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_mrv2_is_measured(tiny_model: str, tmp_path: Path) -> None:
    found = interpreted("lab.tests.engine.interpreted_tools", tmp_path / "results.json", tiny_model)
    steps, cuts = found.pop("steps"), found.pop("cuts")
    for num_rows in ("7", "8"):  # below 8 vLLM 0.24 sorts, and keeps all tokens that tie
        assert cuts[num_rows]["alike"] == [20] * int(num_rows)
        assert (max(cuts[num_rows]["vllm's"]) > 20) == (num_rows == "7")
    assert_recorded(found["recorded"])
    assert {one["settings"]["model_runner"] for one in (*found.values(), steps)} == {"MRV2"}
    assert found["keyed"]["responses"] == found["sam:0"]["responses"] == found["sam:64"]["responses"]
    sam = found["sam:64"]
    assert sam["counters"]["num_draft_tokens"] == sum(sam["timeline"]["num_draft_tokens"]) > 0
    assert not any(found["sam:0"]["timeline"]["num_draft_tokens"])
    for method in ("sam:0", "sam:64"):
        assert found[method]["draft_cpu_s"] > 0
        counters = found[method]["counters"]
        assert counters["num_row_steps"] + counters["num_accepted_tokens"] == 4 * 24
    assert steps["skipped"] == []
    timed = {(row["num_rows"], row["num_drafts"]) for row in steps["steps"]}
    assert timed == {(1, 0), (1, 2), (2, 0), (2, 2)} and {*steps["waits"]} == {"plain", "with drafts"}


METHODS = ["keyed", "sam:4", "ngram"]
LOAD = {"group_size": 4, "median_tokens": 24.0, "max_tokens": 64}


def test_rollouts_without_and_with_drafts(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], in_this_process: None
) -> None:
    options = ["--methods", ",".join(METHODS), "--load", "random", "--num-prompts", "3", "--group-size", "4"]
    options += ["--max-num-seqs", "6", "--tail-threshold", "4", "--median-tokens", "24", "--max-tokens", "64"]
    options += ["--repeats", "1", "--temperature", "0.3", "--dtype", "float32"]
    command = ["bench", "engine", "--model", tiny_model, *options, "--output", str(tmp_path), "--json"]
    assert main(command) == 0
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
    assert 0 < ngram["acceptance_rate"] < 1

    # Drafts are verified one step after at most 4 requests asked for them.
    [line] = timelines["sam:4"]
    before = [4, *line["num_running"]]
    each = zip(before, line["num_draft_tokens"], strict=False)
    assert all(running <= 4 for running, drafted in each if drafted)
    assert {row["drafted"] for row in record["step_times"]} == {False, True}

    trace, table = str(trace_file(tmp_path, 0)), str(tmp_path / "engine.json")
    assert product(["simulate", trace, "--step-times", table, "--max-num-seqs", "6", "--json"]) == 0
    [simulated] = json.loads(capsys.readouterr().out)["results"]
    assert simulated["runs"][0]["makespan_s"] > 0
    engine = record["engines"]["keyed"]
    assert not engine["async_scheduling"] or engine["device"] != "cpu"
    assert sam["predicted_tokens_per_s"]["step_times"] > 0
    assert "predicted_tokens_per_s" not in ngram

    # The same tokens without the weights: step by step the same drafts, and as much of them accepted.
    config = str(Path(tiny_model) / "config.json")
    options = ["--methods", "off,sam:4", "--max-num-seqs", "6", "--repeats", "1", "--gpu", "h100"]
    command = ["bench", "rollout", trace, "--model-config", config, "--dtype", "float32", *options, "--json"]
    assert main([*command, "--output", str(tmp_path / "again")]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made == json.loads((tmp_path / "again" / "engine.json").read_text())
    plain, drafted = made["results"]
    assert plain["repeats"][0]["num_tokens"] == expected and plain["tokens_per_step"] == 1.0
    [again] = json.loads((tmp_path / "again" / "timelines.json").read_text())["sam:4"]
    assert again | {"seconds": line["seconds"]} == line
    assert all(drafted["predicted_tokens_per_s"][name] > 0 for name in ("step_times", "roofline"))
    assert (tmp_path / "again" / "rollouts-0.jsonl").read_text() == Path(trace).read_text()
