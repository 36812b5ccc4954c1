"""Does it last? Two trainings of 30 steps, drafts off and on, and the speed at the weights on the way.

    python -m rollout_spec_lab.studies.lasting outputs/lasting

The demo's policy, problems and reward; both trainings have the same seed. Every prompt comes once in an epoch
of ten steps. The weights are kept behind each epoch. With each of them, and with those before training, one
process serves the same requests with drafts off and on in turns, as the demo does. What is there already is
not made again.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rollout_spec import trace
from rollout_spec.config import SpecConfig
from rollout_spec.predict.replay import Counts, replay
from rollout_spec.report.logs import METRICS_FILE, read_json_lines
from rollout_spec.report.responses import Agreement, agreement, is_looping
from rollout_spec.report.runs import read_run
from rollout_spec.trace import Rollout
from rollout_spec_lab.bench.jobs import answers, last
from rollout_spec_lab.demo import runner
from rollout_spec_lab.demo.data import make_data
from rollout_spec_lab.demo.turns import WORKER, Turns, figures, pairs_of, plan_of
from rollout_spec_lab.verl_cpu.environment import engine_environment

STEPS, EPOCH, SIZE = 30, 10, 2  # training steps; prompts of a step
NUM_PAIRS = 6  # of the turns at each of the weights
OVERRIDES = (
    # Larger than the demo's: the reward shall move within 30 steps.
    "actor_rollout_ref.actor.optim.lr=2e-5",
    "data.max_response_length=160",
    f"trainer.test_freq={EPOCH}",
    "trainer.val_before_train=true",
    f"trainer.save_freq={EPOCH}",
    "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=536870912",
)


def train(folder: Path) -> None:
    """Both trainings, one after the other."""
    model = (folder / "model").absolute()
    if not model.exists():
        folder.mkdir(parents=True, exist_ok=True)
        runner._make_model(folder)
    train_file, val_file = make_data(folder, num_train=SIZE * EPOCH)
    more = (f"data.val_files={val_file.absolute()}", *OVERRIDES)
    plan = runner.Plan(folder, steps=STEPS, model=model, train_file=train_file, overrides=more)
    for method in runner.METHODS:
        if not (folder / method / "checkpoints" / f"global_step_{STEPS}").exists():
            runner.train(plan, method, model, train_file.absolute(), print)


def weights(folder: Path) -> Iterator[tuple[int, Path]]:
    """Those before training and those behind each epoch, as far as there are any."""
    yield 0, folder / "model"
    for step in range(EPOCH, STEPS + 1, EPOCH):
        saved = folder / "sam" / "checkpoints" / f"global_step_{step}" / "actor" / "huggingface"
        if saved.exists():
            yield step, saved


def turns(folder: Path, step: int, model: Path) -> Turns:
    """The first prompts of the training in turns, by an engine with these weights."""
    file = folder / f"turns-{step}.json"
    if not file.exists():
        plan, size = plan_of(folder / "sam", model)
        prompts = list(
            dict.fromkeys(tuple(one.line.prompt_token_ids.tolist()) for one in trained(folder / "sam"))
        )
        load = dataclasses.replace(plan.load, prompts=prompts[: size * NUM_PAIRS])
        plan = dataclasses.replace(plan, load=load)
        pairs = list(itertools.islice(pairs_of(load, size), NUM_PAIRS))
        job = plan.job(0, "sam") | {"pairs": pairs, "seconds": 0.0, "least": NUM_PAIRS}
        found = last(answers(WORKER, job, f"turns-{step}", folder, environment=engine_environment()))
        file.write_text(json.dumps(found["pairs"]))
    return figures(json.loads(file.read_text()))


class Trained(NamedTuple):
    """What a training has recorded of one prompt in one step, validations left out."""

    step: int
    line: Rollout


def trained(run: Path) -> list[Trained]:
    """In the order of the steps; a sample's name begins with its seed, step, and train or val."""
    lines = [line for file in sorted((run / trace.FOLDER).glob("*.jsonl")) for line in trace.read_trace(file)]
    found = [Trained(line.names[0][1], line) for line in lines if line.names[0][2] == "train"]
    return sorted(found, key=lambda each: each.step)


def drafted(lines: list[Trained], history: int) -> dict[int, Counts]:
    """Of each step, if all steps of the engine draft."""
    by_step: dict[int, Counts] = {}
    config = SpecConfig(history=history)
    for response in replay((dataclasses.replace(one.line, step=one.step) for one in lines), config).responses:
        by_step.setdefault(response.step or 0, Counts()).add(response)
    return by_step


def agreements(off: list[Trained], on: list[Trained]) -> dict[int, Agreement]:
    """Of each step that both trainings have, sample by sample."""
    ours, theirs = (
        {
            (one.step, json.dumps(name)): response.tolist()
            for one in lines
            for name, response in zip(one.line.names, one.line.responses, strict=True)
        }
        for lines in (off, on)
    )  # fmt: skip
    found: dict[int, Agreement] = {}
    for key in sorted(ours.keys() & theirs.keys()):
        one, before = agreement(ours[key], theirs[key]), found.get(key[0], Agreement(0, 0))
        found[key[0]] = Agreement(
            before.num_tokens + one.num_tokens, before.num_identical + one.num_identical
        )
    return found


def validations(run: Path) -> dict[int, float]:
    """The mean reward over all kinds of problems, each weighing the same, by step."""
    found = {}
    for step, data in read_json_lines(run / METRICS_FILE):
        if values := [value for name, value in data.items() if name.startswith("val-core/")]:
            found[step] = float(np.mean(values))
    return found


def by_epoch(values: Sequence[float]) -> str:
    """The means of the epochs, of what every step has one of."""
    epochs = [values[first : first + EPOCH] for first in range(0, len(values), EPOCH)]
    return " | ".join(f"{np.nanmean(epoch):.3g}" for epoch in epochs)


def print_tables(folder: Path, served: dict[int, Turns]) -> None:
    runs = {method: read_run(folder / method, method) for method in runner.METHODS}
    texts = {method: trained(folder / method) for method in runner.METHODS}
    print("| mean of a step | " + " | ".join(f"epoch {n + 1}" for n in range(STEPS // EPOCH)) + " |")
    print("|---" * (1 + STEPS // EPOCH) + "|")
    for method, run in runs.items():
        print(f"| reward, {method} | {by_epoch(run.column('reward'))} |")
    sam = runs["sam"]
    for name in ("tokens_per_step", "acceptance_rate", "response_length", "entropy"):
        print(f"| {name}, sam | {by_epoch(sam.column(name))} |")
    ends: dict[int, list[bool]] = {step.step: [] for step in sam.steps}
    for one in texts["sam"]:
        ends[one.step] += [is_looping(response.tolist()) for response in one.line.responses]
    loops = [sum(each) / len(each) for each in ends.values()]
    print(f"| share of responses that end in a loop | {by_epoch(loops)} |")
    for history in (0, SpecConfig.history):
        counts = list(drafted(texts["sam"], history).values())
        steps = by_epoch([count.tokens_per_step for count in counts])
        print(f"| tokens per step if all steps draft, history={history} | {steps} |")
        print(f"| acceptance rate | {by_epoch([count.acceptance_rate for count in counts])} |")
    print("\n| weights behind step | speed, sam to off | tokens per step | accepted | the same tokens |")
    print("|---" * 5 + "|")
    for step, each in served.items():
        (low, high), same = each.speedup.ci95, each.agreement
        print(
            f"| {step} | {each.speedup.value:.2f} ({low:.2f} to {high:.2f}) | {each.tokens_per_step:.2f} | "
            f"{each.acceptance_rate:.0%} | {same.num_identical:,} of {same.num_tokens:,} |"
        )
    print("\nvalidation:", {method: validations(folder / method) for method in runner.METHODS})
    for step, agreed in agreements(texts["off"], texts["sam"]).items():
        print(f"step {step}: {agreed.num_identical:,} of {agreed.num_tokens:,} tokens the same")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of the trainings")
    args = parser.parse_args()
    train(args.folder)
    served = {step: turns(args.folder, step, model) for step, model in weights(args.folder)}
    print_tables(args.folder, served)


if __name__ == "__main__":
    main()
