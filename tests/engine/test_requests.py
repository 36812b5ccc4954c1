"""Whatever a request asks for, it gets what it would get without drafts, or is refused alone."""

import json
import random
import re
import shutil
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.structured_output.backend_outlines import OutlinesGrammar

from docs.request_options import REFUSED, REQUEST, SAMPLING
from tests.engine import serving
from tests.engine.conftest import EOS_TOKEN_ID, KEYED, close, new_engine
from tests.engine.mixtures import MIXING, NUM_MIXED, PROMPT, random_request
from tests.engine.serving import REASONING, SERVED, Request, assert_same, num_accepted, sampling, serve

MARK, END = 28, 29  # of reasoning: two control characters
Engines = tuple[Any, Any]  # without drafts and with


def both_engines(model, spec=None, **arguments):
    spec = {"num_speculative_tokens": 8, "history": 8} | (spec or {})
    plain = new_engine(model, None, model=model, **KEYED, **arguments)
    drafted = new_engine(model, spec, model=model, **arguments)
    yield plain, drafted
    close([plain, drafted])


@pytest.fixture(scope="module")
def engines(chat_model):
    yield from both_engines(chat_model, max_num_seqs=64, max_logprobs=-1, reasoning_config=REASONING)


@pytest.fixture(scope="module")
def text(engines):
    """What the requests say where nothing is asked for; the drafts of the others come from it."""
    plain, drafted = [serve(llm, [asking({"max_tokens": 60})])[0]["text"] for llm in engines]
    assert plain == drafted
    return plain


@pytest.fixture(scope="module")
def expected(engines, text):
    return table(engines[0], text)


def table(llm, text):
    asked = [serving.example(name, PROMPT, text) for name in SERVED]
    return dict(zip(SERVED, serve(llm, asked), strict=True))


def asking(asked, prompt=PROMPT, key="one"):
    return Request(prompt, sampling(asked, key=key))


def test_every_field_has_a_verdict():
    """A field that a new vLLM brings fails here until somebody decides."""
    for found, options in ((SamplingParams, SAMPLING), (EngineCoreRequest, REQUEST)):
        known = [option.name for option in options if serving.VLLM in option.versions]
        assert sorted(found.__struct_fields__) == sorted(known)


@pytest.mark.parametrize("name", SERVED)
def test_alone(engines, text, expected, name):
    """The first time drafts come from what was said where nothing is asked for, also beyond the end."""
    asked = serving.example(name, PROMPT, text)
    num_accepted(engines[1])
    for _ in range(3):  # the second time drafts come from what the first gave
        [found] = serve(engines[1], [asked])
        assert_same(found, expected[name], name)
        if asked.params.max_tokens == 1 or num_accepted(engines[1]):
            return
    pytest.fail("no draft was accepted")


def test_all_together_and_that_an_option_does_what_it_is_for(engines, text, expected):
    num_accepted(engines[1])
    serving.assert_each_same(table(engines[1], text), expected)
    assert num_accepted(engines[1]) > 10 * len(SERVED)
    serving.assert_none_is_idle(expected)


@pytest.mark.parametrize("name", serving.examples(REFUSED))
def test_refused(engines, text, name):
    drafting = engines[1].llm_engine
    drafting.add_request("other", PROMPT, sampling({}))
    with pytest.raises(Exception, match=serving.examples(REFUSED)[name][0].error) as error:
        serve(engines[1], [serving.example(name, PROMPT, text)])
    assert "\n" not in str(error.value)
    outputs = [output for _ in iter(drafting.has_unfinished_requests, False) for output in drafting.step()]
    assert text.startswith(outputs[-1].outputs[0].text)


def test_a_stop_string_ends_tokens_and_text(engines, text):
    """At five places inside drafts, beside what else a request can ask for; the first of several ends it."""
    settings: list[dict[str, Any]] = [
        {}, {"include_stop_str_in_output": True}, {"logprobs": 2}, {"n": 3}, {"min_tokens": 21},
        {"max_tokens": 22}, {"logprobs": 1, "output_kind": 0}, {"logprobs": 1, "output_kind": 1},
    ]  # fmt: skip
    asked = [{"stop": [text[i : i + 2]], **more} for i in (19, 20, 21, 22, 23) for more in settings]
    early, late = text[20:22], text[22:24]
    several = ([late, early], [early, late], [text[21:25], text[20:24]], [text[20:24], text[21:23]])
    asked += [{"stop": stops} for stops in several]
    num_accepted(engines[1])
    requests = [asking({"max_tokens": 60} | each) for each in asked]
    plain, found = (serve(llm, requests) for llm in engines)
    assert_same(found, plain)
    assert num_accepted(engines[1]) > 10 * len(asked)
    for each, one in zip(asked, found, strict=True):
        if each.keys() - {"logprobs", "output_kind"} == {"stop"}:
            first = min(each["stop"], key=lambda stop: text.find(stop) + len(stop))
            assert (one["text"], one["end"]) == (text[: text.find(first)], ["stop", first])


def test_the_samples_of_one_request_have_keys_of_their_own(engines):
    """Sample i is that of a request with the key [key, i]."""
    for llm in engines:
        [together] = serve(llm, [asking({"n": 4})])
        alone = [one["tokens"] for one in serve(llm, [asking({}, key=["one", i]) for i in range(4)])]
        assert [one["tokens"] for one in (together, *together["others"])] == alone
        assert len({*map(tuple, alone)}) == 4


def processed(llm, params, **more):
    prompt = {"type": "token", "prompt_token_ids": [1]}
    return llm.llm_engine.input_processor.process_inputs("one", prompt, params, ("generate",), **more)


def test_streaming_input_is_refused(engines):
    """With drafts, vLLM would take the tokens that a stop cut off for a part of the next turn."""
    assert processed(engines[0], sampling(), resumable=True).resumable
    with pytest.raises(ValueError, match=r"^rollout_spec: [^\n]* streaming input[^\n]*$"):
        processed(engines[1], sampling(), resumable=True)


def test_a_grammar_of_outlines_is_refused_where_its_mask_would_open(engines, monkeypatch):
    for llm, has_drafts in zip(engines, (False, True), strict=True):
        for backend in ("xgrammar", "outlines"):
            monkeypatch.setattr(llm.llm_engine.vllm_config.structured_outputs_config, "backend", backend)
            params = sampling({"structured_outputs": {"regex": "[ab]{9}"}})
            if has_drafts and backend == "outlines" and hasattr(OutlinesGrammar, "_prev_finished"):
                with pytest.raises(ValueError, match="structured_outputs of outlines"):
                    processed(llm, params)
            else:
                assert processed(llm, params).sampling_params.structured_outputs._backend == backend


def test_a_budget_ends_the_reasoning_of_its_own_request(engines):
    """In steps without drafts: each is the first step after a prompt of new characters."""
    start, end = map(ord, (REASONING["reasoning_start_str"], REASONING["reasoning_end_str"]))
    for number in range(3):
        prompts = ["".join(map(chr, range(65 + number, 75 + number))), chr(start) + f"{number}qwertz"]
        served = [
            serve(llm, [asking({"max_tokens": 2}, prompts[0]),
                        asking({"max_tokens": 2, "thinking_token_budget": 8}, prompts[1])])
            for llm in engines
        ]  # fmt: skip
        assert_same(served[1], served[0])
        assert [one["tokens"][1] == end for one in served[0]] == [False, True]


@pytest.fixture(scope="module")
def reasoning_model(chat_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "reasoning"
    shutil.copytree(chat_model, path)
    text = (path / "tokenizer.json").read_text()
    contents = json.loads(text)
    vocabulary = contents["model"]["vocab"]
    for token, mark in ((MARK, "<think>"), (END, "</think>")):
        del vocabulary[chr(token)]
        vocabulary[mark] = token
        contents["added_tokens"].append(
            {"id": token, "content": mark, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
        )  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(contents))
    return str(path)


def test_a_grammar_begins_where_reasoning_ends(reasoning_model):
    """The mark is inside drafts: they come from what the same keys give without a grammar.

    Also where the caller says that the reasoning has ended, or that it has not.
    """
    num, given = 8, (None, False, True)
    for plain, drafted in both_engines(reasoning_model, reasoning_parser="deepseek_r1"):
        for llm in (plain, drafted):
            long = [asking({"temperature": 2.0, "max_tokens": 150}, key=i) for i in range(num)]
            assert sum(END in one["tokens"] for one in serve(llm, long)) >= num / 3
        both = [[answers(llm, num, ended) for ended in given] for llm in (plain, drafted)]
        assert num_accepted(drafted) > 100
    assert_same(both[1], both[0])
    for ended, answered in zip(given, both[1], strict=True):
        for tokens in (one["tokens"] for one in answered):
            if ended or END in tokens:
                answer = "".join(map(chr, tokens if ended else tokens[tokens.index(END) + 1 :]))
                assert re.fullmatch(f"[0-9]{{0,30}}{chr(EOS_TOKEN_ID)}?", answer)


def answers(llm, num, reasoning_ended):
    """Of requests with a grammar after the reasoning, and what their caller says of it."""
    process = llm.llm_engine.input_processor.process_inputs
    asked = {
        "temperature": 2.0, "max_tokens": 150, "ignore_eos": False, "skip_special_tokens": False,
        "structured_outputs": {"regex": "[0-9]{5,30}"},
    }  # fmt: skip

    def process_and_say(*args, **kwargs):
        request = process(*args, **kwargs)
        request.reasoning_ended = reasoning_ended
        return request

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.llm_engine.input_processor, "process_inputs", process_and_say)
        return serve(llm, [asking(asked, "abcabcabcabd", key=i) for i in range(num)])


@pytest.fixture(scope="module")
def mixing_engines(chat_model):
    """Prompts come in chunks, the gate opens and closes."""
    yield from both_engines(chat_model, {"num_speculative_tokens": 3, "batch_threshold": 12}, **MIXING)


@pytest.mark.parametrize("seed", [31, *(pytest.param(seed, marks=pytest.mark.long) for seed in (32, 33))])
def test_random_mixtures(mixing_engines, seed):
    """Requests of all kinds beside each other, and then some alone."""
    draw = random.Random(seed)
    requests = [random_request(draw) for _ in range(NUM_MIXED)]
    plain, drafted = (serve(llm, requests) for llm in mixing_engines)
    assert num_accepted(mixing_engines[1]) > 100
    drafted += [serve(mixing_engines[1], [request])[0] for request in requests[:6]]
    for i, found in enumerate(drafted):
        assert_same(found, plain[i % NUM_MIXED], f"{requests[i % NUM_MIXED]}")
