"""One table of requests (docs/request_options.py), one way to serve them, one comparison, for all engines."""

import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from docs.request_options import NO_EFFECT, REQUEST, SAME, SAMPLING, THINK, VERSIONS
from rollout_spec.vllm.keys import NAME_KEY
from rollout_spec.vllm.versions import untested, version
from tests.engine.conftest import proposer_of, token_ids

SETTINGS: dict[str, Any] = {"temperature": 0.7, "max_tokens": 30, "ignore_eos": True}
REASONING = dict(zip(("reasoning_start_str", "reasoning_end_str"), THINK, strict=True))
VLLM = VERSIONS[-1] if untested() else version()  # whose options the table has
PROMPTS = [[5, 6, 7, 8 + i] * 4 for i in range(8)]
numbers = itertools.count()


class Request(NamedTuple):
    """The arguments of `LLMEngine.add_request`."""

    prompt: Any
    params: Any
    others: Mapping[str, Any] = MappingProxyType({})


def examples(*verdicts):
    """Of the options with these verdicts that the installed vLLM has, by a name for each."""
    return {
        f"{option.name}-{i}": (option, example)
        for option in (*SAMPLING, *REQUEST)
        if VLLM in option.versions and option.verdict in verdicts
        for i, example in enumerate(option.examples)
    }


SERVED = examples(SAME, NO_EFFECT)
FREE = "ignore_eos-0"  # what nothing is asked of
# Their examples give what is given where nothing is asked for.
IDLE = {
    "skip_special_tokens", "spaces_between_special_tokens", "output_kind", "stream_interval",
    "skip_reading_prefix_cache", "cache_salt", "ignore_eos",
}  # fmt: skip


def example(name, prompt, text):
    option, asked = SERVED[name] if name in SERVED else examples("refused")[name]
    if option in SAMPLING:
        return Request(prompt, sampling(asked, text))
    others = {key: value for key, value in asked.items() if key != "prompt"}
    return Request({"prompt": prompt} | asked.get("prompt", {}), sampling({}), others)


def assert_none_is_idle(found):
    """An example that changes nothing of what a request gets would prove nothing."""
    options = {name: SERVED[name][0] for name in found if name in SERVED}
    same = {option.name for name, option in options.items() if found[name] == found[FREE]}
    without_effect = {option.name for option in options.values() if option.verdict == NO_EFFECT}
    assert same - without_effect == IDLE & {option.name for option in options.values()}, same - without_effect


def sampling(asked=MappingProxyType({}), text="", key="one"):
    """The parameters of a request with a name, unless `asked` has other `extra_args`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, StructuredOutputsParams

    made = SETTINGS | {"extra_args": {NAME_KEY: key}} | asked
    for name, make in {
        "structured_outputs": lambda value: StructuredOutputsParams(**value),
        "repetition_detection": lambda value: RepetitionDetectionParams(**value),
        "output_kind": RequestOutputKind,
        "stop": lambda value: [each.format(text[22:25], text[26:28]) if text else each for each in value],
    }.items():
        if name in made:
            made[name] = make(made[name])
    return SamplingParams(**made)


def greedy(max_tokens=60, **settings):
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **settings)


def generate(llm, prompts=PROMPTS, params=None):
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return token_ids(llm.generate(inputs, params or greedy(), use_tqdm=False))


def serve(llm, requests):
    """What each request gets, its streamed parts put together: its first sample, and under `others` the rest.

    Engines may have no tokenizer: where a prompt is a list of tokens, nothing is made a text.
    """
    engine = llm.llm_engine
    parts: dict[str, list[Any]] = {f"request {next(numbers)}": [] for _ in requests}
    for name, (prompt, params, others) in zip(parts, requests, strict=True):
        if isinstance(prompt, list):
            prompt, params.detokenize = {"prompt_token_ids": prompt}, False
        engine.add_request(name, prompt, params, **others)
    while engine.has_unfinished_requests():
        for output in engine.step():
            parts[output.request_id].append(output)
    return [joined(*each) for each in zip(parts.values(), requests, strict=True)]


def joined(parts, request):
    samples = []
    for index in range(request.params.n):
        own = [sample for part in parts for sample in part.outputs if sample.index == index]
        if request.params.output_kind.name != "DELTA":
            own = own[-1:]
        rows = [row for sample in own for row in possible(sample.logprobs)]
        samples.append({
            "tokens": [token for sample in own for token in sample.token_ids],
            "text": "".join(sample.text for sample in own),
            "logprobs": [{token: one.logprob for token, one in row.items()} for row in rows],
            "pieces": [{token: one.decoded_token for token, one in row.items()} for row in rows],
            "cumulative": own[-1].cumulative_logprob,
            "end": [own[-1].finish_reason, own[-1].stop_reason],
            "experts": experts_of(own[-1]),
        })  # fmt: skip
    of_prompt = possible(parts[0].prompt_logprobs)
    prompt = [{token: one.logprob for token, one in row.items()} for row in of_prompt]
    return samples[0] | {"others": samples[1:], "prompt": prompt}


def experts_of(sample):
    """Those of each token and layer, where the engine returns them."""
    found = getattr(sample, "routed_experts", None)
    return None if found is None else np.asarray(found).tolist()


def possible(logprobs):
    """Without forbidden tokens: which of them fills a place is anybody's choice.

    Beside a token that a reasoning budget forces, vLLM gives the others -1e9 over the temperature, or -inf
    where another row of the step has a top_p.
    """
    rows = [sorted((row or {}).items()) for row in logprobs or ()]
    return [{token: one for token, one in row if one.logprob > -1e8} for row in rows]


def assert_same(one, other, where=""):
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


def assert_each_same(found, expected):
    """What an engine gave is what another one gave, which may have served more."""
    for name, one in found.items():
        assert_same(one, expected[name], name)


def num_accepted(llm):
    """How many draft tokens were accepted since the last call; no step has failed."""
    counters = proposer_of(llm).take_counters()
    assert counters.num_failed_steps == counters.num_untracked_rows == 0
    return counters.num_accepted_tokens
