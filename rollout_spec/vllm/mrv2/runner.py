"""What we change in vLLM's MRV2: classes that stand before the runner's own, and before its worker's.

The line above a class says before which of vLLM's it stands, and with which methods. "GPUModelRunner, 2" runs
before "GPUModelRunner, 1", which its `super()` calls; 3 is in `graphs_24` or `graphs_29`. A method reads in
the order in which things happen: what we do before, vLLM's own, what we do after. In a step vLLM calls
`execute_model`, in it `finish_requests`, `add_requests`, `update_requests`, `apply_staged_writes`, from 0.29
on `gather_batch_req_state`, then `MRV2_DISPATCH` and `prepare_inputs`; then `sample_tokens`, in it the
speculator's `propose`.
"""

import contextlib
import copy
import dataclasses
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator, DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler
from vllm.v1.worker.worker_base import WorkerBase

from rollout_spec.config import SpecConfig
from rollout_spec.patches import Patch, PatchError, guard_all, guard_class, put_before, temporarily, wrap
from rollout_spec.vllm.both_runners.logit_rows import log_logit_memory, most_logit_rows
from rollout_spec.vllm.keys import RequestKeys, keys_of
from rollout_spec.vllm.mrv2 import graphs, graphs_24, graphs_29, sampler, signatures, speculators
from rollout_spec.vllm.mrv2.arrivals import TimedOutput
from rollout_spec.vllm.mrv2.host_drafts import SPECULATOR, HostDrafts
from rollout_spec.vllm.options import drafts_with_model, names_our_proposer
from rollout_spec.vllm.proposing.other_ranks import MRV2_DISPATCH
from rollout_spec.vllm.proposing.proposer import BatchProposer
from rollout_spec.vllm.step_notes import plan_of

_WARM_UP = Patch(
    name="vllm-mrv2-warm-up",
    reason="MRV2 warms up with requests that look like a user's: the drafter would learn texts "
    "and step times from them, and unnamed requests would have other keys with drafts than without",
    upstream="vllm/v1/worker/gpu/warmup.py, warmup_kernels",
    until="vLLM says which requests are its own",
)
# What engines apply to themselves.
ENGINE_PATCHES = (
    SPECULATOR, _WARM_UP, sampler.COUPLED, speculators.SHARED_NOISE, speculators.PASS_BY_PASS, graphs.GRAPHS,
)  # fmt: skip

# What we call, wrap or stand in for, beside the methods that our classes override.
_CALLED = (
    (model_runner, "init_speculator", ("vllm_config", "device")),
    (model_runner, MRV2_DISPATCH, ("cudagraph_manager", "num_reqs", "num_tokens")),
    (DraftTokensHandler, "set_draft_tokens", ("self", "input_batch", "draft_tokens")),
    (DraftTokensHandler, "get_draft_tokens", ("self",)),
)


# Before GPUModelRunner, 1: load_model, finish_requests
class KeyedRunner(GPUModelRunner):
    """It draws every token with noise of the request's key and the position, drafts or not."""

    keys: RequestKeys

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self.sampler is not None:  # else another pipeline rank samples
            sampler.couple(self.sampler, self.rejection_sampler, self.keys)

    def finish_requests(self, scheduler_output: Any) -> None:
        self.keys.remove(scheduler_output.finished_req_ids)
        super().finish_requests(scheduler_output)


# Before GPUModelRunner, 2: _dummy_sampler_run, initialize_kv_cache, _dummy_run, execute_model, add_requests,
# sample_tokens
class DraftingRunner(GPUModelRunner):
    """Its drafts come from the host."""

    host_drafts: HostDrafts  # gets the tokens of every step, and gives drafts
    rollout_spec_proposer: BatchProposer
    graphs_misfit: str | None = None  # why this vLLM has no full graphs for steps with drafts; None: it has

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> None:
        # vLLM profiles a row of logits for each request.
        super()._dummy_sampler_run(hidden_states)
        vllm_config, config = self.vllm_config, self.host_drafts.proposer.config
        self.sample(hidden_states, longest_step(self, most_logit_rows(vllm_config, config)), None)
        log_logit_memory(vllm_config, config, self.structured_outputs_worker.grammar_bitmask)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        with graphs.for_plain_steps(self):
            super().initialize_kv_cache(*args, **kwargs)
        put_before(WaitingTables, self.block_tables, SPECULATOR, host_drafts=self.host_drafts)
        graphs.add_graphs_for_drafts(self)

    def _dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        # Also what a data-parallel rank without requests runs. With K + 1 tokens a row, no rank's plain step
        # would have a full graph beside it.
        with graphs.for_plain_steps(self):
            return super()._dummy_run(*args, **kwargs)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        waits = plan_of(scheduler_output).room > 0
        with self.host_drafts.launching if waits else contextlib.nullcontext():
            # In one process it is the scheduler's own, which takes back the tokens for which there was room.
            return super().execute_model(copy.copy(scheduler_output), *args, **kwargs)

    def add_requests(self, scheduler_output: Any) -> None:
        self.host_drafts.begin_step(scheduler_output)
        super().add_requests(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        return self.host_drafts.report(super().sample_tokens(grammar_output))


# Before BlockTables: apply_staged_writes
class WaitingTables(BlockTables):
    """They are on their way while the runner waits for drafts. Next it reads how long its rows are."""

    host_drafts: HostDrafts

    def apply_staged_writes(self) -> None:
        super().apply_staged_writes()
        self.host_drafts.give_drafts()


# Before WorkerBase: compile_or_warm_up_model
class ForgettingWorker(WorkerBase):
    """It warms up with few requests, and nothing is learned from them."""

    def compile_or_warm_up_model(self) -> Any:
        runner = self.model_runner
        if not isinstance(runner, DraftingRunner):
            found = super().compile_or_warm_up_model()
        else:
            proposer, settings = runner.host_drafts.proposer, runner.scheduler_config
            # vLLM's requests have K drafts each: more rows of logits than any step of ours, or the profile.
            few = copy.copy(settings)
            most = most_logit_rows(runner.vllm_config, proposer.config) // runner.decode_query_len
            few.max_num_seqs = min(settings.max_num_seqs, max(1, most))
            with proposer.warming_up(), temporarily(runner, "scheduler_config", few):
                found = super().compile_or_warm_up_model()
        runner.keys.forget()
        return found


def longest_step(runner: Any, num_rows: int) -> Any:
    """A dummy batch of so many rows of logits, K + 1 for each of as many requests as that takes."""
    query_len = runner.decode_query_len
    ends = np.append(np.arange(0, num_rows, query_len, np.int32), np.int32(num_rows))
    numbers, num_reqs = torch.arange(num_rows, device=runner.device), len(ends) - 1
    batch = model_runner.InputBatch.make_dummy(num_reqs, num_reqs, runner.input_buffers)
    return dataclasses.replace(
        batch, num_draft_tokens=num_rows - num_reqs, num_draft_tokens_per_req=np.diff(ends) - 1,
        cu_num_logits=torch.from_numpy(ends).to(runner.device), cu_num_logits_np=ends,
        logits_indices=torch.zeros_like(numbers, dtype=batch.logits_indices.dtype),
        expanded_idx_mapping=(numbers // query_len).to(batch.expanded_idx_mapping.dtype),
        expanded_local_pos=(numbers % query_len).to(batch.expanded_local_pos.dtype),
    )  # fmt: skip


def check_runner() -> None:
    """Raise a PatchError if the installed MRV2 is not one that these classes were written for."""
    guard_all(SPECULATOR, _CALLED)
    guard_class(SPECULATOR, DraftingRunner, GPUModelRunner)
    guard_class(_WARM_UP, ForgettingWorker, WorkerBase)
    guard_class(sampler.COUPLED, KeyedRunner, GPUModelRunner)
    guard_class(SPECULATOR, WaitingTables, BlockTables)
    guard_class(SPECULATOR, TimedOutput, AsyncOutput)
    guard_class(SPECULATOR, speculators.SuffixSpeculator, BaseSpeculator)
    sampler.check_sampler()


def patch_init_speculator() -> None:
    """Let vLLM build our speculator, and its own as a drafter that is not alone."""
    check_runner()

    @wrap(model_runner, "init_speculator", SPECULATOR)
    def init_speculator_or_ours(init: Any, vllm_config: VllmConfig, device: Any, *others: Any) -> Any:
        if names_our_proposer(vllm_config):
            return speculators.SuffixSpeculator()
        if drafts_with_model(vllm_config):
            vllm_config = speculators.for_the_model(vllm_config)
        return init(vllm_config, device, *others)


def bind(worker: Any, config: SpecConfig) -> None:
    """Put our classes before a worker's and its runner's, as far as the engine asks for them; once."""
    check_runner()
    runner, speculator = worker.model_runner, worker.model_runner.speculator
    put_before(KeyedRunner, runner, sampler.COUPLED, keys=keys_of(runner))
    if config.enabled:
        host = HostDrafts(runner, config)
        put_before(DraftingRunner, runner, SPECULATOR, host_drafts=host, rollout_spec_proposer=host.proposer)
        runner.draft_tokens_handler = host.for_scheduler
        runner.graphs_misfit = patch_graphs_for_drafts(runner)
        if isinstance(speculator, speculators.SuffixSpeculator):
            speculator.host = host
        else:
            speculators.send_drafts_to_host(speculator, host)
    elif isinstance(speculator, DraftModelSpeculator):
        speculators.check_speculator()
        put_before(speculators.SharedNoiseModel, speculator, speculators.SHARED_NOISE)
    put_before(ForgettingWorker, worker, _WARM_UP)


def patch_graphs_for_drafts(runner: Any) -> str | None:
    """Let steps with drafts have full graphs, or return why they cannot with this vLLM."""
    try:
        graphs.check_graphs()
        (graphs_29 if signatures.HAS_QUERY_LENS else graphs_24).bind_graphs(runner)
    except PatchError as error:
        return str(error)
    return None
