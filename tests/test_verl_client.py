"""Names: of rows, and of calls by verl's own clients, where the servers record what they get."""

import asyncio
import copy
import inspect
import json
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import verl.utils.tensordict_utils as tu
from omegaconf import OmegaConf
from PIL import Image
from pydantic import BaseModel, ConfigDict
from ray.exceptions import ActorDiedError
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from rollout_spec.sample_names import split_of
from rollout_spec.verl import client as verl_client
from rollout_spec.verl import sample_calls
from rollout_spec.verl.row_names import ROW, RowNames, prompt_name
from rollout_spec.verl.sample_calls import Call, SampleCalls, number_of_prompt, prompt_digest
from rollout_spec.vllm.keys import GROUP_KEY, NAME_KEY, SAMPLE_KEY
from tests.agents import batch_of

SAMPLE = [7, 3, "train", "4", "ab", 0, 1]


class Remote:
    def __init__(self, answer):
        self._answer = answer

    async def remote(self, *args, **kwargs):
        await asyncio.sleep(0)
        return self._answer(*args, **kwargs)


class Server:
    """Answers with two tokens; the requests whose numbers are in `aborted` it does not end."""

    def __init__(self, aborted=()):
        self.requests: list[dict[str, Any]] = []
        self.ended: list[str] = []
        self.end_sample = SimpleNamespace(remote=self.ended.append)
        self._aborted = aborted
        self.generate = Remote(self._generate)

    def _generate(self, **request):
        stop = "aborted" if len(self.requests) in self._aborted else "completed"
        self.requests.append(request)
        return TokenOutput(token_ids=[8, 9], log_probs=[0.0, 0.0], num_preempted=0, stop_reason=stop)

    @property
    def sent(self):
        return [request["sampling_params"].get("extra_args") for request in self.requests]

    @property
    def names(self):
        return [json.dumps(extra_args[NAME_KEY]) for extra_args in self.sent]


class Balancer:
    """As verl's, over one server, and as far as an actor's handle goes."""

    require_acquire_fields = require_release_fields = Remote(list)
    release_server = SimpleNamespace(remote=lambda **_: None)

    def __init__(self, server):
        self.acquire_server = Remote(lambda request_id: ("server", server))
        self.__ray_call__ = Remote(lambda function, *args: function(self, *args))

    def __reduce__(self):
        return Balancer, (None,)


ROLLOUT = {"name": "vllm", "response_length": 6, "seed": 7}
SPEC = {"spec": {"method": "sam"}}
CONFIG = OmegaConf.create({"actor_rollout_ref": {"rollout": ROLLOUT}, "rollout": SPEC})


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """The samples of a process that has just begun."""
    monkeypatch.setattr(sample_calls, "calls_here", SampleCalls())
    return sample_calls.calls_here


def make(server, verls=FullyAsyncLLMServerClient):
    return verls(CONFIG, Balancer(server))


def params(sample=SAMPLE):
    return {"temperature": 1.0, "extra_args": {SAMPLE_KEY: sample, GROUP_KEY: "4:ab"}}


async def call(client, prompt, sampling_params, request_id="r"):
    return await client.generate(request_id, prompt_ids=prompt, sampling_params=sampling_params)


async def best_of(client, sampling_params):
    """Three at once, a retry after them, and two branches whose prompts are of one length."""
    await asyncio.gather(*(call(client, [1, 2], sampling_params) for _ in range(3)))
    await call(client, [1, 2], copy.copy(sampling_params))
    await asyncio.create_task(call(client, [1, 3], copy.deepcopy(sampling_params)))
    await call(client, (2, 1), json.loads(json.dumps(sampling_params)))


@pytest.mark.parametrize("verls", [LLMServerClient, FullyAsyncLLMServerClient])
def test_every_call_of_a_sample_has_a_name_of_its_own_and_the_same_in_every_run(verls, monkeypatch):
    runs = []
    for _ in range(2):
        monkeypatch.setattr(sample_calls, "calls_here", SampleCalls())
        server, given = Server(), params()
        asyncio.run(best_of(make(server, verls), given))
        runs.append(server.names)
        assert given == params(), "the caller's stay as they are"
    assert len(set(runs[0])) == 6
    assert [json.loads(name)[-1] for name in runs[0]] == [0, 1, 2, 3, 0, 0], "among calls with that prompt"
    assert runs[0] == runs[1]
    for name in map(json.loads, runs[0]):
        assert name[: len(SAMPLE)] == SAMPLE, "the rest of the product reads it there"
    # A run that is repeated with another release gets the same tokens.
    assert json.loads(runs[0][3]) == [*SAMPLE, "0c730b69905c5ef7", 3]


def test_what_else_a_caller_gives_is_handed_on_and_the_noise_that_it_chose():
    server = Server()
    client = make(server)
    client.config = OmegaConf.merge(CONFIG, {"actor_rollout_ref": {"rollout": {"full_determinism": True}}})
    asyncio.run(client.generate("mine", prompt_ids=[1], sampling_params=params(), image_data=["a"]))
    assert (server.requests[0]["request_id"], server.requests[0]["image_data"]) == ("mine", ["a"])
    server = Server()
    asyncio.run(call(make(server), [1], {"seed": 5}))
    assert NAME_KEY not in server.sent[0] and server.sent[0]["rollout_spec_call"] == 0
    asyncio.run(call(make(server), [1], params() | {"seed": 5}))
    assert len(server.sent[1][NAME_KEY]) == len(SAMPLE) + 2 and server.sent[1][GROUP_KEY] == "4:ab"


def test_a_call_keeps_its_name_when_it_is_interrupted_and_goes_on(monkeypatch):
    async def at_once(*_): ...

    server = Server(aborted=(0, 1))
    client = make(server)
    fast = SimpleNamespace(**{**vars(asyncio), "sleep": at_once})
    monkeypatch.setattr("verl.workers.rollout.llm_server.asyncio", fast)
    asyncio.run(call(client, [1, 2], params()))
    asyncio.run(call(client, [1, 2, 8, 9, 8, 9, 8, 9, 5], params()))
    prompts = [request["prompt_ids"] for request in server.requests]
    assert prompts[:3] == [[1, 2], [1, 2, 8, 9], [1, 2, 8, 9, 8, 9]]
    assert [server.names.index(name) for name in server.names] == [0, 0, 0, 3]
    lengths = [(sent["rollout_spec_group_tokens"], sent["rollout_spec_call_tokens"]) for sent in server.sent]
    assert lengths == [(2, 2)] * 3 + [(2, 9)], "the group's prompt, and the turn's"
    turns = [(sent[SAMPLE_KEY], sent["rollout_spec_call"]) for sent in server.sent]
    assert turns == [(SAMPLE, turn) for turn in (0, 0, 0, 1)]


def test_a_name_may_be_the_users_own():
    """One that cannot be read is handed on. Without a group, siblings are those with one first prompt."""
    server, deep = Server(), []
    client = make(server)
    for name in ("mine", 5, {"a": [1]}, "mine"):
        asyncio.run(call(client, [1], {"extra_args": {NAME_KEY: name, SAMPLE_KEY: SAMPLE}}))
    assert len(set(server.names)) == 4
    assert [sent[SAMPLE_KEY] for sent in server.sent] == ["mine", 5, {"a": [1]}, "mine"]
    assert [json.loads(name)[:-2] for name in server.names] == [["mine"], [5], [{"a": [1]}], ["mine"]]
    for name in ("one", "two"):
        asyncio.run(call(client, [1, 2], {"extra_args": {NAME_KEY: name}}))
    assert server.sent[-1][GROUP_KEY] == server.sent[-2][GROUP_KEY] != server.sent[0][GROUP_KEY]
    for _ in range(100_000):
        deep = [deep]
    asyncio.run(call(client, [1], {"extra_args": {NAME_KEY: deep}}))
    assert server.sent[-1] == {NAME_KEY: deep} and server.sent[-1][NAME_KEY] is deep


@pytest.mark.parametrize("verls", [LLMServerClient, FullyAsyncLLMServerClient])
def test_calls_of_nobody_are_named_by_their_request_and_its_first_prompt(verls, monkeypatch):
    """Two sessions of one prompt, one of another; turns, and a side request beside the first turn."""

    async def session(client, request_id, prompt, *others):
        turns = (call(client, each, {"temperature": 1.0}, request_id) for each in (prompt, *others))
        await asyncio.gather(*turns)
        await call(client, [*prompt, 8, 9, 5], {"temperature": 1.0}, request_id)

    runs = []
    for request_ids in (("a", "b", "c"), ("x", "z", "y")):
        server = Server()
        client = make(server, verls)
        for process in "12":
            monkeypatch.setattr(sample_calls, "calls_here", SampleCalls())
            for request_id, prompt in zip(request_ids, ([1, 2], [1, 2], [3]), strict=True):
                asyncio.run(session(client, request_id + process, prompt, [4]))
        runs.append(server)
    assert sorted(runs[0].names) == sorted(runs[1].names) and len(set(runs[0].names)) == 9 * 2
    names = [json.loads(name) for name in runs[0].names]
    assert {tuple(name[:2]) for name in names} == {("prompt", 7)}
    assert {name[3] for name in names} == {0, 1, 2, 3}
    turns: dict[str, list[int]] = {}
    for each in runs[0].sent:
        turns.setdefault(str(each[SAMPLE_KEY]), []).append(each["rollout_spec_call"])
    assert list(turns.values()) == [[0, 1, 2]] * 6
    assert len({each[GROUP_KEY] for each in runs[0].sent}) == 2
    assert {each["rollout_spec_group_tokens"] for each in runs[0].sent} == {1, 2}


@pytest.mark.parametrize("balancer", [None, "broken"])
def test_without_a_balancer_that_counts_names_are_apart_all_the_same(balancer):
    async def fail(*_):
        raise ActorDiedError

    client, calls = make(Server()), []
    client._load_balancer = SimpleNamespace(__ray_call__=SimpleNamespace(remote=fail)) if balancer else None
    for request_id in "aab":
        made = Call(request_id, "its digest", 1, {}, False)
        calls.append(asyncio.run(verl_client._name_call(client, made)).extra_args[NAME_KEY])
    assert calls[0][:3] == calls[2][:3] == ["prompt", 7, "its digest"]
    assert calls[0][3] == calls[1][3] != calls[2][3]


@pytest.mark.parametrize("change", ["off", "teacher"])
def test_calls_of_other_servers_are_left_alone(change):
    """Of a run without `rollout.spec`, and for the log-probabilities of a prompt."""
    server, sampling = Server(), {"temperature": 1.0}
    client = make(server)
    if change == "off":
        client.config = OmegaConf.create({"actor_rollout_ref": {"rollout": ROLLOUT}})
    else:
        sampling["prompt_logprobs"] = 1
    asyncio.run(call(client, [1], dict(sampling)))
    assert server.sent == [None]


def test_a_client_that_derives_from_verls_is_named():
    """Whatever it overrides, and however a branch of verl hands a request to its balancer."""

    class OfBranch(LLMServerClient):  # as it is before we patch it
        generate, __getstate__ = map(inspect.unwrap, (LLMServerClient.generate, LLMServerClient.__getstate__))

        async def _acquire_server(self, request_id, prompt_ids=None, /, extra=None):
            assert (request_id, prompt_ids, extra) == ("r", [1], {})
            return await self._load_balancer.acquire_server.remote(request_id)

    class Client(OfBranch):
        async def _acquire_server(self, request_id, prompt_ids=None, **_):
            return await super()._acquire_server(request_id, prompt_ids, extra={})

        async def generate(self, request_id, **request):
            return await super().generate(request_id, **request)

    both = SimpleNamespace(LLMServerClient=OfBranch, FullyAsyncLLMServerClient=FullyAsyncLLMServerClient)
    verl_client.patch_clients(both)
    server = Server()
    client = make(server, Client)
    client._lb_require_release_fields = []
    asyncio.run(call(client, [1], {}))
    assert json.loads(server.names[0])[0] == "prompt"
    assert verl_client._HOME in client.__getstate__()
    sample_calls.calls_here.end_request("r")
    assert server.ended == [json.dumps(server.sent[0][SAMPLE_KEY])]


def test_a_long_prompt_is_told_by_its_length_and_its_ends():
    prompt = list(range(20_000))
    others = [*prompt, 1], [1, *prompt[1:]], [*prompt[:-1], 1]
    digests = [*map(prompt_digest, (prompt, *others))]
    assert len(set(digests)) == 4
    middle = prompt.copy()
    middle[10_000] = 0
    assert prompt_digest(middle) == digests[0]
    assert prompt_digest(middle[5_000:13_000]) != prompt_digest(prompt[5_000:13_000])


def test_samples_are_forgotten_when_they_end_and_beyond_a_bound(monkeypatch, here):
    monkeypatch.setattr(sample_calls, "MAX_OPEN_SAMPLES", 3)
    server = Server()
    client = make(server)
    for number in (0, 1, 2, 0, 3, 4):
        asyncio.run(call(client, [1], params([number]), f"r{number}"))
    assert [[number] in here for number in range(5)] == [True, False, False, True, True], "those used last"
    assert here.name_of("r1") is None and here.name_of("r4") == [4]
    sample_calls.calls_here.end([4])
    sample_calls.calls_here.end("unknown")
    sample_calls.calls_here.end_request("r1")
    sample_calls.calls_here.end_request("r3")
    assert len(here) == 1 and here.name_of("r4") is None
    assert server.ended == ["[4]", "[3]"]
    asyncio.run(call(client, [1], params([4])))
    assert server.names[-1] == server.names[-2], "a run that repeats it"


def test_the_balancer_forgets_what_began_longest_ago(monkeypatch):
    monkeypatch.setattr(sample_calls, "MAX_OPEN_SAMPLES", 2)
    monkeypatch.setattr(sample_calls, "MAX_PROMPTS", 2)
    balancer = SimpleNamespace()
    asked = zip("abacdefa", "xxxyxzyx", strict=True)
    begun = [number_of_prompt(balancer, request_id, digest) for request_id, digest in asked]
    assert begun == [("x", 0), ("x", 1), ("x", 0), ("y", 0), ("x", 2), ("z", 0), ("y", 0), ("x", 0)]


def sent(client, actor):
    """The client as another process gets it; `actor`: the handle of the actor that sends it."""
    with pytest.MonkeyPatch.context() as patch:
        context = SimpleNamespace(get_actor_id=lambda: actor and "id", current_actor=actor)
        patch.setattr(verl_client.ray, "is_initialized", lambda: True)
        patch.setattr(verl_client.ray, "get_runtime_context", lambda: context)
        state = client.__getstate__()
    copied = object.__new__(type(client))
    copied.__dict__.update(state)
    return copied


@pytest.mark.parametrize("verls", [LLMServerClient, FullyAsyncLLMServerClient])
@pytest.mark.parametrize(
    "copied",
    [
        *(copy.copy, copy.deepcopy, lambda client: pickle.loads(pickle.dumps(client))),
        lambda client: sent(client, SimpleNamespace()),  # the actor itself, which nobody need ask
    ],
)
def test_a_copy_is_verls_client_and_counts_with_the_others(verls, copied):
    class ChatModel(BaseModel):
        """As those of agent frameworks that hold the client."""

        model_config = ConfigDict(arbitrary_types_allowed=True)
        client: LLMServerClient

    server = Server()
    client = make(server, verls)
    client.tokenizer = "verl sets it"
    asyncio.run(call(client, [1, 2], params()))
    second = copied(client)
    for each in (client, second, copied(second)):
        assert ChatModel(client=each).client is each
        assert isinstance(each, verls) and each.tokenizer == "verl sets it"
        each._load_balancer = client._load_balancer
        asyncio.run(call(each, [1, 2], params()))
        asyncio.run(call(each, [1, 2], params("another")))
    assert len(set(server.names)) == 7


@pytest.mark.parametrize("failure", ["none", "no actor", "busy", "dead"])
def test_a_client_that_is_sent_asks_where_the_sample_began(failure, here, monkeypatch, caplog):
    """With real processes: tests/test_verl_history.py. Where nobody answers, names are apart all the same."""

    async def answer(function, *args):
        if failure == "busy":
            await asyncio.sleep(60)
        if failure == "dead":
            raise ActorDiedError
        monkeypatch.setattr(sample_calls, "calls_here", here)
        try:
            return function(None, *args)
        finally:
            monkeypatch.setattr(sample_calls, "calls_here", there)

    monkeypatch.setattr(verl_client, "HOME_ANSWER_S", 0.01)
    remote = SimpleNamespace(remote=lambda *args: asyncio.ensure_future(answer(*args)))
    home = SimpleNamespace(__ray_call__=remote) if failure != "no actor" else None
    server, there = Server(), SampleCalls()
    client = make(server)
    assert verl_client._HOME not in client.__getstate__(), "it brings no samples"
    sample_calls.calls_here.begin(SAMPLE)
    asyncio.run(call(client, [1] * 100, params()))
    copied = sent(client, home)
    copied._load_balancer = Balancer(other := Server())
    monkeypatch.setattr(sample_calls, "calls_here", there)
    monkeypatch.setattr(verl_client, "_process", "another")
    for prompt in ([1] * 100, [1] * 600):
        asyncio.run(call(copied, prompt, params()))
    server.requests += other.requests
    assert len(set(server.names)) == 3
    turns = [(each["rollout_spec_call"], each["rollout_spec_group_tokens"]) for each in server.sent]
    if failure == "none":
        assert turns == [(0, 100), (1, 100), (2, 100)] and len(there) == 0
        assert [json.loads(name)[-1] for name in server.names] == [0, 1, 0]
        here.end(SAMPLE)
        assert other.ended == server.ended == [json.dumps(SAMPLE)]
    else:
        assert len(there) == 1
        asyncio.run(call(copied, [1], params("a new one")))
        assert all("another" in name for name in [*server.names[1:], *other.names])
    assert caplog.text.count("another run has other tokens") == (failure in ("busy", "dead")), "once a client"


def rows_of(names, *batch, **more):
    return [json.loads(row) for row in tu.get(names.add_to(batch_of(*batch, **more)), ROW)]


def test_a_rows_name_is_its_own_and_the_same_in_every_run():
    [name] = rows_of(RowNames(7), ["2 + 2"], [4], 3)
    # A run that is repeated with another release gets the same tokens.
    assert name == [7, 3, "train", "4", "119630b4882f7920", 0]
    assert rows_of(RowNames(7), ["2 + 2"], [4], 3) == [name]
    others = [
        rows_of(RowNames(8), ["2 + 2"], [4], 3),
        rows_of(RowNames(7), ["2 + 2"], [4], 4),
        rows_of(RowNames(7), ["2 + 2"], [4], 3, validate=True),
        rows_of(RowNames(7), ["2 + 2"], [5], 3),
        rows_of(RowNames(7), ["2 + 2"], None, 3),
        rows_of(RowNames(7), ["2 + 3"], [4], 3),
        rows_of(RowNames(7), ["2 + 2"], [4], 3, tools_kwargs=[{"task": {"repository": "a"}}]),
        rows_of(RowNames(7), ["2 + 2"], [4], 3, tools_kwargs=[{"task": {"repository": "b"}}]),
        rows_of(RowNames(7), ["2 + 2", "2 + 2"], [4, 4], 3)[1:],
    ]
    assert len({json.dumps(other) for other in [[name], *others]}) == len(others) + 1
    assert rows_of(RowNames(7), ["2 + 2"], [4], 3, tools_kwargs=[{}]) == [name]
    assert split_of(name) == "train" and split_of(others[2][0]) == "val"
    of_no_row = (None, "val", ["unnamed", 0, 0, 3], ["prompt", 7, "ab", 0])
    assert [split_of(each) for each in of_no_row] == [None] * 4


def test_prompts_that_are_drawn_again_in_a_step_are_numbered():
    names = RowNames(0)
    for indices, step, validate, numbers in (
        ([4, 4], 3, False, [0, 1]),
        ([4, 4], 3, False, [2, 3]),  # more of the step
        ([4, 4], 3, True, [0, 1]),  # and what validates it
        ([4, 5], 3, True, [2, 0]),  # alike, but of two places
        ([4, 5], 4, True, [0, 0]),
    ):
        batch = batch_of(["2 + 2", "2 + 2"], indices, step, validate)
        with_names = names.add_to(batch)
        assert [json.loads(row)[-1] for row in tu.get(with_names, ROW)] == numbers
        assert ROW not in batch
    columns = dict(with_names.chunk(2)[1].items())  # as verl's worker reads them
    assert json.loads(columns[ROW][0].data)[3] == "5"
    without = tu.get_tensordict({"uid": ["a"]})
    assert names.add_to(without) is without


def test_prompts_of_one_text_with_other_images_are_two_though_they_have_no_index():
    def digest(image):
        return prompt_name(None, [{"role": "user", "content": [{"type": "image", "image": image}]}])[1]

    pictures = [np.full((2, 2, 3), shade, np.uint8) for shade in (1, 2)]
    for kind in (Image.fromarray, torch.from_numpy, np.array, np.ndarray.tobytes):
        assert [digest(kind(each)) for each in pictures] == [digest(kind(each.copy())) for each in pictures]
        assert digest(kind(pictures[0])) != digest(kind(pictures[1])) != digest(object())
    assert digest(object()) == "8665f43eda0bcee1"
