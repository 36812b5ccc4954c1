"""What can happen to a request in an engine: every scenario's greedy output must equal plain vLLM's."""

from __future__ import annotations

import ctypes
import gc
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.engine.conftest import EOS_TOKEN_ID, VOCAB_SIZE, proposer_of, token_ids
from tests.engine.test_coupled import BAD_WORDS, assert_drafts_were_accepted_and_rejected, params
from tests.text import save_corpus

GROUP_KEY = "rollout_spec_group"  # what a user writes; importing it would import vllm too early
LENGTH = 60
PROMPTS = [[5, 6, 7, 8 + i] * 4 for i in range(8)]


def greedy(max_tokens: int = LENGTH, **settings: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **settings)


def generate(llm: Any, prompts: list[list[int]] = PROMPTS, params: Any = None) -> list[list[int]]:
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return token_ids(llm.generate(inputs, params or greedy(), use_tqdm=False))


def begun(llm: Any) -> Any:
    """The engine, five steps into PROMPTS."""
    for i, prompt in enumerate(PROMPTS):
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, greedy())
    for _ in range(5):
        assert not any(output.finished for output in llm.llm_engine.step())
    return llm


def assert_same_as_plain(
    make_engine: Callable[..., Any],
    arguments: dict[str, Any],
    spec: dict[str, Any] | None = None,
    prompts: list[list[int]] = PROMPTS,
    params: Any = None,
) -> Any:
    """Generate with and without drafts; the drafting engine, which must have drafted, is returned."""
    plain = generate(make_engine(**arguments), prompts, params)
    llm = make_engine(spec or {}, **arguments)
    assert generate(llm, prompts, params) == plain
    proposer = proposer_of(llm)
    proposer._drafter.index.validate()
    assert proposer._drafter.counters.num_accepted_tokens > 0
    return llm


@pytest.mark.parametrize("num_speculative_tokens", [1, 3, 8])
def test_greedy_equals_plain(make_engine: Any, num_speculative_tokens: int) -> None:
    llm = assert_same_as_plain(make_engine, {}, {"num_speculative_tokens": num_speculative_tokens})
    counters = proposer_of(llm).take_counters()
    assert counters.num_failed_steps == 0
    assert counters.num_steps_on == counters.num_steps < LENGTH


def test_a_corpus_drafts_and_changes_no_token(make_engine: Any, tmp_path: pathlib.Path) -> None:
    plain = generate(make_engine())
    num_steps = []
    for corpus in ("", str(save_corpus(tmp_path / "corpus.sam", plain))):
        llm = make_engine({"corpus": corpus})
        assert generate(llm) == plain
        num_steps.append(proposer_of(llm).take_counters().num_steps)
    assert num_steps[1] <= min(LENGTH // 4, num_steps[0] - 1)


def test_requests_end_at_the_models_length(make_engine: Any) -> None:
    prompts = [prompt + [9] * (3 * i) for i, prompt in enumerate(PROMPTS)]
    assert_same_as_plain(make_engine, {"max_model_len": 48}, prompts=prompts, params=greedy(500))


def test_a_row_at_its_end_does_not_cost_the_others_their_drafts(make_engine: Any) -> None:
    """vLLM would not call the drafter, and verify K zeros a row, while one row is within K of the end."""
    llm = make_engine({}, max_model_len=64)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    schedule, num_steps = scheduler.schedule, 0

    def counting_schedule(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_steps
        output = schedule(*args, **kwargs)
        num_steps += output.total_num_scheduled_tokens > 0
        return output

    scheduler.schedule = counting_schedule
    prompts = [PROMPTS[0] + [9] * 44, *PROMPTS[1:]]
    params = [greedy(500), *(greedy(30) for _ in PROMPTS[1:])]
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    assert proposer_of(llm).take_counters().num_steps == num_steps


def test_a_length_that_vllm_sets_later_bounds_the_drafts(make_engine: Any) -> None:
    """As when max_model_len=-1 lets vLLM fit the length to the memory, with the drafter there already."""
    llm = make_engine({})
    llm.collective_rpc("update_max_model_len", args=(64,))
    llm.llm_engine.engine_core.engine_core.scheduler.max_model_len = 64
    proposer = proposer_of(llm)
    propose, levels_seen, ends = proposer.propose, [], []

    def recording_propose(sampled: Any, levels: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = propose(sampled, levels, *args, **kwargs)
        levels_seen.append(int(levels[0]))
        ends.extend(int(levels[row]) + len(draft) for row, draft in enumerate(drafts) if draft)
        return drafts

    proposer.propose = recording_propose
    [output] = generate(llm, PROMPTS[:1], greedy(400))
    assert len(PROMPTS[0] + output) == 64
    assert max(ends) == 63, "the target adds a token of its own"
    assert max(levels_seen) > 64 - 8, "vLLM must go on calling the drafter near the end"


def test_preemption_and_recompute(make_engine: Any) -> None:
    arguments = {
        "num_gpu_blocks_override": 12, "block_size": 32, "max_model_len": 96, "enable_prefix_caching": False,
    }  # fmt: skip
    llm = make_engine({}, **arguments)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempted: list[str] = []
    preempt = scheduler._preempt_request
    scheduler._preempt_request = lambda request, *a, **k: (
        preempted.append(request.request_id),
        preempt(request, *a, **k),
    )[1]
    drafted = generate(llm)
    assert preempted, "the scenario needs a key-value cache small enough to preempt"
    assert proposer_of(llm).take_counters().num_accepted_tokens > 0
    assert drafted == generate(make_engine(**arguments))
    proposer_of(llm)._drafter.index.validate()


def test_chunked_prefill_and_prefix_caching(make_engine: Any) -> None:
    prompts = [[5, 6, 7, 8 + i] * 30 for i in range(4)] * 2
    arguments = {"max_num_batched_tokens": 48, "enable_chunked_prefill": True, "enable_prefix_caching": True}
    assert_same_as_plain(make_engine, arguments, prompts=prompts)


def test_requests_join_and_abort_between_steps(make_engine: Any) -> None:
    plain = generate(make_engine())
    llm = make_engine({})
    engine, finished, steps = llm.llm_engine, {}, 0
    waiting = list(range(len(PROMPTS)))
    aborted = {"2", "5"}
    while waiting or engine.has_unfinished_requests():
        if waiting and steps % 3 == 0:
            i = waiting.pop(0)
            engine.add_request(str(i), {"prompt_token_ids": PROMPTS[i]}, greedy())
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = list(output.outputs[0].token_ids)
        if steps == 18:
            engine.abort_request(sorted(aborted), internal=False)
        steps += 1
    assert finished.keys() == {str(i) for i in range(len(PROMPTS))} - aborted
    assert all(tokens == plain[int(name)] for name, tokens in finished.items())
    generate(llm, PROMPTS[:1])
    assert (
        len(proposer_of(llm)._drafter.request_ids) == 1
    )  # the last batch is closed when the next one starts


def test_siblings_by_explicit_group_with_different_prompts(make_engine: Any) -> None:
    plain = generate(make_engine())
    llm = make_engine({})
    assert generate(llm, params=greedy(extra_args={GROUP_KEY: 7})) == plain
    assert proposer_of(llm)._drafter.index.stats().num_groups == 1


def test_an_engine_logs_what_drafting_does(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout_spec.vllm import proposer as vllm_proposer

    said: list[str] = []
    monkeypatch.setattr(vllm_proposer, "LOG_EVERY", 10)
    monkeypatch.setattr(vllm_proposer.logger, "info", lambda form, *values: said.append(form % values))
    llm = make_engine({})
    generate(llm)
    # What was logged is still counted; each token is a row's own in a step, or an accepted one.
    counters = proposer_of(llm).take_counters()
    assert counters.num_row_steps + counters.num_accepted_tokens == len(PROMPTS) * LENGTH
    assert 0 < counters.num_accepted_tokens <= counters.num_draft_tokens
    lines = [line for line in said if "the last 10 steps: acceptance_rate" in line]
    assert len(lines) == counters.num_steps // 10 > 0
    assert all(", share_on 1, " in line for line in lines)


def test_no_row_drafts_above_the_batch_threshold(make_engine: Any) -> None:
    llm = make_engine({"batch_threshold": 3})
    generate(llm)
    counters = proposer_of(llm).take_counters()
    assert (counters.num_steps_on, counters.num_drafts) == (0, 0)
    assert proposer_of(llm)._drafter.index.stats().num_tokens >= len(PROMPTS) * (
        LENGTH - 1
    )  # indexing went on
    generate(llm, PROMPTS[:3])
    assert proposer_of(llm).take_counters().num_drafts > 0


# Greedy and sampled rows of each in one batch.
CONSTRAINTS: list[dict[str, Any]] = [
    {"seed": 7},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"top_k": 5},
    {"top_p": 0.8},
    {"allowed_token_ids": list(range(3, VOCAB_SIZE, 2))},
    {"min_tokens": 30, "stop_token_ids": list(range(3, 60))},
    {BAD_WORDS: [[3 + i] for i in range(40)] + [[i, i] for i in range(50, VOCAB_SIZE)]},
]


def processed(raw: np.ndarray, setting: dict[str, Any], prompt: list[int], before: list[int]) -> np.ndarray:
    """The definition of a setting: the logits that follow from the model's, behind some output tokens."""
    logits, counts = raw.copy(), np.bincount(before, minlength=VOCAB_SIZE)
    allowed = setting.get("allowed_token_ids", range(VOCAB_SIZE))
    logits[[token for token in range(VOCAB_SIZE) if token not in allowed]] = -np.inf
    for *words, last in setting.get(BAD_WORDS, ()):
        if before[len(before) - len(words) :] == words:
            logits[last] = -np.inf
    if len(before) < setting.get("min_tokens", 0):
        logits[[EOS_TOKEN_ID, *setting["stop_token_ids"]]] = -np.inf
    repeated, factor = list({*prompt, *before}), setting.get("repetition_penalty", 1)
    logits[repeated] = np.where(logits > 0, logits / factor, logits * factor)[repeated]
    logits -= setting.get("frequency_penalty", 0) * counts + setting.get("presence_penalty", 0) * (counts > 0)
    logits /= setting["temperature"] or 1
    if "top_k" in setting and setting["temperature"]:
        logits[logits < np.sort(logits)[-setting["top_k"]]] = -np.inf
    if "top_p" in setting and setting["temperature"]:
        order = np.argsort(logits)[::-1]
        shares = np.exp(logits[order] - np.logaddexp.reduce(logits))
        logits[order[shares.cumsum() - shares >= setting["top_p"]]] = -np.inf
    return logits


@pytest.mark.parametrize(
    ("verify", "mode"),
    [
        ("standard", "raw_logprobs"),
        ("standard", "processed_logprobs"),
        ("standard", "raw_logits"),
        ("standard", "processed_logits"),
        ("coupled", "raw_logits"),  # test_coupled has the other two, against plain steps
        ("coupled", "processed_logits"),
    ],
)
def test_constraints_and_logprobs(make_engine: Any, tiny_model: str, verify: str, mode: str) -> None:
    """Against what the model's logits, as transformers computes them, and the settings' definitions give."""
    import torch
    from transformers import LlamaForCausalLM

    llm, model = (
        make_engine({"verify": verify}, logprobs_mode=mode),
        LlamaForCausalLM.from_pretrained(tiny_model),
    )
    settings = [{"temperature": t, "logprobs": 0} | kind for kind in CONSTRAINTS for t in (0.0, 0.8, 0.8)]
    prompts = [{"prompt_token_ids": PROMPTS[0]}] * len(settings)
    outputs = llm.generate(prompts, [params(setting) for setting in settings], use_tqdm=False)
    assert_drafts_were_accepted_and_rejected(llm)
    for setting, output in zip(settings, [request.outputs[0] for request in outputs], strict=True):
        tokens = list(output.token_ids)
        assert len(tokens) > setting.get("min_tokens", 0)
        with torch.no_grad():
            of_model = model(torch.tensor([PROMPTS[0] + tokens])).logits[0, len(PROMPTS[0]) - 1 :].numpy()
        for j, (token, given) in enumerate(zip(tokens, output.logprobs, strict=True)):
            allowed = processed(of_model[j], setting, PROMPTS[0], tokens[:j])
            assert np.isfinite(allowed[token]), setting
            assert setting["temperature"] or allowed[token] > allowed.max() - 1e-4, setting
            scores = of_model[j] if mode.startswith("raw") else allowed
            wanted = scores - (np.logaddexp.reduce(scores) if mode.endswith("logprobs") else 0)
            np.testing.assert_allclose(given[token].logprob, wanted[token], atol=2e-4, err_msg=str(setting))


def test_new_weights_end_the_drafters_step(make_engine: Any) -> None:
    import torch

    outputs = []
    for spec in (None, {}):
        llm = make_engine(spec, fresh=True)
        first = generate(llm)
        runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        with torch.no_grad():
            runner.get_model().model.norm.weight.mul_(torch.linspace(0.2, 2.0, 128))
        llm.reset_prefix_cache()
        if spec is not None:
            proposer_of(llm).drop_texts()
            assert proposer_of(llm)._drafter.index.stats().num_groups == 0
        outputs.append((first, generate(llm)))
    assert outputs[0] == outputs[1]
    assert outputs[0][0] != outputs[0][1]


def test_requests_in_flight_go_on_after_a_weight_sync(make_engine: Any) -> None:
    """The index drops them, the engine recomputes them, and both start from what they have written."""
    plain = generate(make_engine())
    llm = begun(make_engine({"history": 0}))
    engine, proposer, finished = llm.llm_engine, proposer_of(llm), {}
    proposer.take_counters()
    proposer.drop_texts()
    assert llm.reset_prefix_cache(reset_running_requests=True)
    assert proposer._drafter.index.stats().num_tokens == 0
    while engine.has_unfinished_requests():
        finished |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step() if o.finished}
    assert [finished[str(i)] for i in range(len(PROMPTS))] == plain
    num_tokens = sum(map(len, PROMPTS)) + len(PROMPTS) * LENGTH
    assert proposer._drafter.index.stats().num_tokens == num_tokens
    counters = proposer.take_counters()
    assert counters.num_accepted_tokens > 0
    assert counters.num_failed_steps == 0
    proposer._drafter.index.validate()


@pytest.mark.parametrize("level", [0, 1])
def test_requests_go_on_after_sleep(make_engine: Any, level: int) -> None:
    """vLLM's own path. The CPU engine keeps its memory; it pauses, and level 1 recomputes, as everywhere."""
    plain = generate(make_engine())
    llm = begun(make_engine({}))
    engine, proposer, finished = llm.llm_engine, proposer_of(llm), {}
    llm.sleep(level=level, mode="keep")
    before = proposer._drafter.index.stats()
    engine.step()
    assert proposer._drafter.index.stats().num_tokens == before.num_tokens, "it must be asleep"
    proposer.take_counters()
    llm.wake_up()
    for _ in range(LENGTH):
        finished |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step() if o.finished}
    assert [finished[str(i)] for i in range(len(PROMPTS))] == plain
    counters = proposer.take_counters()
    assert counters.num_accepted_tokens > 0
    assert counters.num_failed_steps == 0
    proposer._drafter.index.validate()


def test_a_full_index_costs_drafts_only(make_engine: Any) -> None:
    prompts = np.random.default_rng(0).integers(3, 120, (24, 1900)).tolist()
    arguments = {"max_model_len": 2048, "max_num_batched_tokens": 16384}
    plain = generate(make_engine(**arguments), prompts)
    llm = make_engine({"max_index_mb": 1}, **arguments)
    assert generate(llm, prompts) == plain
    assert proposer_of(llm)._drafter.index.stats().num_bytes <= 1 << 20
    counters = proposer_of(llm).take_counters()
    assert counters.num_untracked_rows > 0 == counters.num_failed_steps


def test_a_failing_drafter_is_counted_and_generation_goes_on(
    make_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plain = generate(make_engine())
    llm = make_engine({})
    proposer = proposer_of(llm)

    step, num_left = proposer._drafter.step, 4

    def fail(*arguments: Any) -> Any:
        nonlocal num_left
        if num_left == 0:
            raise ZeroDivisionError("a defect")
        num_left -= 1
        return step(*arguments)

    proposer._drafter.step = fail
    assert generate(llm) == plain
    counters = proposer.take_counters()
    assert counters.num_steps == 4, "what was counted before is not lost"
    assert 0 < counters.num_failed_steps <= LENGTH - 4
    warnings = [record for record in caplog.records if "rollout_spec: drafting is off" in record.getMessage()]
    assert len(warnings) == 1
    assert "ZeroDivisionError" in warnings[0].getMessage()


def resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests have freed would hide what is kept
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_soak_memory_returns(make_engine: Any) -> None:
    """Thousands of requests; nothing grows once the idle groups and what was learned have their full size."""
    # What was learned grows to a share of the budget. A small one is full after the warm-up.
    llm = make_engine({"batch_threshold": 1000, "max_index_mb": 1}, max_num_seqs=64)
    generator = np.random.default_rng(0)

    def serve(num_prompts: int) -> tuple[int, int]:
        prompts = [[int(t) for t in generator.integers(3, 120, 12)] for _ in range(num_prompts)]
        generate(llm, [prompt for prompt in prompts for _ in range(4)], greedy(4))
        return int(proposer_of(llm)._drafter.index.stats().num_bytes), resident_bytes()

    warm_index, warm_process = [serve(100) for _ in range(3)][-1]
    sizes = [serve(100) for _ in range(5)]
    assert max(index for index, _ in sizes) <= 1.25 * warm_index, (warm_index, sizes)
    # The engine itself settles slowly; this finds what keeps some 16 KiB of each request.
    assert max(process for _, process in sizes) <= warm_process + (32 << 20), (warm_process, sizes)
    assert len(proposer_of(llm)._drafter.request_ids) <= 64
