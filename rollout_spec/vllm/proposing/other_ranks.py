"""What the data-parallel ranks of a mixture of experts, which step together, know of each other.

Before every forward pass vLLM tells each rank how many tokens every rank has in it.
"""

import dataclasses
import weakref
from collections.abc import Iterable
from typing import Any

from rollout_spec.drafting.gate.step import Work
from rollout_spec.patches import Patch, wrap

_WATCH = Patch(
    name="vllm-watch-ranks",
    reason="a step takes as long as the rank with most tokens, and a proposer is not told how many it had",
    upstream="vllm/v1/worker/gpu_model_runner.py, coordinate_batch_across_dp; "
    "vllm/v1/worker/gpu/model_runner.py, dispatch_cg_and_sync_dp",
    until="the model runner keeps the number of tokens of every rank",
)
MRV2_DISPATCH = "dispatch_cg_and_sync_dp"


class OtherRanks:
    """The steps of the ranks, as a worker sees them."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._is_mrv2 = runner, runner.vllm_config.use_v2_model_runner
        self._num_steps = 0
        self._most_tokens: int | None = None  # None: not known, as with a platform's own model runner

    @property
    def _told_by(self) -> Any:
        """What vLLM names this worker by where it tells the numbers: an object of its runner's."""
        return self._runner.cudagraph_manager if self._is_mrv2 else self._runner.parallel_config

    def watch(self) -> None:
        """Look at what vLLM tells a worker of this process; a PatchError if it tells it in another way."""
        _watching.add(self)
        if self._is_mrv2:
            from vllm.v1.worker.gpu import model_runner

            @wrap(model_runner, MRV2_DISPATCH, _WATCH)
            def look_on_mrv2(
                coordinate: Any, cudagraph_manager: Any, num_reqs: int, num_tokens: int,
                *args: Any, **kwargs: Any,
            ) -> Any:  # fmt: skip
                result = coordinate(cudagraph_manager, num_reqs, num_tokens, *args, **kwargs)
                return _tell(cudagraph_manager, num_tokens, result)
        else:
            from vllm.v1.worker import gpu_model_runner

            @wrap(gpu_model_runner, "coordinate_batch_across_dp", _WATCH)
            def look_on_mrv1(
                coordinate: Any, num_tokens_unpadded: int, *args: Any, parallel_config: Any, **kwargs: Any
            ) -> Any:
                result = coordinate(num_tokens_unpadded, *args, parallel_config=parallel_config, **kwargs)
                return _tell(parallel_config, num_tokens_unpadded, result)

    def note(self, num_own: int, agreed: Any) -> None:
        """`num_own`: this rank's tokens in the next step; `agreed`: what vLLM tells of all."""
        if agreed is not None:  # else no rank has a token
            nums_tokens = getattr(agreed, "num_tokens_across_dp", agreed)  # MRV2's, from vLLM 0.29 on
            self._num_steps += 1
            graphs = self._runner.vllm_config.compilation_config.cudagraph_capture_sizes or ()
            self._most_tokens = most_tokens(num_own, int(nums_tokens.max()), graphs)

    def of_busiest(self, work: Work | None) -> Work | None:
        """What a step processes on the busiest rank: as long as that needs it takes."""
        if work is None or self._most_tokens is None:
            return work
        return dataclasses.replace(work, num_tokens=self._most_tokens, number=self._num_steps)


# A patched function outlives the engine that asked for it: so it holds none of them.
_watching: weakref.WeakSet[OtherRanks] = weakref.WeakSet()


def _tell(told_by: Any, num_own: int, result: Any) -> Any:
    """Hand on what vLLM has told to the worker that it names by this object."""
    for each in list(_watching):
        if each._told_by is told_by:
            each.note(num_own, result[1])
    return result


def most_tokens(num_own: int, num_padded: int, graphs: Iterable[int]) -> int:
    """Tokens of the busiest rank, as far as this one, with `num_own`, knows.

    vLLM tells each rank the tokens of all, padded to the sizes of their graphs. If our own graph is as large
    as the largest, our own number is returned, else the padded one.
    """
    own_graph = min((size for size in graphs if size >= num_own), default=num_own)
    return num_padded if num_padded > own_graph else num_own
