"""A model drafts, alone and beside the suffix drafts; as `interpreted_runner`, on MRV2."""

import contextlib
import functools
import pathlib
from types import SimpleNamespace

import pytest

from rollout_spec.drafting.drafter import Drafter
from rollout_spec.vllm.mrv2 import arrivals
from rollout_spec.vllm.proposing import proposer
from rollout_spec.vllm.proposing.proposer import BatchProposer
from rollout_spec.vllm.versions import mrv2_has_draft_models
from tests.engine import interpreted_runner
from tests.engine.interpreted_runner import FEW_BLOCKS, late, run

NUM_MODEL_TOKENS = 3
NAMES = (*interpreted_runner.NAMES, "one", "short")
BRIEF = ("sampled", "one", "greedy")
AUTO = {"batch_threshold": "auto"}  # where time is virtual
UNTIL_WRONG = {"batch_threshold": 3, "min_survival": 0.0}
FEWER_BLOCKS = FEW_BLOCKS | {"num_gpu_blocks_override": 5}  # for two rows, and then for one


def main(models, in_brief=""):
    if in_brief:
        return served_in_brief(pathlib.Path(models), async_scheduling=True)
    with virtual_time():
        return served(pathlib.Path(models), async_scheduling=True)


@contextlib.contextmanager
def virtual_time():
    """A step takes ten seconds, and one for each pass of a model.

    It gives the passes of each step, and of those with which vLLM warms up.
    """
    nums: list[int] = []
    now, note_passes = 0.0, BatchProposer.note_passes

    def note_and_go_on(self, num):
        nonlocal now
        now += 10.0 + num
        nums.append(num)
        note_passes(self, num)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchProposer, "note_passes", note_and_go_on)
        patch.setattr(arrivals, "time", SimpleNamespace(perf_counter=lambda: now))  # of MRV2
        patch.setattr(proposer, "Drafter", functools.partial(Drafter, clock=lambda: now))  # of MRV1
        yield nums


def served(models, **ahead):
    folders = {path.name: str(path) for path in models.iterdir()}
    target, eagle = folders["target"], {"method": "eagle", "model": folders["eagle"]}
    wrong, gate = eagle | {"model": folders["bigrams-eagle"]}, AUTO if ahead else {}
    same = target, {"method": "draft_model", "model": folders["copy"]}
    if ahead and not mrv2_has_draft_models():
        same = folders["bigrams"], {"method": "eagle", "model": folders["bigrams-eagle"]}
    # vLLM's own drafts of a request with a grammar need a device's stream.
    without_grammar = tuple(name for name in NAMES if name != "grammar")
    plain = run(target, None, names=(*NAMES, "long"))
    stop = late(plain["requests"]["sampled"]["text"])
    with virtual_time() as passes_of_wrong:
        wrong_beside_text = both(target, wrong, AUTO, names=("greedy", "sampled", "one", "long"))
    alone = {"speculative_config": eagle | {"num_speculative_tokens": NUM_MODEL_TOKENS}}
    return {
        "plain": plain,
        "model": run(target, None, stop, without_grammar, **alone),
        "same": both(*same, UNTIL_WRONG, names=("short", "sampled", "one", "looping"), **ahead),
        "both": both(target, eagle, gate, stop, names=NAMES),
        "preempted": preempted(target, eagle, **ahead),
        "wrong": wrong_beside_text | {"passes": passes_of_wrong},
    }


def preempted(model, drafter, **ahead):
    return both(model, drafter, {"batch_threshold": 1}, names=BRIEF, **ahead, **FEWER_BLOCKS)


def served_in_brief(models, **ahead):
    target, eagle = str(models / "target"), {"method": "eagle", "model": str(models / "eagle")}
    return {"plain": run(target, None, names=BRIEF), "preempted": preempted(target, eagle, **ahead)}


def both(model, drafter, spec, *others, **more):
    spec = {"model_tokens": NUM_MODEL_TOKENS} | spec
    return run(model, spec, *others, speculative_config=drafter | {"num_speculative_tokens": 8}, **more)
