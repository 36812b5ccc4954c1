"""A simulated device, for vLLM's MRV2: launches of kernels return at once too.

Import it when the engine is made: MRV2's modules take what vLLM replaces in torch for CPUs.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from triton.runtime.interpreter import InterpretedFunction
from vllm.v1.worker.gpu import model_runner

from rollout_spec_lab.bench.host_device import Device, Event
from rollout_spec_lab.bench.recorded import Recorded

# What Triton takes on the host to launch a compiled kernel: vLLM's pull request 34838 measured 8.7 us with
# kernels of MRV2 on a GB200, tritonbench's 1002 about 11.
LAUNCH_SECONDS = 10e-6


class DeviceV2(Device):
    """Stands in for MRV2's kernels."""

    def install(self) -> None:
        runner = self._runner
        runner.model.forward = self._forward
        runner.model.compute_logits = lambda hidden: hidden
        self.recorded = Recorded(runner, self.clock.run)
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


def _zeros_of(prepare: Callable[..., Any]) -> Callable[..., Any]:
    def prepare_zeros(*args: Any, **kwargs: Any) -> Any:
        found = prepare(*args, **kwargs)
        for tensor in found if isinstance(found, tuple) else (found,):
            tensor.zero_()
        return found

    return prepare_zeros
