"""Full CUDA graphs: for plain steps as without a drafter, and for steps with drafts where attention allows.

`cuda_graphs` says why vLLM's own do not fit. Steps with drafts get graphs for 1 to K + 1 tokens in each row.
vLLM 0.29 and later capture such graphs (`varlen_decode`) for a feature of their own. Those of plain steps are
tried first: in a graph for K + 1 tokens a row, attention takes kernels that are slower for one token
(Triton's without a split of the KV cache, which 0.33's have up to 8 tokens a row; FlashAttention 3's with
tiles of 128 rows, not 64).
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu import attn_utils, model_runner
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from rollout_spec.patches import Patch, guard_parameters, misfit, wrap
from rollout_spec.vllm import refusals
from rollout_spec.vllm.cuda_graphs import has_plain_graphs
from rollout_spec.vllm.other_ranks import V2_NAME

logger = init_logger(f"vllm.{__name__}")

GRAPHS = Patch(
    name="vllm-v2-graphs-for-drafts",
    reason="steps with drafts run piece by piece, because vLLM captures full graphs for rows of different "
    "lengths with its adaptive verification only; and 0.29 would replay one for a prompt's chunk "
    "of at most K + 1 tokens",
    upstream="vllm/v1/worker/gpu/cudagraph_utils.py, CudaGraphManager; vllm/v1/worker/gpu/model_runner.py, "
    "GPUModelRunner.execute_model",
    until="vLLM captures them for every drafter",
)
HAS_GRAPHS = "varlen_decode" in inspect.signature(CudaGraphManager.__init__).parameters


def check_graphs() -> None:
    """Raise a PatchError if the installed vLLM captures and chooses graphs in another way."""
    guard_parameters(GRAPHS, CudaGraphManager, "_init_candidates", ("self",))
    if "max_query_len" not in inspect.signature(getattr(model_runner, V2_NAME)).parameters:
        raise misfit(GRAPHS, f"{V2_NAME} takes no max_query_len")


@contextlib.contextmanager
def for_plain_steps(runner: Any) -> Iterator[None]:
    """In here a runner has the full graphs of plain steps; outside, `decode_query_len` has other uses."""
    decode_query_len = runner.decode_query_len
    if has_plain_graphs(runner):
        runner.decode_query_len = 1
    try:
        yield
    finally:
        runner.decode_query_len = decode_query_len


def add_graphs_for_drafts(runner: Any, why_never: str | None) -> None:
    """Let a runner capture full graphs for steps with drafts too, or say why it has none.

    Args:
        why_never: what speaks against them whatever the runner's configuration is.
    """
    manager = runner.cudagraph_manager
    if not manager.cudagraph_mode.separate_routine():
        return  # there are no full graphs, or the same for all steps
    if manager.decode_query_len > 1:
        return  # Mamba 2's graphs have K draft tokens in every row
    why_not = why_never or _refusal(runner)
    if why_not is None:
        num = add_graphs(manager, runner.decode_query_len)
        logger.info_once(f"rollout_spec: {num} full CUDA graphs more, for steps with drafts")
        return
    logger.info_once(f"rollout_spec: steps with drafts have no full CUDA graphs: {why_not}")
    if manager.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY:
        logger.warning_once(f"rollout_spec: {refusals.WITHOUT_GRAPHS}")


def _refusal(runner: Any) -> str | None:
    """Why a runner is to have no such graphs. With LoRA or pipeline parallelism it has no drafter of ours."""
    parallel = runner.vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "with context parallelism, attention reads the rows' lengths on the host"
    if isinstance(runner.speculator, DraftModelSpeculator):
        return "the model that drafts takes the step's attention metadata, and has no such graphs"
    # vLLM 0.32 allows more for its adaptive verification, and some backends ask whether that is on.
    found = attn_utils.get_attn_cg_support(runner.attn_groups, runner.vllm_config)
    found = found.narrow(*runner.model_state.get_additional_cg_support())
    if found.min_cg_support == AttentionCGSupport.ALWAYS:
        return None
    return f"{found.min_cg_attn_backend} does not allow rows of different lengths in one graph"


def add_graphs(manager: Any, query_len: int) -> int:
    """Let a `CudaGraphManager` capture graphs for 1 to `query_len` tokens a row too. Returns how many."""
    before, plain, plain_len = manager._capture_descs, manager._candidates, manager.decode_query_len
    manager._capture_descs, manager._candidates = {}, {}
    manager.decode_query_len, manager.varlen_decode = query_len, True
    manager._init_candidates()
    manager.decode_query_len, manager.varlen_decode = plain_len, False
    for mode, descs in manager._capture_descs.items():  # the largest first: that is how vLLM captures them
        both = dict.fromkeys([*before.get(mode, []), *descs])
        manager._capture_descs[mode] = sorted(both, key=lambda desc: -desc.num_tokens)
    for key, descs in manager._candidates.items():  # full ones first: that is how vLLM tries them
        both = dict.fromkeys([*plain.get(key, []), *descs])
        manager._candidates[key] = sorted(both, key=lambda desc: desc.cg_mode != CUDAGraphMode.FULL)
    return sum(map(len, manager._capture_descs.values())) - sum(map(len, before.values()))


def keep_prompts_out() -> None:
    """Let no batch with a prompt's chunk take these graphs: vLLM 0.29 would."""

    @wrap(model_runner, V2_NAME, GRAPHS)
    def dispatch_without_prompts(dispatch: Any, cudagraph_manager: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(cudagraph_manager, "has_prompt", False):  # set by `GraphsRunner`
            kwargs["max_query_len"] = None
        return dispatch(cudagraph_manager, *args, **kwargs)
