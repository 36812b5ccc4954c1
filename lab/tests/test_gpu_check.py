"""`gpu-check` without its engines: what fails or has no time is named, and what its verdict says."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout_spec.config import UserError
from rollout_spec.predict.step_times import StepTimes
from rollout_spec_lab.bench import engine, jobs
from rollout_spec_lab.bench.load import Load
from rollout_spec_lab.bench.verify import sentences as verified
from rollout_spec_lab.bench.waits import WAITS
from rollout_spec_lab.cli import gpu_check as command
from rollout_spec_lab.gpu_check import ON_MRV2, gpu_check, latency
from rollout_spec_lab.gpu_check import PARTS as ALL_PARTS
from rollout_spec_lab.gpu_check.gpu_check import Check
from rollout_spec_lab.gpu_check.page import tables, verdict
from rollout_spec_lab.gpu_check.plan import CheckPlan
from tests.vllm_doubles import STEPS as COUNTED

METHODS = ["off", "sam", "suffix"]
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
PARTS = ["doctor", "verify", "certify" + ON_MRV2, "certify", "steps", "rollouts"]
PARTS += [f"rollouts: {method}" for method in METHODS]
NOTHING: dict[str, Any] = dict.fromkeys(ALL_PARTS)
NAMES = [part for part in PARTS if "rollouts: " not in part]


def checked(folder: Path, seconds: float, parts: list[str] = NAMES) -> list[dict[str, Any]]:
    """What there was after each part."""
    load = Load([[1, 2, 3]], 2)
    rollouts = engine.EnginePlan(load, METHODS, "/nowhere", "float32", {"max_num_seqs": 2}, {})
    check = Check(CheckPlan(seconds, {part: {} for part in parts}, rollouts), folder)
    return [json.loads(json.dumps(record)) for record in check.run()]


def test_what_fails_is_named_in_its_place_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (gpu_check, engine):
        monkeypatch.setattr(module, "WORKER", "no.such.worker")
    first, *_, record = checked(tmp_path, 60.0)
    assert [part["part"] for part in first["parts"]] == ["doctor"]
    assert [part["part"] for part in record["parts"]] == PARTS
    assert {part["status"] for part in record["parts"]} == {"failed"}
    missing = [part["part"] for part in record["parts"] if "No module named 'no'" in part["reason"]]
    assert missing == [part for part in PARTS if part != "rollouts"]
    assert NOTHING.items() <= record.items()
    assert "rollouts: failed: nothing to compare with: off has not served." in verdict(record)


def test_what_has_no_time_is_named(tmp_path: Path) -> None:
    record = checked(tmp_path, 0.01)[-1]
    assert [part["part"] for part in record["parts"]] == PARTS
    assert {part["status"] for part in record["parts"]} == {"dropped"}
    assert "rollouts: suffix: dropped: no time." in verdict(record)
    assert NOTHING.items() <= record.items()


def test_a_part_may_take_half_of_what_is_left_and_the_last_one_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock goes on in parts only: a later one has what an earlier one has left."""
    now, asked = [0.0], []

    def answers(
        worker: str, job: Any, name: str, folder: Path, seconds: float, environment: Any
    ) -> Iterator[dict[str, Any]]:
        asked.append((name, seconds, environment, job["deadline"]))
        now[0] += 10.0
        yield {"skipped": ["2 rows, 7 drafts: no room"]}

    monkeypatch.setattr(gpu_check, "answers", answers)
    monkeypatch.setattr(gpu_check, "time", SimpleNamespace(monotonic=lambda: now[0]))
    record = checked(tmp_path, 120.0, ["doctor", "steps" + ON_MRV2, "steps"])[-1]
    names, seconds, environments, deadlines = zip(*asked, strict=True)
    assert (names, seconds) == (("doctor", "steps" + ON_MRV2, "steps"), (60.0, 55.0, 100.0))
    assert environments == ({}, {RUNNER: "1"}, {RUNNER: "0"}) and deadlines == (54.0, 59.5, 110.0)
    assert "steps: 2 rows, 7 drafts: dropped: no room." in verdict(NOTHING | {"parts": record["parts"]})


CUT_OFF = """
import time
from rollout_spec_lab.bench.jobs import reply

def run(job):
    yield {"cells": [1], "skipped": ["2: not reached"]}
    INSTEAD_OF_THE_SECOND

reply(run)
"""


@pytest.mark.parametrize(
    ("instead", "status"), [("time.sleep(600)", "done"), ("raise ValueError('no room')", "failed")]
)
def test_a_part_that_is_cut_off_keeps_what_it_has(
    instead: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is over once its first cell is there, or it fails then."""
    (tmp_path / "cut_off.py").write_text(CUT_OFF.replace("INSTEAD_OF_THE_SECOND", instead))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setattr(gpu_check, "WORKER", "cut_off")
    now = [0.0]
    monkeypatch.setattr(jobs, "time", SimpleNamespace(monotonic=lambda: now[0]))
    records = []
    for record in Check(CheckPlan(60.0, {"verify": {}}, "none"), tmp_path).run():
        records.append(json.loads(json.dumps(record)))
        now[0] = 1000.0 * (status == "done")
    assert [record["verify"]["cells"] for record in records] == [[1], [1]]
    assert records[0]["parts"] == []
    part, cell = records[1]["parts"]
    assert part["status"] == status and ("no room" in part["reason"]) == (status == "failed")
    assert (cell["part"], cell["status"], cell["reason"]) == ("verify: 2", "dropped", "not reached")


def test_predicted_steps_are_beside_measured_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of MRV1 beside MRV1's roofline: 10 ms and 1 ms for each token."""
    steps = [row(64, 1, 0, 0.011), row(64, 2, 1, 0.007)]
    found = {"steps": steps, "settings": {"model_runner": "MRV1"}, "waits": {}}
    monkeypatch.setattr(gpu_check, "answers", lambda *_: iter([found]))
    rooflines = {"MRV1": StepTimes.parse("1:0.011,11:0.021"), "MRV2": StepTimes.parse("1:9")}
    *_, record = Check(CheckPlan(60.0, {"steps": {}}, "none", rooflines, {"model": "m"}), tmp_path).run()
    assert [one["roofline_s"] for one in record["steps"]["steps"]] == pytest.approx([0.011, 0.014])
    assert "The roofline says 1.00 to 2.00 times these times." in verdict(record)
    _, (title, _, cells) = tables(record)
    assert title == "A step, ms (the roofline)" and record["plan"] == {"model": "m"}
    assert cells == [["64", "1", "11.00 (11.00)", ""], ["64", "2", "", "7.00 (14.00)"]]


ALIKE = {"tokens": 256, "differ_from_cpu": 1, "largest_shortfall": 2e-6, "differ_alone": 0}
VERIFIED = {
    "comparison": {
        "words": 1000, "words_that_differ": 0, "noise_that_differs": 0, "noise_largest_ulps": 0,
        "peaked": ALIKE, "flat": ALIKE,
    },
    "cells": [
        {"rows": rows, "k": k, "ms": {"coupled": 1.0 + k / 10, "vllm": 1.0},
         "waits": {"coupled": ["a:1"] * (3 if k else 1), "vllm": []}}
        for rows in (64, 256)
        for k in (0, 7, 15)
    ],
}  # fmt: skip


def test_verification_is_judged_at_64_rows_with_7_drafts() -> None:
    assert list(verified(VERIFIED)) == [
        "The device's random numbers are a CPU's, bit for bit: 1,000 of them.",
        "2 of 512 tokens differ from a CPU's (the largest error of a logit that explains one: 2.0e-06), "
        "0 from those drawn alone.",
        "Waits in sampling are as documented: plain 1 (documented: 1), with drafts 3 (documented: 3).",
        "Verification of 64 rows with 7 drafts takes 1.70 ms, 1.70 times vLLM's: more than the 1.5 times "
        "that we allow.",
    ]


def test_cutting_all_rows_alike_is_compared_with_vllms_choice() -> None:
    """Only where there are several ways: on CUDA."""
    cut = {"top-k, alike": 3.0, "top-k, vllm's": 2.0, "top-p, alike": 1.0, "top-p, vllm's": 1.0}
    cells = [{**cell, "ms": cell["ms"] | cut} for cell in VERIFIED["cells"]]
    cells[0]["ms"]["top-p, alike"] = 2.5
    assert list(verified({**VERIFIED, "cells": cells}))[4:] == [
        "Cutting all rows alike by top-k takes 1.50 times vLLM's at most, with 4096 rows.",
        "Cutting all rows alike by top-p takes 2.50 times vLLM's at most, with 64 rows.",
    ]


@pytest.mark.parametrize(("difference", "says"), [(0.0, "are equal"), (1e-6, "are not equal")])
def test_the_batch_invariant_mode_is_judged_bit_for_bit(difference: float, says: str) -> None:
    counted = {"tokens_compared": 9, "tokens_identical": 9, "unexplained_differences": 0}
    drafted = {"num_draft_tokens": 4, "num_rejected_tokens": 1, "mean_logprob_difference": difference}
    found = counted | drafted | {
        "verdict": "identical", "differences": [], "max_logprob_difference": difference,
        "untested": [], "plan": {}, "model_runner": "MRV1", "tolerance": 0.1,
    }  # fmt: skip
    record = NOTHING | {"certify": found, "parts": [], "plan": {"batch_invariant": True}}
    assert f"log-probabilities {says} bit for bit" in verdict(record)[1]


@pytest.mark.parametrize("has_cuda", [True, False])
def test_engines_are_asked_on_both_model_runners_where_cuda_is(
    has_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_cuda)
    parts = command._parts(argparse.Namespace(parts="rollouts,steps,start,doctor"))
    on_mrv2 = ["steps" + ON_MRV2] * has_cuda
    assert parts == ["doctor", "start" + ON_MRV2 * has_cuda, *on_mrv2, "steps", "rollouts"]
    found = set(command._parts(argparse.Namespace(parts=None)))
    assert found >= {*ALL_PARTS, *["certify" + ON_MRV2] * has_cuda} - {"start", "latency"}
    assert ("latency" in found) == has_cuda, "elsewhere no stream can wait for the host"
    with pytest.raises(UserError, match="--parts stepz: must be one of doctor, latency, start, verify"):
        command._parts(argparse.Namespace(parts="doctor,stepz"))


def test_latencies_are_of_a_stream_that_waits_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that is told what to do and does it at once, but never before the host's flag."""
    flags: list[torch.Tensor] = []
    waiting: list[tuple[torch.Tensor, int]] = []
    fake = SimpleNamespace(
        Stream=lambda _: None, CUDAGraph=lambda: SimpleNamespace(replay=lambda: None),
        graph=lambda _: contextlib.nullcontext(), stream=lambda _: contextlib.nullcontext(),
        Event=lambda: SimpleNamespace(record=lambda: None, query=has_ended),
    )  # fmt: skip

    def has_ended() -> bool:
        return all(int(flag[0]) >= value for flag, value in waiting)

    def pinned(shape: Any, dtype: torch.dtype) -> torch.Tensor:
        flags.append(torch.zeros(shape, dtype=dtype))
        return flags[-1]

    monkeypatch.setattr(latency.torch, "cuda", fake)
    monkeypatch.setattr(latency, "pinned", pinned)
    monkeypatch.setattr(latency, "wait_for", lambda _, flag, value: waiting.append((flag, value)))
    found = latency.latencies(torch.device("cpu"))
    assert [value for _, value in waiting] == [*range(1, latency.ROUNDS + 1)]
    assert {flag.dtype for flag, _ in waiting} == {torch.int32}
    assert found.keys() == {"copy", "graph", "flag", "launch"} and min(found.values()) > 0
    [sentence] = verdict(NOTHING | {"latency": found, "parts": []})
    assert f"{found['flag']:.1f} us after the host's flag" in sentence


def row(context: int, num_rows: int, num_drafts: int, seconds: float) -> dict[str, Any]:
    return {
        "context": context, "num_rows": num_rows, "num_drafts": num_drafts, "seconds": seconds, "num_steps": 4
    }  # fmt: skip


STEPS = [row(64, 1, 0, 0.010), row(64, 4, 0, 0.011), row(64, 1, 3, 0.012), row(64, 2, 1, 0.014)]
STEPS += [row(64, 16, 7, 0.040), row(512, 1, 0, 0.020)]


@pytest.mark.parametrize(
    ("waits", "says"),
    [({"plain": None}, "not counted"),
     ({"plain": ["a:1"], "with drafts": ["a:1", "a:1", "b:2"]}, "are as documented"),
     ({"plain": ["a:1", "b:2"], "with drafts": ["a:1", "a:1", "b:2"]}, "are not as documented: plain 2")],
)  # fmt: skip
def test_the_verdict_on_steps(waits: dict[str, list[str] | None], says: str) -> None:
    """It names the waits of each runner, and the least time of each context and how it grows."""
    found = {"steps": STEPS, "waits": waits, "settings": {"model_runner": "MRV1"}}
    on_mrv2 = {"steps": STEPS, "waits": {"plain": []}, "settings": {"model_runner": "MRV2"}}
    sentences = verdict(NOTHING | {"steps": found, "steps" + ON_MRV2: on_mrv2, "parts": []})
    assert len(sentences) == 6 and says in sentences[3]
    assert sentences[0] == "Waits in sampling are as documented: plain 0 (documented: 0), on MRV2."
    assert [sentence.endswith(", on MRV2.") for sentence in sentences] == [True] * 3 + [False] * 3
    assert "10.00 ms at least" in sentences[4]
    assert "with 4 tokens, and 4.0 times that with 128." in sentences[4]


def test_the_verdict_on_rollouts_has_every_ratio_with_its_interval() -> None:
    def ratio(value: float, *interval: float) -> dict[str, Any]:
        return {"value": value, "ci95": list(interval) or [None, None]}

    def result(method: str, whole: dict[str, Any], seconds: float = 0.0, **over: Any) -> dict[str, Any]:
        return {
            "method": method, "ratios": {"tokens_per_s": whole, "tail_tokens_per_s": ratio(2.0, 1.5, 2.5)},
            "tokens_per_s_over": over, "tokens_per_s": 100.0, "draft_cpu_s": seconds, "num_repeats": 2,
            "repeats": [{"num_steps": 150}] * 2,
        }  # fmt: skip

    results = [
        result("off", ratio(1.0)) | {"predicted_tokens_per_s": {"step_times": 125.0, "roofline": None}},
        result("sam", ratio(1.3, 1.2, 1.4), 0.3, suffix=ratio(1.1, 1.0, 1.2)),
        result("suffix", ratio(1.2)),
    ]
    record = NOTHING | {"rollouts": {"results": results, "load": {"repeats": 2}}, "parts": []}
    figures = ["1.30 (1.20 to 1.40)", "1.20", "1.10 (1.00 to 1.20)", "1.25", "2.00 ms", "three"]
    sentences = verdict(record)
    assert len(sentences) == len(figures)
    assert [figure for figure, said in zip(figures, sentences, strict=True) if figure not in said] == []


def test_it_expects_the_waits_that_are_counted_without_a_gpu() -> None:
    assert {kind: len(COUNTED[kind][1]) for kind in WAITS["MRV1"]} == WAITS["MRV1"]
