"""What a request brings besides its prompt and options: an adapter, a prompt of embeddings, a priority."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from tests.engine.conftest import close, new_engine, proposer_of
from tests.engine.test_requests import assert_same, result

KEY = "rollout_spec_key"
OFF = {"rollout_spec": {"method": "off", "verify": "coupled"}}
PROMPT = [5, 6, 7, 8] * 4
Requests = list[tuple[Any, dict[str, Any]]]


def make_adapter(folder: pathlib.Path, seed: int) -> str:
    """A LoRA adapter of the tiny model, as peft saves it."""
    import torch
    from safetensors.torch import save_file

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


def run(llm: Any, requests: Requests) -> list[dict[str, Any]]:
    """What each request gets: its prompt, and what `add_request` takes besides."""
    from vllm import SamplingParams

    engine, results = llm.llm_engine, dict[str, dict[str, Any]]()
    for i, (prompt, others) in enumerate(requests):
        params = SamplingParams(
            temperature=0.8, max_tokens=40, ignore_eos=True, logprobs=1, extra_args={KEY: i % 3}
        )
        engine.add_request(str(i), prompt, params, **others)
    while engine.has_unfinished_requests():
        results |= {output.request_id: result(output.outputs[0]) for output in engine.step()}
    return [results[str(i)] for i in range(len(requests))]


def same_with_drafts(model: str, requests: Requests, **arguments: Any) -> list[list[int]]:
    """The tokens that the requests get; the second time drafts come from what the first gave."""
    found, num_accepted = [], 0
    for spec, config in ((None, {"additional_config": OFF}), ({"history": 8}, {})):
        llm = new_engine(model, spec, model=model, **config, **arguments)
        found += [run(llm, requests) for _ in range(2)]
        if spec is not None:
            num_accepted = proposer_of(llm).take_counters().num_accepted_tokens
        close([llm])
    for results in found[1:]:
        for one, other in zip(results, found[0], strict=True):
            assert_same(one, other)
    assert num_accepted > 20 * len(requests)
    return [one["tokens"] for one in found[0]]


def test_two_adapters_and_none_in_one_batch(chat_model: str, tmp_path_factory: Any) -> None:
    from vllm.lora.request import LoRARequest

    adapters = [
        LoRARequest(f"adapter {i}", i, make_adapter(tmp_path_factory.mktemp("adapter"), i)) for i in (1, 2)
    ]
    requests: Requests = [
        ({"prompt_token_ids": PROMPT}, {"lora_request": adapter})
        for adapter in (None, *adapters)
        for _ in range(3)
    ]
    tokens = same_with_drafts(chat_model, requests, enable_lora=True, max_loras=2, max_lora_rank=8)
    # On CPUs vLLM gives a request without an adapter the last one's, so these are two policies or three.
    assert len({tuple(each) for each in tokens}) >= 6


def test_prompts_of_embeddings(chat_model: str) -> None:
    import torch

    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randn(12, 128, generator=generator) / 50 for _ in range(2)]
    requests: Requests = [({"prompt_embeds": prompts[i % 2]}, {}) for i in range(4)]
    requests += [({"prompt_token_ids": PROMPT}, {})] * 2
    same_with_drafts(chat_model, requests, enable_prompt_embeds=True)


def test_priorities_and_preemption(chat_model: str) -> None:
    requests: Requests = [({"prompt_token_ids": [*PROMPT, 9 + i]}, {"priority": -i}) for i in range(9)]
    same_with_drafts(
        chat_model, requests, scheduling_policy="priority", num_gpu_blocks_override=12, block_size=32,
        max_model_len=96, enable_prefix_caching=False,
    )  # fmt: skip
