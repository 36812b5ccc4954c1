"""Full graphs for steps with drafts on the MRV2 of vLLM 0.24, which goes with it.

It knows graphs by their sizes, and by the number of tokens that each row has, if that is one for all. Graphs
of ours have VARYING there, and so have the steps that may take them: those with drafts and without a prompt.
Data-parallel ranks agree on that number as on any other. If one has drafts and one has none, both go piece by
piece.
"""

import dataclasses
import weakref
from typing import Any

import numpy as np
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.interface import ModelState

from rollout_spec.patches import Patch, temporarily, wrap
from rollout_spec.vllm.proposing.other_ranks import MRV2_DISPATCH

VARYING = -1


# Before GPUModelRunner, 3: update_requests, prepare_inputs
class VaryingRunner(GPUModelRunner):
    """Its steps with drafts may take these graphs."""

    def update_requests(self, scheduler_output: Any) -> None:
        super().update_requests(scheduler_output)
        _steps[self.cudagraph_manager] = self.req_states, scheduler_output  # which may get its drafts later

    def prepare_inputs(self, scheduler_output: Any, batch_desc: Any) -> Any:
        batch = super().prepare_inputs(scheduler_output, batch_desc)
        if batch_desc.uniform_token_count == VARYING:
            batch.max_query_len = self.decode_query_len
        return batch


def _varies(states: Any, scheduler_output: Any) -> bool:
    """Whether a step has drafts, and no prompt."""
    if not scheduler_output.scheduled_spec_decode_tokens:
        return False
    rows = [states.req_id_to_index[name] for name in scheduler_output.num_scheduled_tokens]
    return not (states.num_computed_prefill_tokens[rows] < states.prefill_len.np[rows]).any()


# Before ModelState, 1: prepare_attn
class PlanningState(ModelState):
    """It plans attention for rows of up to K + 1 tokens, where a graph is for these."""

    longest_query_len: int  # K + 1
    is_captured = False  # such a graph

    def prepare_attn(self, input_batch: Any, *others: Any, **more: Any) -> Any:
        if self.is_captured or hasattr(input_batch, "max_query_len"):  # vLLM reads the largest of these only
            nums = np.array([self.longest_query_len])
            input_batch = dataclasses.replace(input_batch, num_scheduled_tokens=nums)
        return super().prepare_attn(input_batch, *others, **more)


# By a runner's manager, which is all that vLLM hands to what is patched below: what plans its attention; and
# the step that it has taken in, with the states of its requests.
planning: weakref.WeakKeyDictionary[Any, PlanningState] = weakref.WeakKeyDictionary()
_steps: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()


def patch_dispatch(patch: Patch) -> None:
    """Let the manager of a runner capture and find graphs of ours."""

    @wrap(model_runner, MRV2_DISPATCH, patch)
    def dispatch_varying(
        dispatch: Any, cudagraph_manager: Any, num_reqs: int, num_tokens: int, uniform_token_count: Any,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        if cudagraph_manager in _steps and _varies(*_steps.pop(cudagraph_manager)):  # not in a dummy run
            uniform_token_count = VARYING
        return dispatch(cudagraph_manager, num_reqs, num_tokens, uniform_token_count, *args, **kwargs)

    @wrap(CudaGraphManager, "capture", patch)
    def capture_planned(capture: Any, self: Any, create_forward_fn: Any, *args: Any, **kwargs: Any) -> Any:
        def create_planned(desc: Any, warmup: bool) -> Any:
            if desc.uniform_token_count != VARYING:
                return create_forward_fn(desc, warmup)
            with temporarily(planning[self], "is_captured", True):
                return create_forward_fn(desc, warmup)

        return capture(self, create_planned, *args, **kwargs)
