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
    upstream="vllm/v1/worker/gpu_model_runner.py, coordinate_batch_across_dp",
    until="the model runner keeps the number of tokens of every rank",
)
_NAME = "coordinate_batch_across_dp"
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

    def __init__(self) -> None:
        self.ranks: Ranks | None = None
        self._num_steps = 0

    def watch(self) -> None:
        """Look at what vLLM tells this process's worker.

        Raises:
            PatchError: the installed vLLM is not one that this was written for.
        """
        from vllm.v1.worker import gpu_model_runner

        coordinate: Any = getattr(gpu_model_runner, _NAME, None)

        @functools.wraps(coordinate)
        def coordinate_and_look(*args: Any, **kwargs: Any) -> Any:
            result = coordinate(*args, **kwargs)
            self._num_steps += 1
            self.ranks = Ranks(self._num_steps, int(result[1].max()))
            return result

        replace_function(
            gpu_model_runner, _NAME, coordinate_and_look, patch=_WATCH, expected_signature=_SIGNATURE
        )
