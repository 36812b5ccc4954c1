"""A simulated engine of a device: its KV cache has an end, and a model may draft in it.

When the cache is full, the newest request goes back to the queue and is prefilled again later, as in vLLM.
"""

from collections.abc import Callable
from typing import NamedTuple

from rollout_spec.config import SpecConfig
from rollout_spec.drafting.gate.costs import Ranks
from rollout_spec.drafting.index import ModelDrafts
from rollout_spec.predict.engine import Cluster, Engine, StepWork
from rollout_spec.predict.load import Request
from rollout_spec.predict.proposers import drafts_at
from rollout_spec.predict.step_times import Times


class Cache(NamedTuple):
    """The KV cache of a data-parallel rank."""

    num_tokens: float  # that it holds
    row_tokens: Callable[[int], float]
    """Of the most draft tokens of a row: how many tokens would fill what it takes beside its own."""


class CachedEngine(Engine):
    """An engine, or a data-parallel rank, whose KV cache has an end.

    Args:
        most_model_tokens: that a model drafts for a row; 0: there is no model.
    """

    def __init__(
        self,
        config: SpecConfig,
        times: Times,
        cluster: Cluster,
        cache: Cache,
        most_model_tokens: int = 0,
    ) -> None:
        super().__init__(config, times, cluster, min(most_model_tokens, config.num_speculative_tokens))
        most_draft_tokens = config.num_speculative_tokens if config.enabled else most_model_tokens
        self._kv_tokens, self._row_tokens = cache.num_tokens, cache.row_tokens(most_draft_tokens)
        self._admitted: dict[str, None] = {}  # names of running requests, the newest last
        self._nums_done: dict[str, int] = {}  # tokens of responses that were sent back
        self.num_preemptions = 0

    @property
    def _num_kept(self) -> float:
        """Tokens of the KV cache that the step fills."""
        return self._num_context + self._num_verified + len(self._running) * self._row_tokens

    def _admit(self) -> int:
        return 0 if self._preempt() else super()._admit()

    def _preempt(self) -> bool:
        """Send the newest requests back until the rest has room, or one is left; whether any went."""
        num_before = self.num_preemptions
        while len(self._running) > 1 and self._num_kept > self._kv_tokens:
            newest = next(reversed(self._admitted))
            row = next(i for i, request in enumerate(self._running) if request.name == newest)
            self._nums_done[newest] = int(self._levels[row]) - len(self._running[row].prompt_token_ids)
            self._queue.appendleft(self._remove(row))
            self.num_preemptions += 1
        return self.num_preemptions > num_before

    def _has_room(self) -> bool:
        request = self._queue[0]
        num_tokens = len(request.prompt_token_ids) + self._nums_done.get(request.name, 0) + 1
        return not self._running or self._num_kept + num_tokens + self._row_tokens <= self._kv_tokens

    def _num_to_prefill(self, request: Request) -> int:
        return super()._num_to_prefill(request) + self._nums_done.get(request.name, 0)

    def _start(self, request: Request) -> None:
        super()._start(request)
        self._levels[len(self._running) - 1] += self._nums_done.pop(request.name, 0)
        self._admitted[request.name] = None

    def _remove(self, row: int) -> Request:
        request = super()._remove(row)
        del self._admitted[request.name]
        return request


class SimulatedModel(NamedTuple):
    """A draft model of an engine. What it drafts was recorded or simulated, and is in the requests.

    It makes one pass over all tokens of every step, and one more over the rows for each further draft token.
    The further passes are left out while the gate lets nothing be drafted, and where they do not pay.
    """

    num_tokens: int  # the most that it drafts for a row
    times: Times  # of a pass

    def seconds(self, num_tokens: int, num_rows: int, num_context: int, num_passes: int) -> float:
        first = self.times.seconds(num_tokens, False, num_context)
        return first + (num_passes - 1) * self.times.seconds(num_rows, False, num_context)


class ModelEngine(CachedEngine):
    """An engine with a draft model; with method=off all that it drafts is verified."""

    def __init__(
        self,
        config: SpecConfig,
        times: Times,
        cluster: Cluster,
        cache: Cache,
        model: SimulatedModel,
    ) -> None:
        super().__init__(config, times, cluster, cache, model.num_tokens)
        self._model = model

    def seconds(self, work: StepWork, num_tokens_of_others: int) -> float:
        num_passes = max(1, self._num_passes)
        of_model = self._model.seconds(work.num_tokens, work.num_rows, work.num_context, num_passes)
        return super().seconds(work, num_tokens_of_others) + of_model

    @property
    def _num_passes(self) -> int:
        """The model's passes in this step that draft."""
        return self._model.num_tokens if self.drafter is None else self.drafter.num_passes

    def _draft(self, nums_new: list[int], ranks: Ranks | None) -> list[list[int]]:
        model = self._drafts_of_model()
        if self.drafter is not None:
            names = [request.name for request in self._running]
            # If the model did not draft for it, the next step has begun already, without drafts of the index.
            return self.drafter.draft(
                names, nums_new, self._token_ids, self._levels,
                ranks=ranks, in_time=model is not None, model_drafts=model,
            )  # fmt: skip
        if model is None:
            return [[] for _ in self._running]
        rooms = self._ends[: len(self._running)] - self._levels[: len(self._running)] - 1
        return [
            [token for token in tokens[: max(0, room)] if token >= 0]
            for tokens, room in zip(model.tokens.tolist(), rooms.tolist(), strict=True)
        ]

    def _drafts_of_model(self) -> ModelDrafts | None:
        if not self._num_passes:
            return None
        nums_done = [
            int(level) - len(request.prompt_token_ids)
            for level, request in zip(self._levels, self._running, strict=False)
        ]
        return drafts_at([request.proposals for request in self._running], nums_done, self._num_passes)
