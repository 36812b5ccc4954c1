"""vLLM's MRV2: a speculator for the suffix drafts, and a model's beside them. An adapter."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator, DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from rollout_spec.config import SpecConfig
from rollout_spec.patches import Patch, guard_all, record, replace_function
from rollout_spec.vllm.mrv2 import sampler
from rollout_spec.vllm.mrv2.draft_graphs import GRAPHS, HAS_GRAPHS, capture_steps_with_drafts
from rollout_spec.vllm.mrv2.host_drafts import HostDrafts
from rollout_spec.vllm.mrv2.model_drafter import SHARED_NOISE, draft_beside, for_the_model, share_noise
from rollout_spec.vllm.mrv2.plain_graphs import capture_plain_steps_mrv2
from rollout_spec.vllm.options import drafts_with_model, names_our_drafter
from rollout_spec.vllm.other_ranks import V2_NAME

_SPECULATOR = Patch(
    name="vllm-v2-speculator",
    reason="MRV2 builds the speculators that it names itself, and hands them neither requests nor "
    "sampled tokens",
    upstream="vllm/v1/worker/gpu/spec_decode/__init__.py, init_speculator",
    until="MRV2 takes a custom_class, and gives it the requests of its rows",
)
_WARM_UP = Patch(
    name="vllm-v2-warm-up",
    reason="MRV2 warms up with requests that look like a user's: the drafter would learn texts "
    "and step times from them, and unnamed requests would have other keys with drafts than without",
    upstream="vllm/v1/worker/gpu/warmup.py, warmup_kernels",
    until="vLLM says which requests are its own",
)
# What engines apply to themselves.
ENGINE_PATCHES = (_SPECULATOR, _WARM_UP, sampler.COUPLED, SHARED_NOISE) + (GRAPHS,) * HAS_GRAPHS

# Of what is called or replaced here, the parameters that are counted on.
_PARAMETERS = (
    (model_runner, "init_speculator", ("vllm_config", "device")),
    (model_runner, V2_NAME, ("cudagraph_manager", "num_reqs", "num_tokens")),
    (model_runner.GPUModelRunner, "execute_model", ("self", "scheduler_output")),
    (model_runner.GPUModelRunner, "add_requests", ("self", "scheduler_output")),
    (model_runner.GPUModelRunner, "update_requests", ("self", "scheduler_output")),
    (model_runner.GPUModelRunner, "postprocess_sampled",
     ("self", "idx_mapping", "sampled_tokens", "num_sampled", "num_rejected", "query_start_loc")),
    (model_runner.GPUModelRunner, "sample_tokens", ("self", "grammar_output")),
    (AsyncOutput, "get_output", ("self",)),
    (DraftTokensHandler, "set_draft_tokens", ("self", "input_batch", "draft_tokens")),
    (DraftTokensHandler, "get_draft_tokens", ("self",)),
    (BaseSpeculator, "init_cudagraph_manager", ("self", "cudagraph_mode")),
    (BaseSpeculator, "capture", ("self",)),
)  # fmt: skip


def check_runner() -> None:
    """See that the installed MRV2 is one that this module and its sampler were written for.

    Raises:
        PatchError: it is not.
    """
    guard_all(_SPECULATOR, _PARAMETERS)
    sampler.check_sampler()


def teach_speculator() -> None:
    """Let vLLM build a `SuffixSpeculator` where `speculative_config` names our proposer. Idempotent.

    Raises:
        PatchError: the installed MRV2 is not one that this was written for.
    """
    check_runner()
    init_speculator = model_runner.init_speculator

    @functools.wraps(init_speculator)
    def init_any_speculator(vllm_config: VllmConfig, device: torch.device, *others: Any) -> Any:
        if names_our_drafter(vllm_config):
            return SuffixSpeculator(vllm_config, device)
        if drafts_with_model(vllm_config):
            vllm_config = for_the_model(vllm_config)
        return init_speculator(vllm_config, device, *others)

    replace_function(model_runner, "init_speculator", init_any_speculator, patch=_SPECULATOR)


def bind(worker: Any, config: SpecConfig) -> None:
    """Connect a worker with the drafter, if the engine has one, and key its noise; once in its life."""
    check_runner()
    runner, host = worker.model_runner, None
    speculator = runner.speculator
    if isinstance(speculator, SuffixSpeculator):
        host = speculator.host
    elif drafts_with_model(runner.vllm_config):
        host = HostDrafts(runner.vllm_config, runner.device)
        draft_beside(speculator, host)
    elif config.coupled and isinstance(speculator, DraftModelSpeculator):
        share_noise(speculator)
    forget = []
    if host is not None:
        host.bind(runner)
        capture_plain_steps_mrv2(runner)
        capture_steps_with_drafts(runner)
        forget.append(host.proposer.start_afresh)
    if config.coupled:
        forget.append(sampler.couple(runner).forget)
    _forget_warm_up(worker, forget)


def _forget_warm_up(worker: Any, forget: list[Callable[[], None]]) -> None:
    warm_up = worker.compile_or_warm_up_model

    @functools.wraps(warm_up)
    def warm_up_and_forget() -> Any:
        found = warm_up()
        for each in forget:
            each()
        return found

    worker.compile_or_warm_up_model = warm_up_and_forget
    record(_WARM_UP)


class SuffixSpeculator(BaseSpeculator):
    """A speculator of MRV2 whose drafts are those of `SuffixProposer`."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self.host = HostDrafts(vllm_config, device)
        self.model = torch.nn.Module()  # of no layer: vLLM 0.24 prepares the communication of a speculator's

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        self.host.proposer.load_model()

    def capture(self, *_: Any, **__: Any) -> None:
        """There is no model to capture."""

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        *_: Any,
        dummy_run: bool = False,
        **__: Any,
    ) -> torch.Tensor:
        """Draft for the step's rows; what is returned is nothing, drafts come when the next step begins."""
        return self.host.no_drafts(input_batch) if dummy_run else self.host.draft(input_batch, num_sampled)
