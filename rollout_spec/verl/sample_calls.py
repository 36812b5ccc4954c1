"""The calls of samples, as one process counts them: what each is named, and which servers got them.

A sample may make many calls: once a turn, several with one prompt (best of n, a retry), along the branches
of a tree, beside its main text (a title, a sub-agent). The tokens follow from the call's name and the
weights, so every call has its own: the sample's name, a digest of the prompt, and the number of the sample's
earlier calls with it. Every call also says which group and sample it is of, and which of the sample's calls.
The servers that a sample has called are told of its end.
"""

import dataclasses
import hashlib
import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollout_spec.vllm import keys
from rollout_spec.vllm.keys import sample_text

MAX_OPEN_SAMPLES = 20_000  # that are remembered in a process: more than are under way there
MAX_PROMPTS = 100_000  # of which a run knows how many samples have begun with each
_DIGESTED = 4096  # tokens at each end of a prompt: a long one is not read again in every turn


class Call(NamedTuple):
    """What a call's name follows from, as far as another process needs to know it."""

    request_id: str
    digest: str  # of its prompt
    num_tokens: int  # in it
    extra_args: Mapping[str, Any]  # as its caller gave them
    is_seeded: bool  # its caller chose the noise


@dataclasses.dataclass
class _Sample:
    name_suffix: tuple[str, ...] = ()  # what else is in the names of its calls
    group: str | None = None  # by its first prompt
    num_group_tokens: int = 0
    num_calls: Counter[str] = dataclasses.field(default_factory=Counter)  # with each prompt, by its digest
    request_ids: set[str] = dataclasses.field(default_factory=set)
    servers: set[Any] = dataclasses.field(default_factory=set)


class SampleCalls:
    """The calls that are counted in one process. It has a lock: agent loops may run in threads."""

    def __init__(self) -> None:
        # By the name's text, the one used last at the end.
        self._samples: OrderedDict[str | None, _Sample] = OrderedDict()
        self._names: dict[str, Any] = {}  # of samples, by the request ids of their calls
        self._lock = threading.Lock()

    def __contains__(self, name: Any) -> bool:
        return sample_text(name) in self._samples

    def __len__(self) -> int:
        return len(self._samples)

    def name_of(self, request_id: str) -> Any:
        """That of the sample of this request id; None: it has none here."""
        return self._names.get(request_id)

    def begin(self, name: Any, *name_suffix: str) -> _Sample:
        """The sample of this name, whose calls are counted here; `name_suffix` is in their names too."""
        with self._lock:
            sample = self._samples.setdefault(sample_text(name), _Sample(name_suffix))
            self._samples.move_to_end(sample_text(name))
            if len(self._samples) > MAX_OPEN_SAMPLES:
                self._forget(next(iter(self._samples)))
            return sample

    def add(self, name: Any, call: Call) -> dict[str, Any]:
        """The `extra_args` of one more call of the sample of this name."""
        sample = self.begin(name)
        with self._lock:
            if sample.group is None:
                sample.group, sample.num_group_tokens = group_by_prompt(call.digest), call.num_tokens
            sample.request_ids.add(call.request_id)
            self._names[call.request_id] = name
            total, number = sample.num_calls.total(), sample.num_calls[call.digest]
            sample.num_calls[call.digest] += 1
        group = call.extra_args.get(keys.GROUP_KEY)
        own = {
            keys.SAMPLE_KEY: name,
            keys.GROUP_KEY: sample.group if group is None else group,
            keys.GROUP_TOKENS_KEY: sample.num_group_tokens,
            keys.CALL_KEY: total,
            keys.CALL_TOKENS_KEY: call.num_tokens,
        }
        if not call.is_seeded:
            begin = name if isinstance(name, (list, tuple)) else [name]
            own[keys.NAME_KEY] = [*begin, *sample.name_suffix, call.digest, number]
        return {**call.extra_args, **own}

    def note_server(self, name: Any, server: Any) -> None:
        """The sample of this name has a request on this server, an actor of Ray."""
        if (sample := self._samples.get(sample_text(name))) is not None:
            sample.servers.add(server)

    def end(self, name: Any) -> None:
        """The sample of this name makes no more calls: tell the servers of those that it made."""
        with self._lock:
            servers = self._forget(sample_text(name))
        for server in servers:
            server.end_sample.remote(sample_text(name))

    def end_request(self, request_id: str) -> None:
        """The sample whose calls have this request id makes no more."""
        if (name := self.name_of(request_id)) is not None:
            self.end(name)

    def _forget(self, text: str | None) -> set[Any]:
        """Returns the servers that the sample whose name has this text has called."""
        sample = self._samples.pop(text, _Sample())
        for request_id in sample.request_ids:
            self._names.pop(request_id, None)
        return sample.servers


calls_here = SampleCalls()
"""Those of this process: users write `sample_calls.calls_here`."""


def prompt_digest(prompt_ids: Sequence[int]) -> str:
    """Of a long prompt that of its two ends. Should two be alike in them, their calls differ in number."""
    if len(prompt_ids) > 2 * _DIGESTED:
        prompt_ids = [len(prompt_ids), *prompt_ids[:_DIGESTED], *prompt_ids[-_DIGESTED:]]
    return hashlib.sha256(array("q", prompt_ids).tobytes()).hexdigest()[:16]


def group_by_prompt(digest: str) -> str:
    """The group of samples whose first prompt has this digest, where nobody has named it."""
    return f"prompt:{digest}"


def number_of_prompt(balancer: Any, request_id: str, digest: str) -> tuple[str, int]:
    """In the process of verl's balancer: the digest of a sample's first prompt, and how many samples of the
    run had begun with that before. The sample's calls are those with this request id."""
    samples, prompts = vars(balancer).setdefault("_rollout_spec_begun", (OrderedDict(), OrderedDict()))
    if request_id not in samples:
        number = prompts.pop(digest, 0)
        prompts[digest], samples[request_id] = number + 1, (digest, number)
    for begun, most in ((samples, MAX_OPEN_SAMPLES), (prompts, MAX_PROMPTS)):
        if len(begun) > most:
            begun.popitem(last=False)
    found: tuple[str, int] = samples[request_id]
    return found
