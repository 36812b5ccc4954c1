"""What we change in vLLM's MRV1: classes that stand before the runner's own.

The line above a class says before which of vLLM's it stands, and with which methods. "GPUModelRunner, 2" runs
before "GPUModelRunner, 1", which its `super()` calls. A method reads in the order in which things happen:
what we do before, vLLM's own, what we do after. `sample_tokens` calls `_sample`, `_bookkeeping_sync`, which
waits for the tokens, and `propose_draft_token_ids`, which asks our drafter. A model that drafts is asked
before the wait, since its tokens stay on the device.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from rollout_spec.config import SpecConfig
from rollout_spec.drafting.drafts import NextStep, passes_for
from rollout_spec.patches import Patch, guard_class, put_before, record
from rollout_spec.verification.transfers import just_wait
from rollout_spec.vllm.both_runners import WITHOUT_GRAPHS, top_k_top_p
from rollout_spec.vllm.both_runners.cuda_graphs import has_plain_graphs
from rollout_spec.vllm.both_runners.logit_rows import log_logit_memory, most_logit_rows
from rollout_spec.vllm.mrv1 import sampler
from rollout_spec.vllm.mrv1.prompt_rows import in_prompt
from rollout_spec.vllm.mrv1.proposers import SHARED_NOISE, ModelBesideDrafter, ModelPasses, SharedNoiseModel
from rollout_spec.vllm.mrv1.sampler import RowSampling
from rollout_spec.vllm.options import has_model_drafter, names_our_proposer
from rollout_spec.vllm.proposing.proposer import BatchProposer
from rollout_spec.vllm.step_notes import Report, attach, plan_of

logger = init_logger(f"vllm.{__name__}")

PLAIN_STEPS = Patch(
    name="vllm-step-without-drafts",
    reason="vLLM 0.32 verifies steps without draft tokens too: that takes longer than a plain step, and with "
    "top_k fails on the CPU: max(): Expected reduction dim to be specified for input.numel() == 0",
    upstream="vllm/v1/worker/gpu_model_runner.py, GPUModelRunner._sample",
    until="a step without draft tokens is a plain step, as in 0.29",
)
PROMPTS = Patch(
    name="vllm-prompts-without-graphs",
    reason="MRV1 takes a full graph by a step's shape, and that of recurrent layers is of decoding rows: a "
    "step with a chunk of a prompt of the same shape would replay it with the slots of an earlier step",
    upstream="vllm/v1/worker/gpu_model_runner.py, GPUModelRunner._determine_batch_execution_and_padding",
    until="MRV1 knows a chunk of a prompt by more than its length",
)
WORK = Patch(
    name="vllm-note-work",
    reason="the gate learns what steps take from the tokens that they process, and a proposer is not told; "
    "vLLM profiles the memory of one draft token a row, and a step of ours may have more",
    upstream="vllm/v1/worker/gpu_model_runner.py, GPUModelRunner.execute_model, _dummy_sampler_run",
    until="vLLM hands a proposer the scheduler's output",
)
CATCH_UP = Patch(
    name="vllm-catch-up",
    reason="While a GPU works on a step, MRV1 waits for its tokens: the time to index text",
    upstream="vllm/v1/worker/gpu_model_runner.py, GPUModelRunner._bookkeeping_sync",
    until="vLLM tells a proposer that a step was launched",
)
LAST_TOKENS = Patch(
    name="vllm-rows-end-apart",
    reason="vLLM drops the drafts of the whole batch, and verifies K zeros for every row, while any row is "
    "within K tokens of max_model_len: ours stops each row there, and a model's positions vLLM clamps",
    upstream="vllm/v1/worker/gpu_model_runner.py, GPUModelRunner.effective_drafter_max_model_len",
    until="vLLM leaves a custom proposer its last tokens",
)
GRAPHS = Patch(
    name="vllm-plain-graphs",
    reason="with speculation, MRV1 captures full graphs for K draft tokens in every row, so plain steps and "
    "those of a drafter that chooses run piece by piece",
    upstream="vllm/v1/worker/gpu_model_runner.py, GPUModelRunner.uniform_decode_query_len; "
    "vllm/v1/cudagraph_dispatcher.py, CudagraphDispatcher",
    until="MRV1 captures them for plain steps too",
)
# What an engine's processes apply to themselves, as far as it asks for it.
ENGINE_PATCHES = (
    *sampler.SAMPLER_PATCHES, top_k_top_p.PATCH, PLAIN_STEPS, PROMPTS, WORK, CATCH_UP, SHARED_NOISE,
    LAST_TOKENS, GRAPHS,
)  # fmt: skip


# Before GPUModelRunner, 1: _sample
class PlainStepsRunner(GPUModelRunner):
    """A step in which no row has a draft is a plain step."""

    def _sample(self, logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
        has_drafts = spec_decode_metadata is not None and any(spec_decode_metadata.num_draft_tokens)
        return super()._sample(logits, spec_decode_metadata if has_drafts else None)


# Before GPUModelRunner, 2: execute_model, _dummy_sampler_run
class NotingRunner(GPUModelRunner):
    """It tells the proposer what a step processes, and profiles the logits of the longest step."""

    rollout_spec_proposer: BatchProposer

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self.rollout_spec_proposer.note_scheduled(scheduler_output)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> Any:
        # vLLM profiles a draft token for each row. So as many rows as make the longest step.
        config = self.rollout_spec_proposer.config
        log_logit_memory(self.vllm_config, config)
        num_rows = max(len(hidden_states), -(-most_logit_rows(self.vllm_config, config) // 2))
        return super()._dummy_sampler_run(hidden_states[np.arange(num_rows) % len(hidden_states)])


class FirstWait:
    """Where the host first waits for the device in a step. There it indexes text until the device is done."""

    def __init__(self, catch_up: Callable[[Callable[[], bool]], None]) -> None:
        self._catch_up = catch_up  # asks before each piece of text whether there is time
        self._is_to_come = False

    def begin_step(self) -> None:
        self._is_to_come = True

    def before_wait(self) -> None:
        """All that the host is about to wait for has been launched."""
        if self._is_to_come:
            self._is_to_come = False
            event = torch.cuda.Event()
            event.record()
            self._catch_up(lambda: not event.query())


# Before GPUModelRunner, 3: _sample, _bookkeeping_sync
class CatchingUpRunner(GPUModelRunner):
    """Its host indexes text while the device works: in coupled verification, if that waits, or here."""

    first_wait: FirstWait

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        self.first_wait.begin_step()
        return super()._sample(*args, **kwargs)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        self.first_wait.before_wait()
        return super()._bookkeeping_sync(*args, **kwargs)


# Before GPUModelRunner, 4: propose_draft_token_ids
class SharedNoiseRunner(GPUModelRunner):
    """Its model drafts with the noise of the target."""

    row_sampling: RowSampling

    def propose_draft_token_ids(self, scheduler_output: Any, sampled_token_ids: Any, *others: Any) -> Any:
        self.drafter.passes = ModelPasses(self.row_sampling, sampled_token_ids)
        return super().propose_draft_token_ids(scheduler_output, sampled_token_ids, *others)


# Before GPUModelRunner, 4: propose_draft_token_ids, sample_tokens, take_draft_token_ids
class TwoDraftersRunner(GPUModelRunner):
    """Its model drafts with that noise beside a `BatchProposer`, which has the last word."""

    row_sampling: RowSampling
    rollout_spec_proposer: BatchProposer
    drafts: DraftTokenIds | None = None  # for the next step; None: the step had no requests

    def propose_draft_token_ids(self, scheduler_output: Any, sampled_token_ids: Any, *others: Any) -> Any:
        """Nothing, for the scheduler: it gets what `take_draft_token_ids` gives."""
        proposer = self.rollout_spec_proposer
        num = plan_of(scheduler_output).num_drafted(proposer.most_model_tokens)
        self.drafter.passes = ModelPasses(self.row_sampling, sampled_token_ids, num)
        drafts = super().propose_draft_token_ids(scheduler_output, sampled_token_ids, *others)
        proposer.note_passes(passes_for(num))
        return [[] for _ in range(len(drafts))]

    def sample_tokens(self, grammar_output: Any) -> Any:
        self.drafter.passes = self.drafts = None
        output = super().sample_tokens(grammar_output)
        if getattr(output, "req_ids", None):
            batch, proposer, passes = self.input_batch, self.rollout_spec_proposer, self.drafter.passes
            of_model = passes.on_host() if passes is not None and proposer.drafts_here else None
            # A step for which a model has drafted nothing gets no drafts of the text either.
            next_step = NextStep(takes_drafts=of_model is not None)
            nums, work = np.array(list(map(len, output.sampled_token_ids)), np.int32), proposer.busiest_work
            rows = nums, batch.token_ids_cpu, batch.num_tokens_no_spec
            drafts = proposer.draft(*rows, work, of_model, next_step)
            self.drafts = DraftTokenIds(list(output.req_ids), drafts.lists())
            attach(output, Report(proposer.to_come.num_model_tokens))
        return output

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return self.drafts


# Before GPUModelRunner, 5: _determine_batch_execution_and_padding
class PromptsRunner(GPUModelRunner):
    """It runs prompts of a recurrent policy without full graphs."""

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> Any:
        if "force_uniform_decode" not in kwargs and in_prompt(self).any():  # a dummy run has it
            kwargs["force_uniform_decode"] = False
        return super()._determine_batch_execution_and_padding(*args, **kwargs)


def check_runner() -> None:
    """Raise a PatchError if the installed vLLM's MRV1 is not one that this was written for, models apart."""
    sampler.check_samplers()
    guard_class(PLAIN_STEPS, PlainStepsRunner, GPUModelRunner)
    guard_class(PROMPTS, PromptsRunner, GPUModelRunner)
    guard_class(WORK, NotingRunner, GPUModelRunner)
    guard_class(CATCH_UP, CatchingUpRunner, GPUModelRunner)


def check_model_drafter() -> None:
    """Raise a PatchError if the installed vLLM's MRV1 does not draft as these classes were written for."""
    guard_class(SHARED_NOISE, TwoDraftersRunner, GPUModelRunner)
    guard_class(SHARED_NOISE, ModelBesideDrafter, SpecDecodeBaseProposer)


def bind(worker: Any, config: SpecConfig) -> None:
    """Put our classes before a runner's, as far as the engine asks for them; before its model is loaded."""
    runner = worker.model_runner
    proposer = _proposer_for(runner, config) if config.enabled else None
    first_wait: FirstWait | None = None
    if proposer is not None and proposer.drafts_here and current_platform.is_cuda_alike():
        first_wait = FirstWait(proposer.catch_up)
    sampling = RowSampling(runner, first_wait.before_wait if first_wait else just_wait)
    sampling.install()
    if getattr(runner, "rejection_sampler", None) is not None and hasattr(runner, "_sample"):
        put_before(PlainStepsRunner, runner, PLAIN_STEPS)
    if proposer is not None:
        put_before(NotingRunner, runner, WORK, rollout_spec_proposer=proposer)
    if first_wait is not None:
        put_before(CatchingUpRunner, runner, CATCH_UP, first_wait=first_wait)
    if has_model_drafter(runner.vllm_config):
        bind_model_drafter(runner, sampling, proposer)
    if proposer is not None and not current_platform.is_out_of_tree():
        _capture_plain_steps(runner)


def _proposer_for(runner: Any, config: SpecConfig) -> BatchProposer:
    """Our proposer, in the place of the one that vLLM has made, unless that is a model's."""
    if runner.lora_config:  # a dummy step has adapters for max_num_seqs rows, each with one draft token
        most = min(config.max_draft_tokens, runner.vllm_config.scheduler_config.max_num_seqs)
        config = dataclasses.replace(config, max_draft_tokens=most)
    proposer = BatchProposer(runner, config)
    if names_our_proposer(runner.vllm_config):
        runner.drafter = proposer
    record(LAST_TOKENS)
    runner.effective_drafter_max_model_len = 1 << 31
    return proposer


def bind_model_drafter(runner: Any, sampling: RowSampling, proposer: BatchProposer | None) -> None:
    """Let a runner's model draft with the target's noise, and beside our drafter, if the engine has it."""
    check_model_drafter()
    if proposer is None:
        put_before(SharedNoiseRunner, runner, SHARED_NOISE, row_sampling=sampling)
        put_before(SharedNoiseModel, runner.drafter, SHARED_NOISE)
    else:
        put_before(TwoDraftersRunner, runner, SHARED_NOISE, row_sampling=sampling)
        put_before(ModelBesideDrafter, runner.drafter, SHARED_NOISE)


def _capture_plain_steps(runner: Any) -> None:
    """Capture full graphs for plain steps: see `both_runners.cuda_graphs`."""
    if runner.model_config.is_hybrid:
        put_before(PromptsRunner, runner, PROMPTS)
    if has_plain_graphs(runner):
        if runner.vllm_config.compilation_config.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY:
            logger.warning("rollout_spec: %s", WITHOUT_GRAPHS)
        record(GRAPHS)
        runner.uniform_decode_query_len = runner.cudagraph_dispatcher.uniform_decode_query_len = 1
