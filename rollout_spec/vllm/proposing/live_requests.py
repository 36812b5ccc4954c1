"""The requests of an engine, as its drafter is told of them."""

import operator
from typing import Any, Protocol

import numpy as np

from rollout_spec.drafting.drafter import PAD, Drafter
from rollout_spec.drafting.native import Int32Array
from rollout_spec.vllm.keys import read_names


class Batch(Protocol):
    """An engine's requests and their rows: vLLM's MRV1 itself has them, of an MRV2 the `HostBatch`."""

    requests: dict[str, Any]  # by id, preempted ones included: they stay in the index
    input_batch: Any  # its `req_ids` has the request of each row


class LiveRequests:
    """Those that a drafter knows."""

    def __init__(self) -> None:
        self._requests: dict[str, Any] = {}  # of the last step, by id: a caller may use an id again
        self.end_token_ids = set[int]()  # the tokens that end one of them

    def update(self, drafter: Drafter, batch: Batch, max_model_len: int) -> None:
        """Add the requests that are new in the batch, and remove those that have left."""
        live = batch.requests
        before = self._requests.values()
        if len(live) == len(before) and all(map(operator.is_, live.values(), before)):
            return
        known = drafter.request_ids
        # A caller may give the id of one that has ended to a new one.
        for request_id in [r for r in known if self._requests.get(r) is not live.get(r)]:
            drafter.remove(request_id)
        self._requests = dict(live)
        self.end_token_ids = set[int]().union(*map(_end_token_ids, live.values()))
        for request_id in [r for r in live if r not in known]:
            _add(drafter, request_id, live[request_id], max_model_len)

    def until_ends(
        self, request_ids: list[str], nums_new: Int32Array, token_ids: Any, levels: Int32Array
    ) -> tuple[Int32Array, Int32Array]:
        """The step's numbers and levels, without draft tokens accepted after a token that ends a request."""
        nums_new, levels = nums_new.copy(), levels.copy()
        for row in np.flatnonzero(nums_new > 1).tolist():
            num, end_token_ids = int(nums_new[row]), _end_token_ids(self._requests[request_ids[row]])
            tokens = token_ids[row, levels[row] - num : levels[row]].tolist()
            num_after = num - next((n for n, token in enumerate(tokens, 1) if token in end_token_ids), num)
            nums_new[row] -= num_after
            levels[row] -= num_after
        return nums_new, levels


def _add(drafter: Drafter, request_id: str, request: Any, max_model_len: int) -> None:
    # max_model_len is the runner's own: where -1 is asked for, vLLM fits it to the memory later.
    prompt = np.full(_num_prompt(request), PAD, np.int32)  # nobody knows the tokens of embeddings
    if request.prompt_token_ids is not None:
        prompt = np.asarray(request.prompt_token_ids, np.int32)
    names = read_names(getattr(request.sampling_params, "extra_args", None))
    max_level = max_level_of(request, max_model_len)
    drafter.add(request_id, prompt, max_level, names.group, names.num_group_tokens, names.sample)


def _end_token_ids(request: Any) -> set[int]:
    """The tokens that end a request."""
    params = request.sampling_params
    return {params.eos_token_id, *(params.stop_token_ids or ())} - {None} if params else set()


def max_level_of(request: Any, max_model_len: int) -> int:
    """The most tokens, prompt included, that a request can have."""
    max_tokens = getattr(request.sampling_params, "max_tokens", None)
    return max_model_len if max_tokens is None else min(max_model_len, _num_prompt(request) + max_tokens)


def _num_prompt(request: Any) -> int:
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    embeddings = getattr(request, "prompt_embeds", None)
    return 0 if embeddings is None else len(embeddings)
