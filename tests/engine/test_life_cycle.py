"""What can happen to a request while it runs, and what is counted and remembered of it."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

from rollout_spec.drafting.history import group_key
from rollout_spec.vllm import SCHEDULER
from tests.engine.conftest import EOS_TOKEN_ID, OFF, VOCAB_SIZE, proposer_of, token_ids
from tests.engine.serving import BAD_WORDS, Request, sampling, serve
from tests.text import merged, save_corpus

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


def test_a_corpus_drafts_and_changes_no_token(make_engine: Any, tmp_path: pathlib.Path) -> None:
    plain = generate(make_engine())
    num_steps = []
    for corpus in ("", str(save_corpus(tmp_path / "corpus.sam", plain))):
        llm = make_engine({"corpus": corpus})
        assert generate(llm) == plain
        num_steps.append(proposer_of(llm).take_counters().num_steps)
    assert num_steps[1] <= min(LENGTH // 4, num_steps[0] - 1)


def test_a_row_at_its_end_does_not_cost_the_others_their_drafts(make_engine: Any) -> None:
    """vLLM would not call the drafter, and verify K zeros a row, while one row is within K of the end."""
    llm = make_engine({}, fresh=True, max_model_len=64)
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


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
@pytest.mark.parametrize("verify", ["standard", "coupled"])
def test_constraints_and_logprobs(make_engine: Any, tiny_model: str, verify: str, mode: str) -> None:
    """Against what the model's logits, as transformers computes them, and the settings' definitions give."""
    import torch
    from transformers import LlamaForCausalLM

    llm, model = (
        make_engine({"verify": verify}, logprobs_mode=mode),
        LlamaForCausalLM.from_pretrained(tiny_model),
    )
    settings = [{"temperature": t, "logprobs": 0} | kind for kind in CONSTRAINTS for t in (0.0, 0.8, 0.8)]
    asked = [{"max_tokens": LENGTH} | setting for setting in settings]
    found = serve(llm, [Request(PROMPTS[0], sampling(each, key=i)) for i, each in enumerate(asked)])
    counters = proposer_of(llm).take_counters()
    assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
    for setting, one in zip(settings, found, strict=True):
        tokens = one["tokens"]
        assert len(tokens) > setting.get("min_tokens", 0)
        with torch.no_grad():
            of_model = model(torch.tensor([PROMPTS[0] + tokens])).logits[0, len(PROMPTS[0]) - 1 :].numpy()
        for j, (token, given) in enumerate(zip(tokens, one["logprobs"], strict=True)):
            allowed = processed(of_model[j], setting, PROMPTS[0], tokens[:j])
            assert np.isfinite(allowed[token]), setting
            assert setting["temperature"] or allowed[token] > allowed.max() - 1e-4, setting
            scores = of_model[j] if mode.startswith("raw") else allowed
            wanted = scores - (np.logaddexp.reduce(scores) if mode.endswith("logprobs") else 0)
            np.testing.assert_allclose(given[token], wanted[token], atol=2e-4, err_msg=str(setting))


@pytest.mark.parametrize("verify", ["standard", "coupled"])
def test_a_stop_token_is_allowed_as_soon_as_min_tokens_is_reached(make_engine: Any, verify: str) -> None:
    """With drafts vLLM would forbid it one draft longer; also where its own rejection sampling is used."""
    drafting = make_engine({"verify": verify})
    for llm in (make_engine(), drafting):
        stopping = [greedy(min_tokens=30, stop_token_ids=text[30:32]) for text in generate(llm)]
        lengths = [len(tokens) for tokens in generate(llm, params=stopping)]
        assert min(lengths) == 31
    assert lengths == [len(tokens) for tokens in generate(make_engine(), params=stopping)]


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


@pytest.mark.parametrize("what", ["a weight sync", "a sleep of level 0", "a sleep of level 1"])
def test_requests_in_flight_go_on(make_engine: Any, what: str) -> None:
    """The index drops what a sync drops; a CPU engine keeps its memory, so it pauses only, and at level 1
    recomputes. Both go on from what requests have written."""
    plain, level = generate(make_engine()), int(what[-1]) if "sleep" in what else None
    llm = begun(make_engine({}))
    engine, proposer, finished = llm.llm_engine, proposer_of(llm), {}
    proposer.take_counters()
    if level is None:
        proposer.drop_texts()
        assert llm.reset_prefix_cache(reset_running_requests=True)
        assert proposer._drafter.index.stats().num_tokens == 0
    else:
        llm.sleep(level=level, mode="keep")
        before = proposer._drafter.index.stats()
        engine.step()
        assert proposer._drafter.index.stats().num_tokens == before.num_tokens, "it must be asleep"
        llm.wake_up()
    while len(finished) < len(PROMPTS):
        finished |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step() if o.finished}
    assert [finished[str(i)] for i in range(len(PROMPTS))] == plain
    num_tokens = sum(map(len, PROMPTS)) + len(PROMPTS) * LENGTH
    assert proposer._drafter.index.stats().num_tokens == num_tokens
    counters = proposer.take_counters()
    assert counters.num_accepted_tokens > 0 == counters.num_failed_steps
    proposer._drafter.index.validate()


def test_a_failing_drafter_is_counted_and_generation_goes_on(
    make_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plain = generate(make_engine())
    llm = make_engine({}, fresh=True)
    proposer = proposer_of(llm)

    draft, num_left = proposer._drafter.draft, 4

    def fail(*arguments: Any) -> Any:
        nonlocal num_left
        if num_left == 0:
            raise ZeroDivisionError("a defect")
        num_left -= 1
        return draft(*arguments)

    proposer._drafter.draft = fail
    assert generate(llm) == plain
    counters = proposer.take_counters()
    assert counters.num_steps == 4, "what was counted before is not lost"
    assert 0 < counters.num_failed_steps <= LENGTH - 4
    warnings = [record for record in caplog.records if "rollout_spec: drafting is off" in record.getMessage()]
    assert len(warnings) == 1
    assert "ZeroDivisionError" in warnings[0].getMessage()


def count_by_hand(
    llm: Any, params: list[Any], stop_token: int, aborted: set[str]
) -> tuple[dict[str, Any], dict[str, dict[str, int]]]:
    """Run the prompts step by step; returns what finished, and per request what was seen to happen.

    The requests in `aborted` are aborted when two of their drafts have been verified.

    A draft is what the proposer returned; it was verified if the request got tokens in the next step, and
    accepted as far as these tokens equal it, the last of them excluded, which is the target's own.
    """
    engine, proposer = llm.llm_engine, proposer_of(llm)
    runner, propose = proposer._runner, proposer.propose
    pending: dict[str, list[int]] = {}
    counts: dict[str, dict[str, int]] = {}

    def watching_propose(sampled: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        ids = list(runner.input_batch.req_ids)
        for request_id, tokens in zip(ids, sampled, strict=True):
            draft = pending.pop(request_id, None)
            if not tokens:
                continue
            if draft is None:  # the prefill
                counts[request_id] = dict.fromkeys(
                    ("num_decoded_tokens", "num_decode_steps", "num_drafts", "num_draft_tokens",
                     "num_accepted_tokens"), 0,
                )  # fmt: skip
                continue
            agree = 0
            while agree < min(len(draft), len(tokens) - 1) and draft[agree] == tokens[agree]:
                agree += 1
            assert agree == len(tokens) - 1, "only accepted tokens come before the target's own"
            stops = runner.requests[request_id].sampling_params.stop_token_ids
            kept = tokens[: tokens.index(stop_token) + 1] if stops and stop_token in tokens else tokens
            counts[request_id]["num_decoded_tokens"] += len(kept)
            counts[request_id]["num_decode_steps"] += 1
            counts[request_id]["num_drafts"] += bool(draft)
            counts[request_id]["num_draft_tokens"] += len(draft)
            counts[request_id]["num_accepted_tokens"] += agree
        drafts = propose(sampled, *args, **kwargs)
        pending.update(zip(ids, drafts, strict=True))
        return drafts

    proposer.propose = watching_propose
    for i, setting in enumerate(params):
        engine.add_request(str(i), {"prompt_token_ids": PROMPTS[i // 2]}, setting)
    finished: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
        # The engine adds a suffix of its own to a request's id.
        by_name = {name.split("-")[0]: count for name, count in counts.items()}
        due = {name for name in aborted if by_name[name]["num_drafts"] == 2}
        engine.abort_request(sorted(due), internal=False)
        aborted -= due
    return finished, by_name


def test_the_counts_of_a_request_equal_those_taken_by_hand(make_engine: Any) -> None:
    from rollout_spec.vllm.scheduler import counters_of

    llm = make_engine({"batch_threshold": 6}, fresh=True, scheduler_cls=SCHEDULER)
    stop_token = generate(llm, PROMPTS[:1])[0][15]
    params = [greedy(40 + 9 * i, stop_token_ids=[stop_token] if i < 2 else None) for i in range(8)]
    finished, counts = count_by_hand(llm, params, stop_token, {"5", "6"})
    assert finished.keys() == counts.keys() - {"5", "6"}
    assert any(output.outputs[0].finish_reason == "stop" for output in finished.values())
    assert sum(count["num_accepted_tokens"] for count in counts.values()) > 0
    assert counts["5"]["num_decode_steps"] > counts["5"]["num_drafts"] == 2, "steps without a draft, and with"
    for name, output in finished.items():
        assert counters_of(output).to_dict() == counts[name], name
    core = llm.llm_engine.engine_core.engine_core
    assert core.rollout_spec_take_aborted() == {
        key: counts["5"][key] + counts["6"][key] for key in counts["5"]
    }
    assert not any(core.rollout_spec_take_aborted().values())


def test_a_step_without_drafts_is_a_plain_step(make_engine: Any) -> None:
    """vLLM 0.32 verifies it too, and fails with top_k."""
    from vllm import SamplingParams

    llm = make_engine({"batch_threshold": 0, "verify": "standard"}, fresh=True)
    verifier = proposer_of(llm)._runner.rejection_sampler
    verifier.register_forward_pre_hook(lambda *_: pytest.fail("a step without drafts was verified"))
    top_k = SamplingParams(top_k=5, max_tokens=20, ignore_eos=True, detokenize=False)
    assert {len(tokens) for tokens in generate(llm, params=top_k)} == {20}


GROUP = "a prompt"


def sampled(number: int, max_tokens: int = LENGTH) -> Any:
    """A sample's parameters, as verl's agent loops send them in every request of it."""
    extra_args = {"rollout_spec_key": [3, number], "rollout_spec_group": GROUP}
    extra_args |= {"rollout_spec_group_tokens": len(PROMPTS[0]), "rollout_spec_turn_tokens": len(PROMPTS[0])}
    settings = {"temperature": 1.0, "max_tokens": max_tokens, "extra_args": extra_args}
    return sampling(settings | {"detokenize": False})


def history_of(packed: bytes) -> list[list[int]]:
    history = merged(packed)
    assert len(history) == 1
    return [response.tolist() for response in history.get(group_key(GROUP))]


def going_on(llm: Any, generated: dict[int, list[int]]) -> dict[int, list[int]]:
    """What each of the interrupted samples generates in all, once it has gone on as another request."""
    prompts = [PROMPTS[0] + tokens for tokens in generated.values()]
    params = [sampled(number, LENGTH - len(tokens)) for number, tokens in generated.items()]
    return {
        number: tokens + more
        for (number, tokens), more in zip(generated.items(), generate(llm, prompts, params), strict=True)
    }


def interrupted(llm: Any) -> dict[int, list[int]]:
    """What sample n has generated when it is aborted: n tokens, or a few more where it drafts."""
    engine, generated = llm.llm_engine, {}
    for number in range(1, LENGTH):
        engine.add_request(str(number), {"prompt_token_ids": PROMPTS[0]}, sampled(number))
    while engine.has_unfinished_requests():
        for output in engine.step():
            number, tokens = int(output.request_id), list(output.outputs[0].token_ids)
            if len(tokens) >= number and not output.finished:
                generated[number] = tokens
                engine.abort_request([output.request_id], internal=False)
    return generated


def test_a_sample_that_is_aborted_anywhere_goes_on_as_if_it_were_not(make_engine: Any) -> None:
    """No position's noise is drawn twice, none is left out."""
    llm = make_engine({})
    between_drafts, everywhere = interrupted(llm), interrupted(make_engine({"batch_threshold": 0}))
    assert proposer_of(llm).take_counters().num_draft_tokens > 0
    assert len({len(tokens) for tokens in between_drafts.values()}) > LENGTH / 2
    assert [len(tokens) for tokens in everywhere.values()] == list(range(1, LENGTH))
    expected = going_on(make_engine(**OFF), {number: [] for number in everywhere})
    assert going_on(llm, everywhere) == expected
    assert going_on(llm, between_drafts) == {number: expected[number] for number in between_drafts}


def test_the_history_has_each_finished_text_once(make_engine: Any) -> None:
    """A weight sync: samples that had finished just before, and others that go on behind it."""
    llm, texts = make_engine({"history": 100}), {}
    engine, lengths = llm.llm_engine, {number: 12 if number < 4 else LENGTH for number in range(12)}
    for number, length in lengths.items():
        engine.add_request(str(number), {"prompt_token_ids": PROMPTS[0]}, sampled(number, length))
    while any(len(texts.get(number, [])) < 12 for number in range(4)):
        for output in engine.step():
            texts[int(output.request_id)] = list(output.outputs[0].token_ids)
    aborted = {number: texts[number] for number in range(4, 12)}
    assert all(0 < len(tokens) < LENGTH for tokens in aborted.values())
    engine.abort_request([str(number) for number in aborted], internal=False)
    proposer_of(llm).drop_texts([str(number) for number in aborted])
    assert sorted(history_of(proposer_of(llm).pack_history())) == sorted(texts[i] for i in range(4))
    texts |= going_on(llm, aborted)
    assert sorted(history_of(proposer_of(llm).take_history())) == sorted(texts.values())
