"""Full graphs for steps with drafts on the MRV2 of vLLM 0.24, which goes with it.

It knows graphs by their sizes, and by the number of tokens that each row has, if that is one for all. Graphs
of ours have VARYING there, and so have the steps that may take them: those with drafts and without a prompt.
Data-parallel ranks agree on that number as on any other. If one has drafts and one has none, both go piece by
piece.
"""

import dataclasses
from typing import Any

import numpy as np
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.interface import ModelState

from rollout_spec.patches import put_before, temporarily, wrap
from rollout_spec.vllm.mrv2.graphs import GRAPHS, DraftGraphs
from rollout_spec.vllm.proposing.other_ranks import MRV2_DISPATCH

VARYING = -1


# Before ModelState: prepare_attn
class PlanningState(ModelState):
    """It plans attention for rows of up to K + 1 tokens, where a graph is for these."""

    longest_query_len: int  # K + 1
    is_captured = False  # such a graph

    def prepare_attn(self, input_batch: Any, *others: Any, **more: Any) -> Any:
        if self.is_captured or hasattr(input_batch, "max_query_len"):  # vLLM reads the largest of these only
            nums = np.array([self.longest_query_len])
            input_batch = dataclasses.replace(input_batch, num_scheduled_tokens=nums)
        return super().prepare_attn(input_batch, *others, **more)


# Before GPUModelRunner, 3: initialize_kv_cache, update_requests, prepare_inputs
class GraphsRunner(GPUModelRunner):
    """Its steps with drafts may take these graphs."""

    graph_fields = property(lambda self: {"uniform_token_count": VARYING})  # see `graphs.add_graphs`
    taken_in: Any = None  # the next step's SchedulerOutput, which gets its drafts later; None: a dummy run

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)
        put_before(PlanningState, self.model_state, GRAPHS, longest_query_len=self.decode_query_len)

    def update_requests(self, scheduler_output: Any) -> None:
        super().update_requests(scheduler_output)
        self.taken_in = scheduler_output

    def prepare_inputs(self, scheduler_output: Any, batch_desc: Any) -> Any:
        batch = super().prepare_inputs(scheduler_output, batch_desc)
        if batch_desc.uniform_token_count == VARYING:
            batch.max_query_len = self.decode_query_len
        return batch


def _varies(runner: GraphsRunner) -> bool:
    """Whether the step that begins has drafts, and no prompt."""
    step, runner.taken_in = runner.taken_in, None
    if step is None or not step.scheduled_spec_decode_tokens:
        return False
    states = runner.req_states
    rows = [states.req_id_to_index[name] for name in step.num_scheduled_tokens]
    return not (states.num_computed_prefill_tokens[rows] < states.prefill_len.np[rows]).any()


def bind_graphs(runner: Any) -> None:
    """Let a runner capture and find graphs of ours. Raises PatchError."""
    put_before(GraphsRunner, runner, GRAPHS)

    @wrap(model_runner, MRV2_DISPATCH, GRAPHS)
    def dispatch_varying(
        dispatch: Any, cudagraph_manager: Any, num_reqs: int, num_tokens: int, uniform_token_count: Any,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        if isinstance(cudagraph_manager, DraftGraphs) and _varies(cudagraph_manager.runner):
            uniform_token_count = VARYING
        return dispatch(cudagraph_manager, num_reqs, num_tokens, uniform_token_count, *args, **kwargs)

    @wrap(CudaGraphManager, "capture", GRAPHS)
    def capture_planned(capture: Any, self: Any, create_forward_fn: Any, *args: Any, **kwargs: Any) -> Any:
        def create_planned(desc: Any, warmup: bool) -> Any:
            if desc.uniform_token_count != VARYING:
                return create_forward_fn(desc, warmup)
            with temporarily(self.runner.model_state, "is_captured", True):
                return create_forward_fn(desc, warmup)

        return capture(self, create_planned, *args, **kwargs)
