"""The judge of gates sees what a gate can do wrong. Time is virtual: nothing depends on the machine."""

import dataclasses
import json
from unittest import mock

import pytest

from rollout_spec.config import UserError
from rollout_spec.drafting.gate import probes, step_seconds
from rollout_spec.drafting.gate.step_seconds import StepSeconds
from rollout_spec_lab import cli
from rollout_spec_lab.bench.gate import SCENARIOS, DrawnEngine, Gated, Oracle, Plain, Scenario, read_scenarios

DEAR = {"knee": 64, "slope": 9e-5, "repeats": (0.1, 0.8, 0.2), "requests": 96, "rollouts": 1}
BURSTS = Scenario(**DEAR, prompt=8000, budget=2048, length=(4.5, 0.5))
LOADS = {
    "bursts": BURSTS,
    "free": Scenario(requests=96, rollouts=1),
    "cold": Scenario(**DEAR, cold=(5, 20.0)),
    "dear later": Scenario(requests=96, rollouts=1, drafted=0.03, drafted_from=300),
    "ahead": Scenario(**DEAR, ahead=True, drafted=1e-3),
}


def speed(scenario, chooser):
    return DrawnEngine(scenario, chooser, 0).serve().tokens_per_s


@pytest.mark.parametrize("name", ["bursts", "free", "cold", "dear later", "ahead"])
def test_the_gate_never_loses_and_is_near_the_oracle(name):
    plain, ours, best = (speed(LOADS[name], chooser()) for chooser in (Plain, Gated, Oracle))
    assert ours > 0.97 * plain and ours > 0.85 * best


LEARN, NEVER = StepSeconds.learn, 10**9
LATER = Scenario(requests=512, rollouts=1, drafted=3.8e-3, drafted_from=1000, repeats=(0.0, 0.8, 0.1))


def taking_prompts_for_decoding(self, step, seconds):
    num_decoded = step.num_tokens - step.num_prompt_tokens
    return LEARN(self, dataclasses.replace(step, num_prompt_tokens=0, num_tokens=num_decoded), seconds)


@pytest.mark.parametrize(
    ("scenario", "broken"),
    [
        (BURSTS, mock.patch.object(StepSeconds, "learn", taking_prompts_for_decoding)),
        (dataclasses.replace(LATER, drafted=6e-3), mock.patch.object(step_seconds, "ODD", NEVER)),
        (LATER, mock.patch.multiple(step_seconds, MEMORY=NEVER, ODD=NEVER)),
        (LATER, mock.patch.object(probes, "_is_probe", return_value=False)),
    ],
)
def test_a_broken_gate_is_seen(scenario, broken):
    """It drafts in full batches, where that does not pay."""
    right = DrawnEngine(scenario, Gated(), 0).serve().share_full_drafted
    with broken:
        assert DrawnEngine(scenario, Gated(), 0).serve().share_full_drafted > right + 0.1


def test_scenarios_are_data(tmp_path, capsys):
    assert len(read_scenarios(SCENARIOS, [])) > 20
    file = tmp_path / "scenarios.json"
    file.write_text(json.dumps({"mine": {"requests": 8, "rows": 4, "rollouts": 1, "length": [3, 0.1]}}))
    output = tmp_path / "gate.json"
    asked = ["bench", "gate", "--file", str(file), "--seeds", "1", "--output", str(output), "--json"]
    assert cli.main(asked) == 0
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    [row] = json.loads(capsys.readouterr().out)["results"]
    assert row["scenario"] == "mine" and row["gate_over_plain"] > 0.5
    assert json.loads(output.read_text())["results"] == [row]
    for content, message in (("[]", "no scenarios"), ('{"a": {"speed": 1}}', "no scenarios")):
        file.write_text(content)
        with pytest.raises(UserError, match=message):
            read_scenarios(file, [])
    with pytest.raises(UserError, match="no scenario of"):
        read_scenarios(SCENARIOS, ["nothing"])
