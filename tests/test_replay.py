"""The replay against hand-counted traces; what it says to a person: figures, the sentence, the page."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_spec.cli import main
from rollout_spec.config import SpecConfig
from rollout_spec.predict.engine import TAIL_ROWS
from rollout_spec.predict.replay import ReplayResult, replay, replay_line
from rollout_spec.predict.replay_record import num_running, replay_record
from rollout_spec.report.replay import headline, sentences
from rollout_spec.trace import Rollout, read_trace, to_line
from tests.text import int32, write_trace


class Copier:
    """A drafter to count by hand with: what came after the last token where the row had it last."""

    def start(self, line, earlier):
        assert not len(earlier)

    def draft(self, rows, token_ids, levels, max_draft_tokens):
        drafts = np.zeros((len(rows), 4), np.int32)
        numbers = np.zeros(len(rows), np.int32)
        for i, (row, level) in enumerate(zip(rows, levels, strict=True)):
            [places] = np.nonzero(token_ids[row, : level - 1] == token_ids[row, level - 1])
            if len(places) and max_draft_tokens[i]:
                copied = token_ids[row, places[-1] + 1 : level][:4]
                numbers[i], drafts[i, : len(copied)] = len(copied), copied
        return drafts, numbers

    def finish(self): ...


def count(*lines):
    result = ReplayResult()
    for prompt, responses in lines:
        line = Rollout("g", None, int32(*prompt), [int32(*response) for response in responses])
        result.add(replay_line(Copier(), line, (), 4))
    return result


def test_without_repetition_every_step_yields_one_token():
    result = count(([1, 2, 3], [[4, 5, 6, 7]]))
    # The prefill yields 4; three steps yield 5, 6 and 7.
    assert (result.total.num_tokens, result.total.num_steps, result.total.num_draft_tokens) == (4, 3, 0)
    assert result.total.tokens_per_step == 1.0
    assert result.total.acceptance_rate == 0.0
    assert result.to_dict()["mean_acceptance_length"] == 1.0
    result = count(([1], [[2], [3, 4]]), ([], [[]]))  # a single token needs no step
    assert (result.num_groups, len(result.responses)) == (2, 3)
    assert (result.total.num_tokens, result.total.num_steps) == (3, 1)


def test_hand_counted_drafts():
    result = count(([1, 2, 3, 4, 5, 6], [[1, 2, 3, 4, 5, 6, 9]]))
    # Prefill: 1. Step 1 drafts 2 3 4 5, all accepted, and the target adds 6. Step 2 matches the whole of
    # 1 2 3 4 5 6, drafts 1 2 3 4 (what followed it was the response itself), and the target says 9.
    assert result.total.num_steps == 2
    assert result.total.tokens_per_step == 6 / 2
    assert (result.num_drafts, result.total.num_draft_tokens, result.total.num_accepted_tokens) == (2, 8, 4)
    assert result.to_dict()["mean_acceptance_length"] == 1 + 4 / 2
    assert result.total.acceptance_rate == 4 / 8
    # A response that ends inside its draft: 2 3 4 5 are drafted, 2 and 3 accepted, and it is over.
    total = count(([1, 2, 3, 4, 5, 6], [[1, 2, 3]])).total
    assert (total.num_steps, total.num_draft_tokens, total.num_accepted_tokens) == (1, 4, 2)


def test_turns_are_drafted_for_and_what_tools_say_is_not(tmp_path):
    path = tmp_path / "trace.jsonl"
    turns = [([8, 8], [1, 2, 3]), ([1, 2, 3, 4], [7]), ([1], [2, 3, 4, 6])]
    path.write_text(to_line("g", None, [5], names=["a"], samples=[turns]))
    [line] = read_trace(path)
    result = replay_line(Copier(), line, (), 4)
    # 1, 7 and 2 come from prefills. Two steps give 2 and 3, with nothing to draft from. After 1 2 the draft
    # is 3 4 7 1: two are right, and the target says 6.
    assert (result.total.num_tokens, result.total.num_steps, result.total.num_decoded_tokens) == (8, 3, 5)
    assert (result.num_drafts, result.total.num_draft_tokens, result.total.num_accepted_tokens) == (1, 4, 2)
    assert replay_record([line], result, 1, 8, 8)["running"] == [1] * 8, "all its turns run"


def test_the_tail_is_counted_where_a_quarter_of_the_siblings_run():
    # Without drafts every step yields each row one token. Of 8 siblings 8, 7, 5, 4, 3, 2, 1, 1 run in steps 1
    # to 8: a quarter is 2, so the last three steps are the tail.
    lengths = (2, 3, 3, 4, 5, 6, 7, 9)
    texts = [[100 * i + j for j in range(n)] for i, n in enumerate(lengths, 1)]
    result = count(([1], texts))
    assert result.total.num_draft_tokens == 0
    assert result.total.num_steps == sum(lengths) - len(lengths)
    assert (result.num_tail_steps, result.num_tail_tokens) == (4, 4)
    assert result.to_dict()["tail_tokens_per_step"] == 1.0
    # Of three siblings the last one is the tail; with drafts it gains more than one token a step.
    texts = [[7], [8], [1, 2, 3, 4, 5, 6, 9]]
    result = count(([1, 2, 3, 4, 5, 6], texts))
    assert (result.num_tail_steps, result.num_tail_tokens) == (2, 6)
    assert result.to_dict()["tail_tokens_per_step"] == 3.0


@pytest.mark.parametrize("command", [["replay"], ["simulate", "--step-times", "1:0.1"]])
def test_a_table_names_the_file_as_it_is(command, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # pytest-xdist tells its workers the width of a terminal
    trace = write_trace(tmp_path / "[seed=3]:cat:.jsonl", ([1, 2], [[1, 2, 3]]))
    assert main([*command, str(trace)]) == 0
    out = capsys.readouterr().out
    assert f"{trace.name}: " in out and ("tokens per step" in out or "tokens/step" in out)


@settings(max_examples=50)
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
    found, of_two = (replay_record(lines, replay(lines, SpecConfig()), n, 1024, 0) for n in (1, 2))
    assert found["tail_share"] == TAIL_ROWS / (TAIL_ROWS + 1), "one step has a row more"
    assert of_two["running"][0] == 5, "engines take turns with max_imbalance=0"
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
    by_step = {row["step"]: row for row in record["by_step"]}
    assert by_step[1]["tokens_per_step"] > 2 > by_step[2]["tokens_per_step"] == 1.0
    assert 0 < by_step[1]["acceptance_rate"] == record["acceptance_rate"] < 1
    assert not by_step[2]["acceptance_rate"]
    assert [by_step[step]["num_tokens"] for step in (1, 2)] == [41, 40]
    by_length = [(row["from"], row["to"], row["num_responses"]) for row in record["by_length"]]
    assert by_length == [(0, 15, 1), (32, 63, 2)]
    assert record["lengths"] == {"median": 40.0, "longest_tenth": 40.0, "longest": 40}
    assert record["running"] == [1] * 41, "one at a time: 40 steps and one"
    assert record["tail_share"] == 1.0


def test_sentences_say_losses_and_nothing_of_a_tail_that_is_none(record):
    for tokens_per_step, said in ((1.5, "give 1.50 tokens"), (1.004, "change nothing")):
        assert headline(record | {"tokens_per_step": tokens_per_step}).startswith(f"Drafts would {said}")
    with_tail, without = (sentences(record | {"tail_tokens_per_step": value})[0] for value in (1.0, 0.0))
    assert "; 1.00 near the end of a prompt, when a quarter" in with_tail and "quarter" not in without
    said = headline(record | {"tail_share": 0.001})
    assert "More than 8 requests run in almost every step" in said and "0%" not in said


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
    assert printed["headline"].startswith("Drafts would ") and printed["doubts"] == []
    assert printed == json.loads((tmp_path / "replay.json").read_text())


def test_doubts_stand_first_in_page_and_json(tmp_path, capsys):
    file = tmp_path / "trace.jsonl"
    file.write_text(to_line("a", None, [1, 2], [[*range(20)]]) * 2)
    assert main(["replay", str(file), "--output", str(tmp_path), "--json"]) == 0
    again, no_step = json.loads(capsys.readouterr().out)["doubts"]
    assert again.startswith("1 of 2 rows are there again")
    assert no_step.startswith("no row has a step: all 2 prompts count as one rollout")
    page = (tmp_path / "replay.html").read_text()
    assert page.index("</h1>") < page.index("are there again") < page.index("tokens per step;")
