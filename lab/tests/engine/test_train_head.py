"""The head that `studies/train_head.py` trains learns, and vLLM drafts with it what it drafts itself."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm

from rollout_spec.trace import Rollout
from rollout_spec.verification.coupled import keyed_sample
from rollout_spec_lab.studies.train_head import NUM_PASSES, Head, Text, acceptance, kept, read_texts, train
from tests.engine.conftest import make_tiny, token_ids

pytestmark = pytest.mark.skipif(
    not vllm.__version__.startswith("0.24.0"), reason="the script serves one vLLM"
)

PROMPTS = [[65 + i, 70, 75 + i] for i in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny("Llama", tmp_path_factory.mktemp("models"), num_hidden_layers=8)


def test_vllm_drafts_as_the_trained_head_does(
    folder: str, make_engine: Callable[..., Any], tmp_path: pathlib.Path
) -> None:
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams

    policy = AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    torch.manual_seed(0)
    responses = [
        policy.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, 3:].numpy()
        for prompt in PROMPTS
    ]
    lines = [Rollout("", None, np.array(p), [r]) for p, r in zip(PROMPTS, responses, strict=True)]
    texts = list(read_texts(policy, lines))
    head = Head(policy, texts, 96)
    before = acceptance(head, policy, texts, 0.0)[0, 0]
    losses = list(train(head, texts, [0.0] * 80, seed=0))
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    assert acceptance(head, policy, texts, 0.0)[0, 0] > max(0.5, before)
    head.save(tmp_path / "head")

    speculative = {"method": "eagle3", "model": str(tmp_path / "head"), "num_speculative_tokens": 3}
    llm = make_engine(model=folder, speculative_config=speculative, skip_tokenizer_init=True)
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    drafter, drafts = worker.model_runner.drafter, []
    propose = drafter.propose
    drafter.propose = lambda *args, **kwargs: drafts.append(propose(*args, **kwargs)) or drafts[-1]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    (response,) = token_ids(llm.generate({"prompt_token_ids": PROMPTS[0]}, params, use_tqdm=False))
    assert_drafts_are_the_heads(head, policy, PROMPTS[0], response, [each[0].tolist() for each in drafts])


def assert_drafts_are_the_heads(
    head: Head, policy: Any, prompt: list[int], response: list[int], drafts: list[list[int]]
) -> None:
    num_known, num_accepted = 1, 0  # of the response, where a draft begins
    while num_known < len(response):
        draft, rest = drafts.pop(0), response[num_known:]
        known = np.array(prompt + response[:num_known])
        (text,) = read_texts(policy, [Rollout("", None, known, [np.array(draft)])])
        states = head(text.tokens[None], text.aux[None])
        own = [int(head.draft_ids[head.lm_head(state[0, len(known) - 2]).argmax()]) for state in states]
        assert draft == own
        right = int(np.cumprod([a == b for a, b in zip(draft, rest, strict=False)]).sum())
        num_known, num_accepted = num_known + right + 1, num_accepted + right
    assert num_accepted > 6


def test_acceptance_is_of_drafts_that_were_right_so_far() -> None:
    """A head is the policy, in the second pass in every second row, in the third in every third."""
    generator = torch.Generator().manual_seed(0)
    last = 2 * torch.randn(18, 50, generator=generator)
    last[:, 0] = -99.0  # a token that the head does not have
    drawn = torch.randint(1, 50, (18,), generator=generator)

    class SometimesRight(SimpleNamespace):
        def __call__(self, *_: Any) -> Iterator[torch.Tensor]:
            for k in range(NUM_PASSES):
                is_right = torch.arange(len(last)) % (k + 1) == 0
                yield torch.where(is_right[:, None], 1, -99)[None] * last.roll(-k - 1, 0)

    head = SometimesRight(lm_head=lambda states: states[..., 1:], draft_ids=torch.arange(1, 50))
    policy = SimpleNamespace(lm_head=lambda states: states)
    for temperature, response in ((0.0, last.argmax(-1)), (0.7, drawn)):
        text = Text(response.roll(1), 4, last, last)  # drafts begin in rows 3 to 13
        _, *found = acceptance(head, policy, [text], temperature).tolist()
        assert found == [pytest.approx([1, 5 / 11, 2 / 5], abs=0.01)] * 2


def test_acceptance_with_shared_noise_is_what_coupled_verification_gives() -> None:
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(0)) * torch.tensor([[2.0], [1.0]])
    logits[1] += logits[0]  # a head that is right now and then
    target, draft = ((each / 0.7).expand(20_000, -1) for each in logits)
    keys, positions = torch.arange(20_000), torch.zeros(20_000, dtype=torch.int64)
    drawn, drafted = (keyed_sample(each, keys, positions) for each in (target, draft))
    argmax, shared, best = kept(*(logits[i, None].expand(300, -1) for i in (0, 1)), torch.arange(300), 0.7)
    p = target[0].softmax(-1)
    assert (p * shared).sum().item() == pytest.approx((drawn == drafted).float().mean().item(), abs=0.01)
    assert (p * argmax).sum() == p[draft[0].argmax()] < (p * shared).sum() < (p * best).sum()
    assert (p * best).sum().item() == pytest.approx(torch.minimum(p, draft[0].softmax(-1)).sum().item())
