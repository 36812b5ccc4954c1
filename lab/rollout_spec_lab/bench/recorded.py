"""A recording's next tokens instead of what a model runner samples, on both of vLLM's runners.

A draft is accepted as far as it equals the recording. What was sampled has run, and is thrown away.
"""

import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID

from rollout_spec.verification.transfers import to_device


@functools.cache
def number_of(request_id: str, prefix: str) -> int:
    """The number in a request's name, to which vLLM adds a dash and eight characters."""
    return int(request_id.removeprefix(prefix).rpartition("-")[0])


class Recording:
    """The responses of requests, by the names that the requests were added with: `prefix` and a number."""

    def __init__(self, responses: Sequence[Any], prefix: str = "") -> None:
        self._prefix = prefix
        self._tokens = np.concatenate([np.asarray(response, np.int32) for response in responses])
        self._begins = np.cumsum([0, *map(len, responses)])

    def after(
        self, request_ids: Sequence[str], levels: npt.NDArray[Any], width: int
    ) -> npt.NDArray[np.int32]:
        """int32 [rows, width]: what comes after the first levels[i] tokens of each row's response."""
        begins = self._begins[[number_of(request_id, self._prefix) for request_id in request_ids]]
        places = (begins + levels)[:, None] + np.arange(width)
        return self._tokens[np.minimum(places, len(self._tokens) - 1)]  # beyond an end vLLM cuts them off


def verified(
    recorded: npt.NDArray[np.int32], drafts: npt.NDArray[np.int32], nums_drafts: npt.ArrayLike
) -> npt.NDArray[np.int32]:
    """What a verification gives: each row's drafts as far as they are the recorded tokens, and one more; then
    PLACEHOLDER_TOKEN_ID.

    recorded: [rows, width], what comes next in each row; drafts: those of all rows, one after the other.
    """
    nums = np.asarray(nums_drafts)
    columns = np.arange(recorded.shape[1])
    proposed = np.full_like(recorded, PLACEHOLDER_TOKEN_ID)
    proposed[columns < nums[:, None]] = drafts
    num_accepted = np.cumprod(proposed == recorded, axis=1).sum(axis=1)
    return np.where(columns <= num_accepted[:, None], recorded, np.int32(PLACEHOLDER_TOKEN_ID))


class Recorded:
    """Replaces what a model runner samples; to be made once, when the engine is.

    Drafts and levels are known on the host, so the tokens are looked up there. They go to the device in a
    copy that nothing waits for.
    """

    def __init__(self, runner: Any, run: Callable[..., Any] = lambda call, *args: call(*args)) -> None:
        """`run` calls what stands in for a kernel."""
        self.recording: Recording | None = None  # None: what is sampled stays, as in a warm-up
        self.step: Any = None  # vLLM's SchedulerOutput of the last step that was begun
        self._runner, self._run = runner, run
        self._levels: defaultdict[str, int] = defaultdict(int)  # on MRV2: tokens that each request has got
        if hasattr(runner, "_sample"):  # MRV1
            runner.execute_model = self._noting(runner.execute_model)
            runner._sample = self._after_mrv1(runner._sample)
        else:
            runner.update_requests = self._noting(runner.update_requests)  # a step has its drafts soon after
            runner.sample = self._after_mrv2(runner.sample)

    def start(self, responses: Sequence[Any] | None, prefix: str = "") -> None:
        """From now on these come; None: what is sampled."""
        self.recording = None if responses is None else Recording(responses, prefix)
        self._levels.clear()

    def _noting(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        def begin_noted(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self.step = scheduler_output
            return begin(scheduler_output, *args, **kwargs)

        return begin_noted

    def _after_mrv1(self, sample: Callable[..., Any]) -> Callable[..., Any]:
        def sample_recorded(*args: Any, **kwargs: Any) -> Any:
            output = sample(*args, **kwargs)
            batch = self._runner.input_batch
            if self.recording is None or not batch.num_reqs:
                return output
            # vLLM has already counted the token of a step that is in flight.
            rows = slice(batch.num_reqs)
            levels = batch.num_tokens_no_spec[rows] - batch.num_prompt_tokens[rows]
            tokens, _ = self._run(self._tokens, batch.req_ids, levels, None)
            return dataclasses.replace(output, sampled_token_ids=to_device(tokens, self._runner.device))

        return sample_recorded

    def _after_mrv2(self, sample: Callable[..., Any]) -> Callable[..., Any]:
        def sample_recorded(hidden_states: torch.Tensor, batch: Any, *others: Any) -> Any:
            found = sample(hidden_states, batch, *others)
            if self.recording is None:
                return found
            tokens, num_sampled, num_rejected = self._run(self._tokens_mrv2, batch)
            output = dataclasses.replace(
                found[0], sampled_token_ids=tokens, num_sampled=num_sampled, num_rejected=num_rejected
            )
            return output, num_sampled, num_rejected

        return sample_recorded

    def _tokens_mrv2(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As MRV2's: int64 [rows, 1 or K + 1], tokens; int32 [rows], how many, and rejected drafts."""
        levels = np.array([self._levels[name] for name in batch.req_ids])
        tokens, nums_drafts = self._tokens(batch.req_ids, levels, 1 + self._runner.num_speculative_steps)
        ends = batch.num_computed_tokens_np + batch.num_scheduled_tokens
        tokens[ends < batch.prefill_len_np] = PLACEHOLDER_TOKEN_ID  # rows with a part of their prompt
        nums = (tokens != PLACEHOLDER_TOKEN_ID).sum(axis=1)
        for name, num in zip(batch.req_ids, nums.tolist(), strict=True):
            self._levels[name] += num
        rejected = np.where(nums, nums_drafts + 1 - nums, 0)
        sampled = to_device(np.stack([nums, rejected]).astype(np.int32), self._runner.device)
        return to_device(tokens.astype(np.int64), self._runner.device), sampled[0], sampled[1]

    def _tokens(
        self, names: Sequence[str], levels: npt.NDArray[Any], width: int | None
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """[rows, 1 or width; None: what the longest draft asks for] tokens, and [rows], numbers of drafts."""
        assert self.recording is not None
        drafts = [self.step.scheduled_spec_decode_tokens.get(name, ()) for name in names]
        nums = np.array(list(map(len, drafts)))
        width = 1 if not nums.any() else width or 1 + int(nums.max())
        recorded = self.recording.after(names, levels, width)
        return verified(recorded, np.fromiter(itertools.chain(*drafts), np.int32), nums), nums
