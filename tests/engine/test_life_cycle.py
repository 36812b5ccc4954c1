"""What can happen to a request while it runs, and what is counted and remembered of it."""

from typing import Any

import numpy as np
import pytest

from rollout_spec.vllm.keys import GROUP_KEY, GROUP_TOKENS_KEY, SAMPLE_KEY, TURN_KEY
from tests.engine.conftest import EOS_TOKEN_ID, VOCAB_SIZE, core_of, proposer_of, token_ids
from tests.engine.serving import BAD_WORDS, Request, sampling, serve
from tests.text import save_corpus

LENGTH = 60
PROMPTS = [[5, 6, 7, 8 + i] * 4 for i in range(8)]


def greedy(max_tokens=LENGTH, **settings):
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **settings)


def generate(llm, prompts=PROMPTS, params=None):
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return token_ids(llm.generate(inputs, params or greedy(), use_tqdm=False))


def test_a_corpus_drafts_and_changes_no_token(make_engine, tmp_path):
    plain = generate(make_engine())
    num_steps = []
    for corpus in ("", str(save_corpus(tmp_path / "corpus.jsonl", plain))):
        llm = make_engine({"corpus": corpus})
        assert generate(llm) == plain
        num_steps.append(proposer_of(llm).take_counters().num_steps)
    assert num_steps[1] <= min(LENGTH // 4, num_steps[0] - 1)


def test_turns_go_on_where_their_sample_stands(make_engine):
    """A tool speaks between them. With a name of the sample, and without."""
    plain, drafted = make_engine(), make_engine({})
    for names in ({SAMPLE_KEY: "a", GROUP_KEY: "g", GROUP_TOKENS_KEY: len(PROMPTS[0])}, {}):
        proposer_of(drafted).take_counters()
        prompt = [*PROMPTS[0], len(names) + 20]
        for turn in range(3):
            params = greedy(20, extra_args={**names, TURN_KEY: turn})
            [said], [same] = (generate(llm, [prompt], params) for llm in (plain, drafted))
            assert said == same
            prompt = [*prompt, *said, 30, 31 + turn]
        assert proposer_of(drafted).take_counters().num_resumed == 2


def test_a_row_at_its_end_does_not_cost_the_others_their_drafts(make_engine):
    """vLLM would not call the drafter, and verify K zeros a row, while one row is within K of the end."""
    llm = make_engine({}, fresh=True, max_model_len=64)
    scheduler, scheduled = core_of(llm).scheduler, []
    schedule = scheduler.schedule
    scheduler.schedule = lambda *args, **kwargs: scheduled.append(schedule(*args, **kwargs)) or scheduled[-1]
    params = [greedy(500), *(greedy(30) for _ in PROMPTS[1:])]
    generate(llm, [PROMPTS[0] + [9] * 44, *PROMPTS[1:]], params)
    num_steps = sum(output.total_num_scheduled_tokens > 0 for output in scheduled)
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


def processed(raw, setting, prompt, before):
    """The definition of a setting: the logits that follow from the model's, after some output tokens."""
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


MODES = [f"{of}_{what}" for what in ("logprobs", "logits") for of in ("raw", "processed")]


@pytest.mark.parametrize("mode", MODES)
def test_constraints_and_logprobs(make_engine, tiny_model, mode):
    """Against what the model's logits, as transformers computes them, and the settings' definitions give."""
    import torch
    from transformers import LlamaForCausalLM

    llm = make_engine({}, logprobs_mode=mode)
    model = LlamaForCausalLM.from_pretrained(tiny_model)
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


@pytest.mark.parametrize("what", ["a weight sync", "a sleep of level 0", "a sleep of level 1"])
def test_requests_in_flight_go_on(make_engine, what):
    """The index drops nothing; a CPU engine keeps its memory, so it pauses only, and at level 1
    recomputes. Both go on from what requests have written."""
    plain, level = generate(make_engine()), int(what[-1]) if "sleep" in what else None
    llm = make_engine({})
    engine, proposer, finished = llm.llm_engine, proposer_of(llm), {}
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, greedy())
    for _ in range(5):
        assert not any(output.finished for output in engine.step())
    proposer.take_counters()
    if level is None:
        from rollout_spec.vllm.control import Ended, ProposerControl

        ProposerControl(proposer).note_new_weights(Ended((), ()))
        assert llm.reset_prefix_cache(reset_running_requests=True)
    else:
        llm.sleep(level=level, mode="keep")
        before = proposer.drafter.index.stats()
        engine.step()
        assert proposer.drafter.index.stats().num_tokens == before.num_tokens, "it must be asleep"
        llm.wake_up()
    while len(finished) < len(PROMPTS):
        finished |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step() if o.finished}
    assert [finished[str(i)] for i in range(len(PROMPTS))] == plain
    num_tokens = sum(map(len, PROMPTS)) + len(PROMPTS) * LENGTH
    assert proposer.drafter.index.stats().num_tokens == num_tokens
    counters = proposer.take_counters()
    assert counters.num_accepted_tokens > 0 == counters.num_failed_steps
    proposer.drafter.index.validate()


def test_a_step_without_drafts_is_a_plain_step(make_engine):
    """vLLM 0.32 verifies it too, and fails with top_k."""
    from vllm import SamplingParams

    llm = make_engine({"batch_threshold": 0}, fresh=True)
    verifier = proposer_of(llm)._runner.rejection_sampler
    verifier.register_forward_pre_hook(lambda *_: pytest.fail("a step without drafts was verified"))
    top_k = SamplingParams(top_k=5, max_tokens=20, ignore_eos=True, detokenize=False)
    assert {len(tokens) for tokens in generate(llm, params=top_k)} == {20}
