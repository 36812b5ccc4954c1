"""verl's client of the rollout servers, which names every call, in every process and for any agent loop.

A sample may make many calls: once a turn, several with one prompt (best of n, a retry), along the branches
of a tree, beside its main text (a title, a sub-agent). The tokens follow from the call's name and the
weights, so every call has its own: the sample's name, a digest of the prompt, and the number of the sample's
earlier calls with it. After an abort, verl's client sends a further request of the same call and name.

Where nobody has named the sample (`samples.py`), it is named here: by its first prompt, and by how many
samples of the run have begun with that. So a run that repeats this one has the same set of samples. Its calls
are those of one request id. Every request also says which group and sample it is of, and which of the
sample's calls; the servers that a sample has called are told of its end.

The calls of a sample are counted in the process where it begins. A client that is sent to another process in
the middle, as to a task of Ray, asks there.
"""

import asyncio
import contextlib
import hashlib
import threading
import uuid
from array import array
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import ray
from omegaconf import DictConfig
from ray.exceptions import RayError
from verl.utils import normalize_token_ids

from rollout_spec.patches import wrap
from rollout_spec.verl.changes import NAMED_CALLS
from rollout_spec.verl.settings import ROLLOUT, value
from rollout_spec.vllm import keys

MAX_SAMPLES = 20_000  # that are remembered in a process: more than are under way there
MAX_PROMPTS = 100_000  # of which a run knows how many samples have begun with each
MAX_WAIT_S = 10.0  # for the process where a sample began
_DIGESTED = 4096  # tokens at each end of a prompt: a long one is not read again in every turn
_HOME = "_rollout_spec_home"  # of a client that was sent: the process that sent it, and its actor


class Call(NamedTuple):
    """What a call's name follows from, as far as another process needs to know it."""

    request_id: str
    digest: str  # of its prompt
    num_tokens: int  # in it
    extra_args: Mapping[str, Any]  # as its caller gave them
    is_seeded: bool  # its caller chose the noise


class Samples:
    """The samples whose calls are counted in this process. It has a lock: agent loops may run in threads."""

    def __init__(self) -> None:
        self._samples: OrderedDict[str, _Sample] = OrderedDict()  # by name, the one used last at the end
        self._names: dict[str, Any] = {}  # of samples, by the request ids of their calls
        self._lock = threading.Lock()

    def __contains__(self, name: Any) -> bool:
        return str(name) in self._samples

    def __len__(self) -> int:
        return len(self._samples)

    def name_of(self, request_id: str) -> Any:
        """That of the sample of this request id; None: it has none here."""
        return self._names.get(request_id)

    def begin(self, name: Any, *apart: str) -> "_Sample":
        """The sample of this name, whose calls are counted here. `apart`: what else is in their names."""
        with self._lock:
            sample = self._samples.setdefault(str(name), _Sample(apart))
            self._samples.move_to_end(str(name))
            if len(self._samples) > MAX_SAMPLES:
                self._forget(next(iter(self._samples)))
            return sample

    def add(self, name: Any, call: Call) -> dict[str, Any]:
        """The `extra_args` of one more call of the sample of this name."""
        sample = self.begin(name)
        with self._lock:
            if sample.group is None:
                sample.group, sample.num_group_tokens = f"prompt:{call.digest}", call.num_tokens
            sample.request_ids.add(call.request_id)
            self._names[call.request_id] = name
            turn, number = sample.num_calls.total(), sample.num_calls[call.digest]
            sample.num_calls[call.digest] += 1
        group = call.extra_args.get(keys.GROUP_KEY)
        own = {
            keys.SAMPLE_KEY: str(name),
            keys.GROUP_KEY: sample.group if group is None else group,
            keys.GROUP_TOKENS_KEY: sample.num_group_tokens,
            keys.TURN_KEY: turn,
            keys.TURN_TOKENS_KEY: call.num_tokens,
        }
        if not call.is_seeded:
            plain = name if isinstance(name, (list, tuple)) else [name]
            own[keys.NAME_KEY] = [*plain, *sample.apart, call.digest, number]
        return {**call.extra_args, **own}

    def note_server(self, name: str, server: Any) -> None:
        """The sample of this name has a request on this server, an actor of Ray."""
        if (sample := self._samples.get(name)) is not None:
            sample.servers.add(server)

    def end(self, name: Any) -> None:
        """The sample of this name makes no more calls: tell the servers of those that it made."""
        with self._lock:
            servers = self._forget(str(name))
        for server in servers:
            server.end_sample.remote(str(name))

    def end_request(self, request_id: str) -> None:
        """The sample whose calls have this request id makes no more."""
        if (name := self.name_of(request_id)) is not None:
            self.end(name)

    def _forget(self, name: str) -> set[Any]:
        sample = self._samples.pop(name, None)
        for request_id in sample.request_ids if sample is not None else ():
            self._names.pop(request_id, None)
        return sample.servers if sample is not None else set()


class _Sample:
    """What is remembered of a sample."""

    def __init__(self, apart: tuple[str, ...]) -> None:
        self.apart = apart
        self.group: str | None = None  # by its first prompt
        self.num_group_tokens = 0
        self.num_calls: Counter[str] = Counter()  # with each prompt, by its digest
        self.request_ids = set[str]()
        self.servers = set[Any]()


here = Samples()
_process = uuid.uuid4().hex
_sample: ContextVar[tuple[str, Any] | None] = ContextVar("_sample", default=None)  # of a call, and its home


def change(module: Any) -> None:
    """Let the clients of verl's module `llm_server`, and all that derive from them, name their calls."""
    for client in (module.LLMServerClient, module.FullyAsyncLLMServerClient):
        wrap(client, "generate", NAMED_CALLS)(_generate)
    wrap(module.LLMServerClient, "_acquire_server", NAMED_CALLS)(_acquire_server)
    module.LLMServerClient.__getstate__ = _state


async def _generate(
    generate: Any,
    self: Any,
    request_id: Any,
    *,
    prompt_ids: Any,
    sampling_params: Mapping[str, Any],
    **kwargs: Any,
) -> Any:
    """Generate as verl does; the call has a name."""
    given = sampling_params.get("extra_args") or {}
    is_named = keys.TURN_KEY in given  # by a class that stands before this one
    if is_named or "prompt_logprobs" in sampling_params or not _is_ours(self):  # those are a teacher's
        return await generate(
            self, request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs
        )
    prompt_ids = normalize_token_ids(prompt_ids)
    is_seeded = given.get(keys.NAME_KEY) is None and sampling_params.get("seed") is not None
    call = Call(str(request_id), _digest(prompt_ids), len(prompt_ids), dict(given), is_seeded)
    extra_args, home = await _named(self, call)
    token = _sample.set((extra_args[keys.SAMPLE_KEY], home)) if keys.SAMPLE_KEY in extra_args else None
    try:
        params = {**sampling_params, "extra_args": extra_args}
        return await generate(self, request_id, prompt_ids=prompt_ids, sampling_params=params, **kwargs)
    finally:
        if token is not None:
            _sample.reset(token)


async def _acquire_server(acquire: Any, self: Any, request_id: Any, *args: Any, **request: Any) -> Any:
    """Acquire as verl does, whatever it is given, and note where the call's sample goes."""
    acquired = await acquire(self, request_id, *args, **request)
    if (sample := _sample.get()) is not None:
        name, home = sample
        if home is None:
            here.note_server(name, acquired[1])
        else:
            home.__ray_call__.remote(_do, "note_server", name, acquired[1])
    return acquired


def _state(self: Any) -> dict[str, Any]:
    """What a copy of a client gets: it says where the samples began that call through it."""
    state = dict(vars(self))
    if len(here):
        context: Any = ray.get_runtime_context() if ray.is_initialized() else None
        in_actor = context is not None and context.get_actor_id() is not None
        state[_HOME] = _process, context.current_actor if in_actor else None
    return state


async def _named(client: Any, call: Call) -> tuple[dict[str, Any], Any]:
    """The call's `extra_args`, and the actor that counts its sample's calls; None: this process does."""
    name = call.extra_args.get(keys.NAME_KEY)
    if name is None:
        name = here.name_of(call.request_id) or await _name_by_prompt(client, call)
    elif keys.names_of(call.extra_args).key is None:
        return dict(call.extra_args), None  # what cannot be read is handed on
    process, home = vars(client).get(_HOME, (_process, None))
    if process != _process and name not in here:
        if home is not None:
            try:
                asked = home.__ray_call__.remote(_do, "add", name, call)
                return await asyncio.wait_for(asked, MAX_WAIT_S), home
            except (RayError, TimeoutError):
                vars(client)[_HOME] = process, None
        here.begin(name, _process)  # nobody can say which calls there were: these are apart from them
    return here.add(name, call), None


async def _name_by_prompt(client: Any, call: Call) -> list[Any]:
    """The name of a sample that has none: its first prompt, and how many of the run have begun with that.

    verl's balancer counts them: it is one for all processes of the run. Without it a number is random.
    """
    begun: Sequence[Any] = call.digest, uuid.uuid4().hex
    if hasattr(client._load_balancer, "__ray_call__"):
        with contextlib.suppress(RayError):
            begun = await client._load_balancer.__ray_call__.remote(_begin, call.request_id, call.digest)
    return ["prompt", value(client.config, f"{ROLLOUT}.seed"), *begun]


def _begin(balancer: Any, request_id: str, digest: str) -> tuple[str, int]:
    """In the balancer's process: a sample's first prompt, and how many had begun with it before."""
    samples, prompts = vars(balancer).setdefault("_rollout_spec_begun", (OrderedDict(), OrderedDict()))
    if request_id not in samples:
        number = prompts.pop(digest, 0)
        prompts[digest], samples[request_id] = number + 1, (digest, number)
    for begun, most in ((samples, MAX_SAMPLES), (prompts, MAX_PROMPTS)):
        if len(begun) > most:
            begun.popitem(last=False)
    found: tuple[str, int] = samples[request_id]
    return found


def _do(_: Any, method: str, *args: Any) -> Any:
    """Call a method of `Samples` in the process where the sample began."""
    return getattr(here, method)(*args)


def _is_ours(client: Any) -> bool:
    """Whether the client's servers are ours, as its configuration says; a derived one may have any."""
    config = client.config
    return isinstance(config, DictConfig) and value(config, "rollout.spec.method") is not None


def _digest(prompt_ids: Sequence[int]) -> str:
    """Of a prompt; of a long one its two ends. Should two be alike in them, their calls differ in number."""
    if len(prompt_ids) > 2 * _DIGESTED:
        prompt_ids = [len(prompt_ids), *prompt_ids[:_DIGESTED], *prompt_ids[-_DIGESTED:]]
    return hashlib.sha256(array("q", prompt_ids).tobytes()).hexdigest()[:16]
