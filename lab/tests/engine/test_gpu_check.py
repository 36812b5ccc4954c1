"""`gpu-check` from beginning to end, with the smallest load there is; `test_offline.py` has two parts."""

import html
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rollout_spec_lab import processes
from rollout_spec_lab.gpu_check import PARTS

METHODS = ["off", "sam+model"]


def record_of(folder: Path) -> Any:
    """What is there, also while it is made."""
    file = folder / "gpu-check.json"
    return json.loads(file.read_text()) if file.is_file() else {"parts": []}


def test_a_run_that_is_ended_leaves_what_it_has_and_no_process(tiny_model: str, tmp_path: Path) -> None:
    """In its second part."""
    command = [sys.executable, "-m", "rollout_spec_lab.cli", "gpu-check", "--output", str(tmp_path)]
    options = ["--model-config", f"{tiny_model}/config.json", "--parts", "doctor,verify"]
    process = subprocess.Popen([*command, *options])
    try:
        deadline = time.monotonic() + 200
        while not (record_of(tmp_path)["parts"] and processes.descendants(process.pid)):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        below = processes.descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
    finally:
        process.kill()
    assert not [pid for pid in below if Path("/proc", str(pid)).exists()]
    record = record_of(tmp_path)
    assert record["parts"][0]["status"] == "done" and record["doctor"]["works"] and not record["verify"]


@pytest.mark.long
def test_all_parts_in_one_file(chat_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rollout_spec_lab.cli import main

    options = ["--minutes", "60", "--repeats", "1", "--methods", ",".join(METHODS), "--output", str(tmp_path)]
    drafter = ["--model-drafter", f"draft_model:{chat_model}:2"]  # the policy itself
    assert main(["gpu-check", "--model", chat_model, *options, *drafter, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads((tmp_path / "gpu-check.json").read_text())
    parts = [part for part in PARTS if part != "latency"]  # which only a GPU has
    assert {part["part"]: part["status"] for part in record["parts"]} == dict.fromkeys(parts, "done")
    assert record["doctor"]["works"] and record["certify"]["verdict"].startswith("identical")
    results = record["rollouts"]["results"]
    assert [result["method"] for result in results] == METHODS
    assert results[0]["tokens_per_step"] == 1.0 < results[1]["tokens_per_step"]
    assert results[1]["repeats"][0]["counters"]["num_model_accepted_tokens"] > 0
    assert record["plan"]["model_drafter"] == drafter[1]
    assert record["certify"]["plan"]["model_drafter"]["num_speculative_tokens"] == 2

    steps = {(row["context"], row["num_rows"], row["num_drafts"]): row for row in record["steps"]["steps"]}
    assert len(steps) == 2 * 3 * 3 and record["steps"]["skipped"] == []
    assert all(row["num_steps"] >= 2 for row in steps.values())
    assert all(row["seconds"] > 0 for row in steps.values())
    assert record["environment"]["device"] == record["steps"]["settings"]["device"]

    page = (tmp_path / "index.html").read_text()
    assert "http" not in page and "data:image/png;base64," in page
    said = html.unescape(page)
    assert all(sentence.split(":")[0] in said for sentence in record["verdict"])
