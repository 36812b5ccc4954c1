"""SpecDecode-Bench: a made checkout, whose figures can be counted by hand."""

import json
from pathlib import Path

import numpy as np
import pytest

from rollout_spec_lab.bench.specdecode import TimeModel, price, read, recorded_steps, speed, with_eagle
from rollout_spec_lab.cli import main

CLOCK = {
    "target_c_kv": 0.0, "target_c_compute": 1e-3, "target_c_fixed": 9e-3, "draft_c_kv": 0.0,
    "draft_c_fixed": 5e-3, "ngram_draft_percentage": 0.5, "overhead_constant_per_step": 0.0,
}  # fmt: skip
RESPONSE = [7, 8, 9, 7, 8, 9, 7, 8]
EAGLE = [3, 2, 1, 4, 3, 2, 1, 1]  # tokens that a step gives, after the first one, two, ...
NGRAM = [1, 1, 5, 4, 3, 2, 1, 1]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    data = tmp_path / "data/llama3.1-8B"
    data.mkdir(parents=True)
    row = {"id": "1", "prompt_token_ids": [1, 2], "generated_token_ids": RESPONSE}
    lens = {"acc_eagle": {"acc_len": EAGLE}, "acc_ngram": {"acc_len": NGRAM}}
    other = lens | {"acc_eagle": {"acc_len": [1]}}  # its EAGLE run was another text
    rows = [row | lens, row | other]
    (data / "combined_gsm8k.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    text = "".join(f"    {name} = {value!r}\n" for name, value in CLOCK.items())
    (tmp_path / "predictor.py").write_text(f"class Llama8BH100:\n{text}")
    return tmp_path


def test_a_recorded_drafter_steps_from_entry_to_entry(checkout: Path) -> None:
    [request] = read(checkout, "gsm8k")
    # After 1 token EAGLE has 2 right; after 4 it has 3.
    assert recorded_steps(request.eagle, None, np.ones(8)).tolist() == [[1, 2, 3, 1], [4, 3, 4, 1]]
    # n-gram with two tokens: where nothing is accepted, it drafted in a fifth of the places.
    steps = recorded_steps(request.ngram, 2, np.zeros(8), 0.2)
    assert steps == pytest.approx(np.array([[1, 0.4, 1, 0], [2, 0.4, 1, 0], [3, 2, 3, 0], [6, 2, 2, 0]]))


def test_the_model_says_what_was_accepted_and_then_a_wrong_token(checkout: Path) -> None:
    [request] = read(checkout, "gsm8k")
    [line] = with_eagle([request], 3)
    said = line.proposals[0].tokens
    assert said[1, :2].tolist() == [8, 9] and said[1, 2] not in RESPONSE
    assert said[4].tolist() == [8, 9, 7] and said[2, 0] == 9 and said[2, 1] != 7


def test_speed_and_price_by_hand(checkout: Path) -> None:
    """Two rows: prefill 13 ms, 7 plain steps of 11 ms; two steps of 15 and 17 ms, and EAGLE's 5 ms each."""
    model, [request] = TimeModel.read(checkout), read(checkout, "gsm8k")
    steps = [recorded_steps(request.eagle, None, np.ones(8))]
    assert speed(model, [request], steps, 2, 0.0, 0.0) == pytest.approx((13 + 77) / (13 + 15 + 17 + 10))
    assert speed(model, [request], steps, 2, 0.5, 0.0) == pytest.approx((13 + 77) / (13 + 22.5 + 25.5 + 10))
    # 3.5 tokens a row in a mean step of 9 + 2 x 3.5 + 5 ms; a draft token takes 1 ms.
    assert price(model, [request], steps, 2) == pytest.approx(2 * 3.5 / 21)


def test_the_command_has_all_methods(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "specdecode", str(checkout), "--datasets", "gsm8k", "--rows", "1", "8"]
    assert main([*command, "--json"]) == 0
    found = {each["method"]: each for each in json.loads(capsys.readouterr().out)["gsm8k"]}
    assert found["EAGLE, oracle"]["tokens_per_step"] == 3.5
    assert found["oracle of both"]["tokens_per_step"] == 3.5
    assert found["oracle of both"]["speed"].keys() == {"1", "8"}
    ours = [found[name]["tokens_per_step"] for name in ("ours, text alone", "ours, text and EAGLE")]
    assert ours == sorted(ours) and ours[0] > 1
    assert main(command) == 0
    assert "oracle of both" in capsys.readouterr().out
