"""What a step of sampling and verification asks of a GPU, without one: waits, copies, kernels, memory.

vLLM's own samplers, with our hooks, run on `tests.accelerator`; docs/how-it-works/verification.md quotes it.
"""

import dataclasses
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker import gpu_input_batch

from rollout_spec import patches
from rollout_spec.verification import blocks, coupled, noise
from rollout_spec.vllm.mrv1.row_generators import keep_from_fused_kernel
from rollout_spec.vllm.mrv1.sampler import RowSampling
from rollout_spec.vllm.upstream import allowed_tokens
from tests import vllm_doubles as doubles
from tests.accelerator import DEVICE, Accelerator
from tests.vllm_doubles import STEPS, VOCAB_SIZE, Samplers, flat, vllm_on_a_gpu  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("vllm_on_a_gpu")


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("chunk_size", [1 << 10, 1 << 22])
def test_what_a_step_waits_for_and_sends(name, chunk_size, monkeypatch):
    monkeypatch.setattr(blocks, "CHUNK_SIZE", chunk_size)
    step, places, num_sent = STEPS[name]
    accelerator = step()
    assert (accelerator.waits, accelerator.num_sent) == (places, num_sent)


@pytest.mark.parametrize("temperature", [doubles.GREEDY, doubles.SOME_GREEDY, doubles.SAMPLED])
@pytest.mark.parametrize("has_drafts", [False, True])
def test_mrv1_indexes_text_where_it_waits_first(temperature, has_drafts, monkeypatch):
    """Once a step, when the device has all that it can be given: `nonzero` waits for itself."""
    log = Samplers(temperature).indexing(has_drafts, monkeypatch).log
    before, after = log[: log.index("catch up")], log[log.index("catch up") + 1 :]
    assert "wait" not in before and "catch up" not in after
    assert after[: after.index("wait")] == (["nonzero"] if any(temperature) else [])


def test_an_engine_without_drafts_has_no_patch_for_them():
    runner = Samplers(doubles.SAMPLED).runner
    runner.sampler, runner.rejection_sampler = Sampler("processed_logprobs"), None
    patches._applied.clear()
    with Accelerator():
        RowSampling(runner).install()
    names = {patch.name for patch in patches.applied()}
    assert "vllm-keyed-sampler" in names and "vllm-min-tokens-bonus" not in names


def test_a_fused_kernel_draws_for_no_row_that_has_a_key():
    """vLLM 0.33 asks such a function before its samplers run; here it says yes."""
    module: Any = SimpleNamespace(__name__="sampler")
    module.mixed_sample_eligible = lambda sm, predict_bonus_token: True
    keep_from_fused_kernel(module)
    engine = Samplers(doubles.SAMPLED)
    generators = engine.row_sampling.generators_of_step([0] * len(doubles.DRAFTS))
    keyed = dataclasses.replace(engine.sampling, generators=generators)
    assert [module.mixed_sample_eligible(each, False) for each in (engine.sampling, keyed)] == [True, False]
    keep_from_fused_kernel(SimpleNamespace())  # of another vLLM


def test_allowed_tokens_hold_on_the_device():
    """A mask moves with its request, leaves nothing, and is sent; after a draft it is the same row's."""
    allowed_tokens.fix(gpu_input_batch)
    with Accelerator():
        batch = gpu_input_batch.InputBatch(
            max_num_reqs=4, max_model_len=16, max_num_batched_tokens=16, device=DEVICE,
            vocab_size=VOCAB_SIZE, block_sizes=[4], kernel_block_sizes=[4], max_num_blocks_per_req=[4],
        )  # fmt: skip

        def add(name, allowed):
            batch.add_request(
                gpu_input_batch.CachedRequestState(
                    req_id=name, prompt_token_ids=[1], mm_features=[], generator=None, block_ids=([0],),
                    sampling_params=SamplingParams(allowed_token_ids=allowed),
                    num_computed_tokens=1, output_token_ids=[],
                )
            )  # fmt: skip

        add("ended", None)
        add("left", [3, 4])
        batch.remove_request("ended")
        batch.condense()
        add("next", None)
        batch.refresh_metadata()
    mask = doubles.forbidden_but((3, 4), 4)
    assert torch.equal(batch.sampling_metadata.allowed_token_ids_mask.value, mask[:2])
    for _ in range(2):
        assert torch.equal(batch.allowed_token_ids_mask_cpu_tensor, mask)
        batch.swap_states(0, 1)
        mask = mask[[1, 0, 2, 3]]
    engine = Samplers(doubles.SAMPLED, allowed=(3, 4))
    engine.with_drafts()
    tokens = engine.output.sampled_token_ids.value.tolist()
    assert tokens[0][0] in (3, 4)
    assert not {token for row in tokens[1:] for token in row} <= {3, 4, -1}


def test_the_accelerator_computes_the_known_answer_itself():
    with Accelerator() as accelerator:
        noise.check(DEVICE)
    assert accelerator.waits == [f"{noise.__name__}.check"] * 3  # two tensors to it, and a word back


def has_cuda_kernel(name):
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CUDA")


VIEWS_AND_COPIES = {
    "alias", "clone", "copy", "detach", "empty", "expand", "lift_fresh", "permute", "scalar_tensor", "select",
    "slice", "split", "split_with_sizes", "squeeze", "to_copy", "unbind", "unsafe_view", "unsqueeze", "view",
}  # fmt: skip


# The operations of `coupled` but `log_odds`, views and copies apart. torch_npu has all of them: read in its
# op-plugin's list, op_plugin/config/op_plugin_functions.yaml, for torch 2.1 to 2.8; not run.
HAD_BY_NPUS = {
    "add", "amax", "arange", "argmax", "bitwise_and", "bitwise_xor", "cat", "clamp", "div", "exp",
    "floor_divide", "gather", "ge", "gt", "index", "index_put", "index_select", "irshift", "log", "log1p",
    "lt", "masked_fill", "mul", "neg", "nonzero", "ones", "remainder", "sub", "sum", "where", "zeros",
}  # fmt: skip


def test_every_operation_has_a_kernel_for_cuda_and_for_npus():
    """CUDA's are in torch's register; NPUs' in the list above."""
    accelerators = [step() for step, *_ in STEPS.values()]
    accelerators.append(Accelerator())
    with accelerators[-1] as accelerator:
        rows = torch.arange(5)
        coupled.shortfall(accelerator.put(torch.randn(5, VOCAB_SIZE)), rows, rows, accelerator.put(rows))
    used = set().union(*(accelerator.operations for accelerator in accelerators))
    assert len(used) > 100
    # vllm-ascend has samplers of its own, so that only our operations count, and not those for MRV2.
    ours = {
        re.sub(r"^_+|_+$|^new_|_like$", "", operation.overloadpacket.__name__).strip("_")
        for operation, place in used
        if place.startswith("rollout_spec") and ".mrv2." not in place and "cpu_expand" not in place
    }
    # op-plugin's list has log_softmax as well; a number is read at the start, in `noise.check`.
    assert ours - VIEWS_AND_COPIES == HAD_BY_NPUS | {"log_softmax", "local_scalar_dense"}
    if torch.version.cuda is not None:
        assert not {operation.name() for operation, _ in used if not has_cuda_kernel(operation.name())}
        assert not has_cuda_kernel("aten::_mkldnn_transpose"), "what has none is found"


def coupled_step(temperature):
    accelerator, counts = Accelerator(), [8] * 256
    put, count = accelerator.put, len(counts)
    logits, after = put(flat(sum(counts))), put(flat(count))
    drafts, bonus = put(torch.zeros(sum(counts), dtype=torch.int32)), put(torch.zeros(count, 1))
    with accelerator:
        accelerator.start()
        step = coupled.StepNoise(range(count), range(count), counts)
        if temperature:
            bonus = step.sample_after(after).unsqueeze(-1)
        coupled.coupled_verify(drafts, 8, logits, bonus, bool(temperature), step)
    return accelerator


# By step of 256 requests with 8 draft tokens each and 151,936 tokens: megabytes beyond the logits.
MEMORY: dict[str, tuple[Callable[[], Accelerator], int]] = {
    "coupled": (lambda: coupled_step(1.0), 101),
    "coupled, all rows greedy": (lambda: coupled_step(0.0), 10),
    "coupled, on MRV2": (lambda: doubles.mrv2_step([8] * 256), 1),
}


@pytest.mark.parametrize("name", MEMORY)
def test_memory_beyond_the_logits(name, monkeypatch):
    """With equal noise, so that all blocks are summed."""
    exponential = noise.exponential
    monkeypatch.setattr(noise, "exponential", lambda *args: exponential(*args).fill_(1.0))
    step, megabytes = MEMORY[name]
    assert megabytes - 1 < step().peak / 1e6 <= megabytes
