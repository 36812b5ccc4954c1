"""Drafts change nothing of what requests get, however an engine schedules them and whatever they bring."""

import importlib
import json
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from rollout_spec import patches
from rollout_spec.vllm import fixes, upstream
from rollout_spec.vllm.both_runners import top_k_top_p
from rollout_spec.vllm.both_runners.logit_rows import most_logit_rows
from tests.engine.conftest import KEYED, close, core_of, new_engine, proposer_of, runner_of
from tests.engine.serving import Request, assert_same, num_accepted, sampling, serve
from tests.native.checks import check_index
from tests.tiny_vl import make_image, make_tiny_vl, tokens

LENGTHS = (60, 30, 60)  # so that the batch gets smaller
PROMPTS = [[5, 6, 7, 8 + i] * 4 for i in range(5) for _ in range(3)][:13]
UNNAMED: dict[str, Any] = {"extra_args": None}
NAMES: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"seed": 4} | UNNAMED, UNNAMED]
FEW_BLOCKS = {
    "num_gpu_blocks_override": 12, "block_size": 32, "max_model_len": 96, "enable_prefix_caching": False,
}  # fmt: skip


def requests(**others):
    """Named, greedy, seeded and unnamed ones, siblings beside others; `others` by number."""
    settings = {"temperature": 1.0, "logprobs": 1}
    asked = [settings | {"max_tokens": LENGTHS[i % 3]} | NAMES[i % 4] for i in range(len(PROMPTS))]
    return [
        Request(prompt, sampling(asked[i], key=[3, i]), {name: value(i) for name, value in others.items()})
        for i, prompt in enumerate(PROMPTS)
    ]


def test_what_is_mended_was_read_in_this_vllm(monkeypatch):
    """A function that a fix stands on is one of those beside which the fix was written."""
    unread = list[str]()
    monkeypatch.setattr(patches.logger, "warning", lambda *args: unread.append(args[2]))
    kinds = (upstream.ALL, upstream.WITH_DRAFTS, upstream.RECURRENT_MRV1, upstream.RECURRENT_MRV2)
    for fix, module in fixes.needed_by(*kinds):
        fixes.apply(fix, importlib.import_module(module))
    top_k_top_p.cut_rows_alike()
    assert unread == []


@pytest.fixture(scope="module")
def expected(tiny_model):
    llm = new_engine(tiny_model, **KEYED)
    found = serve(llm, requests())
    close([llm])
    return found


# Options of the drafter, arguments of vLLM, and what requests bring besides.
SCENARIOS: dict[str, tuple[dict[str, Any] | None, dict[str, Any], dict[str, Any]]] = {
    "one draft token": ({"num_speculative_tokens": 1}, {}, {}),
    "three draft tokens": ({"num_speculative_tokens": 3}, {}, {}),
    "a gate that opens and closes": ({"batch_threshold": 9, "history": 8}, {}, {}),
    "preemption": ({}, FEW_BLOCKS, {}),
    "priority preemption": ({}, FEW_BLOCKS | {"scheduling_policy": "priority"}, {"priority": lambda i: -i}),
    "prompts in chunks": ({}, {"max_num_batched_tokens": 24, "enable_chunked_prefill": True}, {}),
    "waiting": ({}, {"max_num_seqs": 5}, {}),
    "the model's length": ({}, {"max_model_len": 48}, {}),
    "no drafts, scheduled ahead": (None, KEYED | {"async_scheduling": True}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_scheduling_does_not_matter(name, expected, make_engine):
    spec, arguments, others = SCENARIOS[name]
    llm = make_engine(spec, fresh=True, **arguments)
    scheduler, preempted = core_of(llm).scheduler, []
    preempt = scheduler._preempt_request
    scheduler._preempt_request = lambda *args, **kwargs: preempted.append(args) or preempt(*args, **kwargs)
    for i, (one, whole) in enumerate(zip(serve(llm, requests(**others)), expected, strict=True)):
        if others and NAMES[i % 4].keys() == {"extra_args"}:
            continue  # unnamed, it is numbered where it comes
        most = min(LENGTHS[i % 3], arguments.get("max_model_len", 512) - len(PROMPTS[i]))
        assert one["tokens"] == whole["tokens"][:most], i
        assert one["end"] == ["length", None]
        assert_same(one["logprobs"], whole["logprobs"][:most], f"{i}")
    assert bool(preempted) == ("preemption" in name)
    if spec is not None:
        check_index(proposer_of(llm).drafter.index)
        counters = proposer_of(llm).take_counters()
        assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
        assert counters.num_failed_steps == 0
        assert (counters.num_steps_on < counters.num_steps) == ("batch_threshold" in spec)


def same_with_drafts(model, asked, num_times=2, **arguments):
    """What the requests get; the second time drafts come from what the first gave."""
    found, accepted = [], 0
    for spec, off in ((None, KEYED), ({"history": 8}, {})):
        llm = new_engine(model, spec, model=model, **off, **arguments)
        found += [serve(llm, asked) for _ in range(num_times)]
        accepted = num_accepted(llm) if spec is not None else 0
        close([llm])
    for results in found[1:]:
        assert_same(results, found[0])
    assert accepted > 20 * len(asked) * (num_times - 1)
    return found[0]


def named(prompt, i, **others):
    return Request(prompt, sampling({"max_tokens": 40, "logprobs": 1}, key=i), others)


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_logits_in_place_of_log_probabilities(mode, chat_model):
    """In a verification and in a plain step; with logarithms all tests of requests have them."""
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 0}, {"top_k": 5}, {"top_p": 0.8}, {"repetition_penalty": 1.3, "temperature": 0},
        {"allowed_token_ids": list(range(3, 128, 2))}, {"min_tokens": 30, "stop_token_ids": [*range(3, 60)]},
    ]  # fmt: skip
    asked = [sampling({"max_tokens": 40, "logprobs": 2} | kind, key=i) for i, kind in enumerate(kinds)]
    found = same_with_drafts(chat_model, [Request(PROMPTS[0], each) for each in asked], logprobs_mode=mode)
    assert max(max(row.values()) for row in found[0]["logprobs"]) > 0


def make_adapter(folder, seed):
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(2):
        for name, num_out in (("q_proj", 128), ("v_proj", 64)):
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{path}.lora_A.weight"] = torch.randn(8, 128, generator=generator)
            weights[f"{path}.lora_B.weight"] = torch.randn(num_out, 8, generator=generator) / 20
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def test_two_adapters_and_none_in_one_batch(chat_model, tmp_path_factory):
    folders = {i: tmp_path_factory.mktemp("adapter") for i in (1, 2)}
    adapters = [LoRARequest(f"adapter {i}", i, make_adapter(folder, i)) for i, folder in folders.items()]
    asked = [named(PROMPTS[0], i, lora_request=each) for each in (None, *adapters) for i in range(3)]
    found = same_with_drafts(chat_model, asked, enable_lora=True, max_loras=2, max_lora_rank=8)
    # On CPUs vLLM gives a request without an adapter the last one's, so these are two policies or three.
    assert len({tuple(one["tokens"]) for one in found}) >= 6


def test_prompts_of_embeddings(chat_model):
    generator = torch.Generator().manual_seed(0)
    prompts: list[Any] = [{"prompt_embeds": torch.randn(12, 128, generator=generator) / 50} for _ in range(2)]
    prompts = [*prompts, *prompts, PROMPTS[0], PROMPTS[0]]
    asked = [named(prompt, i % 3) for i, prompt in enumerate(prompts)]
    for request in asked[::2]:  # without a fix it would be of tokens that others have left in their rows
        request.params.repetition_penalty = 1.5
    same_with_drafts(chat_model, [*asked, *asked[::-1]], enable_prompt_embeds=True, max_num_seqs=4)


def test_images(tmp_path):
    asked = []
    for text, images in (
        (("Look. ", 1, "What is it?"), [0]),
        (("Look. ", 1, "What is it?"), [1]),
        ((2, "Which one?"), [0, 1]),
        (("First ", 1, " and then ", 2), [2, 0, 2]),
        (("No image at all.",), []),
    ):
        seen = {"image": [*map(make_image, images)]}
        asked.append(named({"prompt_token_ids": tokens(*text), "multi_modal_data": seen}, len(asked)))
    found = same_with_drafts(make_tiny_vl(tmp_path), asked, limit_mm_per_prompt={"image": 3})
    assert len({tuple(one["tokens"]) for one in found}) == len(found)


def test_beside_adapters_no_step_has_more_rows_of_logits_than_vllm_profiles(make_engine):
    """One draft token for each of 16 requests: its profile has adapters for no more."""
    runner = runner_of(make_engine({"max_draft_tokens": 100}, fresh=True, enable_lora=True))
    assert most_logit_rows(runner.vllm_config, runner.drafter.config) == 32


def test_the_profile_of_mrv1_has_as_many_rows_of_logits_as_the_longest_step(make_engine):
    """16 requests, and 100 draft tokens. Its warm-up is the same, beside a KV cache that has the rest."""
    runner = runner_of(make_engine({"max_draft_tokens": 100}, fresh=True))
    nums, verify = list[int](), runner.rejection_sampler.forward
    runner.rejection_sampler.forward = lambda metadata, probs, logits, sampling: (
        nums.append(len(logits)), verify(metadata, probs, logits, sampling)
    )[1]  # fmt: skip
    with torch.inference_mode():
        runner._dummy_sampler_run(torch.zeros(16, 128))
    assert set(nums) == {116}  # vLLM 0.32 verifies twice
