"""Requests with images get the same with drafts as without, on the engine and on verl's server."""

from __future__ import annotations

import asyncio
import importlib.util
from typing import Any

import pytest

from rollout_spec.vllm.keys import GROUP_KEY, GROUP_TOKENS_KEY, KEY
from tests.engine.conftest import close, new_engine, proposer_of, token_ids
from tests.tiny_vl import TOKENS, make_image, make_processor, make_tiny_vl

OFF = {"rollout_spec": {"method": "off", "verify": "coupled"}}
IMAGE = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_vl(tmp_path_factory.mktemp("models"))


def tokens(*parts: str | int) -> list[int]:
    """The tokens of a text, with so many images where a number is."""
    found: list[str] = []
    for part in parts:
        found += IMAGE * part if isinstance(part, int) else list(part)
    return [TOKENS[each] for each in found]


def requests() -> list[tuple[dict[str, Any], Any]]:
    """Prompts and parameters: one image and several, others behind the same tokens, and none."""
    from vllm import SamplingParams

    prompts = [
        (tokens("Look. ", 1, "What is it?"), [0]),
        (tokens("Look. ", 1, "What is it?"), [1]),
        (tokens(2, "Which one?"), [0, 1]),
        (tokens("First ", 1, " and then ", 2), [2, 0, 2]),
        (tokens("No image at all."), []),
    ]
    return [
        (
            {"prompt_token_ids": prompt, "multi_modal_data": {"image": [make_image(i) for i in images]}},
            SamplingParams(
                temperature=0.8, max_tokens=40, ignore_eos=True, detokenize=False, logprobs=1,
                extra_args={KEY: number},
            ),
        )
        for number, (prompt, images) in enumerate(prompts)
    ]  # fmt: skip


def test_images(model: str) -> None:
    results = []
    for spec, config in ((None, {"additional_config": OFF}), ({"history": 8}, {})):
        llm = new_engine(model, spec, skip_tokenizer_init=False, limit_mm_per_prompt={"image": 3}, **config)
        for _ in range(2):
            prompts, params = map(list, zip(*requests(), strict=True))
            results.append(llm.generate(prompts, params, use_tqdm=False))
        num_accepted = proposer_of(llm).take_counters().num_accepted_tokens if spec is not None else 0
        close([llm])
    assert num_accepted > 100
    first, *others = results
    assert len({tuple(each) for each in token_ids(first)}) == len(first)
    for other in others:
        assert token_ids(other) == token_ids(first)
        for one, two in zip(first, other, strict=True):
            assert two.outputs[0].cumulative_logprob == pytest.approx(
                one.outputs[0].cumulative_logprob, abs=1e-3
            )


@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="other vLLMs are tested without verl")
def test_turns_on_verls_server(model: str, make_server: Any) -> None:
    """Siblings of three turns, with images in the first, the second and the third turn."""
    from verl.workers.rollout.utils import get_vision_placeholder_token_ids

    processor = make_processor()
    banned = get_vision_placeholder_token_ids(processor)
    assert len(banned) == 2
    results = []
    for spec, more in ((None, {"additional_config": OFF}), ({}, {})):
        server = make_server(spec, model=model, limit_mm_per_prompt={"image": 4}, **more)
        server.model_config.processor = processor
        # As verl does before it serves.
        server.engine.llm.collective_rpc("monkey_patch_model", args=(len(TOKENS), banned))
        results += [asyncio.run(trajectory(server, sibling)) for sibling in (0, 1, 0)]
        counters = asyncio.run(server.engine.collective_rpc("rollout_spec_call", args=("take_counters",)))
    assert counters[0]["num_accepted_tokens"] > 60
    assert results[:3] == results[3:]
    assert results[0] == results[2] != results[1]


async def trajectory(server: Any, sibling: int) -> list[list[int]]:
    """The responses of three turns; as verl's agent loops, each prompt has an image's four tokens."""
    prompt, images, responses = list[int](), list[int](), list[list[int]]()
    for turn, more in enumerate([[0], [1, 2], [0]]):
        question = tokens("Turn ", len(more), "?")
        prompt += [token for each in question for token in [each] * (4 if each == TOKENS[IMAGE[1]] else 1)]
        images += more
        extra_args = {
            KEY: [sibling, turn],
            GROUP_KEY: "g",
            GROUP_TOKENS_KEY: len(tokens("Turn ", 1, "?")) + 3,
        }
        params = {"temperature": 0.8, "max_tokens": 30, "ignore_eos": True, "extra_args": extra_args}
        output = await server.generate(
            list(prompt), params, f"{sibling}-{turn}", image_data=[make_image(each) for each in images]
        )
        responses.append(list(output.token_ids))
        prompt += responses[-1]
    return responses
