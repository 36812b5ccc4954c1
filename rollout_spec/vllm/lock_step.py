"""What the data-parallel ranks of a mixture of experts, which step together, know of each other.

Before every forward pass vLLM tells each rank how many tokens every rank has in it.
"""

from __future__ import annotations

import functools
from typing import Any

from rollout_spec.drafting.costs import Ranks
from rollout_spec.patches import Patch, replace_function

_WATCH = Patch(
    name="vllm-watch-ranks",
    reason="a step takes as long as the rank with most tokens, and a proposer is not told how many it had",
    upstream="vllm/v1/worker/gpu_model_runner.py, coordinate_batch_across_dp; "
    "vllm/v1/worker/gpu/model_runner.py, dispatch_cg_and_sync_dp",
    until="the model runner keeps the number of tokens of every rank",
)
V2_NAME = "dispatch_cg_and_sync_dp"
_SIGNATURE = (
    "(num_tokens_unpadded: int, allow_microbatching: bool, "
    "parallel_config: vllm.config.parallel.ParallelConfig, num_tokens_padded: int | None = None, "
    "uniform_decode: bool | None = None, cudagraph_mode: int = 0)"
    " -> tuple[bool, torch.Tensor | None, int]"
)


class LockStep:
    """The steps of the ranks, as a worker sees them.

    Attributes:
        ranks: of the last step; None where it is not known, as with a platform's own model runner.
    """

    def __init__(self, is_v2: bool) -> None:
        self.ranks: Ranks | None = None
        self._num_steps = 0
        self._is_v2 = is_v2

    def watch(self) -> None:
        """Look at what vLLM tells this process's worker.

        Raises:
            PatchError: the installed vLLM is not one that this was written for.
        """
        if self._is_v2:  # `runner_v2.check_runner` knows its parameters
            from vllm.v1.worker.gpu import model_runner as module

            name, signature = V2_NAME, None
        else:
            from vllm.v1.worker import gpu_model_runner as module

            name, signature = "coordinate_batch_across_dp", _SIGNATURE
        coordinate: Any = getattr(module, name, None)

        @functools.wraps(coordinate)
        def coordinate_and_look(*args: Any, **kwargs: Any) -> Any:
            result = coordinate(*args, **kwargs)
            agreed = result[1]
            if agreed is not None:  # else no rank has a token
                nums_tokens = getattr(agreed, "num_tokens_across_dp", agreed)  # V2's, from vLLM 0.29 on
                self._num_steps += 1
                self.ranks = Ranks(self._num_steps, int(nums_tokens.max()))
            return result

        replace_function(module, name, coordinate_and_look, patch=_WATCH, expected_signature=signature)
