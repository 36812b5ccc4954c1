"""vLLM's objects without an engine: its configuration, and its samplers with our hooks on an accelerator."""

import inspect
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
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from rollout_spec import patches
from rollout_spec.vllm import OPTIONS_KEY, speculative_config
from rollout_spec.vllm.mrv1.runner import CATCH_UP, CatchingUpRunner, FirstWait
from rollout_spec.vllm.mrv1.sampler import RowSampling
from rollout_spec.vllm.mrv2.sampler import verify_by_sampling
from rollout_spec.vllm.upstream import cpu_expand
from tests.accelerator import DEVICE, Accelerator

NUM_ROWS, K = 8, 4


def vllm_config(options, **parallel):
    one_rank = {"data_parallel_size": 1, "tensor_parallel_size": 1, "rank": 0}
    return SimpleNamespace(
        additional_config={OPTIONS_KEY: {"batch_threshold": NUM_ROWS, **options}},
        speculative_config=SimpleNamespace(**speculative_config(K)),
        parallel_config=SimpleNamespace(**one_rank | {"distributed_executor_backend": "uni"} | parallel),
        model_config=SimpleNamespace(get_vocab_size=lambda: 1000),
        use_v2_model_runner=False,
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[]),
    )


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


class Samplers:
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
        limited = range(num) if min_tokens else ()
        processor.min_toks = {row: processor.add_request(params, None, []) for row in limited}
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
def vllm_on_a_gpu(monkeypatch):
    """Pinned memory, and torch's operations where it has Triton's kernels."""
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
TOKENS = "rollout_spec.verification.transfers.to_host"
DRAWN = [RACE, RACE, TOKENS]
LOGPROBS = "rollout_spec.vllm.mrv1.kept_logprobs._get_logprobs_tensors"
# By step: what the host waits in, and the copies to the device that nothing waits for.
STEPS: dict[str, tuple[Callable[[], Accelerator], list[str], int]] = {
    "plain": (lambda: Samplers(SAMPLED).plain(), [RACE], 1),
    "plain, some rows greedy": (lambda: Samplers(SOME_GREEDY).plain(), [RACE], 1),
    "plain, all rows greedy": (lambda: Samplers(GREEDY).plain(), [], 0),
    "plain, with log-probabilities": (lambda: Samplers(SAMPLED, logprobs=0).plain(), [RACE], 1),
    "plain, with top-k and top-p": (lambda: Samplers(SAMPLED, is_cut=True).plain(), [RACE], 1),
    "with drafts": (lambda: Samplers(SAMPLED).with_drafts(), DRAWN, 2),
    "with drafts, some rows greedy": (lambda: Samplers(SOME_GREEDY).with_drafts(), DRAWN, 3),
    "with drafts, all rows greedy": (lambda: Samplers(GREEDY).with_drafts(), [TOKENS], 1),
    "with drafts, top-k and top-p": (lambda: Samplers(SAMPLED, is_cut=True).with_drafts(), DRAWN, 2),
    "with drafts and log-probabilities": (
        lambda: Samplers(SAMPLED, logprobs=0).with_drafts(), [*DRAWN, LOGPROBS], 3,
    ),
    # vLLM copies rows and tokens, for the drafts and again for what comes behind them.
    "with drafts and min_tokens": (lambda: Samplers(SAMPLED, min_tokens=9).with_drafts(), DRAWN, 6),
    "with drafts, on MRV2": (mrv2_step, [], 0),
}  # fmt: skip


def flat(num_rows, vocab_size=151_936):
    """Logits that leave every block able to win; one row in memory."""
    row = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(0)) * 0.01
    return row.expand(num_rows, -1)
