"""What `replay` says to a person: figures by hand, the batch, the sentence, the page."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_spec.cli import main
from rollout_spec.config import SpecConfig
from rollout_spec.predict.outlook import num_running, outlook
from rollout_spec.predict.replay import replay
from rollout_spec.predict.simulate import TAIL_ROWS
from rollout_spec.report.outlook import headline
from rollout_spec.trace import Rollout, to_line


@settings(deadline=None, max_examples=50)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=9), rows=st.integers(1, 4))
def test_running_requests_are_those_of_an_engine_stepped_by_hand(lengths, rows):
    waiting, running, counts = list(lengths), [], []
    while waiting or running:
        while waiting and len(running) < rows:
            running.append(waiting.pop(0))
        counts.append(len(running))
        running = [left - 1 for left in running if left > 1]
    assert num_running(lengths, rows).tolist() == counts


def test_the_tail_begins_with_its_rows():
    responses = [np.arange(length, dtype=np.int32) for length in range(1, TAIL_ROWS + 2)]
    lines = [Rollout("g", None, np.zeros(1, np.int32), responses)]
    found = outlook(lines, replay(lines, SpecConfig()), 1, 1024)
    assert found["tail_share"] == TAIL_ROWS / (TAIL_ROWS + 1), "one step has a row more"
    assert found["by_step"] == []


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    file = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    known, unknown = list(range(20)) * 2, list(range(100, 140))
    file.write_text(to_line("a", 1, list(range(20)), [known, [7]]) + to_line("b", 2, [1], [unknown]))
    output = file.parent / "output"
    command = ["replay", str(file), "--output", str(output), "--max-num-seqs", "1", "--spec", "history=0"]
    assert main(command) == 0
    return json.loads((output / "replay.json").read_text())


def test_figures_by_step_and_by_length(record):
    found = record
    by_step = {row["step"]: row for row in found["by_step"]}
    assert by_step[1]["tokens_per_step"] > 2 > by_step[2]["tokens_per_step"] == 1.0
    assert (
        0 < by_step[1]["acceptance_rate"] == found["acceptance_rate"] < 1
        and not by_step[2]["acceptance_rate"]
    )
    assert [by_step[step]["num_tokens"] for step in (1, 2)] == [41, 40]
    assert [(row["from"], row["to"], row["num_responses"]) for row in found["by_length"]] == [
        (0, 15, 1),
        (32, 63, 2),
    ]
    assert found["lengths"] == {"median": 40.0, "longest_tenth": 40.0, "longest": 40}
    assert found["running"] == [1] * 41, "one at a time: 40 steps and one"
    assert found["tail_share"] == 1.0


@pytest.mark.parametrize(
    ("tokens_per_step", "said"),
    [(1.5, "Drafts would give 1.50 tokens per step"), (1.004, "Drafts would change nothing")],
)
def test_a_sentence_says_losses_too(record, tokens_per_step, said):
    assert headline(record | {"tokens_per_step": tokens_per_step}).startswith(said)


def test_the_page_says_what_is_printed(tmp_path, capsys):
    file = tmp_path / "trace.jsonl"
    file.write_text(to_line("a", 1, [1, 2], [[1, 2, 1, 2]]) + to_line("a", 2, [1, 2], [[3, 4]]))
    command = ["replay", str(file), "--output", str(tmp_path), "--spec", "history=0"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "Groups: 2, responses: 2." in " ".join(out.split())
    assert out.startswith("Drafts would ") and f"page: {tmp_path / 'replay.html'}" in out
    page = (tmp_path / "replay.html").read_text()
    assert "<h1>Drafts would " in page and "data:image/png;base64," in page
    assert main([*command, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["headline"].startswith("Drafts would ")
    assert printed == json.loads((tmp_path / "replay.json").read_text())
