"""Whatever a request asks for, it gets what it would get without drafts, or is refused alone."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rollout_spec.vllm.keys import GROUP_KEY, GROUP_TOKENS_KEY, KEY, TURN_TOKENS_KEY
from rollout_spec.vllm.scheduler import UNCOUNTED_KEY
from tests.engine.conftest import EOS_TOKEN_ID, close, new_engine, proposer_of

PROMPT = "abcabcabcabd"
SPEC = {"num_speculative_tokens": 8}
OFF: dict[bool, dict[str, Any]] = {
    True: {"additional_config": {"rollout_spec": {"method": "off"}}},
    False: {},
}
THINK, END = 28, 29  # two control characters, in the tokenizer that reasons


def params(name: Any = "one", **settings: Any) -> Any:
    from vllm import SamplingParams

    settings = {"temperature": 0.8, "max_tokens": 60, "ignore_eos": True} | settings
    settings["extra_args"] = {KEY: name} | settings.get("extra_args", {})
    return SamplingParams(**settings)


def result(output: Any) -> dict[str, Any]:
    """All that a sample consists of."""
    # Which of the forbidden tokens fills a place is anybody's choice.
    logprobs = output.logprobs and [
        {token: one for token, one in sorted(position.items()) if one.logprob > float("-inf")}
        for position in output.logprobs
    ]
    return {
        "tokens": list(output.token_ids), "text": output.text, "end": output.finish_reason,
        "stop": output.stop_reason,
        "logprobs": logprobs and [{token: one.logprob for token, one in row.items()} for row in logprobs],
        "pieces": logprobs and [{token: one.decoded_token for token, one in row.items()} for row in logprobs],
    }  # fmt: skip


def assert_same(drafted: dict[str, Any], plain: dict[str, Any]) -> None:
    both = [{name: one[name] for name in one if name != "logprobs"} for one in (drafted, plain)]
    assert both[0] == both[1]
    assert (drafted["logprobs"] is None) == (plain["logprobs"] is None)
    for one, other in zip(drafted["logprobs"] or [], plain["logprobs"] or [], strict=True):
        assert one == pytest.approx(other, abs=2e-4)


def samples(llm: Any, all_params: list[Any], prompt: str = PROMPT) -> list[list[dict[str, Any]]]:
    """Of each request, its samples."""
    outputs = llm.generate([prompt] * len(all_params), all_params, use_tqdm=False)
    return [[result(sample) for sample in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def engines(chat_model: str) -> Iterator[tuple[Any, Any]]:
    """Without drafts and with; both have generated the text of the key "one" that drafts then come from."""
    plain, drafted = (
        new_engine(chat_model, spec, model=chat_model, max_logprobs=20, **OFF[spec is None])
        for spec in (None, SPEC)
    )
    yield plain, drafted
    close([plain, drafted])


@pytest.fixture(scope="module")
def free(engines: tuple[Any, Any]) -> str:
    """The text that the key "one" gives: drafts come from it where it is asked for again."""
    texts = [samples(llm, [params()])[0][0]["text"] for llm in engines]
    assert texts[0] == texts[1]
    return texts[0]


def same_in_both(engines: tuple[Any, Any], all_params: Callable[[], list[Any]]) -> list[list[dict[str, Any]]]:
    """What the engine with drafts gives, after it is seen to be what the one without gives."""
    plain, drafted = (samples(llm, all_params()) for llm in engines)
    for one, other in zip(drafted, plain, strict=True):
        for sample, expected in zip(one, other, strict=True):
            assert_same(sample, expected)
    return drafted


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"include_stop_str_in_output": True},
        {"logprobs": 2},
        {"n": 3},
        {"min_tokens": 21},
        {"max_tokens": 22},
    ],
    ids=str,
)
def test_a_stop_string_ends_tokens_and_text(engines: Any, free: str, settings: dict[str, Any]) -> None:
    for begin in (19, 20, 21, 22, 23):
        stop = free[begin : begin + 2]
        same_in_both(engines, lambda stop=stop: [params(stop=[stop], **settings)])


def test_the_first_stop_string_in_the_text_ends_it(engines: Any, free: str) -> None:
    early, late = free[20:22], free[22:24]
    for stops in ([late, early], [early, late], [free[21:25], free[20:24]], [free[20:24], free[21:23]]):
        same_in_both(engines, lambda stops=stops: [params(stop=stops)])


def test_a_stream_shows_nothing_behind_a_stop(engines: Any, free: str) -> None:
    """As deltas and as whole texts; a delta holds what a step has given."""
    from vllm.sampling_params import RequestOutputKind

    for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE):
        [plain], [drafted] = (
            streamed(llm, PROMPT, [params(stop=[free[20:22]], logprobs=1, output_kind=kind)])
            for llm in engines
        )
        assert_same(drafted, plain)
        assert (drafted["text"], drafted["stop"]) == (free[:20], free[20:22])


def streamed(llm: Any, prompt: Any, asked: list[Any]) -> list[dict[str, Any]]:
    """What the parts of each stream come to."""
    for number, each in enumerate(asked):
        llm.llm_engine.add_request(f"stream {number}", prompt, each)
    parts = defaultdict[str, list[dict[str, Any]]](list)
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            parts[output.request_id].append(result(output.outputs[0]))
    return [
        joined(parts[f"stream {number}"])
        if each.output_kind.name == "DELTA"
        else parts[f"stream {number}"][-1]
        for number, each in enumerate(asked)
    ]


def joined(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    whole = dict(deltas[-1])
    for name in ("tokens", "logprobs", "pieces"):
        whole[name] = whole[name] and [each for delta in deltas for each in delta[name]]
    return whole | {"text": "".join(delta["text"] for delta in deltas)}


# Whole characters of one to four bytes, pieces that begin one, end one or both, and parts of long ones.
BYTES = [bytes([97 + i % 26, 0xC3 + i, 0x80 + i])[i % 2 :] for i in range(28)]
BYTES += [bytes([0x80 + i, 97 + i % 26, 0xC3 + i % 28])[i % 3 // 2 : 2 + i % 3] for i in range(88)]
BYTES += [
    *b"\xe2 \xe2\x82 \x82 \xac \xe2\x82\xac \xf0 \xf0\x9f \x9f \x98 \x98\x80 \xf0\x9f\x98\x80 \x80".split()
]


@pytest.fixture(scope="module")
def byte_engines(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """Without drafts and with, of a tokenizer whose characters take up to four tokens."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    names = {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    pieces = ["".join(names[byte] for byte in piece) for piece in BYTES]
    bytewise = Tokenizer(models.BPE({piece: token for token, piece in enumerate(pieces)}, []))
    bytewise.decoder = decoders.ByteLevel()
    path = tmp_path_factory.mktemp("models") / "bytes"
    shutil.copytree(tiny_model, path)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token=pieces[EOS_TOKEN_ID])
    tokenizer.save_pretrained(path)
    plain, drafted = (
        new_engine(str(path), spec, model=str(path), **OFF[spec is None]) for spec in (None, SPEC)
    )
    yield plain, drafted
    close([plain, drafted])


@pytest.mark.parametrize("is_fast", [True, False])
def test_characters_of_several_tokens(
    byte_engines: tuple[Any, Any], is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Responses end, are stopped and are streamed in the middle of characters."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import detokenizer

    if not is_fast:
        monkeypatch.setattr(detokenizer, "FastIncrementalDetokenizer", detokenizer.SlowIncrementalDetokenizer)
    prompt = {"prompt_token_ids": [*range(3, 30)]}
    ask = functools.partial(params, temperature=2.0, max_tokens=40, logprobs=2)
    [whole], [other] = (streamed(llm, prompt, [ask()]) for llm in byte_engines)
    assert_same(other, whole)
    tokens, text = whole["tokens"], whole["text"]
    assert len({character for character in text if character > "\x7f"}) > 5
    ends: list[dict[str, Any]] = [{"max_tokens": length} for length in range(20, 28)]
    ends += [{"stop_token_ids": [tokens[length]], "min_tokens": length} for length in range(20, 28)]
    ends += [{"stop": [text[i : i + length]]} for i in range(12, 18) for length in (1, 2)]
    ends += [{"stop": ["\ufffd"]}, {"stop": ["\ufffd"], "min_tokens": 20, "include_stop_str_in_output": True}]
    proposer_of(byte_engines[1]).take_counters()
    for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE):
        both = (streamed(llm, prompt, [ask(output_kind=kind, **end) for end in ends]) for llm in byte_engines)
        for plain, drafted in zip(*both, strict=True):
            assert_same(drafted, plain)
    assert proposer_of(byte_engines[1]).take_counters().num_accepted_tokens > 10 * len(ends)


def test_streaming_input_is_refused(engines: Any) -> None:
    """With drafts, vLLM would take the tokens that a stop cut off for a part of the next turn."""
    for llm, is_refused in zip(engines, (False, True), strict=True):
        process = functools.partial(
            llm.llm_engine.input_processor.process_inputs, "turns",
            {"type": "token", "prompt_token_ids": [1]}, params(), ("generate",), resumable=True,
        )  # fmt: skip
        if is_refused:
            with pytest.raises(ValueError, match="streaming input"):
                process()
        else:
            assert process().resumable


def test_a_grammar_of_outlines_is_refused_where_its_mask_would_open(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.structured_output.backend_outlines import OutlinesGrammar

    for llm, has_drafts in zip(engines, (False, True), strict=True):
        config = llm.llm_engine.vllm_config.structured_outputs_config
        for backend in ("xgrammar", "outlines"):
            monkeypatch.setattr(config, "backend", backend)
            process = functools.partial(
                llm.llm_engine.input_processor.process_inputs, "grammar",
                {"type": "token", "prompt_token_ids": [1]},
                params(structured_outputs=StructuredOutputsParams(regex="[ab]{9}")), ("generate",),
            )  # fmt: skip
            if has_drafts and backend == "outlines" and hasattr(OutlinesGrammar, "_prev_finished"):
                with pytest.raises(ValueError, match="structured_outputs of outlines"):
                    process()
            else:
                assert process().sampling_params.structured_outputs._backend == backend


def test_log_probabilities_of_chosen_tokens_are_refused_for_that_request(engines: Any, free: str) -> None:
    drafted = engines[1]
    with pytest.raises(ValueError, match="logprob_token_ids"):
        drafted.generate([PROMPT], params(logprob_token_ids=[65, 66]), use_tqdm=False)
    [[sample]] = same_in_both(engines, lambda: [params(logprobs=2)])
    assert sample["text"] == free


@pytest.fixture(scope="module")
def reasoning_model(chat_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model with two control characters for the marks of reasoning."""
    path = tmp_path_factory.mktemp("models") / "reasoning"
    shutil.copytree(chat_model, path)
    text = (path / "tokenizer.json").read_text()
    contents = json.loads(text)
    vocabulary = contents["model"]["vocab"]
    for token, mark in ((THINK, "<think>"), (END, "</think>")):
        del vocabulary[chr(token)]
        vocabulary[mark] = token
        contents["added_tokens"].append(
            {"id": token, "content": mark, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
        )  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(contents))
    return str(path)


def test_a_grammar_begins_where_reasoning_ends(reasoning_model: str) -> None:
    """The mark is inside drafts: they come from what the same keys give without a grammar.

    Also where the caller says that the reasoning has ended, or that it has not.
    """
    num, both = 12, []
    for spec in (None, SPEC):
        more = {"reasoning_parser": "deepseek_r1", **OFF[spec is None]}
        llm = new_engine(reasoning_model, spec, model=reasoning_model, **more)
        free = [
            one for [one] in samples(llm, [params(i, temperature=2.0, max_tokens=200) for i in range(num)])
        ]
        both.append([answers(llm, num, ended) for ended in (None, False, True)])
        assert sum(END in one["tokens"] for one in free) >= num / 3
        if spec:
            assert proposer_of(llm).take_counters().num_accepted_tokens > 100
        close([llm])
    for plain, drafted in zip(*both, strict=True):
        for one, other in zip(drafted, plain, strict=True):
            assert_same(one, other)
    for ended, drafted in zip((None, False, True), both[1], strict=True):
        for tokens in (one["tokens"] for one in drafted):
            if ended or END in tokens:
                answer = "".join(map(chr, tokens if ended else tokens[tokens.index(END) + 1 :]))
                assert re.fullmatch(f"[0-9]{{0,30}}{chr(EOS_TOKEN_ID)}?", answer)


def answers(llm: Any, num: int, reasoning_ended: bool | None) -> list[dict[str, Any]]:
    """Of requests with a grammar behind the reasoning, and what their caller says of it."""
    from vllm.sampling_params import StructuredOutputsParams

    engine, found = llm.llm_engine, dict[str, dict[str, Any]]()
    for i in range(num):
        asked = params(
            i, temperature=2.0, max_tokens=200, ignore_eos=False, skip_special_tokens=False,
            structured_outputs=StructuredOutputsParams(regex="[0-9]{5,30}"),
        )  # fmt: skip
        prompt = {"type": "token", "prompt_token_ids": [*map(ord, PROMPT)]}
        request = engine.input_processor.process_inputs(str(i), prompt, asked, ("generate",))
        request.reasoning_ended = reasoning_ended
        engine.add_request(str(i), request, asked)
    while engine.has_unfinished_requests():
        found |= {output.request_id: result(output.outputs[0]) for output in engine.step()}
    return [found[str(i)] for i in range(num)]


STRANGE = {
    "surrogate": "\ud800", "long": 10**5000, "negative": -(1 << 70), "nan": float("nan"),
    "list": ["a", {"b": 1}], "true": True, "bytes": b"a",
}  # fmt: skip


@pytest.mark.parametrize("word", STRANGE)
def test_a_strange_word_costs_nobody_else_a_draft(engines: Any, free: str, word: str) -> None:
    """In whatever a request says of itself."""
    from vllm.exceptions import VLLMValidationError

    drafted = engines[1]
    for name in (KEY, GROUP_KEY, GROUP_TOKENS_KEY, TURN_TOKENS_KEY, UNCOUNTED_KEY):
        said = {GROUP_KEY: "group", name: STRANGE[word]}
        with contextlib.suppress(ValueError, VLLMValidationError):  # vLLM 0.32 refuses long numbers itself
            same_in_both(engines, lambda said=said: [params("other", extra_args=said, max_tokens=8)])
    proposer_of(drafted).take_counters()
    [[sample]] = samples(drafted, [params()])
    counters = proposer_of(drafted).take_counters()
    assert sample["text"] == free
    assert counters.num_accepted_tokens > 0
    assert counters.num_failed_steps == 0
