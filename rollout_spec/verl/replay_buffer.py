"""DAPO's dynamic sampling with a bound on the prompts of one step.

verl's V1 trainers bound what is in flight, not what a step generates in all: where most groups score the same
throughout, a step never ends. Used through verl's `trainer.v1.sampler.custom_sampler`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from rollout_spec.patches import guard_parameters
from rollout_spec.verl.private_methods import PRIVATE_METHODS

logger = logging.getLogger(__name__)
_EVICTION = ("self", "global_steps", "partition_id")
guard_parameters(PRIVATE_METHODS, ReplayBuffer, "_dapo_filtered_keys", ("self", "partition_id"))
guard_parameters(PRIVATE_METHODS, ReplayBufferAsync, "_terminal_eviction_reasons", _EVICTION)


class BoundedReplayBuffer(ReplayBuffer):
    """verl's replay buffer, which throws away groups only while it may generate others for them.

    It generates at most `max_num_gen_batches * train_batch_size` prompts for one batch. A group that it can
    no longer replace stays in the batch: its samples all score the same, so it has no gradient.
    In an asynchronous mode of the trainer this makes an `AsyncBoundedReplayBuffer`.

    Args:
        sampler_kwargs: `filter_groups` (verl's `algorithm.filter_groups`) and `train_batch_size`, prompts.
        refill_fn: submits that many fresh prompts.
        kwargs: verl's other arguments.

    Raises ValueError: `max_num_gen_batches` is below 1.
    """

    def __new__(cls, *, trainer_mode: str, **_: Any) -> BoundedReplayBuffer:
        return object.__new__(cls if trainer_mode == "sync" else AsyncBoundedReplayBuffer)

    def __init__(self, *, sampler_kwargs: Any, refill_fn: Callable[[int], None], **kwargs: Any) -> None:
        groups, train_batch_size = sampler_kwargs["filter_groups"], int(sampler_kwargs["train_batch_size"])
        max_batches = int(groups["max_num_gen_batches"])
        if max_batches < 1:
            raise ValueError(
                f"algorithm.filter_groups.max_num_gen_batches={max_batches}: must be at least 1 with the "
                "replay buffer rollout_spec.verl.replay_buffer.BoundedReplayBuffer"
            )
        super().__init__(
            sampler_kwargs=sampler_kwargs,
            refill_fn=self._refill,
            filter_groups_metric=groups["metric"] if groups["enable"] else None,
            train_batch_size=train_batch_size,
            gen_batch_size=1,
            max_inflight_gen_batches=int(groups["max_inflight_gen_batches"]),
            **kwargs,
        )
        self._submit = refill_fn
        self._max_prompts = max_batches * train_batch_size
        self._num_prompts = 0  # generated for the batch that is being sampled

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict]:
        """Sample as verl does, and add `training/filter_groups/num_gen_batches` to the metrics."""
        self._begin(global_steps, batch_size)
        batch, metrics = super().sample(global_steps, partition_id, batch_size)
        if partition_id != "val" and self.filter_groups_metric is not None:
            metrics["training/filter_groups/num_gen_batches"] = self._num_prompts / self.train_batch_size
        return batch, metrics

    def _begin(self, global_steps: int, batch_size: int) -> None:
        # The trainer has submitted one batch before it asks for one.
        self._num_prompts = batch_size

    def _refill(self, num_prompts: int) -> None:
        num_prompts = min(num_prompts, self._max_prompts - self._num_prompts)
        if num_prompts > 0:
            self._num_prompts += num_prompts
            self._submit(num_prompts)

    def _dapo_filtered_keys(self, partition_id: str) -> tuple[set[str], Counter]:
        """Filter verl's groups, but leave enough prompts for a batch: done, in flight or still allowed."""
        filtered, counts = super()._dapo_filtered_keys(partition_id)
        if not filtered:
            return filtered, counts
        num_spare = max(0, self._num_spare(partition_id))
        if num_spare >= len(filtered):
            return filtered, counts
        logger.warning(
            "algorithm.filter_groups.max_num_gen_batches is reached: %d groups without signal stay",
            len(filtered) - num_spare,
        )
        evicted = set(sorted(filtered)[:num_spare])
        rewards = self._dapo_classification_cache[partition_id]
        return evicted, Counter(rewards[uid] for uid in evicted)

    def _num_spare(self, partition_id: str) -> int:
        """How many prompts the batch can do without."""
        known = (
            self.pending_keys[partition_id]
            | self.running_keys[partition_id]
            | self.finished_keys[partition_id]
            | self.failure_keys[partition_id]
        )
        return len(known) + self._max_prompts - self._num_prompts - self.train_batch_size


class AsyncBoundedReplayBuffer(BoundedReplayBuffer, ReplayBufferAsync):
    """verl's asynchronous replay buffer with the same bound, here on the prompts of one training step.

    It refills at once whatever leaves the buffer, so that as many prompts are under way as before. A prompt
    that is stale or has failed leaves in any case, and counts.
    """

    _step = -1  # the training step that the prompts are counted of

    def _begin(self, global_steps: int, batch_size: int) -> None:
        if global_steps != self._step:
            self._step, self._num_prompts = global_steps, self.train_batch_size

    def _terminal_eviction_reasons(
        self, global_steps: int, partition_id: str
    ) -> tuple[set[str], set[str], set[str], Counter]:
        # With hybrid switching verl asks for these between two batches too.
        self._begin(global_steps, self.train_batch_size)
        return super()._terminal_eviction_reasons(global_steps, partition_id)

    def _refill(self, num_prompts: int) -> None:
        self._num_prompts += num_prompts
        self._submit(num_prompts)

    def _num_spare(self, partition_id: str) -> int:
        return self._max_prompts - self._num_prompts
