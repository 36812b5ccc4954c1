"""verl's client of the rollout servers, which names every call that an agent loop makes.

An agent loop may call `generate` many times for one sample: once a turn, several times with one prompt (best
of n, a retry), along the branches of a tree. The tokens follow from the request's name
and the weights, so every call has its own: the sample's name, a digest of the prompt, and the number of
earlier calls with it. After an abort, verl's client sends a further request of the same call and name.
Every request also says which sample it is of, and which of the sample's calls; servers are told of its end.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import uuid
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError
from ray.experimental.internal_kv import _internal_kv_put  # Ray has no public one
from verl.utils import normalize_token_ids
from verl.workers.rollout.llm_server import LLMServerClient
from vllm.v1.engine.exceptions import EngineDeadError

from rollout_spec.patches import Patch, put_before
from rollout_spec.vllm.keys import GROUP_TOKENS_KEY, NAME_KEY, SAMPLE_KEY, TURN_KEY, TURN_TOKENS_KEY, names_of

NAMED_CALLS = Patch(
    name="verl-named-calls",
    reason="all calls of a sample have the same sampling parameters, so no server could tell them apart",
    upstream="verl/workers/rollout/llm_server.py, LLMServerClient",
    until="verl's client says which call of which sample a request is",
)
MAX_SAMPLES = 100_000  # that are remembered; more than a worker has under way


def name_calls(client: Any, calls: Calls) -> Any:
    """The same `LLMServerClient`, which names its calls from now on; so do its copies, in any process."""
    client._verls, client._calls = type(client), calls
    put_before(NamingClient, client, NAMED_CALLS)
    return client


class Calls:
    """The calls that agent loops make, by sample.

    A copy in this process is the same object. A copy that is sent to another process counts for itself; its
    calls' names also say which copy it is, by the order in which copies were sent. If several processes load
    one copy (one `ray.put`), the first that makes a call counts as the copy, and each other one adds a number
    of its own, below 0. Outside Ray nobody can say which is the first, so each adds one.
    """

    def __init__(self, name: str | None = None, copy: tuple[int, ...] = ()) -> None:
        self._name, self._copy = name or uuid.uuid4().hex, copy
        self._copies = itertools.count(1)
        self._samples: dict[str, _Sample] = {}  # by name
        self.death: Exception | None = None  # of a server or its engine, as a call met it

    def __reduce__(self) -> tuple[Any, ...]:
        _calls_here.setdefault(self._name, self)
        return _find_calls, (self._name, (*self._path, next(self._copies)))

    @functools.cached_property
    def _path(self) -> tuple[int, ...]:
        """Which copy this is, in which process."""
        number = _claim(f"{self._name} {self._copy}") if self._copy else 0
        return (*self._copy, number) if number else self._copy

    def named(self, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any]) -> Mapping[str, Any]:
        """The parameters of one more call, with its name, its sample and its number there, and two lengths:
        the group's prompt's, the turn's.

        Args:
            prompt_ids: the call's prompt, token ids.
            sampling_params: with the sample's name in `extra_args`; without one they stay as they are.
        """
        extra_args = sampling_params.get("extra_args") or {}
        names = names_of(extra_args)
        if names.key is None:
            return sampling_params
        sample_name = str(extra_args[NAME_KEY])
        sample = self._samples.setdefault(sample_name, _Sample(len(prompt_ids)))
        if len(self._samples) > MAX_SAMPLES:
            self._samples.pop(next(iter(self._samples)), None)  # another thread may take the same one
        name = sample.name_call(extra_args[NAME_KEY], prompt_ids, self._path)
        turn = {TURN_KEY: next(sample.turns), TURN_TOKENS_KEY: len(prompt_ids)}
        own = {NAME_KEY: name, SAMPLE_KEY: sample_name, **turn}
        if names.group is not None:
            own[GROUP_TOKENS_KEY] = sample.num_group_tokens
        return {**sampling_params, "extra_args": {**extra_args, **own}}

    def note_server(self, sampling_params: Mapping[str, Any], server: Any) -> None:
        """A request with these parameters goes to this server, an actor of Ray."""
        sample = self._samples.get(names_of(sampling_params.get("extra_args")).sample or "")
        if sample is not None:
            sample.servers.add(server)

    def end(self, name: Any) -> None:
        """The sample of this name makes no more calls: tell the servers of those that it made here."""
        sample = self._samples.pop(str(name), None)
        for server in sample.servers if sample is not None else ():
            server.end_sample.remote(str(name))


class _Sample:
    """What is remembered of a sample. Whatever tasks and threads its calls come from, no two share a name."""

    def __init__(self, num_group_tokens: int) -> None:
        self.num_group_tokens = num_group_tokens  # the length of its first prompt
        self.turns = itertools.count()
        self.servers = set[Any]()
        self._numbers: dict[str, Iterator[int]] = {}  # of the calls with each prompt, by its digest

    def name_call(self, name: Any, prompt_ids: Sequence[int], copy: tuple[int, ...]) -> list[Any]:
        digest = hashlib.sha256(array("q", prompt_ids).tobytes()).hexdigest()[:16]
        number = next(self._numbers.setdefault(digest, itertools.count()))
        return [*(name if isinstance(name, (list, tuple)) else [name]), *copy, digest, number]


class NamingClient(LLMServerClient):
    """Stands before a class of verl's clients."""

    _verls: type  # that class
    _calls: Calls

    async def generate(
        self, request_id: str, *, prompt_ids: Any, sampling_params: Mapping[str, Any], **kwargs: Any
    ) -> Any:
        """Generate as verl does; the call has a name."""
        prompt_ids = normalize_token_ids(prompt_ids)
        named = self._calls.named(prompt_ids, sampling_params)
        try:
            return await super().generate(request_id, prompt_ids=prompt_ids, sampling_params=named, **kwargs)
        except (ActorDiedError, EngineDeadError) as error:
            self._calls.death = error
            raise

    async def _acquire_server(self, request_id: str, **request: Any) -> tuple[str, Any]:
        server_id, server = await super()._acquire_server(request_id, **request)
        self._calls.note_server(request.get("sampling_params") or {}, server)
        return server_id, server

    def __reduce__(self) -> tuple[Any, ...]:
        return _new_client, (self._verls,), self.__getstate__()


_calls_here: dict[str, Calls] = {}  # those of which there are copies, by name


def _claim(copy: str) -> int:
    """0 in the first process of the run that asks for this copy, another number in each other one."""
    if not ray.is_initialized():
        return -os.getpid()
    keys = (f"rollout_spec {copy} {number}".encode() for number in itertools.count())
    return -next(number for number, key in enumerate(keys) if not _internal_kv_put(key, b"", overwrite=False))


def _find_calls(name: str, copy: tuple[int, ...]) -> Calls:
    return _calls_here.setdefault(name, Calls(name, copy))


def _new_client(verls: type) -> Any:
    client: Any = object.__new__(verls)
    put_before(NamingClient, client, NAMED_CALLS)
    return client
