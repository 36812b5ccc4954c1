"""The replay against hand-counted traces."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from rollout_spec.cli import main
from rollout_spec.predict.replay import ReplayResult, replay_line
from rollout_spec.trace import read_trace, to_line


def write_trace(path, *lines):
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(to_line("g", None, prompt, responses) for prompt, responses in lines)
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.jsonl.gz"


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


def count(path):
    """What a replay of the trace counts with the Copier."""
    result = ReplayResult()
    for line in read_trace(path):
        replay_line(Copier(), line, (), 4, result)
    return result


def test_without_repetition_every_step_yields_one_token(path):
    result = count(write_trace(path, ([1, 2, 3], [[4, 5, 6, 7]])))
    # The prefill yields 4; three steps yield 5, 6 and 7.
    assert (result.num_tokens, result.num_steps, result.num_draft_tokens) == (4, 3, 0)
    assert result.tokens_per_step == 1.0
    assert result.acceptance_rate == 0.0
    assert result.mean_acceptance_length == 1.0
    result = count(write_trace(path, ([1], [[2], [3, 4]]), ([], [[]])))  # a single token needs no step
    assert (result.num_groups, result.num_responses, result.num_tokens, result.num_steps) == (2, 3, 3, 1)


def test_hand_counted_drafts(path):
    result = count(write_trace(path, ([1, 2, 3, 4, 5, 6], [[1, 2, 3, 4, 5, 6, 9]])))
    # Prefill: 1. Step 1 drafts 2 3 4 5, all accepted, and the target adds 6. Step 2 matches the whole of
    # 1 2 3 4 5 6, drafts 1 2 3 4 (what followed it was the response itself), and the target says 9.
    assert result.num_steps == 2
    assert result.tokens_per_step == 6 / 2
    assert (result.num_drafts, result.num_draft_tokens, result.num_accepted_tokens) == (2, 8, 4)
    assert result.mean_acceptance_length == 1 + 4 / 2
    assert result.acceptance_rate == 4 / 8
    # A response that ends inside its draft: 2 3 4 5 are drafted, 2 and 3 accepted, and it is over.
    result = count(write_trace(path, ([1, 2, 3, 4, 5, 6], [[1, 2, 3]])))
    assert (result.num_steps, result.num_draft_tokens, result.num_accepted_tokens) == (1, 4, 2)


def test_the_tail_is_counted_where_a_quarter_of_the_siblings_run(path):
    # Without drafts every step yields each row one token. Of 8 siblings 8, 7, 5, 4, 3, 2, 1, 1 run in steps 1
    # to 8: a quarter is 2, so the last three steps are the tail.
    lengths = (2, 3, 3, 4, 5, 6, 7, 9)
    texts = [[100 * i + j for j in range(n)] for i, n in enumerate(lengths, 1)]
    result = count(write_trace(path, ([1], texts)))
    assert result.num_draft_tokens == 0
    assert result.num_steps == sum(lengths) - len(lengths)
    assert (result.num_tail_steps, result.num_tail_tokens) == (4, 4)
    assert result.tail_tokens_per_step == 1.0
    # Of three siblings the last one is the tail; with drafts it gains more than one token a step.
    texts = [[7], [8], [1, 2, 3, 4, 5, 6, 9]]
    result = count(write_trace(path, ([1, 2, 3, 4, 5, 6], texts)))
    assert (result.num_tail_steps, result.num_tail_tokens) == (2, 6)
    assert result.tail_tokens_per_step == 3.0


def test_lines_can_be_limited(path, capsys):
    line = ([1, 2], [[3, 4, 5, 6], [7, 8]])
    write_trace(path, line, line, line)
    assert main(["replay", str(path), "--limit-groups", "2", "--json"]) == 0
    limited = json.loads(capsys.readouterr().out)
    assert [limited[name] for name in ("num_groups", "num_responses", "num_tokens")] == [2, 4, 12]


@pytest.mark.parametrize("command", [["replay"], ["simulate", "--step-times", "1:0.1"]])
def test_a_table_names_the_file_as_it_is(command, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # pytest-xdist tells its workers the width of a terminal
    trace = write_trace(tmp_path / "[seed=3]:cat:.jsonl", ([1, 2], [[1, 2, 3]]))
    assert main([*command, str(trace)]) == 0
    out = capsys.readouterr().out
    assert f"{trace.name}: " in out and ("tokens per step" in out or "tokens/step" in out)
