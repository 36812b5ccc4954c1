"""What we change in vLLM's MRV2: classes that stand before the runner's own, and before its worker's.

A method reads in the order in which things happen: what we do before, vLLM's own, what we do after. In a step
vLLM calls `execute_model`, in it `finish_requests` of `KeyedRunner`, `add_requests` and `update_requests` of
`DraftingRunner`, `apply_staged_writes` of `WaitingTables`, `gather_batch_req_state` and `prepare_inputs` of
`GraphsRunner`; then `sample_tokens`, in it the speculator's `propose`, and at its end `HostDrafts.report`.
"""

import contextlib
import copy
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator, DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler
from vllm.v1.worker.worker_base import WorkerBase

from rollout_spec.config import SpecConfig
from rollout_spec.patches import Patch, PatchError, guard_all, guard_class, put_before, wrap
from rollout_spec.vllm.keys import RequestKeys, keys_of
from rollout_spec.vllm.mrv2 import graphs, sampler, speculators
from rollout_spec.vllm.mrv2.arrivals import TimedOutput
from rollout_spec.vllm.mrv2.host_drafts import SPECULATOR, HostDrafts
from rollout_spec.vllm.mrv2.versions import PASS_BY_PASS
from rollout_spec.vllm.options import drafts_with_model, names_our_drafter
from rollout_spec.vllm.other_ranks import V2_NAME
from rollout_spec.vllm.step_notes import plan_of

_WARM_UP = Patch(
    name="vllm-v2-warm-up",
    reason="MRV2 warms up with requests that look like a user's: the drafter would learn texts "
    "and step times from them, and unnamed requests would have other keys with drafts than without",
    upstream="vllm/v1/worker/gpu/warmup.py, warmup_kernels",
    until="vLLM says which requests are its own",
)
# What engines apply to themselves.
ENGINE_PATCHES = (
    SPECULATOR, _WARM_UP, sampler.COUPLED, speculators.SHARED_NOISE, PASS_BY_PASS,
    *([graphs.GRAPHS] if graphs.HAS_GRAPHS else []),
)  # fmt: skip

# What we call, wrap or stand in for, beside the methods that our classes override.
_CALLED = (
    (model_runner, "init_speculator", ("vllm_config", "device")),
    (model_runner, V2_NAME, ("cudagraph_manager", "num_reqs", "num_tokens")),
    (DraftTokensHandler, "set_draft_tokens", ("self", "input_batch", "draft_tokens")),
    (DraftTokensHandler, "get_draft_tokens", ("self",)),
)


class KeyedRunner(GPUModelRunner):
    """It draws every token with noise of the request's key and the position, drafts or not."""

    keys: RequestKeys

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self.sampler is not None:  # else another pipeline rank samples
            sampler.couple(self.sampler, self.rejection_sampler, self.keys)

    def finish_requests(self, scheduler_output: Any) -> None:
        self.keys.end(scheduler_output.finished_req_ids)
        super().finish_requests(scheduler_output)


class DraftingRunner(GPUModelRunner):
    """Its drafts come from the host."""

    host_drafts: HostDrafts  # gets the tokens of every step, and gives drafts
    why_no_graphs: str | None = None  # with this vLLM, for steps with drafts; None: they can have full ones

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        with graphs.for_plain_steps(self):
            super().initialize_kv_cache(*args, **kwargs)
        self.block_tables.host_drafts = self.host_drafts
        put_before(WaitingTables, self.block_tables, SPECULATOR)
        graphs.add_graphs_for_drafts(self, self.why_no_graphs)

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

    def update_requests(self, scheduler_output: Any) -> None:
        super().update_requests(scheduler_output)
        self.host_drafts.step = scheduler_output

    def sample_tokens(self, grammar_output: Any) -> Any:
        return self.host_drafts.report(super().sample_tokens(grammar_output))


class WaitingTables(BlockTables):
    """They are on their way while the runner waits for drafts. Next it reads how long its rows are."""

    host_drafts: HostDrafts

    def apply_staged_writes(self) -> None:
        super().apply_staged_writes()
        self.host_drafts.give_drafts()


class GraphsRunner(GPUModelRunner):
    """It replays full graphs for steps with drafts, from vLLM 0.29 on."""

    def gather_batch_req_state(self, scheduler_output: Any, dummy_run: bool) -> Any:
        # vLLM puts rows of `decode_query_len` tokens first. Some attention decodes rows of the first one's
        # length only, and takes others for prompts, with lengths that the host counts, which are ahead.
        is_plain = not scheduler_output.scheduled_spec_decode_tokens
        with graphs.for_plain_steps(self) if is_plain else contextlib.nullcontext():
            gathered = super().gather_batch_req_state(scheduler_output, dummy_run)
        if self.cudagraph_manager is not None:
            state = gathered[0]  # None of no batch
            self.cudagraph_manager.has_prompt = state is not None and state.has_prefill
        return gathered

    def prepare_inputs(
        self, scheduler_output: Any, batch_req_state: Any, batch_desc: Any, *others: Any
    ) -> Any:
        batch = super().prepare_inputs(scheduler_output, batch_req_state, batch_desc, *others)
        # Attention is planned as for the graph: FlashAttention 3's plan for one token a row has another
        # layout than the one for K + 1 that the graph was captured with (`is_causal` in its
        # `mha_fwd_get_scheduler_metadata`). A plain step takes such a graph where another rank has drafts.
        if batch_desc.max_query_len is not None:
            batch.max_query_len = batch_desc.max_query_len
        return batch


class ForgettingWorker(WorkerBase):
    """It forgets what it has learned from the requests with which vLLM warms up."""

    def compile_or_warm_up_model(self) -> Any:
        found = super().compile_or_warm_up_model()
        runner = self.model_runner
        if isinstance(runner, DraftingRunner):
            runner.host_drafts.proposer.start_afresh()
        runner.keys.forget()
        return found


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


def teach_speculator() -> None:
    """Let vLLM build our speculator, and its own as a drafter that is not alone."""
    check_runner()

    @wrap(model_runner, "init_speculator", SPECULATOR)
    def init_speculator_or_ours(init: Any, vllm_config: VllmConfig, device: Any, *others: Any) -> Any:
        if names_our_drafter(vllm_config):
            return speculators.SuffixSpeculator()
        if drafts_with_model(vllm_config):
            vllm_config = speculators.for_the_model(vllm_config)
        return init(vllm_config, device, *others)


def bind(worker: Any, config: SpecConfig) -> None:
    """Put our classes before a worker's and its runner's, as far as the engine asks for them; once."""
    check_runner()
    runner = worker.model_runner
    speculator = runner.speculator
    runner.keys = keys_of(runner)
    put_before(KeyedRunner, runner, sampler.COUPLED)
    if config.enabled:
        runner.host_drafts = host = HostDrafts(runner, config)
        put_before(DraftingRunner, runner, SPECULATOR)
        runner.why_no_graphs = give_graphs_or_say_why_not(runner)
        if isinstance(speculator, speculators.SuffixSpeculator):
            speculator.host = host
        else:
            speculators.draft_beside(speculator, host)
    elif isinstance(speculator, DraftModelSpeculator):
        speculators.check_speculator()
        put_before(speculators.SharedNoise, speculator, speculators.SHARED_NOISE)
    put_before(ForgettingWorker, worker, _WARM_UP)


def give_graphs_or_say_why_not(runner: Any) -> str | None:
    """Let steps with drafts have full graphs, or return why they cannot with this vLLM."""
    if not graphs.HAS_GRAPHS:
        return "this vLLM captures none for rows of different lengths"
    try:
        graphs.check_graphs()
        put_before(GraphsRunner, runner, graphs.GRAPHS)
        graphs.keep_prompts_out()
    except PatchError as error:
        return str(error)
    return None
