"""What a request says of itself in `SamplingParams.extra_args`, and the noise key that follows.

The noise key decides which tokens `verify=coupled` gives a request, in any engine and any batch.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection
from typing import Any

from rollout_spec.verification.noise import make_key

KEY = "rollout_spec_key"  # the request's name, any JSON value
GROUP_KEY = "rollout_spec_group"  # a string or a number, the same for siblings
GROUP_TOKENS_KEY = "rollout_spec_group_tokens"  # how many of the prompt's tokens are the group's prompt
TURN_TOKENS_KEY = (
    "rollout_spec_turn_tokens"  # how many are this turn's prompt; what follows was said before an abort
)


def key_of_name(name: Any) -> int:
    """The noise key of a request whose `extra_args["rollout_spec_key"]` is `name`, any JSON value."""
    try:
        text = json.dumps(name, sort_keys=True, default=str)
    except (TypeError, ValueError):
        text = repr(name)  # whatever a caller sends, it must not cost the engine its life
    return make_key("key", text)


def with_numbered_key(params: Any, index: int) -> Any:
    """The sampling parameters of one of a request's n samples: its key is [the request's key, its number]."""
    extra_args = params.extra_args or {}
    if extra_args.get(KEY) is None:
        return params
    params = copy.copy(params)  # vLLM hands the same one to all samples
    params.extra_args = {**extra_args, KEY: [extra_args[KEY], index]}
    return params


class RequestKeys:
    """The noise keys of an engine's requests: of their names, their seeds, or the order of arrival."""

    def __init__(self, engine_seed: int) -> None:
        self._engine_seed = engine_seed
        self._num_unnamed = 0
        self._keys: dict[str, int] = {}

    def rows(self, request_ids: Collection[str], live: dict[str, Any]) -> list[int]:
        """The keys of a batch's rows.

        Args:
            request_ids: the rows' requests.
            live: every request in the engine, in the order in which they came to it.
        """
        if self._keys.keys() != live.keys():
            self._keys = {
                name: self._keys[name] if name in self._keys else self.new_key(request.sampling_params)
                for name, request in live.items()
            }
        return [self._keys[name] for name in request_ids]

    def new_key(self, params: Any) -> int:
        """The key of the next request to come to the engine, of its sampling parameters."""
        named = (getattr(params, "extra_args", None) or {}).get(KEY)
        if named is not None:
            return key_of_name(named)
        if getattr(params, "seed", None) is not None:
            return make_key("seed", params.seed)
        self._num_unnamed += 1
        return make_key("arrival", self._engine_seed, self._num_unnamed)
