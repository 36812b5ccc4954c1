"""What engines give on vLLM's own MRV2 on the CPU, with our drafter and without."""

import functools
import itertools
import pathlib
import random
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
from vllm import LLM
from vllm.v1.request import RequestStatus

from rollout_spec.drafting.history import prompt_key
from rollout_spec.vllm.proposing.control import Ended, ProposerControl
from rollout_spec.vllm.proposing.proposer import proposer_of
from rollout_spec.vllm.versions import is_before
from tests.engine.conftest import KEYED, VOCAB_SIZE, close, core_of, engine_settings, runner_of
from tests.engine.mixtures import FEW_CHARACTERS, bad_words, random_request
from tests.engine.serving import FREE, Request, example, sampling, serve
from tests.tiny_vl import make_image, make_tiny_vl, tokens

PROMPT = [1, *[65, 66] * 14, 67]
TEXT = "".join(map(chr, PROMPT))
BAD_WORDS = range(64, 128, 2)
# Beside the table's. All are sampled but for two; their names are their keys but for one.
COMMON: dict[str, dict[str, Any]] = {
    "unnamed": {"extra_args": None},
    "greedy": {"temperature": 0},
    "sampled": {"max_tokens": 50},
    "penalties": {
        "temperature": 0, "frequency_penalty": 0.5, "presence_penalty": 0.2, "repetition_penalty": 1.1,
    },
    "top_k": {"temperature": 1.2, "top_k": 6, "logprobs": 6},
    "stop_token": {"stop_token_ids": [*range(4, 39)]},
    "bad_words": {"bad_words": [*map(chr, BAD_WORDS)]},
    "all at once": {
        "allowed_token_ids": [*map(ord, FEW_CHARACTERS)], "bad_words": bad_words(random.Random(2)),
        "stop_token_ids": [ord("!")], "min_tokens": 30, "max_tokens": 60, "repetition_penalty": 1.1,
        "top_k": 4, "logprobs": 2,
    },
    "grammar": {"structured_outputs": {"regex": "([a-d][!-+]){7,9}"}, "ignore_eos": False},
}  # fmt: skip
# With those of the table in which a model runner, or its sampler, takes part.
NAMES = (*COMMON, "top_p-0", "allowed_token_ids-0", "logprobs-1", "min_tokens-0")
MORE = (
    FREE, "seed-0", "frequency_penalty-0", "repetition_penalty-0", "prompt_logprobs-0",
    "logprobs-2", "max_tokens-1", "looping",
)  # fmt: skip
REQUESTS = COMMON | {
    "looping": {"temperature": 0, "max_tokens": 60},  # so that drafts are right in the end
    "long": {"max_tokens": 160},  # so that passes are learned long before its end
    "one": {"temperature": 1.0, "max_tokens": 40}, "short": {"max_tokens": 12},
}  # fmt: skip
FEW = ("unnamed", "greedy", "sampled", "penalties", "top_k", "logprobs-1")

# For two requests of at most 64 tokens, drafts included, and one block more; the first block is vLLM's.
FEW_BLOCKS = {"block_size": 32, "num_gpu_blocks_override": 6, "max_model_len": 80, "max_num_seqs": 4}
# Keys behind a window are freed, and others take their blocks at once.
WINDOW = {
    "hf_overrides": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 32}, "block_size": 16,
    "num_gpu_blocks_override": 9, "max_model_len": 112, "max_num_seqs": 3, "enable_prefix_caching": False,
}  # fmt: skip
WINDOWED = ("greedy", "sampled", "looping", "unnamed", "penalties", "top_k")
DRAW = random.Random(5)
DRAWN = {f"mixed {number}": random_request(DRAW) for number in range(24)}
# Without what 0.24 does not take on MRV2.
MIXED = {name: asked for name, asked in DRAWN.items() if asked.params.thinking_token_budget is None}

LATE = ("grammar", "stop_token", "min_tokens-0", "looping")  # what depends on tokens that are on their way


SCENARIOS: dict[str, Callable[[str], Any]] = {
    "plain": lambda m: run(m, None, names=(*NAMES, *MORE, *MIXED), max_num_seqs=64),
    "drafted": lambda m: run(m, {}, stop_for(m), (*NAMES, "looping"), max_num_seqs=64),
    "ahead": lambda m: run(m, {"batch_threshold": 3}, stop_for(m), (*FEW, *LATE), async_scheduling=True),
    "open": lambda m: run(m, {}, stop_for(m), (*NAMES, *MORE), async_scheduling=True, max_num_seqs=64),
    "preempted": lambda m: run(m, {"batch_threshold": 3}, names=FEW, async_scheduling=True, **FEW_BLOCKS),
    "plain window": lambda m: run(m, None, names=WINDOWED, **WINDOW),
    "window": lambda m: run(m, {}, names=WINDOWED, async_scheduling=not is_before(29), **WINDOW),
    "mixed": lambda m: run(m, {}, names=(*MIXED,), async_scheduling=True, max_num_batched_tokens=24),
    "plain images": lambda _: images(None, async_scheduling=False),
    "images": lambda _: images({}, async_scheduling=True),
}


@functools.cache
def scenario(name, model):
    verify_in_pieces()
    return SCENARIOS[name](model)


def stop_for(model):
    return late(scenario("plain", model)["requests"]["sampled"]["text"])


def verify_in_pieces(num_rows=20):
    """Logits of so many rows at a time."""
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    from rollout_spec.vllm.mrv2 import sampler_24

    sampler_24.PIECE_BYTES = rejection_sampler.MAX_CHUNK_BYTES = num_rows * 4 * VOCAB_SIZE


def images(spec, **more):
    """Prompts with one image, another one, both, and none."""
    prompts = []
    for seeds in ([0], [1], [0, 1], []):
        text, seen = tokens("Look. ", len(seeds), "What is it?"), {"image": [*map(make_image, seeds)]}
        prompts.append({"prompt_token_ids": text, "multi_modal_data": seen})
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_vl(pathlib.Path(folder))
        asked = {"names": FEW[:4], "prompts": prompts, "limit_mm_per_prompt": {"image": 2}}
        return run(model, spec, **asked, **more)


def late(text):
    """Two characters that a text does not have before its middle."""
    return next(text[i : i + 2] for i in range(len(text) // 2, len(text)) if text.find(text[i : i + 2]) == i)


def run(model, spec, stop=None, names=NAMES, prompts=None, **arguments):
    """What an engine gives for the requests of these names, what its drafter counted, and how its steps were
    scheduled. With a stop string, it serves more after the weights have changed."""
    settings = engine_settings(model, None if spec is None else {"history": 64} | spec)
    sizes = {"max_model_len": 256, "max_logprobs": -1, "skip_tokenizer_init": False}
    sizes |= {"scheduling_policy": "priority"}  # of MIXED
    llm = LLM(**settings | sizes | ({} if spec is not None else KEYED) | arguments)
    core, runner = core_of(llm), runner_of(llm)
    found: dict[str, Any] = {
        "model_runner": type(runner).__module__,
        "steps": noted_steps(core.scheduler, runner),
        "calls": noted_calls(core),
        "requests": serve_named(llm, names, prompts),
    }
    found["steps"], found["calls"] = found["steps"].copy(), "".join(found["calls"])
    drafter = proposer_of(runner)
    if drafter is not None:
        found["counters"] = drafter.take_counters().to_dict()
        found["refusal"] = refusal(llm)
    if stop is not None:
        found["stop"] = stop
        found |= interrupted(llm, "sampled", runner)
        if drafter is not None:
            found["history"] = history(drafter)
            drafter.take_counters()
        [found["stopped"]] = serve(llm, [request("sampled", stop=[stop])])
    if stop is not None and drafter is not None:
        found["counters_behind"] = drafter.take_counters().to_dict()
        found |= reset(llm, FEW[1:])
        found["reset_history"] = history(drafter)
        drafter.take_counters()
        if hasattr(runner, "host_drafts"):  # MRV2
            runner.host_drafts._arrivals._batch.extend = None
        found["failing"] = serve_named(llm, ("sampled",))
        found["num_failed_steps"] = drafter.take_counters().num_failed_steps
    close([llm])
    return found


def request(name, prompt=TEXT, num_tokens=0, **more):
    """The request of that name, one that has as many tokens already."""
    if name in MIXED:
        return MIXED[name]
    if name not in REQUESTS:
        return example(name, prompt, "")
    asked = {"max_tokens": 24} | REQUESTS[name] | more
    asked["max_tokens"] -= num_tokens
    return Request(prompt, sampling(asked, key=["V2", name]))


def serve_named(llm, names, prompts=None):
    prompts = prompts or [TEXT] * len(names)
    asked = [request(name, prompt) for name, prompt in zip(names, prompts, strict=True)]
    return dict(zip(names, serve(llm, asked), strict=True))


def refusal(llm):
    try:
        serve(llm, [request("sampled", logprob_token_ids=[65])])
    except ValueError as error:
        return str(error)
    return "none"


def interrupted(llm, name, runner):
    """A request's tokens where a weight sync aborts it on its way, and it goes on as another request.

    And how many steps were in flight to the drafter when the sync came, and after it. Four are aborted, and
    late: so the gate has closed.
    """
    engine, tokens = llm.llm_engine, []
    arrivals = runner.host_drafts._arrivals._arrivals if hasattr(runner, "host_drafts") else ()  # MRV2
    aborted = [f"aborted {i}" for i in range(4)]
    for each in aborted:
        engine.add_request(each, TEXT, request(name).params)
    while len(tokens) < 27:
        for output in engine.step():
            tokens = list(output.outputs[0].token_ids)
    engine.abort_request(aborted, internal=False)
    in_flight = [len(arrivals)]
    if (proposer := proposer_of(runner)) is not None:
        ProposerControl(proposer).note_new_weights(Ended(aborted))
    in_flight.append(len(arrivals))
    [rest] = serve(llm, [request(name, {"prompt_token_ids": PROMPT + tokens}, len(tokens))])
    return {"interrupted": tokens + rest["tokens"], "sync_in_flight": in_flight}


def reset(llm, names):
    """Requests' tokens where their KV cache is dropped on their way, and the steps in flight then."""
    engine, found, in_flight = llm.llm_engine, {}, []
    for name in names:
        engine.add_request(f"reset {name}", TEXT, request(name).params)
    for number in itertools.count(1):
        for output in engine.step():
            if output.finished:
                found[output.request_id.removeprefix("reset ")] = list(output.outputs[0].token_ids)
        if not engine.has_unfinished_requests():
            break
        if number % 2 == 0:
            in_flight.append(len(core_of(llm).batch_queue or ()))
            assert llm.reset_prefix_cache(reset_running_requests=True)
    return {"reset": found, "reset_in_flight": in_flight}


def history(proposer):
    ProposerControl(proposer).pack_history()  # takes in those that have ended
    return [each.tolist() for each in proposer.drafter.history.get(prompt_key(np.array(PROMPT, np.int32)))]


def noted_calls(core):
    """Whether each call of an engine core's step from now on has run one."""
    step, calls = core.step_fn, []

    def step_and_note():
        outputs, has_run = step()
        calls.append("ran " if has_run else "idle ")
        return outputs, has_run

    core.step_fn = step_and_note
    return calls


def noted_steps(scheduler, runner):
    host = getattr(runner, "host_drafts", None)
    batch = None if host is None else host._arrivals._batch
    schedule, update, steps = scheduler.schedule, scheduler.update_draft_token_ids, []

    def schedule_and_note(*args, **kwargs):
        num_in_flight = getattr(scheduler, "_num_in_flight", 0)
        waiting = [name for name, one in scheduler.requests.items() if one.status == RequestStatus.PREEMPTED]
        drafted = {request.request_id: len(request.spec_token_ids) for request in scheduler.running}
        output = schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            preempted = output.preempted_req_ids or ()
            steps.append({
                "in_flight": num_in_flight,
                "rows": len(output.num_scheduled_tokens),
                "drafts": num_drafts(output),
                "preempted": len(preempted),
                "lost": sum(drafted.get(request_id, 0) for request_id in preempted),
                "cut": 0,
                "waiting_rows": len({*waiting} & {*batch.input_batch.req_ids}) if batch is not None else 0,
            })  # fmt: skip
        return output

    def update_and_note(drafts):
        num_drafted = sum(map(len, drafts.draft_token_ids))
        update(drafts)
        steps[-1]["cut"] += num_drafted - sum(len(request.spec_token_ids) for request in scheduler.running)

    def fill_and_note():
        output = host.step.output
        fill()
        if output is not None and output.total_num_scheduled_tokens:
            steps[-1]["drafts"] = num_drafts(output)

    scheduler.schedule, scheduler.update_draft_token_ids = schedule_and_note, update_and_note
    if batch is not None:  # MRV2, where the room of a step that is scheduled ahead is filled after this
        fill, host.give_drafts = host.give_drafts, fill_and_note
    return steps


def num_drafts(output):
    """Of a step; beside drafts there is room for some, and a padded request's placeholders."""
    return sum(token >= 0 for draft in output.scheduled_spec_decode_tokens.values() for token in draft)
