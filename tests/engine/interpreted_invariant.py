"""vLLM's batch-invariant kernels, interpreted: a row alone beside the same row in a pass over a draft.

Attention is Triton's; FlashAttention and cuBLASLt are no kernels that a CPU can run.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

import torch

NUM_ROWS = 6  # a row's token and five draft tokens
HIDDEN, WIDE, VOCAB = 192, 160, 700


def main() -> dict[str, bool]:
    torch.manual_seed(0)
    package = next(name for name in ("determinism", "layers") if is_there(f"{name}.batch_invariant"))
    kernels = importlib.import_module(f"vllm.model_executor.{package}.batch_invariant")
    kernels.num_compute_units = lambda device: 4
    rows, weight = torch.randn(NUM_ROWS, HIDDEN), torch.randn(HIDDEN, WIDE)
    found = {
        "norm": is_invariant(lambda x: kernels.rms_norm_batch_invariant(x, weight[:, 0].contiguous()), rows),
        "log_softmax": is_invariant(kernels.log_softmax, torch.randn(NUM_ROWS, VOCAB)),
        "mean": is_invariant(lambda x: kernels.mean_batch_invariant(x, [-1]), rows),
        "attention": attention_is_invariant(),
    }
    for dtype in (torch.float32, torch.bfloat16):
        found[f"product {dtype}"] = is_invariant(
            lambda x, dtype=dtype: kernels.matmul_persistent(x.to(dtype), weight.to(dtype)), rows
        )
    if is_there(f"{package}.batch_invariant_configs"):  # vLLM 0.32: tiles go by the number of rows
        configs = importlib.import_module(f"vllm.model_executor.{package}.batch_invariant_configs")
        configs._TUNED_MATMUL_CONFIGS_RESOLVED = True
        for family, table in configs._BATCH_INVARIANT_MATMUL_TUNED_CONFIGS.items():
            buckets = next(iter(table.values()))
            configs._TUNED_MATMUL_CONFIGS_FOR_DEVICE = {(WIDE, HIDDEN): buckets}
            found[f"tuned product, {family}"] = is_invariant(
                lambda x: kernels.matmul_persistent(x.bfloat16(), weight.bfloat16()), torch.randn(40, HIDDEN)
            )
    return found


def is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(f"vllm.model_executor.{module}") is not None
    except ModuleNotFoundError:
        return False


def is_invariant(function: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> bool:
    """Whether each row alone has the bits that it has among the others."""
    together = function(rows)
    return all(torch.equal(together[i : i + 1], function(rows[i : i + 1])) for i in range(len(rows)))


def attention_is_invariant(num_tokens: int = 75, heads: int = 4, kv_heads: int = 2, size: int = 32) -> bool:
    """One pass with NUM_ROWS query tokens beside as many passes with one, as `TritonAttentionImpl` asks."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    block, segments = 16, 4
    num_blocks = -(-num_tokens // block)
    keys, values = torch.randn(2, num_blocks, block, kv_heads, size)
    queries = torch.randn(NUM_ROWS, heads, size)

    def attend(queries: torch.Tensor, num_keys: int) -> torch.Tensor:
        out = torch.empty_like(queries)
        parts = torch.empty(len(queries), heads, segments, size)
        unified_attention(
            queries, keys, values, out, torch.tensor([0, len(queries)], dtype=torch.int32), len(queries),
            torch.tensor([num_keys], dtype=torch.int32), num_keys, size**-0.5, True, (-1, -1),
            torch.arange(num_blocks, dtype=torch.int32)[None], 0.0, None, None, None,
            seq_threshold_3D=8, num_par_softmax_segments=segments, softmax_segm_output=parts,
            softmax_segm_max=parts[..., 0].clone(), softmax_segm_expsum=parts[..., 0].clone(),
        )  # fmt: skip
        return out

    together = attend(queries, num_tokens)
    first = num_tokens - NUM_ROWS + 1
    alone = [attend(queries[i : i + 1], first + i) for i in range(NUM_ROWS)]
    return torch.equal(together, torch.cat(alone))
