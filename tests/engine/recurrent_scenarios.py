"""What an engine of a recurrent policy serves, with drafts and without; as `interpreted_runner`, on MRV2."""

import functools
import math
import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

from tests.engine.conftest import KEYED, close, core_of, engine_settings, proposer_of, runner_of, token_ids
from tests.engine.recurrent_layers import replace_layers
from tests.engine.serving import NAME_KEY, sampling
from tests.engine.tiny_recurrent import SEEN, make_mtp, make_recurrent
from tests.tiny_vl import IMAGE, make_image

Tokens = list[list[int]]
# Four groups of three siblings.
PROMPTS = [([5, 6, 7, 8 + i] * 6)[: 21 + i] for i in range(4) for _ in range(3)]
LONG_PROMPTS = [[3 + (7 * j + i) % 90 for j in range(40 + 5 * i)] + [5, 6, 7, 8] * 4 for i in range(8)]
# What is in a request's prompt, by its number, if the policy sees.
IMAGES = ((), (0,), (1,), (0, 0))
SEES = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 2, "video": 0}}


def asked(i, max_tokens=40):
    """Parameters of a request with a name: greedy and sampled ones in turn, of different lengths."""
    temperature, length = [0.0, 1.0, 0.7][i % 3], max_tokens - 9 * (i % 4)
    return sampling({"temperature": temperature, "max_tokens": length, "detokenize": False}, key=[3, i])


def seen(engine, prompt, params):
    sees = engine.model_config.is_multimodal_model
    seeds = IMAGES[params.extra_args[NAME_KEY][1] % len(IMAGES)] if sees else ()
    if not seeds:
        return {"prompt_token_ids": prompt}
    image = [SEEN[token] for token in IMAGE]
    images = {"image": [*map(make_image, seeds)]}
    return {"prompt_token_ids": prompt[:18] + image * len(seeds) + prompt[18:], "multi_modal_data": images}


def generate(llm, prompts, params):
    params = list(params)
    given = [seen(llm.llm_engine, *each) for each in zip(prompts, params, strict=True)]
    return token_ids(llm.generate(given, params, use_tqdm=False))


def batch(llm):
    return generate(llm, PROMPTS, map(asked, range(len(PROMPTS))))


def crowded(llm):
    """Twice, so drafts have up to K tokens: in short steps they leave none for the last of four rows."""
    twice = (generate(llm, PROMPTS[:4], (asked(i, 50 + 9 * (i % 4)) for i in range(4))) for _ in range(2))
    return [tokens for each in twice for tokens in each]


def long_prompts(llm):
    """They are prefilled in chunks where the engine's steps are short."""
    return generate(llm, LONG_PROMPTS, map(asked, range(8)))


def single_tokens(llm):
    """Prompts of one token, in blocks of the cache that earlier requests have used."""
    return generate(llm, [[5 + i] for i in range(4)], map(asked, range(4)))


def fresh_single_tokens(llm):
    """The same in blocks that no request has used."""
    return single_tokens(llm)


def gate(llm):
    """Three requests, then six more, then few again: a gate of 4 rows is open, closes and opens."""
    engine, found, step = llm.llm_engine, dict[str, list[int]](), 0
    while step == 0 or step <= 6 or engine.has_unfinished_requests():
        for i in {0: range(3), 6: range(3, 9)}.get(step, ()):
            add(engine, f"gate {i}", PROMPTS[i], asked(i, (50 if i < 3 else 14 + i) + 9 * (i % 4)))
        take(engine, found)
        step += 1
    return [found[f"gate {i}"] for i in range(9)]


def preempted(llm):
    """All running requests lose their states every five steps."""
    engine, found, step = llm.llm_engine, dict[str, list[int]](), 0
    for i in range(6):
        add(engine, f"preempted {i}", PROMPTS[i], asked(i, 50))
    while engine.has_unfinished_requests():
        take(engine, found)
        step += 1
        if step % 5 == 0:
            llm.reset_prefix_cache(reset_running_requests=True)
    return [found[f"preempted {i}"] for i in range(6)]


def resumed(llm):
    """Aborted after some tokens; a request of prompt and tokens goes on. Without drafts none is aborted."""
    lengths = [50 - 9 * (i % 4) for i in range(6)]
    if proposer_of(llm) is None:
        return generate(llm, PROMPTS[:6], (asked(i, 50) for i in range(6)))
    engine, found = llm.llm_engine, dict[str, list[int]]()
    for i in range(6):
        add(engine, f"resumed {i}", PROMPTS[i], asked(i, 50))
    while len(found) < 6 or min(map(len, found.values())) < 8:
        take(engine, found)
    engine.abort_request([f"resumed {i}" for i in range(6)], internal=False)
    tokens = [found[f"resumed {i}"] for i in range(6)]
    going = [i for i in range(6) if len(tokens[i]) < lengths[i]]
    params = [asked(i, max_tokens=lengths[i] - len(tokens[i]) + 9 * (i % 4)) for i in going]
    rest = generate(llm, [PROMPTS[i] + tokens[i] for i in going], params)
    for i, more in zip(going, rest, strict=True):
        tokens[i] = tokens[i] + more
    return tokens


def add(engine, name, prompt, params):
    engine.add_request(name, seen(engine, prompt, params), params)


def take(engine, found):
    for output in engine.step():
        found[output.request_id] = list(output.outputs[0].token_ids)


SCENARIOS: tuple[Callable[[Any], Tokens], ...] = (
    fresh_single_tokens, batch, crowded, gate, long_prompts, single_tokens, preempted, resumed
)  # fmt: skip


def new_recurrent_engine(model, spec, **arguments):
    from vllm import LLM

    settings = engine_settings(model, None if spec is None else {"history": 8} | spec)
    sizes = {"kv_cache_memory_bytes": 256 << 20, "enable_prefix_caching": False}
    # vLLM 0.24 takes chunks from linear attention where its own kernels would use AMX.
    with mock.patch("torch.cpu._is_amx_tile_supported", return_value=False):
        return LLM(**settings | sizes | (KEYED if spec is None else {}) | arguments)


FAST = ("fresh_single_tokens", "batch", "crowded", "gate", "long_prompts", "single_tokens")
# The last token of some of the long prompts is computed alone.
SHORT_STEPS = {"max_num_batched_tokens": 24, "enable_chunked_prefill": True}


def with_mtp(k):
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": k}}


def served(model, spec, names=None, **arguments):
    scenarios = {each.__name__: each for each in SCENARIOS}
    llm = new_recurrent_engine(model, spec, **arguments)
    try:
        rows, graphs = note_rows(core_of(llm).scheduler), note_graphs(runner_of(llm))
        found: dict[str, Any] = {name: scenarios[name](llm) for name in names or scenarios}
        drafter = proposer_of(llm)
        if drafter is not None:
            found["counters"] = drafter.take_counters().to_dict()
            found |= {"rows": rows, "graphs": graphs, "state_bytes": state_bytes(runner_of(llm))}
            found["model_runner"] = type(runner_of(llm)).__module__
        return found
    finally:
        close([llm])


def note_rows(scheduler):
    """Count the rows that vLLM gets wrong: without a draft after a step with one, and those left out."""
    schedule, drafted, rows = scheduler.schedule, set[str](), {"alone": 0, "beside drafts": 0, "left out": 0}

    @functools.wraps(schedule)
    def schedule_and_note(*args, **kwargs):
        nonlocal drafted
        output = schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            drafts = {name for name, draft in output.scheduled_spec_decode_tokens.items() if draft}
            kind = "beside drafts" if drafts else "alone"
            rows[kind] += len((drafted - drafts) & set(output.num_scheduled_tokens))
            rows["left out"] += len(scheduler.running) - len(output.num_scheduled_tokens)
            drafted = drafts
        return output

    scheduler.schedule = schedule_and_note
    return rows


def note_graphs(runner):
    """Of MRV1's steps: is a row in its prompt, has every row one token, may the step have a full graph."""
    steps = set[tuple[bool, bool, bool]]()
    if not hasattr(runner, "_is_uniform_decode"):
        return steps
    is_uniform = runner._is_uniform_decode

    def note(*args, **kwargs):
        found, batch = is_uniform(*args, **kwargs), runner.input_batch
        n = batch.num_reqs
        in_prompt = bool((batch.num_computed_tokens_cpu[:n] < batch.num_prompt_tokens[:n]).any())
        steps.add((in_prompt, kwargs["num_tokens"] == kwargs["num_reqs"], found))
        return found

    runner._is_uniform_decode = note
    return steps


def state_bytes(runner):
    """Of a request, by vLLM's own specification of its cache."""
    from vllm.v1.kv_cache_interface import MambaSpec

    return sum(
        (1 + spec.num_speculative_blocks) * math.prod(shape) * dtype.itemsize
        for spec in runner.get_kv_cache_spec().values()
        if isinstance(spec, MambaSpec)
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    )


def main(name, head):
    """Without drafts and with; head "mtp": the policy's own drafts beside the text; "images": it sees."""
    replace_layers()
    # Few rows: interpreted, the kernels that copy their states take most of the time.
    names = ("crowded", "gate") if head == "mtp" else ("crowded", "gate", "preempted", "long_prompts")
    cached = {"enable_prefix_caching": True, "block_size": 32, "max_num_seqs": 8}
    spec = {"num_speculative_tokens": 3, "batch_threshold": 4}
    sees, beside = head == "images", with_mtp(3) if head == "mtp" else {}
    ahead = {"async_scheduling": os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"}  # as on a GPU
    cached |= SEES if sees else {}
    with tempfile.TemporaryDirectory() as name_of:
        folder = pathlib.Path(name_of)
        model = make_mtp(name, folder) if beside else make_recurrent(name, folder, sees)
        plain = served(model, None, names, **cached)
        drafted = served(model, spec, names, **cached, **beside, **ahead)
    del drafted["graphs"]
    return {"plain": plain, "drafted": drafted}
