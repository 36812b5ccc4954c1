"""What a step of sampling and verification asks of a GPU, without one: waits, copies, kernels, memory.

vLLM's own samplers, with our hooks, run on `tests.accelerator`; docs/how-it-works/verification.md quotes it.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.utils import torch_utils
from vllm.v1.sample import rejection_sampler, sampler
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker import gpu_input_batch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from rollout_spec import patches
from rollout_spec.verification import blocks, coupled, noise
from rollout_spec.vllm.mrv1.row_generators import keep_from_fused_kernel
from rollout_spec.vllm.mrv1.runner import CATCH_UP, CatchingUpRunner, FirstWait
from rollout_spec.vllm.mrv1.sampler import RowSampling
from rollout_spec.vllm.mrv2.sampler import verify_by_sampling
from rollout_spec.vllm.upstream import allowed_tokens, cpu_expand
from tests.accelerator import DEVICE, Accelerator

VOCAB_SIZE, DRAFTS = 600, [2, 0, 3]
GREEDY, SOME_GREEDY, SAMPLED = [0.0] * 3, [1.0, 0.0, 0.7], [1.0] * 3


def forbidden_but(allowed, num_rows):
    """vLLM's mask of rows of which the first may get these tokens only: True where it may not."""
    mask = torch.zeros(num_rows, VOCAB_SIZE, dtype=torch.bool)
    mask[0] = True
    mask[0, list(allowed)] = False
    return mask


def bare(kind, **attributes):
    """An object of a class of vLLM's that has these attributes, and nothing that its constructor makes."""
    made = kind.__new__(kind)
    vars(made).update(attributes)
    return made


class Engine:
    """The samplers of a vLLM engine with our hooks, as a model runner has them; on an accelerator.

    `is_cut`: to the 50 likeliest tokens and 0.9 of the probability; `allowed`: the tokens that row 0 may get.
    """

    def __init__(self, temperature, logprobs=None, min_tokens=0, is_cut=False, allowed=None):
        self.accelerator, num = Accelerator(), len(DRAFTS)
        put = self.accelerator.put
        # Its constructor would pin memory.
        processor = MinTokensLogitsProcessor.__new__(MinTokensLogitsProcessor)
        processor.device, processor.neg_inf_tensor = DEVICE, put(torch.tensor(-torch.inf))
        params = SamplingParams(min_tokens=min_tokens, stop_token_ids=[1, 2])
        processor.min_toks = {
            row: processor.add_request(params, None, []) for row in range(num) if min_tokens
        }
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
        if allowed is not None:
            self.sampling.allowed_token_ids_mask = put(forbidden_but(allowed, num))
        self.sampler = Sampler("processed_logprobs")  # verl's mode
        self.verifier = RejectionSampler(self.sampler)
        requests = {str(row): SimpleNamespace(sampling_params=None) for row in range(num)}
        batch = SimpleNamespace(
            num_reqs=len(requests), req_ids=list(requests), num_tokens_no_spec=np.arange(9, 12), generators={}
        )
        self.runner: Any = SimpleNamespace(
            sampler=self.sampler, rejection_sampler=self.verifier, device=DEVICE, requests=requests,
            model_config=SimpleNamespace(seed=0), input_batch=batch,
            parallel_config=SimpleNamespace(data_parallel_index=0),
        )  # fmt: skip
        self.first_wait = FirstWait(self._note_time)
        self.row_sampling = RowSampling(self.runner, self.first_wait.before_wait)
        with self.accelerator:
            self.row_sampling.install()

    def plain(self):
        logits = self.accelerator.put(torch.randn(len(DRAFTS), VOCAB_SIZE) * 5)
        return self.counted(lambda: self.sampler(logits=logits, sampling_metadata=self.sampling))

    def with_drafts(self):
        logits, metadata = self._drafted()
        return self.counted(lambda: self.verifier(metadata, None, logits, self.sampling))

    def _drafted(self):
        """The logits of a step with drafts, and vLLM's description of it."""
        ends, put = np.cumsum(DRAFTS), self.accelerator.put
        after = ends + np.arange(len(DRAFTS))
        logits = torch.randn(sum(DRAFTS) + len(DRAFTS), VOCAB_SIZE) * 5
        drafted = np.delete(np.arange(len(logits)), after)
        metadata = SpecDecodeMetadata(
            put(logits[drafted].argmax(dim=-1).int()), DRAFTS,
            put(torch.from_numpy(ends).int()), put(torch.from_numpy(after + 1).int()),
            put(torch.from_numpy(drafted)), put(torch.from_numpy(after)), put(torch.arange(len(logits))),
        )  # fmt: skip
        return put(logits), metadata

    def indexing(self, has_drafts, monkeypatch):
        """MRV1's own step, while text is unindexed: `log` has "catch up" where it is indexed."""
        accelerator, batch, num = self.accelerator, self.runner.input_batch, len(DRAFTS)
        logits, metadata = accelerator.put(torch.randn(num, VOCAB_SIZE)), None
        if has_drafts:
            logits, metadata = self._drafted()

        class Event:
            def record(self):
                self.num_waits = len(accelerator.waits)

            def query(self):
                return len(accelerator.waits) > self.num_waits

            def synchronize(self):
                accelerator.wait()

        monkeypatch.setattr(torch.cuda, "Event", Event)
        batch = SimpleNamespace(
            **vars(batch), sampling_metadata=self.sampling, update_async_output_token_ids=lambda: None,
            req_id_to_index={}, vocab_size=VOCAB_SIZE, token_ids_cpu=np.zeros((num, 16), np.int32),
            is_token_ids=np.zeros((num, 16), np.bool_),
        )  # fmt: skip
        for request in self.runner.requests.values():
            request.output_token_ids = []
        nothing: Any = [None] * 7
        runner = bare(
            GPUModelRunner, input_batch=batch, requests=self.runner.requests,
            sampler=self.sampler, rejection_sampler=self.verifier, transfer_event=Event(), max_model_len=16,
            discard_request_mask=SimpleNamespace(np=np.zeros(num, np.bool_)), use_async_scheduling=False,
            sampled_token_ids_pinned_cpu=torch.zeros(num, 1, dtype=torch.int32), speculative_config=None,
            num_prompt_logprobs={}, routed_experts_initialized=False, supports_mm_inputs=False,
            parallel_config=SimpleNamespace(enable_eplb=False), kv_connector_output=None, _draft_probs=None,
            execute_model_state=(
                SimpleNamespace(total_num_scheduled_tokens=len(logits), num_scheduled_tokens={}),
                logits, metadata, None, logits, *nothing[:5],
            ),
        )  # fmt: skip
        patches.put_before(CatchingUpRunner, runner, CATCH_UP, first_wait=self.first_wait)
        # In inference mode operations come whole, and the accelerator knows their parts.
        step = inspect.unwrap(GPUModelRunner.sample_tokens)
        return self.counted(lambda: step(runner, None))

    def _note_time(self, has_time):
        assert has_time()
        self.accelerator.log.append("catch up")

    def counted(self, step):
        """Run a step; `output` has what it gives."""
        with self.accelerator:
            self.accelerator.start()
            self.output = step()
        return self.accelerator


@pytest.fixture
def vllm(monkeypatch):
    """vLLM as on a GPU: pinned memory, and torch's operations where it has Triton's kernels."""
    platform = SimpleNamespace(is_cuda=lambda: True, is_cpu=lambda: False)
    monkeypatch.setattr(topk_topp_sampler, "current_platform", platform)
    monkeypatch.setattr(sampler, "current_platform", platform, raising=False)  # from 0.32 on
    monkeypatch.setattr(torch_utils, "PIN_MEMORY", True)
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", cpu_expand.expand_batch_to_tokens)
    # What the hooks put there goes again.
    monkeypatch.setattr(rejection_sampler, "rejection_sample", rejection_sampler.rejection_sample)
    monkeypatch.setattr(patches, "_applied", {})


def mrv2_step(counts=DRAFTS):
    """`verify_by_sampling` of MRV2, where the last draft token only is wrong.

    vLLM's own sampler, which is Triton's, has drawn the tokens already.
    """
    accelerator, nums = Accelerator(), torch.tensor(counts) + 1
    put, total, rows = accelerator.put, sum(counts) + len(counts), torch.arange(len(counts)).int()
    ends = torch.nn.functional.pad(nums.cumsum(0), (1, 0)).int()
    places = torch.cat([torch.arange(num) for num in nums.tolist()]).int()
    logits, drawn = put(flat(total)), put(torch.arange(total))
    inputs = torch.arange(total).int() - 1
    inputs[-1] = 0
    sampler = SimpleNamespace(sample=lambda **_: (drawn, logits))
    verifier: Any = SimpleNamespace(sampler=sampler, num_speculative_steps=max(counts))
    given = {
        "logits": logits, "draft_sampled": put(inputs), "verify_draft_sampled": put(inputs),
        "pos": put(torch.arange(total)), "cu_num_logits": put(ends), "idx_mapping": put(rows),
        "idx_mapping_np": rows.numpy(), "expanded_idx_mapping": put(rows.repeat_interleave(nums)),
        "expanded_local_pos": put(places), "seq_lens_upper_bound_np": rows.numpy(),
    }  # fmt: skip
    with accelerator:
        accelerator.start()
        *_, num_sampled = verify_by_sampling(verifier, given)
    assert num_sampled.value.tolist() == [*nums[:-1], counts[-1]]
    return accelerator


RACE = "rollout_spec.verification.coupled._block_masses"
DRAWN = [RACE, RACE]
TOKENS = "rollout_spec.verification.transfers.to_host"
LOGPROBS = "rollout_spec.vllm.mrv1.kept_logprobs._get_logprobs_tensors"
# By step: what the host waits in, and the copies to the device that nothing waits for.
STEPS: dict[str, tuple[Callable[[], Accelerator], list[str], int]] = {
    "plain": (lambda: Engine(SAMPLED).plain(), [RACE], 1),
    "plain, some rows greedy": (lambda: Engine(SOME_GREEDY).plain(), [RACE], 1),
    "plain, all rows greedy": (lambda: Engine(GREEDY).plain(), [], 0),
    "plain, with log-probabilities": (lambda: Engine(SAMPLED, logprobs=0).plain(), [RACE], 1),
    "plain, with top-k and top-p": (lambda: Engine(SAMPLED, is_cut=True).plain(), [RACE], 1),
    "with drafts": (lambda: Engine(SAMPLED).with_drafts(), [*DRAWN, TOKENS], 2),
    "with drafts, some rows greedy": (lambda: Engine(SOME_GREEDY).with_drafts(), [*DRAWN, TOKENS], 3),
    "with drafts, all rows greedy": (lambda: Engine(GREEDY).with_drafts(), [TOKENS], 1),
    "with drafts, top-k and top-p": (lambda: Engine(SAMPLED, is_cut=True).with_drafts(), [*DRAWN, TOKENS], 2),
    "with drafts and log-probabilities": (
        lambda: Engine(SAMPLED, logprobs=0).with_drafts(), [*DRAWN, TOKENS, LOGPROBS], 3,
    ),
    # vLLM copies rows and tokens, for the drafts and again for what comes behind them.
    "with drafts and min_tokens": (lambda: Engine(SAMPLED, min_tokens=9).with_drafts(), [*DRAWN, TOKENS], 6),
    "with drafts, on MRV2": (mrv2_step, [], 0),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("chunk_size", [1 << 10, 1 << 22])
def test_what_a_step_waits_for_and_sends(name, chunk_size, vllm, monkeypatch):
    monkeypatch.setattr(blocks, "CHUNK_SIZE", chunk_size)
    step, places, num_sent = STEPS[name]
    accelerator = step()
    assert (accelerator.waits, accelerator.num_sent) == (places, num_sent)


@pytest.mark.parametrize("temperature", [GREEDY, SOME_GREEDY, SAMPLED])
@pytest.mark.parametrize("has_drafts", [False, True])
def test_mrv1_indexes_text_where_it_waits_first(temperature, has_drafts, vllm, monkeypatch):
    """Once a step, when the device has all that it can be given: `nonzero` waits for itself."""
    log = Engine(temperature).indexing(has_drafts, monkeypatch).log
    before, after = log[: log.index("catch up")], log[log.index("catch up") + 1 :]
    assert "wait" not in before and "catch up" not in after
    assert after[: after.index("wait")] == (["nonzero"] if any(temperature) else [])


def test_an_engine_without_drafts_has_no_patch_for_them(vllm):
    runner = Engine(SAMPLED).runner
    runner.sampler, runner.rejection_sampler = Sampler("processed_logprobs"), None
    patches._applied.clear()
    with Accelerator():
        RowSampling(runner).install()
    names = {patch.name for patch in patches.applied()}
    assert "vllm-keyed-sampler" in names and "vllm-min-tokens-bonus" not in names


def test_a_fused_kernel_draws_for_no_row_that_has_a_key(vllm):
    """vLLM 0.33 asks such a function before its samplers run; here it says yes."""
    module: Any = SimpleNamespace(__name__="sampler")
    module.mixed_sample_eligible = lambda sm, predict_bonus_token: True
    keep_from_fused_kernel(module)
    engine = Engine(SAMPLED)
    generators = engine.row_sampling.generators_of_step([0] * len(DRAFTS))
    keyed = dataclasses.replace(engine.sampling, generators=generators)
    assert [module.mixed_sample_eligible(each, False) for each in (engine.sampling, keyed)] == [True, False]
    keep_from_fused_kernel(SimpleNamespace())  # of another vLLM


def test_allowed_tokens_hold_on_the_device(vllm):
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
    mask = forbidden_but((3, 4), 4)
    assert torch.equal(batch.sampling_metadata.allowed_token_ids_mask.value, mask[:2])
    for _ in range(2):
        assert torch.equal(batch.allowed_token_ids_mask_cpu_tensor, mask)
        batch.swap_states(0, 1)
        mask = mask[[1, 0, 2, 3]]
    engine = Engine(SAMPLED, allowed=(3, 4))
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


def test_every_operation_has_a_kernel_for_cuda_and_for_npus(vllm):
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


def flat(num_rows, vocab_size=151_936):
    """Logits that leave every block able to win; one row in memory."""
    row = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(0)) * 0.01
    return row.expand(num_rows, -1)


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
    "coupled, on MRV2": (lambda: mrv2_step([8] * 256), 1),
}


@pytest.mark.parametrize("name", MEMORY)
def test_memory_beyond_the_logits(name, monkeypatch):
    """With equal noise, so that all blocks are summed."""
    exponential = noise.exponential
    monkeypatch.setattr(noise, "exponential", lambda *args: exponential(*args).fill_(1.0))
    step, megabytes = MEMORY[name]
    assert megabytes - 1 < step().peak / 1e6 <= megabytes
