"""What a request may ask of vLLM, and what comes of it together with drafts.

`docs/request-options.md` is written from this table. `tests/engine/test_requests.py` compares it with
the installed vLLM: a field that is not here fails, and every example is run.
"""

from __future__ import annotations

import dataclasses
from typing import Any

VERSIONS = ("0.23.0", "0.24.0", "0.29.0", "0.32.0")
FROM_29, FROM_32 = VERSIONS[2:], VERSIONS[3:]
SAME, REFUSED, NO_EFFECT = "same", "refused", "no effect"
_OWN = "set by vLLM, not by requests"
THINK = ("<", ">")  # what begins and ends reasoning in the engines of the examples


@dataclasses.dataclass(frozen=True)
class Option:
    """One field, and its verdict.

    Attributes:
        name: vLLM's.
        verdict: SAME as without drafts; REFUSED in one line, for that request alone; or with NO_EFFECT on
            what the request gets.
        note: what the page says besides.
        examples: what sets it: arguments of `SamplingParams`, or, of a field of vLLM's request, those of
            `LLMEngine.add_request`.
        versions: those that have it.
        error: a part of the one line that refuses it.
        test: the test of what takes more than an example, file::function in `tests/engine`.
    """

    name: str
    verdict: str
    note: str = ""
    _: dataclasses.KW_ONLY
    examples: tuple[dict[str, Any], ...] = ()
    versions: tuple[str, ...] = VERSIONS
    error: str = ""
    test: str = ""


def _same(name: str, *examples: dict[str, Any], **others: Any) -> Option:
    return Option(name, SAME, examples=examples, **others)


def _refused(name: str, error: str, note: str, example: dict[str, Any], **others: Any) -> Option:
    return Option(name, REFUSED, note, error=error, examples=(example,), **others)


def _of_vllm(name: str, versions: tuple[str, ...] = VERSIONS) -> Option:
    return Option(name, NO_EFFECT, _OWN, versions=versions)


_BY_VLLM = "by vLLM, together with any drafter"
_SPECULATIVE = "not yet supported with speculative decoding"
_NEEDS_V2 = "by vLLM: it needs MRV2"
_PARTS = "the parts of a stream add up to the same; one part may have several tokens"
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_ENDING = {"ignore_eos": False}

# The fields of SamplingParams.
SAMPLING = (
    _same("n", {"n": 3}),
    _same("temperature", {"temperature": 1.0}, {"temperature": 0.0}),
    _same("top_p", {"top_p": 0.8}),
    _same("top_k", {"top_k": 5}),
    _refused("min_p", _SPECULATIVE, _BY_VLLM, {"min_p": 0.1}),
    _same("seed", {"seed": 7, "extra_args": None}),
    _same("presence_penalty", {"presence_penalty": 0.5}),
    _same("frequency_penalty", {"frequency_penalty": 0.5}),
    _same("repetition_penalty", {"repetition_penalty": 1.2}),
    _refused("logit_bias", _SPECULATIVE, _BY_VLLM, {"logit_bias": {65: 2.0}}),
    _same("allowed_token_ids", {"allowed_token_ids": list(range(33, 120, 2))}),
    _same("bad_words", {"bad_words": [*"JKLMNOPQ", "ab", "abc"]}),
    _same("stop", {"stop": ["{1}", "{0}"]}, {"stop": ["{1}"], "min_tokens": 20}),
    _same("include_stop_str_in_output", {"include_stop_str_in_output": True, "stop": ["{0}"]}),
    _same("stop_token_ids", {"stop_token_ids": list(range(33, 37))}),
    _same("ignore_eos", {"ignore_eos": False}),
    _same("max_tokens", {"max_tokens": 21}, {"max_tokens": 1}),
    _same("min_tokens", {"min_tokens": 20, "stop_token_ids": list(range(33, 60))}),
    _same("logprobs", {"logprobs": 0}, {"logprobs": 3}, {"logprobs": -1}),
    _same("flat_logprobs", {"flat_logprobs": True, "logprobs": 2}),
    _refused("logprob_token_ids", "logprob_token_ids", "by us",
             {"logprob_token_ids": [65, 66]}),
    _same("prompt_logprobs", {"prompt_logprobs": 2}),
    _refused("prompt_logprob_token_ids", "V2 model runner", _NEEDS_V2,
             {"prompt_logprob_token_ids": [[65, 66]] * 11}, versions=FROM_32),
    _refused("prompt_logprob_start", "V2 model runner", _NEEDS_V2,
             {"prompt_logprob_start": 5, "prompt_logprob_token_ids": [[65, 66]] * 6}, versions=FROM_32),
    _same("detokenize", {"detokenize": False}),
    _same("skip_special_tokens", {"skip_special_tokens": False}),
    _same("spaces_between_special_tokens", {"spaces_between_special_tokens": False}),
    _same("output_kind", {"output_kind": 1}, {"output_kind": 2}, note=_PARTS),
    _same("stream_interval", {"stream_interval": 5, "output_kind": 1}, note=_PARTS, versions=FROM_29),
    _same(
        "structured_outputs",
        {"structured_outputs": {"regex": "[abc]{5,40}"}},
        {"structured_outputs": {"json": _SCHEMA}} | _ENDING,
        {"structured_outputs": {"choice": ["abcabcabd", "abcabcabe"]}} | _ENDING,
        {"structured_outputs": {"json_object": True}} | _ENDING,
        {"structured_outputs": {"grammar": 'root ::= "abc" root | "."'}} | _ENDING,
        note="before vLLM 0.32, we refuse grammars of the backend `outlines`",
        test="test_requests.py::test_a_grammar_of_outlines_is_refused_where_its_mask_would_open",
    ),
    _same("thinking_token_budget", {"thinking_token_budget": 12}),
    _same("repetition_detection", {"repetition_detection": {"max_pattern_size": 2, "min_count": 2}}),
    _same("extra_args", {"extra_args": {"rollout_spec_key": ["a", 1], "rollout_spec_group": "g"}},
          note="here a request gives its name and its group"),
    Option("watermarking", NO_EFFECT, "an engine with watermarks and drafts is refused",
           examples=({"watermarking": True},), versions=FROM_32),
    _refused("trace_decode_token_ids", "trace_decode_token_ids", _BY_VLLM,
             {"trace_decode_token_ids": [65, 66]}, versions=FROM_29),
    _same("routed_experts_prompt_start", versions=VERSIONS[:2],
          test="test_parallel.py::test_the_experts_that_are_returned_are_each_tokens_own",
          note="with `enable_return_routed_experts`: the experts of each token are those without drafts"),
    Option("routed_experts_prompt_start", NO_EFFECT,
           "not tested: CPUs (0.29) and MRV1 (0.32) return no experts",
           examples=({"routed_experts_prompt_start": 2},), versions=FROM_29),
    _same("skip_reading_prefix_cache", {"skip_reading_prefix_cache": True}),
    Option("skip_clone", NO_EFFECT, "how vLLM copies the options", examples=({"skip_clone": True},)),
    _of_vllm("output_text_buffer_length"),
    _of_vllm("_eos_token_id"),
    _of_vllm("_all_stop_token_ids"),
    _of_vllm("_bad_words_token_ids"),
    _of_vllm("_watermarking_skipped", FROM_32),
)  # fmt: skip

# The fields of EngineCoreRequest: what else a request brings.
REQUEST = (
    _same("prompt_token_ids", {"prompt": {"prompt_token_ids": [65, 66, 67] * 4}}),
    _same("mm_features", note="images; video and audio are not tested", test="test_engines.py::test_images"),
    _same("lora_request", note="on CPUs vLLM gives a row without an adapter the one of another row",
          test="test_engines.py::test_two_adapters_and_none_in_one_batch"),
    _same("prompt_embeds", test="test_engines.py::test_prompts_of_embeddings"),
    _same("prompt_is_token_ids", test="test_engines.py::test_prompts_of_embeddings"),
    _same("priority", note="with `scheduling_policy=priority`",
          test="test_engines.py::test_scheduling_does_not_matter"),
    _same("cache_salt", {"prompt": {"cache_salt": "a"}}),
    _same("reasoning_ended", note="where a grammar begins after the reasoning; a caller may set it",
          test="test_requests.py::test_a_grammar_begins_where_reasoning_ends"),
    _same("reasoning_parser_kwargs", note="as `reasoning_ended`",
          test="test_requests.py::test_a_grammar_begins_where_reasoning_ends"),
    Option("resumable", REFUSED, "by us", error="resumable",
           test="test_requests.py::test_streaming_input_is_refused"),
    Option("sampling_params", SAME, "the table above"),
    Option("pooling_params", NO_EFFECT, "a pooling request generates nothing"),
    Option("data_parallel_rank", NO_EFFECT, "which engine core; a named request gets the same from each"),
    Option("trace_headers", NO_EFFECT, "for tracing", examples=({"trace_headers": {}},)),
    Option("session_id", NO_EFFECT, "where the cache is kept", examples=({"session_id": "a"},),
           versions=FROM_29),
    Option("kv_hints", NO_EFFECT, "where the cache is kept", versions=FROM_32),
    Option("arrival_time", NO_EFFECT, "for metrics, and for the order of requests of one priority",
           examples=({"arrival_time": 1.0},)),
    Option("abort_immediately", NO_EFFECT, "the request generates nothing"),
    _of_vllm("request_id"),
    _of_vllm("external_req_id"),
    _of_vllm("client_index"),
    _of_vllm("current_wave"),
)  # fmt: skip


def page(options: tuple[Option, ...]) -> str:
    """These options in Markdown: those of which there is something to say, by verdict; then the others."""
    lines = ["| field | verdict | vLLM | |", "|---|---|---|---|"]
    order = (REFUSED, NO_EFFECT, SAME)
    for option in sorted(options, key=lambda each: order.index(each.verdict)):
        if option.note and option.note != _OWN:
            versions = "all" if option.versions == VERSIONS else ", ".join(option.versions)
            lines.append(f"| `{option.name}` | **{option.verdict}** | {versions} | {option.note} |")
    same = ", ".join(f"`{each.name}`" for each in options if each.verdict == SAME and not each.note)
    own = ", ".join(f"`{each.name}`" for each in options if each.note == _OWN)
    return (
        "\n".join([*lines, "", f"**Same** in all: {same}.", "", f"Set by vLLM, not by requests: {own}."])
        + "\n"
    )
