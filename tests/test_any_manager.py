"""Trainings with agent loop managers that are not verl's: names, turns, history, validations, ends."""

import itertools
import json
from collections import Counter

import pytest

from tests.agents import ENDED
from tests.gateways import NUM_TOKENS, NUM_TURNS
from tests.trainings import GIVEN, NUM_PROMPTS, TOOLS, Run, command, execute, hook, managed_by, responses_of

NUM_SAMPLES = 4
NUM_STEPS = 2  # with the same prompts
MODES = ("sync", "colocate_async", "separate_async")
LONG = [pytest.mark.long, pytest.mark.timeout(1800)]
# `make test` has the manager of which nothing is known; `make test-long` has the others, and the other modes.
CASES = [
    pytest.param(manager, mode, marks=[] if (manager, mode) == ("unknown", "sync") else LONG)
    for manager, mode in itertools.product(GIVEN, MODES)
]


def told_ends(folder):
    file = folder / ENDED
    names = file.read_text().splitlines() if file.exists() else []
    return {name for name in names if '"val"' not in name}


def train(folder, policy, manager, mode, method="sam", *overrides):
    options = [
        "trainer.test_freq=1",
        "trainer.save_freq=1",
        "data.max_response_length=160",
        "actor_rollout_ref.rollout.calculate_log_probs=false",
        f"reward.custom_reward_function.path={TOOLS}",
        *managed_by(manager, mode, folder),
        *overrides,
    ]
    hook(folder, '__import__("tests.agents").agents.note_ends(it)', after="rollout_spec.verl.server")
    sizes = {"num_train": NUM_PROMPTS, "num_steps": NUM_STEPS, "num_samples": NUM_SAMPLES}
    training = command(folder, policy, *options, method=method, mode=mode, **sizes)
    return Run(folder, execute(training, folder), responses_of(folder))


@pytest.mark.parametrize(("manager", "mode"), CASES)
def test_any_manager_trains_with_drafts(manager, mode, policy, tmp_path):
    run = train(tmp_path, policy, manager, mode)
    log = (tmp_path / "train.log").read_text()
    histories, ended = [run.history(step) for step in range(1, NUM_STEPS + 1)], told_ends(tmp_path)
    num_said = sum(response.num_generated for response in run.responses)
    totals = {name: run.total(name) for name in ("generated_tokens", "num_resumed", "num_interrupted")}
    kept = f"{[len(history._texts) for history in histories]} prompts in the history, {len(ended)} ends told"
    rates = run.of_steps("tokens_per_step")
    print(f"{manager}, {mode}: {totals}, {num_said} recorded, {kept}; {rates} tokens per step")
    kinds = {response.name[2 * (manager != "unknown")] for response in run.responses}
    assert kinds <= {"prompt" if manager == "unknown" else "train"}
    assert ("does not say of which rows" in log) == (manager == "unknown")
    assert "has neither a name" not in log and "have seen no request" not in log
    assert all(histories), "the second epoch has what the first one said"
    assert run.total("num_failed_steps") == 0 < run.total("num_accepted_tokens")
    if manager not in ("verls", "derived"):
        assert totals["num_resumed"] > 0
    if mode == "sync":  # what a validation says is not counted
        num_sessions = NUM_STEPS * NUM_PROMPTS * NUM_SAMPLES
        lost = NUM_STEPS * (NUM_TURNS - 1)  # turns of the session that dies
        num_unknown = ((NUM_TURNS + 1) * num_sessions - lost) * NUM_TOKENS
        assert totals["generated_tokens"] == (num_unknown if manager == "unknown" else num_said)
        assert len(ended) == (manager != "unknown") * num_sessions


@pytest.mark.long
@pytest.mark.parametrize("manager", GIVEN[2:])
def test_a_run_without_drafts_trains_on_the_same_samples(manager, policy, tmp_path):
    """As verl itself dumps them; the sessions' own ids are random."""
    said = []
    for method, own in (("off", ["rollout.spec.method=keyed"]), ("sam", [])):
        folder = tmp_path / method
        folder.mkdir()
        options = [*own, "trainer.total_training_steps=1", f"trainer.rollout_data_dir={folder}/dumped"]
        train(folder, policy, manager, "sync", method, *options)
        lines = map(json.loads, (folder / "dumped" / "1.jsonl").read_text().splitlines())
        said.append(sorted((line["input"], line["output"]) for line in lines))
    # A sample's number goes by arrival: the session that dies may have had another number in each run.
    num_same = (Counter(said[0]) & Counter(said[1])).total()
    assert num_same >= len(said[0]) - (manager == "unknown") >= NUM_PROMPTS * NUM_SAMPLES - 1
