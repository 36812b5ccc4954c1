"""verl's side without Ray: what its trainer logs, its agent loops send, and its server counts and records."""

import asyncio
import contextlib
import inspect
import json
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import ray
import transfer_queue
import verl.utils.tensordict_utils as tu
from omegaconf import OmegaConf
from verl.experimental.agent_loop import agent_loop
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from vllm.v1.engine.exceptions import EngineDeadError

from rollout_spec.config import ConfigError
from rollout_spec.metrics import EngineCounters, RequestCounters
from rollout_spec.patches import PatchError
from rollout_spec.predict.rollout_files import read_rollouts
from rollout_spec.verification.noise import make_key
from rollout_spec.verl import row_names, sample_calls, server_drafters, server_windows, trainer_hooks
from rollout_spec.verl import server as verl_server
from rollout_spec.verl.row_names import ROW
from rollout_spec.verl.sample_calls import SampleCalls
from rollout_spec.verl.server_windows import Windows
from rollout_spec.vllm import SCHEDULER
from rollout_spec.vllm.keys import RequestKeys
from tests.agents import batch_of
from tests.configs import composed
from tests.text import tokens_of


@pytest.fixture
def answers(server_of, monkeypatch):
    """`answers(...)`: how verl's own server ends requests; in the list their parameters will be."""
    asked: list[Any] = []

    def install(token_ids=(8,), admits=True, **fields):
        async def generate(self, _, sampling_params, request_id, **others):
            if admits:
                self._windows.admit()
            asked.append(sampling_params | others)
            return SimpleNamespace(token_ids=token_ids, extra_fields={**fields}, stop_reason="completed")

        monkeypatch.setattr(server_of.__mro__[1], "generate", generate)
        return asked

    return install


def test_a_verl_without_a_method_that_we_override_is_refused(monkeypatch):
    monkeypatch.delattr(verl_server.vLLMHttpServer, "_park_until_admitted")
    with pytest.raises(PatchError, match="_park_until_admitted takes nothing: it is gone"):
        verl_server.SpecHttpServer()


@pytest.mark.parametrize("method", ["sam", "off"])
def test_a_server_remembers_ended_samples_for_drafters_alone(method, server_of):
    server = server_of(None, {"method": method})
    for _ in range(2):
        asyncio.run(server.end_sample("a"))
    assert list(server._drafters.take_ended().samples) == ["a"] * (method == "sam")


def test_ends_of_samples_are_passed_on_soon_also_those_that_come_meanwhile(monkeypatch):
    async def call(self, method, samples):
        passed.append(sorted(samples))
        for sample in "bcb" if len(passed) == 1 else "":
            self.end_sample(sample)

    async def serve():
        drafters.end_sample("a")
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

    passed: list[list[str]] = []
    monkeypatch.setattr(server_drafters, "TELL_ENDED_AFTER_S", 0)
    monkeypatch.setattr(server_drafters.Drafters, "call", call)
    drafters = server_drafters.Drafters(lambda: None, 0)
    asyncio.run(serve())
    assert passed == [["a"], ["b", "c"]] and drafters.take_ended().samples == []


def test_a_sample_without_a_told_end_ends_after_three_syncs_without_it(server_of, answers, monkeypatch):
    async def call(self, method, ended, step=None):
        found.append(list(ended.samples))

    found: list[list[str]] = []
    answers(admits=False)
    monkeypatch.setattr(verl_server.Drafters, "call", call)
    server = server_of(None, {"method": "sam"})

    def serve(sample):
        asyncio.run(server.generate([1], {"extra_args": {"rollout_spec_sample": sample}}, "one"))

    for sample in "abc":
        serve(sample)
    for step in range(6):
        if step == 1:
            asyncio.run(server.end_sample("b"))
            serve("c")
        asyncio.run(server.set_global_steps(step))
    assert found == [[], ["b"], [], ["a"], ["c"], []]


def test_a_step_logs_what_ran_before_its_weight_sync_and_no_validation(server_of, monkeypatch):
    """The real wrappers and servers; verl's methods are cut down to what they do to the servers."""

    class CountingEngine:
        """Its drafter works a step for each token, and is off in a validation."""

        def __init__(self):
            self.counters, self.engine_core = EngineCounters(), self

        async def call_utility_async(self, _): ...

        async def collective_rpc(self, _, args):
            return [self.counters.take().to_dict() if args == ("take_counters",) else None]

    async def generate(self, prompt_ids, sampling_params, request_id, stop="completed"):
        self._windows.admit()
        num, is_training = len(prompt_ids), "extra_args" not in sampling_params
        self.engine.counters.add(EngineCounters(num_steps=num, num_steps_on=num * is_training))
        counts = RequestCounters(num, num, num, 2 * num, num).to_dict()
        sent = {"kv_transfer_params": {"rollout_spec": counts}}
        return SimpleNamespace(token_ids=prompt_ids, extra_fields=sent, stop_reason=stop)

    def serve(server, num_tokens, **more):
        """A request of nobody's name, as of an agent loop manager of the user's own."""
        asyncio.run(server.generate([1] * num_tokens, {"seed": 0}, "id", **more))

    def sync(server):
        asyncio.run(server.set_global_steps(0))

    def compute(self, batch, metrics, timing_raw, global_steps, epoch):
        metrics["upstream"] = global_steps

    compute.__signature__ = inspect.signature(PPOTrainer._compute_metrics)  # type: ignore[attr-defined]
    monkeypatch.setattr(server_of.__mro__[1], "generate", generate)
    servers = [server_of(CountingEngine(), {"method": "sam"}) for _ in range(2)]
    asked = ("take_rollout_report", "begin_validation", "end_validation")
    handles = [
        SimpleNamespace(**{name: SimpleNamespace(remote=getattr(server, name)) for name in asked})
        for server in servers
    ]
    monkeypatch.setattr(PPOTrainer, "_compute_metrics", compute)
    monkeypatch.setattr(PPOTrainer, "_validate", lambda self: [serve(server, 1000) for server in servers])
    monkeypatch.setattr(ray, "get", lambda replies: list(map(asyncio.run, replies)))
    trainer_hooks.install()
    trainer: Any = SimpleNamespace(
        config=OmegaConf.create({"rollout": {"spec": {"method": "sam"}}}),
        _rollout_server_managers=lambda: [SimpleNamespace(server_handles=handles)],
    )

    def metrics_of(step):
        metrics: dict[str, float] = {}
        PPOTrainer._compute_metrics(trainer, None, metrics, {}, step, 0)
        return metrics

    PPOTrainer._validate(trainer)  # trainer.val_before_train
    for step, (tokens, validate) in enumerate((((10, 20), False), ((30, 5), True), ((4, 4), True)), start=1):
        for server, num in zip(servers, tokens, strict=True):
            serve(server, num, stop="aborted" if num == 5 else "completed")
            sync(server)
        if validate:
            PPOTrainer._validate(trainer)
        metrics = metrics_of(step)
        assert metrics["rollout/spec_generated_tokens"] == sum(tokens)
        assert metrics["rollout/spec_num_draft_tokens"] == 2 * sum(tokens)
        assert metrics["rollout/spec_num_interrupted"] == (5 in tokens)
        assert metrics["rollout/spec_share_on"] == 1 and metrics["upstream"] == step
        assert metrics["rollout/spec_acceptance_rate"] == 0.5
    # An asynchronous trainer: what is under way when a step is logged is of a later one.
    serve(servers[0], 7)
    PPOTrainer._validate(trainer)
    assert metrics_of(4)["rollout/spec_generated_tokens"] == 0
    serve(servers[0], 8)
    sync(servers[0])
    assert metrics_of(5)["rollout/spec_generated_tokens"] == 15


def test_a_server_is_busy_while_its_engine_has_requests(monkeypatch):
    """However many it has; not while one waits for a weight sync, or is turned away."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    windows = Windows()
    with windows.request(is_training=True):
        windows.admit()
        with windows.request(is_training=True):
            windows.admit()
            now[0] += 1
        now[0] += 2
    now[0] += 4
    with windows.request(is_training=True):
        windows.admit()
        now[0] += 8
        windows.end(None, RequestCounters())
        assert windows.take().rollout_seconds == 1 + 2 + 8
        assert windows.take().rollout_seconds == 0
    windows = Windows()
    monkeypatch.setattr(server_windows, "ABORTED_END_S", 0.01)
    with windows.request(is_training=True):
        now[0] += 1
        assert windows.is_quiet and windows.is_untouched
        windows.admit()
        now[0] += 2
        assert not windows.is_quiet and not asyncio.run(windows.wait_until_quiet())
        with windows.request(is_training=True) as rejected:
            pass
        windows.count(rejected, 0, None, "aborted")
    windows.end(None, RequestCounters())
    report = windows.take()
    assert (report.rollout_seconds, report.num_interrupted) == (2, 0)


def test_a_request_that_outlives_its_window_counts_in_the_next_one():
    windows = Windows()
    with windows.request(is_training=True) as late:
        windows.admit()
        windows.end(None, RequestCounters())
        with windows.request(is_training=False):
            windows.admit()
        windows.count(late, 5, None, "aborted")
    windows.end(None, RequestCounters())
    report = windows.take()
    assert (report.num_generated_tokens, report.num_interrupted) == (5, 1)


@pytest.mark.parametrize("arguments", [{}, {"abort_only": False}, {"abort_only": True}])
def test_an_abort_that_pauses_nothing_ends_no_window(arguments, server_of, monkeypatch):
    """verl has `abort_only` after 0.9.1: requests go on coming, and the weights stay."""

    async def abort_all_requests(self, abort_only=False):
        return {"aborted_count": 1}

    monkeypatch.setattr(server_of.__mro__[1], "abort_all_requests", abort_all_requests)
    server = server_of(None, {"method": "off"}, scheduler=None)
    with server._windows.request(is_training=True):
        server._windows.admit()
    assert asyncio.run(server.abort_all_requests(**arguments)) == {"aborted_count": 1}
    assert server._windows.is_untouched is not arguments.get("abort_only", False)


@pytest.mark.parametrize(("drafter", "level"), [("custom_class", 2), (None, 2), ("eagle3", 1)])
def test_an_engine_that_sleeps_keeps_a_head_that_no_sync_brings(drafter, level, server_of):
    server = server_of(None, {"method": "sam"})
    speculative = None if drafter is None else {"method": drafter}
    server.config.mtp = None
    OmegaConf.update(server.config, "engine_kwargs.vllm.speculative_config", speculative)
    assert server._resolve_sleep_level() == level


@pytest.mark.parametrize(("scheduler", "num_decoded"), [(None, 0), (SCHEDULER, 8 + 4)])
def test_the_reference_run_counts_the_drafts_of_a_model(scheduler, num_decoded, server_of, answers):
    """An engine that does not count is asked for nothing."""
    counts = {"num_decoded_tokens": 8, "num_decode_steps": 4, "num_drafts": 3, "num_draft_tokens": 9}
    answers([8] * 9, **({"kv_transfer_params": {"rollout_spec": counts}} if scheduler else {}))

    async def take_aborted(method):
        return {"num_decoded_tokens": 4, "num_decode_steps": 1}

    engine = SimpleNamespace(engine_core=SimpleNamespace(call_utility_async=take_aborted))
    server = server_of(engine if scheduler else None, {"method": "off"}, scheduler=scheduler)
    output = asyncio.run(server.generate([1, 2], {}, "one"))
    asyncio.run(server._end_window())
    report = asyncio.run(server.take_rollout_report())
    assert (report.engine, report.num_generated_tokens) == (None, 9)
    assert (report.requests + report.aborted).num_decoded_tokens == num_decoded
    assert output.extra_fields.get("spec_num_draft_tokens") == (9 if scheduler else None)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"extra_args": {"rollout_spec_key": "mine"}, "seed": 5}, ("key", '"mine"')),
        ({"seed": 5}, ("seed", 5)),
        ({"extra_args": {"rollout_spec_key": None}, "seed": 0}, ("seed", 0)),
        ({}, ("key", '["unnamed", 0, 3, null, 1]')),
        ({"extra_args": {"rollout_spec_key": None}, "seed": None}, ("key", '["unnamed", 0, 3, null, 1]')),
        ({"extra_args": {"rollout_spec_sample": [7, 1, "val"]}}, ("key", '[7, 1, "val"]')),
    ],
)
@pytest.mark.parametrize("method", ["sam", "keyed"])
def test_the_noise_follows_from_the_name_else_the_seed(sent, expected, method, server_of, answers):
    asked = answers()
    asyncio.run(server_of(None, {"method": method}).generate([1, 2], sent, "one", image_data=["a"]))
    assert asked[0].pop("image_data") == ["a"]
    params = SimpleNamespace(**{"seed": None, "extra_args": None, **asked[0]})
    assert RequestKeys(0).new_key(params) == make_key(*expected)


@pytest.mark.parametrize(
    ("kind", "expected"), [("train", [True, True]), ("val", [False] * 2), (None, [True, False])]
)
def test_a_request_says_if_it_validates_or_the_trainer_does(kind, expected, server_of, answers, monkeypatch):
    answers()
    said: list[Any] = []
    monkeypatch.setattr(verl_server.logger, "warning", lambda *message: said.append(message))
    server = server_of(None, {"method": "off"}, scheduler=None)
    name = ["prompt", 7, "ab", 0] if kind is None else [7, 3, kind, "4", "ab", 0, 1]
    counted, server._recorder = [], Mock()
    for server._is_validating in (False, True):
        asyncio.run(server.generate([1], {"extra_args": {"rollout_spec_sample": name}}, "one"))
        counted.append(server._windows.has_training)
        server._windows.has_training = False
    assert counted == expected and server._recorder.add.call_count == sum(expected)
    assert len(said) == (kind is None), "once"


def test_a_legacy_trainer_is_refused_before_its_engines_start(monkeypatch):
    """It has not joined verl's TransferQueue, whatever `trainer.use_v1` says."""
    config = composed("+rollout.spec=off").actor_rollout_ref.rollout

    def init(self, replica_rank, config):
        self.is_reward_model = self.is_teacher_model = False

    monkeypatch.setattr(verl_server.vLLMReplica, "__init__", init)
    legacy = r"^this is verl's legacy trainer: .*use_v1=True\. .*V1 trainer only"
    with pytest.raises(ConfigError, match=legacy):
        verl_server.SpecReplica(0, config)
    monkeypatch.setattr(transfer_queue, "get_client", lambda: "that of the V1 trainer")
    serves: Any = verl_server.SpecReplica(0, config).server_class
    assert serves.__ray_actor_class__ is verl_server.SpecHttpServer


class LookingLoop:
    def __init__(self, server_manager, **_):
        self.seen = server_manager.seen

    async def run(self, sampling_params, session_id, **kwargs):
        sample = sampling_params["extra_args"].get("rollout_spec_sample")
        assert sample is None or sample in sample_calls.calls_here
        self.seen.append((sampling_params, kwargs))
        if session_id > 1:
            raise asyncio.CancelledError if session_id == 2 else ValueError("it failed")
        said = {"prompt_ids": [1], "response_ids": [2], "response_mask": [1]}
        return AgentLoopOutput(**said, metrics=AgentLoopMetrics())


def test_workers_name_samples_until_their_agent_loops_return_whatever_derives_from_them(monkeypatch):
    """Ours around verl's own methods; the reward is computed when the sample has ended."""

    class Worker(AgentLoopWorkerTQ.__ray_actor_class__):
        tokenizer = processor = hf_model_type = dataset_cls = tools = mm_processor_kwargs = None
        config = SimpleNamespace(data=None)
        distillation_enabled = False
        llm_client = SimpleNamespace(seen=[])

        def __init__(self):
            reward = SimpleNamespace(compute_score=SimpleNamespace(remote=self.score))
            self.reward_loop_worker_handles = [reward]

        async def score(self, data):
            scored.append((data.non_tensor_batch["session_id"][0], len(here)))
            return {"reward_score": 1.0, "reward_extra_info": {}}

    async def put(**_): ...

    here, scored = SampleCalls(), list[Any]()
    monkeypatch.setattr(sample_calls, "calls_here", here)
    monkeypatch.setattr(transfer_queue, "async_kv_batch_put", put)
    monkeypatch.setitem(agent_loop._agent_loop_registry, "looking", {"_target_": f"{__name__}.LookingLoop"})
    row_names.patch_agent_loops(agent_loop)
    row, given = [7, 3, "train", "4", "ab", 1], {"temperature": 1.0, "extra_args": {"mine": 1}}
    step = {"step": 3, "validate": False, "sample_index": 4, "rollout_n": 0}
    columns = {"agent_name": "looking", "trace": False, "uid": "u", "global_steps": 3}

    async def start(session, **more):
        await Worker()._run_agent_loop(dict(given), step, session_id=session, **columns, **more)
        return Worker.llm_client.seen[-1]

    named = {ROW: json.dumps(row)}
    for session in (0, 1):
        sampling, kwargs = asyncio.run(start(session, **named))
        assert kwargs == {"uid": "u", "global_steps": 3}
        extra_args = {"mine": 1, "rollout_spec_sample": [*row, session], "rollout_spec_group": "4:ab"}
        assert sampling == {"temperature": 1.0, "extra_args": extra_args}
    assert asyncio.run(start(0))[0] == given, "a row without a name"
    assert scored == [(0, 0), (1, 0), (0, 0)], "no sample is under way any more"
    for session, error in ((2, asyncio.CancelledError), (3, ValueError)):
        with pytest.raises(error):
            asyncio.run(start(session, **named))
        assert len(here) == 0, "a sample is forgotten when it fails, or is cancelled"
    assert len(scored) == 3


def test_any_manager_gets_rows_with_names_and_a_trainer_watches_its_servers(monkeypatch):
    class Manager:
        def generate_sequences(self, prompts):
            given.append(prompts)

    def fit(self, agent_loop_manager):
        agent_loop_manager.generate_sequences(batch_of(["2 + 2"], [4], 1))
        self.replay_buffer._wait_for_next_poll("train", 0.0)

    given: list[Any] = []
    waited: list[Any] = []
    fit.__signature__ = inspect.signature(PPOTrainer.fit)  # type: ignore[attr-defined]
    wait = lambda self, partition_id, last_debug_time: waited.append(partition_id)  # noqa: E731
    monkeypatch.setattr(PPOTrainer, "fit", fit)
    monkeypatch.setattr(ReplayBufferAsync.__mro__[1], "_wait_for_next_poll", wait)
    trainer_hooks.install()
    said: list[str] = []
    monkeypatch.setattr(trainer_hooks.logger, "warning", said.append)
    monkeypatch.setattr(ray, "wait", Mock(side_effect=[([], []), EngineDeadError()]))
    asked = SimpleNamespace(raise_if_dead=SimpleNamespace(remote=lambda: "a reply"))
    rollout = {"rollout": {"seed": 7}}
    for method, died in (("off", False), ("off", True), (None, False)):
        trainer: Any = SimpleNamespace(
            config=OmegaConf.create({"rollout": {"spec": {"method": method}}, "actor_rollout_ref": rollout}),
            _rollout_server_managers=lambda: [SimpleNamespace(server_handles=[asked])],
            replay_buffer=object.__new__(ReplayBufferAsync),
        )
        with pytest.raises(EngineDeadError) if died else contextlib.nullcontext():
            PPOTrainer.fit(trainer, Manager())
        assert (ROW in given[-1]) == (method is not None)
        for num_tokens in (5 * died, 0):  # of the first two steps
            trainer_hooks._say_uncounted(trainer, {"rollout/spec_generated_tokens": num_tokens})
    assert waited == ["train"] * 2 and ray.wait.call_count == 2
    assert len(said) == 1 and "have seen no request" in said[0], "of the run whose first step had none"
    assert json.loads(tu.get(given[0], ROW)[0])[0] == 7


def test_what_verl_itself_dumps_is_read(tmp_path):
    """Its rollout_data_dir and validation_data_dir, with token ids instead of texts."""
    inputs, outputs = [[7], [7], [7], [8]], [[1], [2, 3], [4], [5]]
    scores = [np.float32(1), float("nan"), 0, 0]
    extra = {"uid": ["u_0_0", "u_1_0", "v_0_0", "w_0_0"], "acc": [np.bool_(True)] * 4}
    for step in (2, 10):
        PPOTrainer._write_generations(inputs, outputs, [None] * 4, scores, extra, str(tmp_path), step)
    read = list(read_rollouts([tmp_path]))
    of_step = [([7], [[1], [2, 3]]), ([7], [[4]]), ([8], [[5]])]
    expected = [(step, *line) for step in (2, 10) for line in of_step]
    assert [(one.step, *tokens_of(one)) for one in read] == expected
    assert len({one.group for one in read}) == 2, "the prompts come back"
