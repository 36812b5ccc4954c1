"""Full CUDA graphs: for plain steps as without a drafter, and for steps with drafts where attention allows.

`both_runners.cuda_graphs` says why vLLM's own do not fit. Steps with drafts get graphs for 1 to K + 1 tokens
in each row. How vLLM finds them depends on its version: `graphs_24` and `graphs_29` each have a
`GraphsRunner`, and `bind_graphs`, which puts it before a runner. Graphs of plain steps are tried first: in
one for K + 1 tokens a row, attention takes kernels that are slower for one token (Triton's without a split of
the KV cache, which 0.33's have up to 8 tokens a row; FlashAttention 3's with tiles of 128 rows, not 64).
"""

import contextlib
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from rollout_spec.patches import Patch, guard_parameters, put_before, temporarily
from rollout_spec.vllm.both_runners import WITHOUT_GRAPHS
from rollout_spec.vllm.both_runners.cuda_graphs import has_plain_graphs

logger = init_logger(f"vllm.{__name__}")

GRAPHS = Patch(
    name="vllm-mrv2-graphs-for-drafts",
    reason="steps with drafts run piece by piece, because vLLM captures full graphs for rows of different "
    "lengths with its adaptive verification only; and 0.29 would replay one for a prompt's chunk "
    "of at most K + 1 tokens",
    upstream="vllm/v1/worker/gpu/cudagraph_utils.py, CudaGraphManager; vllm/v1/worker/gpu/model_runner.py, "
    "GPUModelRunner.execute_model",
    until="vLLM captures them for every drafter",
)


# Before CudaGraphManager
class DraftGraphs(CudaGraphManager):
    """The graphs of a runner. They know it: where vLLM asks for a graph it names the manager alone."""

    runner: Any  # a `GraphsRunner`


def check_graphs() -> None:
    """Raise a PatchError if the installed vLLM captures and chooses graphs in another way."""
    fields = "cg_mode", "num_tokens", "num_reqs", "uniform_token_count"
    guard_parameters(GRAPHS, cudagraph_utils, "BatchExecutionDescriptor", fields)


def for_plain_steps(runner: Any) -> contextlib.AbstractContextManager[None]:
    """In here a runner has the full graphs of plain steps; outside, `decode_query_len` has other uses."""
    return temporarily(runner, "decode_query_len", 1 if has_plain_graphs(runner) else runner.decode_query_len)


def add_graphs_for_drafts(runner: Any) -> None:
    """Let a runner capture full graphs for steps with drafts too, or say why it has none."""
    manager = runner.cudagraph_manager
    if runner.graphs_misfit is None:
        put_before(DraftGraphs, manager, GRAPHS, runner=runner)
    # There are no full graphs, or the same for all steps; or Mamba 2's, with K draft tokens in every row.
    if not manager.cudagraph_mode.separate_routine() or manager.decode_query_len > 1:
        return
    why_no_graphs = runner.graphs_misfit or _why_no_graphs(runner)
    if why_no_graphs is None:
        num = add_graphs(manager, runner.decode_query_len, runner.graph_fields)
        logger.info_once(f"rollout_spec: {num} full CUDA graphs more, for steps with drafts")
        return
    logger.info_once(f"rollout_spec: steps with drafts have no full CUDA graphs: {why_no_graphs}")
    if manager.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY:
        logger.warning_once(f"rollout_spec: {WITHOUT_GRAPHS}")


def _why_no_graphs(runner: Any) -> str | None:
    """Why a runner is to have none. With LoRA, pipeline or prefill context parallelism it does not draft."""
    if runner.vllm_config.parallel_config.decode_context_parallel_size > 1:
        return "with context parallelism, attention reads the rows' lengths on the host"
    if isinstance(runner.speculator, DraftModelSpeculator):
        return "the model that drafts takes the step's attention metadata, and has no such graphs"
    # vLLM 0.32 allows more for its adaptive verification, and some backends ask whether that is on.
    state, groups = runner.model_state, [group for groups in runner.attn_groups for group in groups]
    asked = [
        (group.get_metadata_builder(0).get_cudagraph_support(runner.vllm_config, group.kv_cache_spec),
         group.backend.__name__)
        for group in groups
    ]  # fmt: skip
    if hasattr(state, "get_additional_cg_support"):  # from 0.29 on
        asked.append(state.get_additional_cg_support())
    refusing = [name for support, name in asked if support != AttentionCGSupport.ALWAYS]
    return f"{refusing[0]} does not allow rows of different lengths in one graph" if refusing else None


def add_graphs(manager: Any, query_len: int, fields: dict[str, int]) -> int:
    """Let a `CudaGraphManager` capture graphs for 1 to `query_len` tokens a row too. Returns how many.

    fields: by which a `BatchExecutionDescriptor` says that a graph is one of these.
    """
    most_reqs, captured = manager.max_num_reqs, manager._capture_descs.setdefault(CUDAGraphMode.FULL, [])
    num, last, sizes = 0, 0, manager.compilation_config.cudagraph_capture_sizes
    for size in few_sizes(sorted(size for size in sizes if 1 < size <= most_reqs * query_len)):
        desc = BatchExecutionDescriptor(CUDAGraphMode.FULL, size, min(size, most_reqs), **fields)
        captured.append(desc)
        for key in ((num_tokens, 0) for num_tokens in range(last + 1, size + 1)):
            # Full ones first: that is how vLLM tries them.
            both = [*manager._candidates.get(key, []), desc]
            manager._candidates[key] = sorted(both, key=lambda desc: desc.cg_mode != CUDAGraphMode.FULL)
        num, last = num + 1, size
    captured.sort(key=lambda desc: -desc.num_tokens)  # that is how vLLM captures them
    return num


def few_sizes(sizes: list[int]) -> list[int]:
    """Of these rising sizes those whose padding costs little, up to the largest.

    From one to the next a step may double, since each token asks for experts of its own in a mixture of them,
    and take a tenth longer. On an H100 a step computes 300 tokens in the time in which it reads the weights.
    """
    chosen = [1]
    while sizes and chosen[-1] < sizes[-1]:
        last = chosen[-1]
        most = min(2 * last, 1.1 * (last + 1 + 300) - 300)
        larger = [size for size in sizes if size > last]
        chosen.append(max((size for size in larger if size <= most), default=larger[0]))
    return chosen[1:]
