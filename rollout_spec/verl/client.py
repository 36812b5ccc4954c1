"""Lets verl's client of the rollout servers name every call, in every process and for any agent loop.

What a call's name is, `sample_calls.py` says. After an abort, verl's client sends a further request of the
same call and name. Where nobody has named the sample (`row_names.py`), it is named here, so that a run that
repeats this one has the same set of samples. Its calls are those of one request id.

The calls of a sample are counted at its *home*, the process where it begins. A client that is sent to another
process in the middle, as to a task of Ray, takes along where it comes from, and asks there.
"""

import asyncio
import logging
import uuid
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import ray
from omegaconf import DictConfig
from ray.exceptions import RayError
from verl.utils import normalize_token_ids

from rollout_spec.patches import wrap
from rollout_spec.sample_names import BY_PROMPT
from rollout_spec.verl import sample_calls
from rollout_spec.verl.changes import NAMED_CALLS
from rollout_spec.verl.sample_calls import Call, number_of_prompt, prompt_digest
from rollout_spec.verl.settings import ROLLOUT, value
from rollout_spec.vllm import keys

logger = logging.getLogger(f"verl.{__name__}")
_NOT_REPEATED = "who counts a sample's calls gave no answer, so another run has other tokens for it"
HOME_ANSWER_S = 10.0  # for which an answer of a sample's home is waited for


class Home(NamedTuple):
    """The process that has sent a client: samples that call through it may have begun there."""

    process: str
    actor: Any  # of Ray, which can be asked; None: nothing can


_HOME = "_rollout_spec_home"  # the attribute of a client that was sent
_process = uuid.uuid4().hex  # this one


class NamedCall(NamedTuple):
    """A call with its names, which is counted."""

    extra_args: dict[str, Any]
    counted_by: Any  # the actor of the sample's home; None: this process


_current: ContextVar[NamedCall | None] = ContextVar("_current", default=None)


def patch_clients(module: Any) -> None:
    """Let the clients of verl's module `llm_server`, and all that derive from them, name their calls."""
    for client in (module.LLMServerClient, module.FullyAsyncLLMServerClient):
        wrap(client, "generate", NAMED_CALLS)(_generate)
    wrap(module.LLMServerClient, "_acquire_server", NAMED_CALLS)(_acquire_server)
    wrap(module.LLMServerClient, "__getstate__", NAMED_CALLS)(_state)


async def _generate(
    generate: Any, self: Any, request_id: Any, *, prompt_ids: Any, sampling_params: Any, **more: Any
) -> Any:
    """Generate as verl does; the call has a name."""
    given = sampling_params.get("extra_args") or {}
    is_named = keys.CALL_KEY in given  # a class that stands before this one has done it
    if is_named or "prompt_logprobs" in sampling_params or not _is_ours(self):  # those are a teacher's
        return await generate(
            self, request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **more
        )
    prompt_ids = normalize_token_ids(prompt_ids)
    is_seeded = _given_name(given) is None and sampling_params.get("seed") is not None
    call = Call(str(request_id), prompt_digest(prompt_ids), len(prompt_ids), dict(given), is_seeded)
    named = await _name_call(self, call)
    token = _current.set(named)
    try:
        params = {**sampling_params, "extra_args": named.extra_args}
        return await generate(self, request_id, prompt_ids=prompt_ids, sampling_params=params, **more)
    finally:
        _current.reset(token)


async def _acquire_server(acquire: Any, self: Any, request_id: Any, *args: Any, **request: Any) -> Any:
    """Acquire as verl does, whatever it is given, and note at the sample's home which server it calls."""
    acquired = await acquire(self, request_id, *args, **request)
    if (call := _current.get()) is not None:
        noted = call.extra_args.get(keys.SAMPLE_KEY), acquired[1]
        if call.counted_by is None:
            sample_calls.calls_here.note_server(*noted)
        else:
            _ask(call.counted_by, "note_server", *noted)
    return acquired


def _state(get_state: Any, self: Any) -> dict[str, Any]:
    """What a copy of a client gets: it says where the samples began that call through it."""
    state = dict(get_state(self))
    if len(sample_calls.calls_here):
        context: Any = ray.get_runtime_context() if ray.is_initialized() else None
        in_actor = context is not None and context.get_actor_id() is not None
        state[_HOME] = Home(_process, context.current_actor if in_actor else None)
    return state


async def _name_call(client: Any, call: Call) -> NamedCall:
    name = await _name_of_sample(client, call)
    if keys.sample_text(name) is None:
        return NamedCall(dict(call.extra_args), None)  # what cannot be read is handed on
    home = vars(client).get(_HOME)
    is_away = home is not None and home.process != _process and name not in sample_calls.calls_here
    if is_away and home.actor is not None:
        try:
            extra_args = await asyncio.wait_for(_ask(home.actor, "add", name, call), HOME_ANSWER_S)
            return NamedCall(extra_args, home.actor)
        except (RayError, TimeoutError) as error:
            logger.warning("rollout_spec: %s: %r", _NOT_REPEATED, error)
            vars(client)[_HOME] = Home(home.process, None)  # it is not asked again
    if is_away:  # nobody can say which calls there were: those from here are apart from them
        sample_calls.calls_here.begin(name, _process)
    return NamedCall(sample_calls.calls_here.add(name, call), None)


async def _name_of_sample(client: Any, call: Call) -> Any:
    """The one that it has, or one by its first prompt and how many samples of the run have begun with that.

    verl's balancer counts them: it is one for all processes of the run. Without it a number is random.
    """
    name = _given_name(call.extra_args)
    if name is None:
        name = sample_calls.calls_here.name_of(call.request_id)
    if name is not None:
        return name
    begun: Sequence[Any] = call.digest, uuid.uuid4().hex
    if hasattr(balancer := client._load_balancer, "__ray_call__"):
        try:
            begun = await balancer.__ray_call__.remote(number_of_prompt, call.request_id, call.digest)
        except RayError as error:
            logger.warning("rollout_spec: %s: %r", _NOT_REPEATED, error)
    return [BY_PROMPT, value(client.config, f"{ROLLOUT}.seed"), *begun]


def _given_name(extra_args: Mapping[str, Any]) -> Any:
    """Of a sample: its agent loop's own, else that of its row; None: nobody has named it."""
    name = extra_args.get(keys.NAME_KEY)
    return extra_args.get(keys.SAMPLE_KEY) if name is None else name


def _ask(home: Any, method: str, *args: Any) -> Any:
    """What a method of `SampleCalls` returns at this home, as a reference of Ray's."""
    return home.__ray_call__.remote(_answer, method, *args)


def _answer(_: Any, method: str, *args: Any) -> Any:
    return getattr(sample_calls.calls_here, method)(*args)


def _is_ours(client: Any) -> bool:
    """Whether the client's servers are ours, as its configuration says; a derived one may have any."""
    config = client.config
    return isinstance(config, DictConfig) and value(config, "rollout.spec.method") is not None
