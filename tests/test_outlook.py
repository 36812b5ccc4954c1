"""What `replay` says to a person: figures by hand, the batch, the sentence, the page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from rollout_spec.cli import main
from rollout_spec.config import SpecConfig
from rollout_spec.predict.outlook import num_running, outlook
from rollout_spec.predict.replay import replay
from rollout_spec.predict.simulate import TAIL_ROWS, Cluster
from rollout_spec.report.outlook import MAX_ROWS, _draw_steps, headline, sentences, tables
from rollout_spec.trace import Rollout, to_line

QWEN = Path(__file__).parents[1] / "recipes" / "models" / "qwen3_8b.json"


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
    lines, config = [Rollout("g", None, np.zeros(1, np.int32), responses)], SpecConfig()
    found = outlook(lines, replay(lines, config), config, Cluster(1, 1024, None))
    assert found["tail_share"] == TAIL_ROWS / (TAIL_ROWS + 1), "one step has a row more"
    assert (found["by_step"], found["predicted"]) == ([], None)


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """Two steps; a response that repeats the prompt, and others that nothing predicts."""
    file = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    known, unknown = list(range(20)) * 2, list(range(100, 140))
    file.write_text(to_line("a", 1, list(range(20)), [known, [7]]) + to_line("b", 2, [1], [unknown]))
    output = file.parent / "output"
    command = ["replay", str(file), "--output", str(output), "--max-num-seqs", "1", "--spec", "history=0"]
    assert main([*command, "--model-config", str(QWEN), "--gpu", "h100"]) == 0
    return json.loads((output / "replay.json").read_text()), output


def test_figures_by_step_and_by_length(record):
    found, _ = record
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
    off, on = found["predicted"]["off"], found["predicted"]["on"]
    assert off["tokens_per_step"] == 1.0 and off["makespan_s"] > 0 and on["makespan_s"] > 0


def test_a_sentence_comes_first_and_says_losses(record):
    found, _ = record
    found["predicted"] = {"off": {"makespan_s": 10.0}, "on": {"makespan_s": 8.0}}
    assert headline(found).startswith(
        "Drafts would save time: these rollouts are predicted to take 8.0\N{NO-BREAK SPACE}s"
    )
    found["predicted"]["on"]["makespan_s"] = 12.5
    assert headline(found).startswith("Drafts would be slower: ") and "0.80 times as fast" in headline(found)
    found["predicted"]["on"]["makespan_s"] = 10.04
    assert headline(found).startswith("Drafts would change nothing: ") and "1.00 times" in headline(found)
    found["predicted"] = None
    assert f"{found['tokens_per_step']:.2f} tokens per step" in headline(found)
    assert "--model-config" in " ".join(sentences(found))
    found["tokens_per_step"] = 1.004
    assert headline(found).startswith("Drafts would change nothing: ")


@pytest.mark.parametrize(("options", "runner"), [([], "v2"), (["--runner", "v1"], "v1")])
def test_a_prediction_names_the_runner_whose_host_it_has(options, runner, tmp_path, capsys):
    file = tmp_path / "trace.jsonl"
    file.write_text(to_line("a", 1, [1, 2], [[1, 2, 1, 2]]) + to_line("a", 2, [1, 2], [[3, 4]]))
    command = ["replay", str(file), "--output", str(tmp_path), "--spec", "history=0", *options]
    command += ["--model-config", str(QWEN), "--gpu", "h100"]
    assert main(command) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        f"Predicted, not measured, with what drafting costs the host on vLLM's model runner {runner.upper()}"
        in said
    )
    assert "Groups: 2, responses: 2." in said
    assert f"<dt>model runner</dt><dd>{runner}</dd>" in (tmp_path / "replay.html").read_text()
    assert main([*command, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    written = json.loads((tmp_path / "replay.json").read_text())
    assert printed["runner"] == runner and printed["headline"].startswith("Drafts would ")
    assert printed == written


def test_a_prediction_has_the_models_drafts(tmp_path, capsys):
    """Of a text that the index knows nothing of."""
    file = tmp_path / "trace.jsonl"
    file.write_text(to_line("a", 1, [0], [list(range(100, 140))]))
    command = ["replay", str(file), "--model-config", str(QWEN), "--gpu", "h100", "--json"]
    found = []
    for more in ([], ["--model-acceptance", "1"], ["--model-acceptance", "0"]):
        assert main([*command, *more]) == 0
        found.append(json.loads(capsys.readouterr().out)["predicted"])
    without, right, wrong = found
    assert without["off"] == right["off"] == wrong["off"]
    assert without["on"]["tokens_per_step"] == 1.0 < right["on"]["tokens_per_step"]
    assert wrong["on"]["makespan_s"] > without["on"]["makespan_s"], "of its passes"


@pytest.mark.parametrize(
    ("groups", "responses", "doubt"),
    [(70, 75, "a prompt has two"), (1, 65, "group=NAME"), (3, 65, None), (1, 64, None)],
)
def test_groups_that_are_none_are_doubted(record, groups, responses, doubt):
    found = record[0] | {"num_groups": groups, "num_responses": responses, "predicted": None}
    said = " ".join(sentences(found))
    assert [word for word in ("a prompt has two", "group=NAME") if word in said] == [doubt] * bool(doubt)


def test_a_long_training_has_a_short_table(record):
    steps = [record[0]["by_step"][0] | {"step": step} for step in range(100)]
    title, _, rows = next(tables(record[0] | {"by_step": steps}))
    assert (title, len(rows), rows[0][0], rows[-1][0]) == ("By training step", MAX_ROWS, "0", "99")


def test_the_page_has_everything_inside_it_and_whole_training_steps(record):
    axes = Figure().subplots()
    _draw_steps(axes, record[0])
    assert axes.get_ylim() == (0, 1.1 * max(row["tokens_per_step"] for row in record[0]["by_step"]))
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
    page = (record[1] / "replay.html").read_text()
    assert "<h1>Drafts would " in page and "data:image/png;base64," in page and "By training step" in page
    assert (record[1] / "replay.png").read_bytes().startswith(b"\x89PNG")
