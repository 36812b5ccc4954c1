"""What a step of sampling and verification asks of a GPU, without one: waits, copies, kernels, memory.

vLLM's own samplers, with our hooks, run on `tests.accelerator`. What it counts must be what
docs/how-it-works/verification.md says.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout_spec import patches
from rollout_spec.verification import blocks, coupled, noise, standard
from rollout_spec.verification.transfers import fetched, sent
from rollout_spec_lab.gpu_check.gpu_check import WAITS
from tests.accelerator import DEVICE, Accelerator
from tests.test_standard import VIEWS_AND_COPIES, listed_operations

VOCAB_SIZE, DRAFTS = 600, [2, 0, 3]
GREEDY, SOME_GREEDY, SAMPLED = [0.0] * 3, [1.0, 0.0, 0.7], [1.0] * 3
PAGE = Path(__file__).parents[1] / "docs/how-it-works/verification.md"


def table(head: str) -> dict[str, list[int]]:
    """The numbers of the page's table whose first column has this head."""
    rows = PAGE.read_text().partition(f"| {head} |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {name: [int(number) for number in numbers] for name, *numbers in cells}


class Engine:
    """The samplers of a vLLM engine with our hooks, as a model runner has them; on an accelerator.

    Args:
        temperature: of the rows.
        logprobs: how many log-probabilities each request wants beside the sampled token's; None for none.
        min_tokens: of each request.
        is_cut: to the 50 likeliest tokens and 0.9 of the probability.
    """

    def __init__(
        self,
        temperature: list[float],
        logprobs: int | None = None,
        min_tokens: int = 0,
        is_cut: bool = False,
    ) -> None:
        from vllm.v1.sample.logits_processor import LogitsProcessors
        from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
        from vllm.v1.sample.metadata import SamplingMetadata
        from vllm.v1.sample.rejection_sampler import RejectionSampler
        from vllm.v1.sample.sampler import Sampler

        from rollout_spec.vllm.sampler import RowSampling

        self.accelerator, num = Accelerator(), len(DRAFTS)
        put = self.accelerator.put
        # Its constructor would pin memory.
        processor = MinTokensLogitsProcessor.__new__(MinTokensLogitsProcessor)
        processor.device, processor.neg_inf_tensor = DEVICE, put(torch.tensor(-torch.inf))
        processor.min_toks = {row: (min_tokens, [], {1, 2}) for row in range(num) if min_tokens}
        self.sampling = SamplingMetadata(
            temperature=put(torch.tensor(temperature)),
            all_greedy=not any(temperature), all_random=all(temperature),
            top_p=put(torch.full((num,), 0.9)) if is_cut else None,
            top_k=put(torch.full((num,), 50)) if is_cut else None,
            generators={}, max_num_logprobs=logprobs, no_penalties=True,
            prompt_token_ids=None, frequency_penalties=None, presence_penalties=None,
            repetition_penalties=None, output_token_ids=[[] for _ in DRAFTS], allowed_token_ids_mask=None,
            bad_words_token_ids={}, logitsprocs=LogitsProcessors([processor]),
        )  # fmt: skip
        self.sampler = Sampler("processed_logprobs")  # verl's mode
        self.verifier = RejectionSampler(self.sampler)
        requests = {str(row): types.SimpleNamespace(sampling_params=None) for row in range(num)}
        batch = types.SimpleNamespace(
            num_reqs=len(requests), req_ids=list(requests), num_tokens_no_spec=np.arange(9, 12), generators={}
        )
        runner = types.SimpleNamespace(
            sampler=self.sampler, rejection_sampler=self.verifier, device=DEVICE, requests=requests,
            model_config=types.SimpleNamespace(seed=0), input_batch=batch,
            parallel_config=types.SimpleNamespace(data_parallel_index=0),
        )  # fmt: skip
        with self.accelerator:
            RowSampling(runner, is_coupled=True).install()

    def plain(self) -> Accelerator:
        logits = self.accelerator.put(torch.randn(len(DRAFTS), VOCAB_SIZE) * 5)
        return self._counted(lambda: self.sampler(logits=logits, sampling_metadata=self.sampling))

    def with_drafts(self) -> Accelerator:
        from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

        ends, put = np.cumsum(DRAFTS), self.accelerator.put
        behind = ends + np.arange(len(DRAFTS))
        logits = torch.randn(sum(DRAFTS) + len(DRAFTS), VOCAB_SIZE) * 5
        drafted = np.delete(np.arange(len(logits)), behind)
        metadata = SpecDecodeMetadata(
            put(logits[drafted].argmax(dim=-1).int()), DRAFTS,
            put(torch.from_numpy(ends).int()), put(torch.from_numpy(behind + 1).int()),
            put(torch.from_numpy(drafted)), put(torch.from_numpy(behind)), put(torch.arange(len(logits))),
        )  # fmt: skip
        return self._counted(lambda: self.verifier(metadata, None, put(logits), self.sampling))

    def _counted(self, step: Callable[[], Any]) -> Accelerator:
        with self.accelerator:
            self.accelerator.start()
            step()
        return self.accelerator


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM as on a GPU: pinned memory, and torch's operations where it has Triton's kernels."""
    from vllm.utils import torch_utils
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops import topk_topp_sampler

    import rollout_spec.vllm.sampler_v2  # noqa: F401 (whose imports copy what is replaced here)

    platform = types.SimpleNamespace(is_cuda=lambda: True, is_cpu=lambda: False)
    monkeypatch.setattr(topk_topp_sampler, "current_platform", platform)
    monkeypatch.setattr(torch_utils, "PIN_MEMORY", True)
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", standard.expand_batch_to_tokens)
    # What the hooks put there goes again.
    monkeypatch.setattr(rejection_sampler, "rejection_sample", rejection_sampler.rejection_sample)
    monkeypatch.setattr(patches, "_applied", {})


def standard_step(
    temperature: list[float],
    counts: list[int] = DRAFTS,
    logits: torch.Tensor | None = None,
    has_draft_probs: bool = False,
    **options: Any,
) -> Accelerator:
    """`standard.rejection_sample` where no draft token is right."""
    accelerator = Accelerator()
    put = accelerator.put
    if logits is None:
        logits = torch.randn(sum(counts), VOCAB_SIZE)
    sampling = types.SimpleNamespace(
        temperature=put(torch.tensor(temperature)), all_greedy=not any(temperature),
        all_random=all(temperature), generators={},
    )  # fmt: skip
    given = (
        put(logits[:, :-1].argmin(dim=-1).int()), counts, max(counts), put(torch.tensor(counts).cumsum(0)),
        put(logits.softmax(dim=-1).roll(1)) if has_draft_probs else None, put(logits),
        put(torch.zeros(len(counts), 1, dtype=torch.int32)), sampling,
    )  # fmt: skip
    with accelerator:
        accelerator.start()
        standard.rejection_sample(*given, **options)
    return accelerator


def v2_step(counts: list[int] = DRAFTS) -> Accelerator:
    """`coupled_verify` of model runner V2, where the last draft token only is wrong.

    vLLM's own sampler, which is Triton's, has drawn the tokens already.
    """
    from rollout_spec.vllm.sampler_v2 import coupled_verify

    accelerator, nums = Accelerator(), torch.tensor(counts) + 1
    put, total, rows = accelerator.put, sum(counts) + len(counts), torch.arange(len(counts)).int()
    ends = torch.nn.functional.pad(nums.cumsum(0), (1, 0)).int()
    places = torch.cat([torch.arange(num) for num in nums.tolist()]).int()
    logits, drawn = put(flat(total)), put(torch.arange(total))
    inputs = torch.arange(total).int() - 1
    inputs[-1] = 0
    sampler = types.SimpleNamespace(sample=lambda **_: (drawn, logits))
    verifier: Any = types.SimpleNamespace(sampler=sampler, num_speculative_steps=max(counts))
    given = {
        "logits": logits, "draft_sampled": put(inputs), "verify_draft_sampled": put(inputs),
        "pos": put(torch.arange(total)), "cu_num_logits": put(ends), "idx_mapping": put(rows),
        "idx_mapping_np": rows.numpy(), "expanded_idx_mapping": put(rows.repeat_interleave(nums)),
        "expanded_local_pos": put(places), "seq_lens_upper_bound_np": rows.numpy(),
    }  # fmt: skip
    with accelerator:
        accelerator.start()
        *_, num_sampled = coupled_verify(verifier, given)
    assert num_sampled.value.tolist() == [*nums[:-1], counts[-1]]
    return accelerator


RACE, TOKENS, LOGPROBS = (
    f"rollout_spec.{name}"
    for name in (
        "verification.coupled._block_masses",
        "verification.transfers.fetched",
        "vllm.logprobs.kept_logprobs",
    )
)
# Each row of the page's table: the step, and what it waits in.
STEPS: dict[str, tuple[Callable[[], Accelerator], list[str]]] = {
    "plain": (lambda: Engine(SAMPLED).plain(), [RACE]),
    "plain, some rows greedy": (lambda: Engine(SOME_GREEDY).plain(), [RACE]),
    "plain, all rows greedy": (lambda: Engine(GREEDY).plain(), []),
    "plain, with log-probabilities": (lambda: Engine(SAMPLED, logprobs=0).plain(), [RACE]),
    "plain, with top-k and top-p": (lambda: Engine(SAMPLED, is_cut=True).plain(), [RACE]),
    "with drafts": (lambda: Engine(SAMPLED).with_drafts(), [RACE, RACE, TOKENS]),
    "with drafts, some rows greedy": (lambda: Engine(SOME_GREEDY).with_drafts(), [RACE, RACE, TOKENS]),
    "with drafts, all rows greedy": (lambda: Engine(GREEDY).with_drafts(), [TOKENS]),
    "with drafts, top-k and top-p": (
        lambda: Engine(SAMPLED, is_cut=True).with_drafts(),
        [RACE, RACE, TOKENS],
    ),
    "with drafts and log-probabilities": (
        lambda: Engine(SAMPLED, logprobs=0).with_drafts(),
        [RACE, RACE, TOKENS, LOGPROBS],
    ),
    "with drafts, on model runner V2": (v2_step, []),
}


def test_the_page_has_these_steps() -> None:
    assert list(table("step")) == list(STEPS)


def test_gpu_check_expects_what_the_page_says() -> None:
    assert {kind: table("step")[kind][0] for kind in WAITS} == WAITS


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("chunk_size", [1 << 10, 1 << 22])
def test_a_step_waits_as_often_as_the_page_says(
    name: str, chunk_size: int, vllm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many chunks it works in; and it copies as often to the device, without waiting."""
    monkeypatch.setattr(blocks, "CHUNK_SIZE", chunk_size)
    step, places = STEPS[name]
    accelerator = step()
    assert accelerator.waits == places
    assert [len(accelerator.waits), accelerator.num_sent] == table("step")[name]


@pytest.mark.parametrize("options", [{}, {"has_draft_probs": True}, {"use_fp64_gumbel": True}], ids=str)
@pytest.mark.parametrize("temperature", [SAMPLED, SOME_GREEDY])
@pytest.mark.parametrize("chunk_size", [1 << 10, 1 << 22])
def test_standard_waits_for_what_is_accepted_and_for_the_tokens(
    chunk_size: int, temperature: list[float], options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "CHUNK_SIZE", chunk_size)
    accelerator = standard_step(temperature, **options)
    accepted = f"{standard.__name__}.rejection_sample"
    assert (accelerator.waits, accelerator.num_sent) == ([accepted, TOKENS], 2)


def test_min_tokens_waits_for_nothing(vllm: None) -> None:
    """vLLM copies rows and tokens, for the drafts and again for what comes behind them."""
    without, with_it = Engine(SAMPLED).with_drafts(), Engine(SAMPLED, min_tokens=9).with_drafts()
    assert with_it.waits == without.waits
    assert with_it.num_sent == without.num_sent + 2 + 2


def test_the_values_behind_an_accelerators_tensors_are_those_of_the_cpu() -> None:
    logits, drafts = torch.randn(5, VOCAB_SIZE) * 5, torch.randint(VOCAB_SIZE, (5,))
    accelerator = Accelerator()

    def tokens(put: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        step = coupled.CoupledStep(range(3), range(3), DRAFTS)
        sampling = types.SimpleNamespace(
            temperature=put(torch.tensor(SOME_GREEDY)), all_greedy=False, all_random=False
        )
        behind = step.sample_behind(put(logits[:3])).unsqueeze(-1)
        return coupled.coupled_sample(put(drafts), 3, put(logits), behind, sampling, step)

    with accelerator:
        there = tokens(accelerator.put)
    assert there.device == DEVICE
    assert torch.equal(there.value, tokens(lambda tensor: tensor))


def test_the_accelerator_computes_the_known_answer_itself() -> None:
    with Accelerator() as accelerator:
        noise.check(DEVICE)
    assert accelerator.waits == [f"{noise.__name__}.check"] * 3  # two tensors to it, and a word back


# What the accelerator must find; each waits once.
WAITING: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool((x > 0).all()),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "copy": lambda x: torch.empty(4).copy_(x),
    "nonzero": lambda x: (x > 0).nonzero(),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "tensor": lambda x: torch.tensor([1, 2], device=x.device),
    "from the host": lambda x: torch.ones(3).to(x.device),
    "not pinned": lambda x: torch.ones(3).to(x.device, non_blocking=True),
    "pinned, blocking": lambda x: torch.ones(3).pin_memory().to(x.device),
    "index on the host": lambda x: x[torch.tensor([0, 1])],
    "a number put at places": lambda x: x.index_put_((x.long(),), torch.tensor(2.0)),
    "several fetched": lambda x: fetched(x, x),
}  # fmt: skip
NOT_WAITING: dict[str, Callable[[torch.Tensor], Any]] = {
    "compute": lambda x: (x * 2).exp_().sum(),
    "index": lambda x: x[x.long()],
    "masked_fill": lambda x: x.masked_fill_(x > 0, 2.0),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long(), output_size=4),
    "to another dtype": lambda x: x.to(torch.float64),
    "pinned": lambda x: sent(np.arange(3), x.device),
    "on the host": lambda x: torch.ones(3).nonzero(),
}


@pytest.mark.parametrize(
    ("use", "num_waits"),
    [*((use, 1) for use in WAITING.values()), *((use, 0) for use in NOT_WAITING.values())],
    ids=[*WAITING, *(f"not {name}" for name in NOT_WAITING)],
)
def test_the_accelerator_finds_what_waits(use: Callable[[torch.Tensor], Any], num_waits: int) -> None:
    accelerator = Accelerator()
    x = accelerator.put(torch.ones(4))
    with accelerator:
        use(x)
    assert len(accelerator.waits) == num_waits


def test_the_accelerator_refuses_what_cuda_refuses() -> None:
    accelerator = Accelerator()
    x = accelerator.put(torch.ones(4))
    with accelerator, pytest.raises(RuntimeError, match="two different devices"):
        x + torch.ones(4)
    with accelerator, pytest.raises((RuntimeError, TypeError), match="numpy"):
        x.numpy()


def has_cuda_kernel(name: str) -> bool:
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CUDA")


def test_every_operation_has_a_kernel_for_cuda_and_for_npus(vllm: None) -> None:
    """CUDA's are in torch's register; NPUs' in the list that `rollout_spec.verification` quotes."""
    if torch.version.cuda is None:
        pytest.skip("this torch was built without CUDA")
    accelerators = [step() for step, _ in STEPS.values()]
    accelerators += [standard_step(SOME_GREEDY, has_draft_probs=True), Engine(SAMPLED, 0, 9).with_drafts()]
    used = set().union(*(accelerator.operations for accelerator in accelerators))
    assert len(used) > 100
    assert not {operation.name() for operation, _ in used if not has_cuda_kernel(operation.name())}
    assert not has_cuda_kernel("aten::_mkldnn_transpose"), "what has none is found"
    # vllm-ascend has samplers of its own, so that only our operations count, and not those for vLLM's V2.
    ours = {
        operation.overloadpacket.__name__
        for operation, place in used
        if place.startswith("rollout_spec") and "sampler_v2" not in place
    }
    names = {re.sub(r"^_+|_+$|^new_|_like$", "", name).strip("_") for name in ours}
    known = VIEWS_AND_COPIES | listed_operations() | {"log_softmax"}  # op-plugin's list has it as well
    assert sorted(names - known) == ["local_scalar_dense"], "at the start: `noise.check`"


def flat(num_rows: int) -> torch.Tensor:
    """Logits of 151,936 tokens that leave every block able to win; one row in memory."""
    return (torch.randn(1, 151_936, generator=torch.Generator().manual_seed(0)) * 0.01).expand(num_rows, -1)


def coupled_step(temperature: float) -> Accelerator:
    """A step of 256 requests with 8 draft tokens each."""
    accelerator, counts = Accelerator(), [8] * 256
    put, count = accelerator.put, len(counts)
    logits, behind = put(flat(sum(counts))), put(flat(count))
    drafts, bonus = put(torch.zeros(sum(counts), dtype=torch.int32)), put(torch.zeros(count, 1))
    sampling = types.SimpleNamespace(all_greedy=not temperature, all_random=bool(temperature))
    with accelerator:
        accelerator.start()
        step = coupled.CoupledStep(range(count), range(count), counts)
        if temperature:
            bonus = step.sample_behind(behind).unsqueeze(-1)
        coupled.coupled_sample(drafts, 8, logits, bonus, sampling, step)
    return accelerator


MEMORY: dict[str, Callable[[], Accelerator]] = {
    "`coupled`": lambda: coupled_step(1.0),
    "`coupled`, all rows greedy": lambda: coupled_step(0.0),
    "`coupled`, on model runner V2": lambda: v2_step([8] * 256),
    "`standard`, as it is on NPUs": lambda: standard_step([1.0] * 256, [8] * 256, flat(2048)),
}


@pytest.mark.parametrize("name", MEMORY)
def test_memory_is_as_the_page_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 requests with 8 draft tokens each, 151,936 tokens; equal noise, so that all blocks are summed."""
    exponential = noise.exponential
    monkeypatch.setattr(noise, "exponential", lambda *args: exponential(*args).fill_(1.0))
    promised = table("beyond the logits")
    assert list(promised) == list(MEMORY)
    megabytes = promised[name][0]
    assert megabytes - 1 < MEMORY[name]().peak / 1e6 <= megabytes
