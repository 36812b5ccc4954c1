"""What a request says of itself in `SamplingParams.extra_args`, and the noise key that follows.

The noise key decides which tokens coupled verification gives a request, in any engine and any batch.
"""

import contextlib
import copy
import json
import sys
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from rollout_spec.verification.noise import make_key

# The request's name (its id is vLLM's), any JSON value: the noise follows from it. In verl it is the call's.
NAME_KEY = "rollout_spec_key"
GROUP_KEY = "rollout_spec_group"  # a string or a number, the same for siblings
GROUP_TOKENS_KEY = "rollout_spec_group_tokens"  # how many of the prompt's tokens are the group's prompt
# The sample's name, any JSON value, the same for all its requests: turns, and what goes on after an abort.
SAMPLE_KEY = "rollout_spec_sample"
CALL_KEY = "rollout_spec_call"  # which call of the sample it is, from 0
# How many of the prompt's tokens are this call's prompt; what follows was said before an abort.
CALL_TOKENS_KEY = "rollout_spec_call_tokens"


class RequestNames(NamedTuple):
    """What a request says of itself, as far as it can be used: a caller may send anything."""

    key: int | None  # the noise key of its name
    group: str | None
    num_group_tokens: int | None
    num_call_tokens: int | None
    sample: str | None = None  # the `sample_text` of its sample's name
    call: int | None = None


def read_names(extra_args: Any) -> RequestNames:
    """Read `SamplingParams.extra_args`. Whatever is in it costs the request its names at most."""
    said = extra_args if isinstance(extra_args, Mapping) else {}
    name, group = said.get(NAME_KEY), _text(said.get(GROUP_KEY))
    key = None
    if name is not None:
        with contextlib.suppress(ValueError, RecursionError):
            key = key_of_name(name)
    return RequestNames(
        key=key,
        group=group,
        num_group_tokens=None if group is None else _count(said.get(GROUP_TOKENS_KEY)),
        sample=sample_text(said.get(SAMPLE_KEY)),
        call=_count(said.get(CALL_KEY)),
        num_call_tokens=_count(said.get(CALL_TOKENS_KEY)),
    )


def sample_text(name: Any) -> str | None:
    """The text by which servers and drafters know the sample of this name; None: it cannot be written."""
    if isinstance(name, (list, tuple, Mapping)):
        with contextlib.suppress(ValueError, RecursionError):
            name = _json(name)
    return _text(name)


def _text(name: Any) -> str | None:
    if not isinstance(name, (str, int, float)):
        return None
    try:
        text = str(name)
        text.encode()
    except ValueError:  # half a surrogate pair, or a number of more than 4,300 digits
        return None
    return text


def _count(number: Any) -> int | None:
    return number if type(number) is int and 0 <= number <= sys.maxsize else None


def key_of_name(name: Any) -> int:
    """The noise key of a request whose `extra_args["rollout_spec_key"]` is `name`, any JSON value.

    Raises ValueError, RecursionError: it cannot be written: a number of 4,300 digits, or nested too deeply.
    """
    return make_key("key", _json(name))


def _json(name: Any) -> str:
    try:
        return json.dumps(name, sort_keys=True, default=str)
    except (TypeError, ValueError):  # keys of several types, or a value that holds itself
        return repr(name)


def with_numbered_key(params: Any, index: int) -> Any:
    """The sampling parameters of one of a request's n samples: its key is [the request's key, its number]."""
    extra_args = params.extra_args
    if not isinstance(extra_args, Mapping) or extra_args.get(NAME_KEY) is None:
        return params
    params = copy.copy(params)  # vLLM hands the same one to all samples
    params.extra_args = {**extra_args, NAME_KEY: [extra_args[NAME_KEY], index]}
    return params


class RequestKeys:
    """The noise keys of an engine's requests: of their names, their seeds, or the order of arrival.

    MRV1 asks for the keys of all `rows` in every step, and shows which requests there are. MRV2 asks for the
    key `of` a request that joins, and says which requests have ended. `engine` tells engines apart that count
    arrivals.
    """

    def __init__(self, *engine: int) -> None:
        self._engine = engine
        self._num_unnamed = 0
        self._keys: dict[str, int] = {}  # by the request's id
        self._live: dict[str, Any] = {}  # MRV1's requests in the last step, by id

    def rows(self, request_ids: list[str], live: dict[str, Any]) -> list[int]:
        """The keys of a batch's rows. `live`: every request in the engine, in the order of their arrival."""
        # A caller may give the id of a request that has ended to a new one.
        self.remove([each for each, request in self._live.items() if live.get(each) is not request])
        self._live = dict(live)
        for request_id in [each for each in live if each not in self._keys]:
            self.of(request_id, live[request_id].sampling_params)
        return [self._keys[request_id] for request_id in request_ids]

    def of(self, request_id: str, params: Any) -> int:
        """The key of one request, which it keeps until `remove`; params: its sampling parameters."""
        if request_id not in self._keys:
            self._keys[request_id] = self.new_key(params)
        return self._keys[request_id]

    def remove(self, request_ids: Collection[str]) -> None:
        """Requests have ended; their ids may come again."""
        for request_id in request_ids:
            self._keys.pop(request_id, None)

    def forget(self) -> None:
        """The next request is the first one."""
        self._num_unnamed, self._keys = 0, {}

    def new_key(self, params: Any) -> int:
        """The key of the next request to come to the engine, of its sampling parameters."""
        key = read_names(getattr(params, "extra_args", None)).key
        if key is not None:
            return key
        if getattr(params, "seed", None) is not None:
            return make_key("seed", params.seed)
        self._num_unnamed += 1
        return make_key("arrival", *self._engine, self._num_unnamed)


def keys_of(runner: Any) -> RequestKeys:
    """The keys of a model runner's requests.

    Unnamed requests are numbered per data-parallel rank; rank 0 has the numbers of an engine without ranks.
    """
    rank: int = runner.parallel_config.data_parallel_index
    return RequestKeys(runner.model_config.seed, *([rank] if rank else []))
