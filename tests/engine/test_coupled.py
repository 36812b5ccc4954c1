"""`verify=coupled`: the same tokens with drafts and without, whatever happens to a request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollout_spec.certify.numerics import p_values
from tests.engine.conftest import VOCAB_SIZE, proposer_of, token_ids

KEY = "rollout_spec_key"  # what a user writes; importing it would import vllm too early
OFF = {"additional_config": {"rollout_spec": {"method": "off", "verify": "coupled"}}}
BAD_WORDS = "bad_words_token_ids"
LENGTH = 60
PROMPTS = [[5, 6, 7, 8 + i] * 4 for i in range(5) for _ in range(3)][:13]


def test_any_key_is_a_key() -> None:
    from rollout_spec.vllm.keys import key_of_name

    assert key_of_name({1: 0, "a": 1}) == key_of_name({1: 0, "a": 1}) != key_of_name({1: 0, "a": 2})
    assert key_of_name({(1, 2): 0}) >= 0


def params(settings: dict[str, Any], i: int = 0, max_tokens: int = LENGTH) -> Any:
    from vllm import SamplingParams

    defaults = {
        "ignore_eos": True,
        "detokenize": False,
        "max_tokens": max_tokens,
        "extra_args": {KEY: [3, i]},
    }
    given = {name: value for name, value in settings.items() if name != BAD_WORDS}
    result = SamplingParams(**defaults | given)
    result._bad_words_token_ids = settings.get(BAD_WORDS)  # what a tokenizer makes of `bad_words`
    return result


def generate(llm: Any, sampling: list[Any], prompts: list[list[int]] = PROMPTS) -> list[Any]:
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(inputs, sampling, use_tqdm=False)


def assert_drafts_were_accepted_and_rejected(llm: Any) -> None:
    counters = proposer_of(llm).take_counters()
    assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens


# One for each row of a batch, so that all of them meet in every step.
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "repetition_penalty": 1.1, "presence_penalty": 0.2},
    {"temperature": 0.7, "frequency_penalty": 0.1},
    {"temperature": 1.0, "allowed_token_ids": list(range(3, VOCAB_SIZE, 2))},
    {"temperature": 1.0, "min_tokens": 40, "stop_token_ids": list(range(3, 60))},
    {"temperature": 0.8, BAD_WORDS: [[3 + i] for i in range(40)] + [[i, i] for i in range(50, 128)]},
    {"temperature": 0.9, "seed": 11, "extra_args": None},
    {"temperature": 0.9, "extra_args": None},
]


@pytest.mark.parametrize("logprobs_mode", ["raw_logprobs", "processed_logprobs"])
def test_every_kind_of_request_in_one_batch(make_engine: Any, logprobs_mode: str) -> None:
    lengths = [LENGTH // 2 if i % 3 == 1 else LENGTH for i in range(len(SETTINGS))]  # the batch gets smaller
    sampling = [
        params({"logprobs": 1} | setting, i, length)
        for i, (setting, length) in enumerate(zip(SETTINGS, lengths, strict=True))
    ]
    plain = generate(make_engine(**OFF, logprobs_mode=logprobs_mode), sampling)
    for options in ({"num_speculative_tokens": 8}, {"num_speculative_tokens": 3, "batch_threshold": 9}):
        llm = make_engine(options, logprobs_mode=logprobs_mode)
        drafted = generate(llm, sampling)
        for i, (one, other) in enumerate(zip(token_ids(plain), token_ids(drafted), strict=True)):
            assert one == other, SETTINGS[i]
            for words in SETTINGS[i].get(BAD_WORDS, ()):
                assert words not in [one[j : j + len(words)] for j in range(len(one))]
        assert_drafts_were_accepted_and_rejected(llm)
        for one, other in zip(plain, drafted, strict=True):
            pairs = zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True)
            for token, (left, right) in zip(one.outputs[0].token_ids, pairs, strict=True):
                np.testing.assert_allclose(left[token].logprob, right[token].logprob, atol=2e-4)


def test_a_stop_token_is_allowed_as_soon_as_min_tokens_is_reached(make_engine: Any) -> None:
    """With drafts vLLM would forbid it one draft longer; also where its own rejection sampling is used."""
    from vllm import SamplingParams

    lengths = []
    for spec in (None, {"verify": "standard"}, {"verify": "coupled"}):
        llm = make_engine(spec)
        greedy = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, detokenize=False)
        texts = token_ids(generate(llm, [greedy] * len(PROMPTS)))
        stopping = [
            SamplingParams(
                temperature=0, max_tokens=LENGTH, detokenize=False, min_tokens=30, stop_token_ids=text[30:32]
            )
            for text in texts
        ]
        lengths.append([len(tokens) for tokens in token_ids(generate(llm, stopping))])
    assert lengths[0] == lengths[1] == lengths[2]
    assert min(lengths[0]) == 31


@pytest.mark.parametrize(
    "arguments",
    [
        {
            "num_gpu_blocks_override": 12,
            "block_size": 32,
            "max_model_len": 96,
            "enable_prefix_caching": False,
        },
        {"max_num_batched_tokens": 24, "enable_chunked_prefill": True},
        {"max_num_seqs": 5},
    ],
    ids=["preemption", "chunked prefill", "waiting"],
)
def test_scheduling_does_not_matter(make_engine: Any, arguments: dict[str, Any]) -> None:
    """Keyed, seeded and unnamed requests get the tokens that an engine with room for all of them gives."""
    names: list[dict[str, Any]] = [{}, {"seed": 4, "extra_args": None}, {"extra_args": None}]
    sampling = [params({"temperature": 1.0, **names[i % 3]}, i) for i in range(len(PROMPTS))]
    expected = token_ids(generate(make_engine(**OFF), sampling))
    llm = make_engine({}, **arguments)
    assert token_ids(generate(llm, sampling)) == expected
    assert_drafts_were_accepted_and_rejected(llm)


def test_plain_engine_with_asynchronous_scheduling(make_engine: Any) -> None:
    sampling = [params({"temperature": 1.0}, i) for i in range(len(PROMPTS))]
    runs = [
        token_ids(generate(make_engine(**OFF, async_scheduling=value), sampling)) for value in (False, True)
    ]
    assert runs[0] == runs[1]


def test_a_key_names_its_tokens(make_engine: Any) -> None:
    """Neither the place in the batch nor the engine's seed matters; siblings with one seed differ."""
    sampling = [params({"temperature": 1.0, "seed": 1}, i) for i in range(6)]
    prompts = PROMPTS[:1] * 6
    first = token_ids(generate(make_engine({}, seed=0), sampling, prompts))
    assert len({tuple(tokens) for tokens in first}) == 6
    again = token_ids(
        generate(make_engine({}, seed=5), sampling[::-1] + sampling[:1], [*prompts, prompts[0]])
    )
    assert again == [*first[::-1], first[0]]


def test_the_samples_of_one_request_differ(make_engine: Any) -> None:
    """With a key and `n` sample i is that of a request with the key [key, i], drafted or not."""
    four = params({"temperature": 1.0, "n": 4})
    ones = [params({"temperature": 1.0, "extra_args": {KEY: [four.extra_args[KEY], i]}}) for i in range(4)]
    drafting = make_engine({})
    samples = []
    for llm in (make_engine(**OFF), drafting):
        [together, *alone] = generate(llm, [four, *ones], PROMPTS[:1] * 5)
        samples += [[list(output.token_ids) for output in together.outputs], token_ids(alone)]
    assert_drafts_were_accepted_and_rejected(drafting)
    assert len({tuple(tokens) for tokens in samples[0]}) == 4
    assert all(tokens == samples[0] for tokens in samples)


def test_the_distribution_is_plain_vllms(make_engine: Any) -> None:
    """Against vLLM's own sampler, by the test that finds the upstream bug in test_sampling."""
    from tests.engine import test_sampling

    settings = {"temperature": 0.8, "top_k": 12}
    plain = test_sampling.sample(make_engine(max_num_seqs=64), 1, **settings)
    drafting = make_engine({"num_speculative_tokens": 3}, max_num_seqs=64)
    values = p_values(plain, test_sampling.sample(drafting, 2, **settings))
    assert_drafts_were_accepted_and_rejected(drafting)
    assert min(values) > test_sampling.FALSE_ALARM_RATE / len(values), values


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"additional_config": {"rollout_spec": {"verify": "exact"}}}, r"rollout\.spec\.verify='exact'"),
        ({"additional_config": {"rollout_spec": {}}}, r"rollout\.spec\.method=sam without"),
        (
            OFF | {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "goes with our drafter",
        ),
    ],
)
def test_what_cannot_be_coupled_is_refused(make_engine: Any, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine(**arguments)


@pytest.mark.parametrize(
    ("where", "patch"),
    [
        ("sampler.Sampler.forward", "vllm-keyed-sampler"),
        ("ops.topk_topp_sampler.TopKTopPSampler.forward_native", "vllm-keyed-sampler"),
        ("rejection_sampler.RejectionSampler.forward", "vllm-min-tokens-bonus"),
        ("rejection_sampler.RejectionSampler._get_logprobs_tensors", "vllm-kept-logprobs"),
        ("rejection_sampler.rejection_sample", "vllm-coupled-verification"),
    ],
)
def test_doctor_fails_where_an_engine_patch_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str, patch: str
) -> None:
    from rollout_spec.certify import diagnosis
    from rollout_spec.cli import main

    monkeypatch.setattr(diagnosis, "PROBES", [("engine patches", diagnosis._engine_patches)])
    assert main(["doctor"]) == 0
    monkeypatch.setattr(f"vllm.v1.sample.{where}", lambda self, other: None)
    capsys.readouterr()
    assert main(["doctor"]) == 1
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(
        f"fail  engine patches  PatchError: patch '{patch}' does not fit the installed packages"
    )


def test_an_engine_whose_sampler_takes_other_arguments_does_not_start(make_engine: Any) -> None:
    """A platform's own class in the place of vLLM's, as vllm-ascend has them."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    from rollout_spec.patches import PatchError
    from rollout_spec.vllm.mrv1.sampler import RowSampling

    class Another(RejectionSampler):
        def forward(self, metadata, draft_probs, logits, bonus_token_ids, sampling_metadata):  # type: ignore
            raise AssertionError("must not be called")

    runner = proposer_of(make_engine({}))._runner
    runner.rejection_sampler = Another(runner.sampler)
    message = "'vllm-min-tokens-bonus' does not fit .*: Another.forward takes self, metadata, "
    with pytest.raises(PatchError, match=message):
        RowSampling(runner, is_coupled=True).install()
