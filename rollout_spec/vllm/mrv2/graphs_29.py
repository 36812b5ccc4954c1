"""Full graphs for steps with drafts on the MRV2 of vLLM 0.29 and later.

It has graphs for rows of up to `max_query_len` tokens, for a feature of its own. Ours are such graphs.
"""

import contextlib
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from rollout_spec.patches import put_before, wrap
from rollout_spec.vllm.mrv2.graphs import GRAPHS, DraftGraphs, for_plain_steps
from rollout_spec.vllm.proposing.other_ranks import MRV2_DISPATCH


# Before GPUModelRunner, 3: gather_batch_req_state, prepare_inputs
class GraphsRunner(GPUModelRunner):
    """It replays full graphs for steps with drafts, and none of these for a prompt's chunk: 0.29 would."""

    graph_fields = property(lambda self: {"max_query_len": self.decode_query_len})  # see `graphs.add_graphs`
    has_prompt = False  # the step that begins

    def gather_batch_req_state(self, scheduler_output: Any, dummy_run: bool) -> Any:
        # vLLM puts rows of `decode_query_len` tokens first. Some attention decodes rows of the first one's
        # length only, and takes others for prompts, with lengths that the host counts, which are ahead.
        is_plain = not scheduler_output.scheduled_spec_decode_tokens
        with for_plain_steps(self) if is_plain else contextlib.nullcontext():
            gathered = super().gather_batch_req_state(scheduler_output, dummy_run)
        state = gathered[0]  # None of no batch
        self.has_prompt = state is not None and state.has_prefill
        return gathered

    def prepare_inputs(
        self, scheduler_output: Any, batch_req_state: Any, batch_desc: Any, *others: Any
    ) -> Any:
        batch = super().prepare_inputs(scheduler_output, batch_req_state, batch_desc, *others)
        # Attention is planned as for the graph: FlashAttention 3's plan for one token a row has another
        # layout than the one for K + 1 that the graph was captured with (`is_causal` in its
        # `mha_fwd_get_scheduler_metadata`). A plain step takes such a graph where another rank has drafts.
        # A graph for any step is captured with one row of all its tokens.
        is_for_any = batch_desc.cg_mode == CUDAGraphMode.FULL and batch_desc.uniform_token_count is None
        if is_for_any or batch_desc.max_query_len is not None:
            batch.max_query_len = batch_desc.max_query_len or batch_desc.num_tokens
        return batch


def bind_graphs(runner: Any) -> None:
    """Let a runner capture and find graphs of ours. Raises PatchError."""
    put_before(GraphsRunner, runner, GRAPHS)

    @wrap(model_runner, MRV2_DISPATCH, GRAPHS)
    def dispatch_without_prompts(dispatch: Any, cudagraph_manager: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(cudagraph_manager, DraftGraphs) and cudagraph_manager.runner.has_prompt:
            kwargs["max_query_len"] = None
        return dispatch(cudagraph_manager, *args, **kwargs)
