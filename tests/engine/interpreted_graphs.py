"""Engines that go the ways of CUDA, beside eager ones that serve the same; as `interpreted_runner`."""

# ruff: noqa: I001 (what is imported depends on what comes before)
from tests.engine import interpreted_cuda

import contextlib
import functools
import pathlib
from typing import Any

from vllm.distributed.parallel_state import destroy_model_parallel

from rollout_spec.vllm.keys import NAME_KEY
from tests.engine.interpreted_model import BRIEF, FEWER_BLOCKS, NUM_MODEL_TOKENS
from tests.engine.interpreted_runner import FEW, FEW_BLOCKS, LATE, MIXED, MORE, NAMES, late, run

FULL, DECODE = (interpreted_cuda.with_graphs(mode) for mode in ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"))
SOME = (*FEW, *LATE, "one")
ONE_TOKEN = [{"prompt_token_ids": [65 + i]} for i in range(len(SOME))]
CHUNKS = {"max_num_batched_tokens": 24}
AHEAD = {"async_scheduling": True}
EARLY = ("gate", "mixed decode", "eagle gate")  # their copies to the host come as early as they may
STOPPED = ("all of life", "eagle gate")
GATE = {"batch_threshold": 3}  # closed at first, and open at the end
RETURNED = {"enable_return_routed_experts": True}  # with which the scheduler waits


def text(models, spec, names, **more):
    return run(models["target"], spec, names=names, **more)


def experts(models, spec, **more):
    destroy_model_parallel()  # the groups of engines of a dense model have none for experts
    return run(models["experts"], spec, names=SOME, tokenizer=models["target"], **more)


def beside(models, spec, names, head="eagle", **more):
    """A model drafts too. What it drafts is noted, because verification hides where that is wrong."""
    method = "draft_model" if head == "copy" else "eagle"
    drafter = {"method": method, "model": models[head], "num_speculative_tokens": 8}
    spec = {"model_tokens": NUM_MODEL_TOKENS} | spec
    with noted_drafts() as drafts:
        found = run(models["target"], spec, names=names, speculative_config=drafter, **AHEAD | more)
    return found | {"drafts": drafts}


@contextlib.contextmanager
def noted_drafts():
    from rollout_spec.vllm.mrv2.host_batch import HostBatch

    drafts: dict[str, Any] = {}
    by_row = HostBatch.by_row

    def by_row_and_note(self, places, nums, tokens, log_odds):
        for row, num, *draft in zip(places.rows.tolist(), nums, tokens, log_odds, strict=True):
            if num == 0 or row < 0:
                continue
            level, request = int(self.levels[row]), self.requests[self.input_batch.req_ids[row]]
            name = (request.sampling_params.extra_args or {}).get(NAME_KEY)
            is_whole = level < self._max_levels[row]  # else more tokens may have come
            if isinstance(name, list) and is_whole:  # examples of the table share a name
                drafts[f"{name}, {level}"] = [each.tolist() for each in draft]
        return by_row(self, places, nums, tokens, log_odds)

    HostBatch.by_row = by_row_and_note
    try:
        yield drafts
    finally:
        HostBatch.by_row = by_row


SCENARIOS: dict[str, Any] = {
    # Eager ones, with which the others are compared.
    "plain": lambda m: text(m, None, (*NAMES, *MORE, "one", "long"), max_num_seqs=64),
    "plain mixed": lambda m: text(m, None, (*MIXED,), max_num_seqs=64),
    "plain one token": lambda m: text(m, None, SOME, prompts=ONE_TOKEN),
    "eager eagle": lambda m: beside(m, {}, SOME),
    "eager copy": lambda m: beside(m, {"min_survival": 0.0}, SOME, head="copy"),
    # The drafter alone.
    "open": lambda m: text(m, {"max_draft_tokens": 24}, (*NAMES, "looping"), **AHEAD, **FULL),
    "gate": lambda m: text(m, GATE, SOME, **AHEAD, **DECODE),
    "all of life": lambda m: text(m, GATE, (*NAMES, "looping", "long"), stop=m["stop"], **AHEAD, **FULL),
    "waiting": lambda m: text(m, GATE, SOME, **FULL),
    "preempted": lambda m: text(m, GATE, FEW, **AHEAD, **FEW_BLOCKS, **FULL),
    "one token": lambda m: text(m, {}, SOME, prompts=ONE_TOKEN, **AHEAD, **FULL),
    "whole": lambda m: text(m, {}, SOME, **AHEAD, **interpreted_cuda.with_graphs("FULL")),
    "mixed": lambda m: text(m, {}, (*MIXED,), **CHUNKS, **AHEAD, **FULL),
    "mixed decode": lambda m: text(m, {}, (*MIXED,), **CHUNKS, **AHEAD, **DECODE),
    "plain experts": lambda m: experts(m, None),
    "experts": lambda m: experts(m, GATE, **AHEAD, **FULL),
    "plain returned": lambda m: experts(m, None, **RETURNED),
    "returned": lambda m: experts(m, GATE, **RETURNED, **FULL),
    # A model beside it.
    "eagle": lambda m: beside(m, {}, SOME, **FULL),
    "eagle gate": lambda m: beside(m, GATE, SOME, stop=m["stop"], **DECODE),
    "eagle preempted": lambda m: beside(m, {"batch_threshold": 1}, BRIEF, **FEWER_BLOCKS, **FULL),
    "copy": lambda m: beside(m, {"min_survival": 0.0}, SOME, head="copy", **FULL),
}


@functools.cache
def scenario(name, models):
    folders = {path.name: str(path) for path in pathlib.Path(models).iterdir()}
    if name in STOPPED:
        folders["stop"] = late(scenario("plain", models)["requests"]["sampled"]["text"])
    interpreted_cuda.Event.are_early = name in EARLY
    return SCENARIOS[name](folders) | interpreted_cuda.take_notes()
