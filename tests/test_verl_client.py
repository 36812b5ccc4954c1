"""verl's own clients, which name the calls of an agent loop; the servers record what they get."""

import asyncio
import contextlib
import copy
import json
import pickle
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict
from ray.exceptions import ActorDiedError, RayTaskError
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from vllm.v1.engine.exceptions import EngineDeadError

from rollout_spec.verl import client as verl_client
from rollout_spec.verl.agent_loop import KeyedAgentLoopWorker
from rollout_spec.verl.client import Calls, name_calls
from rollout_spec.vllm.keys import GROUP_KEY, NAME_KEY

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
    """As verl's, over one server. It can be pickled, as an actor's handle can; its server stays behind."""

    require_acquire_fields = require_release_fields = Remote(list)
    release_server = SimpleNamespace(remote=lambda **_: None)

    def __init__(self, server):
        self.acquire_server = Remote(lambda request_id: ("server", server))

    def __reduce__(self):
        return Balancer, (None,)


CONFIG = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm", "response_length": 6}}})


def make(server, verls=FullyAsyncLLMServerClient, calls=None):
    return name_calls(verls(CONFIG, Balancer(server)), calls or Calls())


def params(sample=SAMPLE):
    return {"temperature": 1.0, "extra_args": {NAME_KEY: sample, GROUP_KEY: "4:ab"}}


async def call(client, prompt, sampling_params):
    return await client.generate("r", prompt_ids=prompt, sampling_params=sampling_params)


async def best_of(client, sampling_params):
    """Three at once, a retry after them, and two branches whose prompts are of one length."""
    await asyncio.gather(*(call(client, [1, 2], sampling_params) for _ in range(3)))
    await call(client, [1, 2], copy.copy(sampling_params))
    await asyncio.create_task(call(client, [1, 3], copy.deepcopy(sampling_params)))
    await call(client, (2, 1), json.loads(json.dumps(sampling_params)))


@pytest.mark.parametrize("verls", [LLMServerClient, FullyAsyncLLMServerClient])
def test_every_call_of_a_sample_has_a_name_of_its_own_and_the_same_in_every_run(verls):
    runs = []
    for _ in range(2):
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


def test_what_else_a_caller_gives_is_handed_on():
    server = Server()
    client = make(server)
    client.config = OmegaConf.merge(CONFIG, {"actor_rollout_ref": {"rollout": {"full_determinism": True}}})
    asyncio.run(client.generate("mine", prompt_ids=[1], sampling_params=params(), image_data=["a"]))
    assert (server.requests[0]["request_id"], server.requests[0]["image_data"]) == ("mine", ["a"])


def test_a_call_keeps_its_name_when_it_is_interrupted_and_goes_on(monkeypatch):
    async def at_once(*_): ...

    server = Server(aborted=(0, 1))
    client = make(server)
    monkeypatch.setattr(
        "verl.workers.rollout.llm_server.asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": at_once})
    )
    asyncio.run(call(client, [1, 2], params()))
    asyncio.run(call(client, [1, 2, 8, 9, 8, 9, 8, 9, 5], params()))
    prompts = [request["prompt_ids"] for request in server.requests]
    assert prompts[:3] == [[1, 2], [1, 2, 8, 9], [1, 2, 8, 9, 8, 9]]
    assert [server.names.index(name) for name in server.names] == [0, 0, 0, 3]
    lengths = [(sent["rollout_spec_group_tokens"], sent["rollout_spec_turn_tokens"]) for sent in server.sent]
    assert lengths == [(2, 2)] * 3 + [(2, 9)], "the group's prompt, and the turn's"
    turns = [(sent["rollout_spec_sample"], sent["rollout_spec_turn"]) for sent in server.sent]
    assert turns == [(str(SAMPLE), turn) for turn in (0, 0, 0, 1)]


def test_a_name_may_be_the_users_own_or_none():
    """None of an agent loop that keeps none of the parameters; one that cannot be read is handed on."""
    server, deep = Server(), []
    client = make(server)
    for name in ("mine", 5, {"a": [1]}, "mine"):
        asyncio.run(call(client, [1], params(name)))
    assert len(set(server.names)) == 4
    assert [json.loads(name)[:-2] for name in server.names] == [["mine"], [5], [{"a": [1]}], ["mine"]]
    for _ in range(100_000):
        deep = [deep]
    asyncio.run(call(client, [1], {"extra_args": {NAME_KEY: deep}}))
    asyncio.run(call(client, [1, 2], {"temperature": 1.0}))
    assert server.sent[-2][NAME_KEY] is deep and server.sent[-1] is None


def test_samples_are_forgotten_when_they_end_and_beyond_a_bound(monkeypatch):
    monkeypatch.setattr(verl_client, "MAX_SAMPLES", 3)
    server, calls = Server(), Calls()
    client = make(server, calls=calls)
    for number in range(5):
        asyncio.run(call(client, [1], params([number])))
    assert len(calls._samples) == 3
    calls.end([4])
    calls.end("unknown")
    assert len(calls._samples) == 2
    assert server.ended == ["[4]"]
    asyncio.run(call(client, [1], params([4])))
    assert server.names[-1] == server.names[-2], "a run that repeats it"


@pytest.mark.parametrize("verls", [LLMServerClient, FullyAsyncLLMServerClient])
@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda client: pickle.loads(pickle.dumps(client))]
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
    assert len(set(server.names)) == 4


@contextlib.contextmanager
def elsewhere():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verl_client, "_calls_here", {})
        yield


def test_copies_are_of_their_worker_and_one_in_each_process():
    first, second = Calls(), Calls()
    data = pickle.dumps(first), pickle.dumps(second)
    assert pickle.loads(data[0]) is first and pickle.loads(data[1]) is second
    with elsewhere():
        there = [pickle.loads(each) for each in data]
        assert all(isinstance(calls, Calls) for calls in there) and there[0] is not there[1]
        assert pickle.loads(data[0]) is there[0]
        back = pickle.dumps(there[0])
    assert pickle.loads(back) is first


def test_copies_in_other_processes_name_calls_apart_and_the_same_when_repeated():
    def names_of_a_run():
        here = [Calls()]
        for data in [pickle.dumps(here[0]) for _ in range(2)]:
            with elsewhere():
                here.append(pickle.loads(data))
        return [
            json.dumps(each.named([1], params())["extra_args"][NAME_KEY]) for each in here for _ in range(2)
        ]

    names = names_of_a_run()
    assert len(set(names)) == len(names) == 6
    assert names_of_a_run() == names


def test_a_dead_server_is_met_by_whoever_wants_more_of_it(monkeypatch):
    """Also the error that a server raises for its engine, as Ray hands it on; also where a copy met it."""
    verls = AsyncMock()
    monkeypatch.setattr(KeyedAgentLoopWorker.__mro__[1], "generate_sequences", verls)
    engine = RayTaskError("generate", "its traceback", EngineDeadError()).as_instanceof_cause()
    for error, kind in ((ActorDiedError(), ActorDiedError), (engine, EngineDeadError)):
        worker, server = object.__new__(KeyedAgentLoopWorker), Server()
        worker._calls, server.generate = Calls(), Remote(Mock(side_effect=error))
        asyncio.run(worker.generate_sequences({"batch": 1}))
        assert verls.await_args.args == ({"batch": 1},)
        client = copy.copy(make(server, calls=worker._calls))
        with pytest.raises(kind):
            asyncio.run(call(client, [1], {}))
        with pytest.raises(kind):
            asyncio.run(worker.generate_sequences({}))
