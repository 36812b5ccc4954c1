"""A device made of time, for vLLM's model runner V2: launches of kernels return at once too.

Import it when the engine is made: V2's modules take what vLLM replaces in torch for CPUs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from triton.runtime.interpreter import InterpretedFunction
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID
from vllm.v1.worker.gpu import model_runner

from rollout_spec_lab.bench.host_device import Clock, Device, Event, verified

# What Triton takes on the host to launch a compiled kernel: vLLM's pull request 34838 measured 8.7 us with
# kernels of V2 on a GB200, tritonbench's 1002 about 11.
LAUNCH_SECONDS = 10e-6


class DeviceV2(Device):
    """In the place of V2's kernels."""

    def __init__(self, runner: Any, clock: Clock) -> None:
        super().__init__(runner, clock)
        self._levels: defaultdict[str, int] = defaultdict(int)  # tokens that each request has got

    def install(self) -> None:
        runner = self._runner
        runner.update_requests = self._noting(runner.update_requests)  # behind it a step has its drafts
        runner.model.forward = self._forward
        runner.model.compute_logits = lambda hidden: hidden
        runner.sample = self._recorded_behind(runner.sample)
        InterpretedFunction.run = self._launch
        # Where the host waits for a step's tokens.
        torch.cuda.Event = torch.Event = lambda *_, **__: Event(self.clock)
        torch.cuda.stream = lambda stream: stream  # as vLLM itself replaces it from 0.29 on
        # Each attention backend makes its own; those of CPUs read what kernels have left.
        for group in itertools.chain.from_iterable(runner.attn_groups):
            group.get_metadata_builder(0).build = lambda *_, **__: None
        # What kernels say here is used to index.
        for name in ("combine_sampled_and_draft_tokens", "expand_idx_mapping"):
            setattr(model_runner, name, _zeros_of(getattr(model_runner, name)))

    def _launch(self, *_: Any, **__: Any) -> None:
        self.clock.launch_s += LAUNCH_SECONDS

    def _recorded_behind(self, sample: Callable[..., Any]) -> Callable[..., Any]:
        def sample_recorded(hidden_states: torch.Tensor, batch: Any, *others: Any) -> Any:
            output, *_ = sample(hidden_states, batch, *others)  # what the host does for it, and no tokens
            tokens, num_sampled, num_rejected = self.clock.run(self._sampled, batch)
            output = dataclasses.replace(
                output, sampled_token_ids=tokens, num_sampled=num_sampled, num_rejected=num_rejected
            )
            return output, num_sampled, num_rejected

        return sample_recorded

    def _sampled(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As V2's samplers: int64 [rows, 1 or K + 1], tokens; int32 [rows], how many, and drafts rejected."""
        assert self.recording is not None
        drafts = [self._step.scheduled_spec_decode_tokens.get(name, ()) for name in batch.req_ids]
        nums_drafts = np.array(list(map(len, drafts)))
        width = 1 + self._runner.num_speculative_steps * bool(nums_drafts.any())
        levels = np.array([self._levels[name] for name in batch.req_ids])
        recorded = self.recording.after(batch.req_ids, levels, width)
        tokens = verified(recorded, np.fromiter(itertools.chain(*drafts), np.int32), nums_drafts)
        ends = batch.num_computed_tokens_np + batch.num_scheduled_tokens
        tokens[ends < batch.prefill_len_np] = PLACEHOLDER_TOKEN_ID  # rows with a part of their prompt
        nums = (tokens != PLACEHOLDER_TOKEN_ID).sum(axis=1)
        for name, num in zip(batch.req_ids, nums.tolist(), strict=True):
            self._levels[name] += num
        rejected = np.where(nums, nums_drafts + 1 - nums, 0)
        return (
            torch.from_numpy(tokens.astype(np.int64)),
            torch.from_numpy(nums.astype(np.int32)),
            torch.from_numpy(rejected.astype(np.int32)),
        )


def _zeros_of(prepare: Callable[..., Any]) -> Callable[..., Any]:
    def prepare_zeros(*args: Any, **kwargs: Any) -> Any:
        found = prepare(*args, **kwargs)
        for tensor in found if isinstance(found, tuple) else (found,):
            tensor.zero_()
        return found

    return prepare_zeros
