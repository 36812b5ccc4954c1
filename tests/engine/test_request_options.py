"""Each field of a request, in the installed vLLM, has the verdict that `docs/request_options.py` gives it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from docs.request_options import NO_EFFECT, REFUSED, REQUEST, SAME, SAMPLING, THINK, Option
from rollout_spec.vllm.keys import GROUP_KEY, KEY
from rollout_spec.vllm.versions import version
from tests.engine.conftest import VOCAB_SIZE, close, new_engine, proposer_of

PROMPT = "<abcabcabcab"
SETTINGS: dict[str, Any] = {"temperature": 0.7, "max_tokens": 30, "ignore_eos": True}
SPEC = {"num_speculative_tokens": 8, "history": 8}
OFF = {"rollout_spec": {"method": "off", "verify": "coupled"}}
numbers = itertools.count()


class Request(NamedTuple):
    """The arguments of `LLMEngine.add_request`."""

    prompt: Any
    params: Any
    others: Mapping[str, Any] = MappingProxyType({})


def cases(*verdicts: str) -> list[Any]:
    """Every example of the options with these verdicts that the installed vLLM has."""
    return [
        pytest.param(option, example, id=f"{option.name}-{i}")
        for option in (*SAMPLING, *REQUEST)
        if version() in option.versions and option.verdict in verdicts
        for i, example in enumerate(option.examples)
    ]


SERVED = cases(SAME, NO_EFFECT)
NAMES = [case.id for case in SERVED]
# Their examples give what is given where nothing is asked for.
IDLE = {
    "skip_special_tokens", "spaces_between_special_tokens", "output_kind", "stream_interval",
    "skip_reading_prefix_cache", "cache_salt", "ignore_eos",
}  # fmt: skip


@pytest.fixture(scope="module")
def engines(chat_model: str) -> Iterator[list[Any]]:
    made = both_engines(chat_model, max_num_seqs=64)
    yield made
    close(made)


def both_engines(model: str, **arguments: Any) -> list[Any]:
    """Without drafts and with."""
    marks = dict(zip(("reasoning_start_str", "reasoning_end_str"), THINK, strict=True))
    arguments |= {"model": model, "max_logprobs": -1, "reasoning_config": marks}
    return [
        new_engine(model, None, additional_config=OFF, **arguments),
        new_engine(model, SPEC, **arguments),
    ]


@pytest.fixture(scope="module")
def text(engines: list[Any]) -> str:
    """What the requests say where nothing is asked for; the drafts of the others come from it."""
    free = [run(llm, [Request(PROMPT, sampling({}))])[0]["samples"][0]["text"] for llm in engines]
    assert free[0] == free[1]
    return free[0]


@pytest.fixture(scope="module")
def expected(engines: list[Any], text: str) -> dict[str, Any]:
    """What every request of the table gets without drafts, by the test's name."""
    return dict(zip(NAMES, run(engines[0], [asked(*case.values, text) for case in SERVED]), strict=True))


def asked(option: Option, example: dict[str, Any], text: str) -> Request:
    """What an example stands for; its stop strings are parts of the text where it has braces."""
    if option in SAMPLING:
        return Request(PROMPT, sampling(example, text))
    others = {key: value for key, value in example.items() if key != "prompt"}
    return Request({"prompt": PROMPT} | example.get("prompt", {}), sampling({}), others)


def sampling(example: dict[str, Any], text: str = "") -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, StructuredOutputsParams

    made = dict(example)
    for name, make in {
        "structured_outputs": lambda value: StructuredOutputsParams(**value),
        "repetition_detection": lambda value: RepetitionDetectionParams(**value),
        "output_kind": RequestOutputKind,
        "stop": lambda value: [each.format(text[22:25], text[26:28]) for each in value],
    }.items():
        if name in made:
            made[name] = make(made[name])
    return SamplingParams(**SETTINGS | {"extra_args": {KEY: "one"}} | made)


def run(llm: Any, requests: Sequence[Request]) -> list[dict[str, Any]]:
    """What each request gets, its streamed parts put together."""
    engine = llm.llm_engine
    parts: dict[str, list[Any]] = {f"request {next(numbers)}": [] for _ in requests}
    for name, one in zip(parts, requests, strict=True):
        engine.add_request(name, one.prompt, one.params, **one.others)
    while engine.has_unfinished_requests():
        for output in engine.step():
            parts[output.request_id].append(output)
    return [joined(*each) for each in zip(parts.values(), requests, strict=True)]


def joined(parts: list[Any], request: Request) -> dict[str, Any]:
    samples = []
    for index in range(request.params.n):
        own = [sample for part in parts for sample in part.outputs if sample.index == index]
        if request.params.output_kind.name != "DELTA":
            own = own[-1:]
        samples.append({
            "token_ids": [token for sample in own for token in sample.token_ids],
            "text": "".join(sample.text for sample in own),
            "logprobs": [row for sample in own for row in values(sample.logprobs)],
            "cumulative": own[-1].cumulative_logprob,
            "end": (own[-1].finish_reason, own[-1].stop_reason),
        })  # fmt: skip
    return {"samples": samples, "prompt": values(parts[0].prompt_logprobs)}


def values(logprobs: Any) -> list[dict[int, float]]:
    """Without those of forbidden tokens: which of them fills a place is anybody's choice."""
    return [
        {token: one.logprob for token, one in (row or {}).items() if one.logprob > -np.inf}
        for row in logprobs or ()
    ]


def assert_same(one: Any, other: Any, where: str) -> None:
    """Equal, but for the last digits of log-probabilities."""
    if isinstance(one, float):
        np.testing.assert_allclose(one, other, atol=2e-4, err_msg=where)
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}, {key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), (where, one, other)
        for i, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{where}, {i}")
    else:
        assert one == other, where


def num_accepted(llm: Any) -> int:
    return proposer_of(llm).take_counters().num_accepted_tokens


def test_every_field_has_a_verdict() -> None:
    """A field that a new vLLM brings fails here until somebody decides."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    for found, table in ((SamplingParams, SAMPLING), (EngineCoreRequest, REQUEST)):
        known = [option.name for option in table if version() in option.versions]
        assert sorted(found.__struct_fields__) == sorted(known)


@pytest.mark.parametrize(("option", "example"), SERVED)
def test_alone(
    engines: list[Any], text: str, expected: dict[str, Any], option: Option, example: dict[str, Any],
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """The first time drafts come from what was said where nothing is asked for, also beyond the end."""
    name, one = request.node.callspec.id, asked(option, example, text)
    num_accepted(engines[1])
    for _ in range(3):  # the second time drafts come from what the first gave
        [found] = run(engines[1], [one])
        assert_same(found, expected[name], name)
        if one.params.max_tokens == 1 or num_accepted(engines[1]):
            return
    pytest.fail("no draft was accepted")


def test_all_together(engines: list[Any], text: str, expected: dict[str, Any]) -> None:
    num_accepted(engines[1])
    together = run(engines[1], [asked(*case.values, text) for case in SERVED])
    for name, found in zip(NAMES, together, strict=True):
        assert_same(found, expected[name], name)
    assert num_accepted(engines[1]) > 10 * len(SERVED)


def test_an_option_does_what_it_is_for(text: str, expected: dict[str, Any]) -> None:
    """An example that changes nothing would prove nothing."""
    idle = {case.values[0].name for case in SERVED if expected[case.id] == expected["ignore_eos-0"]}
    assert idle - {case.values[0].name for case in cases(NO_EFFECT)} == IDLE & {
        case.values[0].name for case in SERVED
    }


@pytest.mark.parametrize(("option", "example"), cases(REFUSED))
def test_refused(engines: list[Any], text: str, option: Option, example: dict[str, Any]) -> None:
    """In one line, while another request runs, which goes on."""
    drafting = engines[1].llm_engine
    drafting.add_request("other", PROMPT, sampling({}))
    with pytest.raises(Exception, match=option.error) as error:
        run(engines[1], [asked(option, example, text)])
    assert "\n" not in str(error.value)
    outputs = [output for _ in iter(drafting.has_unfinished_requests, False) for output in drafting.step()]
    assert outputs[-1].outputs[0].text == text


NUM_MIXED, NUM_ALONE = 70, 6  # of each seed
CHARACTERS = [chr(i) for i in range(33, 123)]  # no braces, which stand for parts of a text in stop strings
MIXED = {case.values[0].name: case.values[0].examples for case in SERVED if case.values[0] in SAMPLING}


def random_request(draw: random.Random) -> Request:
    """A request with up to six options, each an example of the table or with values of its own.

    There are few prompts and keys: texts begin alike, and drafts come from them.
    """
    examples: list[dict[str, Any]] = [
        {"stop": [*draw.choices(CHARACTERS, k=2), "".join(draw.choices(CHARACTERS, k=2))]},
        {"stop_token_ids": draw.sample(range(VOCAB_SIZE), 6)},
        {"min_tokens": draw.randint(1, 12)},
        {"frequency_penalty": -0.2},
        {"top_k": draw.randint(1, 20), "top_p": draw.uniform(0.3, 1.0)},
        {"bad_words": draw.choices(CHARACTERS, k=4)},
        {"allowed_token_ids": draw.sample(range(3, VOCAB_SIZE), 100)},
        {"structured_outputs": {"regex": draw.choice(["[a-z]+", "([0-9]{2}-){4,9}", "(ab|cd)+e"])}},
        {"extra_args": {KEY: "grouped", GROUP_KEY: draw.choice(["a", "b"])}},
        {"seed": draw.randrange(4), "extra_args": None},
    ]
    examples += map(draw.choice, MIXED.values())
    asked: dict[str, Any] = {
        "extra_args": {KEY: ["mixed", draw.randrange(4)]}, "temperature": draw.choice([0.0, 0.7, 1.0]),
        "max_tokens": draw.randint(1, 40), "ignore_eos": draw.random() < 0.8,
    }  # fmt: skip
    for example in draw.sample(examples, draw.randint(0, 6)):
        asked |= example
    if "structured_outputs" in asked:  # together they may allow nothing
        for name in ("allowed_token_ids", "bad_words", "thinking_token_budget"):
            asked.pop(name, None)
        asked["ignore_eos"] = False
    if "n" in asked:  # vLLM refuses several greedy samples
        asked["temperature"] = asked["temperature"] or 1.0
    if not asked.get("detokenize", True):
        asked.pop("stop", None)
    asked["min_tokens"] = min(asked.get("min_tokens", 0), asked["max_tokens"])
    text = "".join(draw.choices(CHARACTERS, k=28))
    prompt = draw.choice([PROMPT, "123123", "hello"])
    return Request(prompt, sampling(asked, text), {"priority": draw.randrange(3)})


@pytest.fixture(scope="module")
def mixing_engines(chat_model: str) -> Iterator[list[Any]]:
    """Prompts come in chunks."""
    made = both_engines(chat_model, scheduling_policy="priority", max_num_batched_tokens=24)
    yield made
    close(made)


@pytest.mark.parametrize("seed", [31, 32, 33])
def test_random_mixtures(mixing_engines: list[Any], seed: int) -> None:
    """Requests of all kinds beside each other, and then some alone."""
    draw = random.Random(seed)
    requests = [random_request(draw) for _ in range(NUM_MIXED)]
    plain, drafted = (run(llm, requests) for llm in mixing_engines)
    counters = proposer_of(mixing_engines[1]).take_counters()
    assert counters.num_accepted_tokens > 100
    assert counters.num_failed_steps == counters.num_untracked_rows == 0
    drafted += [run(mixing_engines[1], [request])[0] for request in requests[:NUM_ALONE]]
    for i, found in enumerate(drafted):
        assert_same(found, plain[i % NUM_MIXED], f"{requests[i % NUM_MIXED]}")
