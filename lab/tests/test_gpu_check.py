"""`gpu-check` without its engines: what fails or has no time is named, and what its verdict says."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_spec_lab.bench import engine
from rollout_spec_lab.gpu_check import PARTS as ALL_PARTS
from rollout_spec_lab.gpu_check import V2, gpu_check
from rollout_spec_lab.gpu_check.gpu_check import WAITS, Check, Plan, step_times
from rollout_spec_lab.gpu_check.page import verdict

METHODS = ["off", "sam", "suffix"]
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
PARTS = ["doctor", "verify", "certify" + V2, "certify", "steps", "rollouts"]
PARTS += [*(f"rollouts: {method}" for method in METHODS), "thresholds"]
NOTHING: dict[str, Any] = dict.fromkeys(ALL_PARTS)
NAMES = [part for part in PARTS if "rollouts: " not in part]


def checked(folder: Path, seconds: float, parts: list[str] = NAMES) -> list[dict[str, Any]]:
    """What there was after each part."""
    load = engine.Load([[1, 2, 3]], 2)
    rollouts = engine.Plan(load, METHODS, "/nowhere", "float32", {"max_num_seqs": 2}, {})
    check = Check(Plan(seconds, {part: {} for part in parts}, rollouts), folder)
    return [json.loads(json.dumps(record)) for record in check.run()]


def test_what_fails_is_named_in_its_place_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (gpu_check, engine):
        monkeypatch.setattr(module, "WORKER", "no.such.worker")
    first, *_, record = checked(tmp_path, 60.0)
    assert [part["part"] for part in first["parts"]] == ["doctor"]
    assert [part["part"] for part in record["parts"]] == PARTS
    assert {part["status"] for part in record["parts"][:-1]} == {"failed"}
    missing = [part["part"] for part in record["parts"] if "No module named 'no'" in part["reason"]]
    assert missing == [part for part in PARTS if part not in ("rollouts", "thresholds")]
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

    def answer(
        worker: str, job: Any, name: str, folder: Path, seconds: float, environment: Any
    ) -> dict[str, Any]:
        asked.append((name, seconds, environment))
        now[0] += 10.0
        return {"skipped": ["2 rows, 7 drafts: no room"]}

    monkeypatch.setattr(gpu_check, "answer", answer)
    monkeypatch.setattr(gpu_check, "time", SimpleNamespace(monotonic=lambda: now[0]))
    record = checked(tmp_path, 120.0, ["doctor", "steps" + V2, "steps"])[-1]
    names, seconds, environments = zip(*asked, strict=True)
    assert (names, seconds) == (("doctor", "steps" + V2, "steps"), (60.0, 55.0, 100.0))
    assert environments == ({}, {RUNNER: "1"}, {RUNNER: "0"})
    assert "steps: 2 rows, 7 drafts: dropped: no room." in verdict(NOTHING | {"parts": record["parts"]})


def row(context: int, num_rows: int, num_drafts: int, seconds: float) -> dict[str, Any]:
    return {
        "context": context, "num_rows": num_rows, "num_drafts": num_drafts, "seconds": seconds, "num_steps": 4
    }  # fmt: skip


STEPS = [row(64, 1, 0, 0.010), row(64, 4, 0, 0.011), row(64, 1, 3, 0.012), row(64, 2, 1, 0.014)]
STEPS += [row(64, 16, 7, 0.040), row(512, 1, 0, 0.020)]


def test_step_times_are_of_the_shortest_context_and_of_one_mean_for_each_number_of_tokens() -> None:
    found = {(one["drafted"], one["num_tokens"]): one["seconds"] for one in step_times(STEPS)}
    assert found == {
        (False, 1): 0.010,
        (False, 4): 0.011,
        (True, 4): pytest.approx(0.013),
        (True, 128): 0.040,
    }


@pytest.mark.parametrize(
    ("waits", "says"),
    [(None, "not counted"), ({"plain": ["a:1"], "with drafts": ["a:1", "a:1", "b:2"]}, "are as documented"),
     ({"plain": ["a:1", "b:2"], "with drafts": ["a:1", "a:1", "b:2"]}, "are not as documented: plain 2")],
)  # fmt: skip
def test_the_verdict_on_steps(waits: dict[str, list[str]] | None, says: str) -> None:
    """Of each runner the waits, and of each context the least time and how it grows."""
    found = {"steps": STEPS, "waits": waits}
    record = NOTHING | {"steps": found, "steps" + V2: found, "waits_expected": WAITS, "parts": []}
    sentences = verdict(record)
    assert len(sentences) == 6 and says in sentences[0] and says in sentences[3]
    assert [sentence.endswith(", on MRV2.") for sentence in sentences] == [True] * 3 + [False] * 3
    assert (
        "10.00 ms at least" in sentences[4] and "with 4 tokens, and 4.0 times that with 128." in sentences[4]
    )


def test_the_verdict_on_rollouts_has_every_ratio_with_its_interval() -> None:
    def ratio(value: float, *interval: float) -> dict[str, Any]:
        return {"value": value, "ci95": list(interval) or [None, None]}

    def result(method: str, whole: dict[str, Any], **over: Any) -> dict[str, Any]:
        ratios = {"tokens_per_s": whole, "tail_tokens_per_s": ratio(2.0, 1.5, 2.5)}
        return {"method": method, "ratios": ratios, "tokens_per_s_over": over, "tokens_per_s": 100.0}

    results = [
        result("off", ratio(1.0)) | {"predicted_tokens_per_s": {"step_times": 125.0, "roofline": None}},
        result("sam:0", ratio(0.98, 0.96, 1.0)),
        result("sam", ratio(1.3, 1.2, 1.4), suffix=ratio(1.1, 1.0, 1.2)),
        result("suffix", ratio(1.2)),
    ]
    record = NOTHING | {"rollouts": {"results": results, "load": {"repeats": 2}}, "parts": []}
    figures = ["0.98 (0.96 to 1.00)", "1.30 (1.20 to 1.40)", "1.20", "1.10 (1.00 to 1.20)", "1.25", "three"]
    sentences = verdict(record)
    assert len(sentences) == len(figures)
    assert [figure for figure, said in zip(figures, sentences, strict=True) if figure not in said] == []
