"""verl's side without Ray: what its trainer logs, its agent loops send, and its server counts and records."""

import asyncio
import importlib
import inspect
import json
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
import transfer_queue
import verl.utils.tensordict_utils as tu
from omegaconf import OmegaConf
from PIL import Image
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.workers.rollout.llm_server import LLMServerClient

from rollout_spec.config import ConfigError
from rollout_spec.metrics import EngineCounters, RequestCounters
from rollout_spec.patches import PatchError
from rollout_spec.predict.dumps import read_rollouts
from rollout_spec.trace import DIR_VARIABLE, read_trace, trace_file
from rollout_spec.verification.noise import make_key
from rollout_spec.verl import replica, server_windows, trainer_hooks
from rollout_spec.verl import server as verl_server
from rollout_spec.verl.agent_loop import KeyedAgentLoopManager, KeyedAgentLoopWorker, prompt_name, sample_name
from rollout_spec.verl.recorder import Recorder
from rollout_spec.verl.server_windows import BusyClock, Windows
from rollout_spec.vllm import SCHEDULER
from rollout_spec.vllm.keys import RequestKeys
from tests.test_verl_check_config import composed


def test_a_verl_without_a_method_that_we_override_is_refused(monkeypatch):
    monkeypatch.delattr(verl_server.vLLMHttpServer, "_park_until_admitted")
    with pytest.raises(PatchError, match="_park_until_admitted takes nothing: it is gone"):
        importlib.reload(verl_server)


@pytest.mark.parametrize("method", ["sam", "off"])
def test_a_server_remembers_ended_samples_for_drafters_alone(method, server_of):
    server = server_of(None, {"method": method})
    for _ in range(2):
        asyncio.run(server.end_sample("a"))
    assert list(server._drafters.take_ended().samples) == ["a"] * (method == "sam")


def test_a_step_logs_what_ran_before_its_weight_sync_and_no_validation(server_of, monkeypatch):
    """The real wrappers and servers; verl's methods are cut down to what they do to the servers."""

    class Engine:
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
    servers = [server_of(Engine(), {"method": "sam"}) for _ in range(2)]
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
    clock = BusyClock()
    begin, end = clock.begin, clock.end
    for seconds, act in ((0, begin), (0, begin), (1, end), (2, end), (4, begin)):
        now[0] += seconds
        act()
    now[0] += 8
    assert clock.take_seconds() == 1 + 2 + 8
    assert clock.take_seconds() == 0
    windows = Windows()
    monkeypatch.setattr(server_windows, "MAX_WAIT_S", 0.01)
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


def tokens(line):
    return line.prompt_token_ids.tolist(), [response.tolist() for response in line.responses]


def test_the_trace_is_what_replay_reads(tmp_path, monkeypatch):
    first = {"rollout_spec_group": "first", "rollout_spec_turn_tokens": 2}
    monkeypatch.setenv(DIR_VARIABLE, str(tmp_path / "traces"))
    writer = Recorder(replica_rank=1)
    writer.add([1, 2], [3], first)
    writer.add([5], [6, 7], {"rollout_spec_group": "second"})
    # It was interrupted after two tokens, and went on.
    writer.add([1, 2, 4, 4], [5], first | {"rollout_spec_key": [7, 1, "train"]})
    writer.add([5], [], {"rollout_spec_group": "second"})
    # A caller may send anything.
    writer.add(np.array([9]), [1], {"rollout_spec_turn_tokens": "all", "rollout_spec_key": b"raw"})
    # A sample of three turns, then one whose context was compressed; they end in any order.
    agent = {"rollout_spec_group": "agents", "rollout_spec_sample": "a"}
    for turn, prompt, said in (
        (1, [8, 8, 1, 0, 0], [2]),
        (0, [8, 8], [1]),
        (2, [8, 8, 1, 0, 0, 2], [3, 4]),
        (3, [8, 1], [5]),
    ):
        writer.add(prompt, said, agent | {"rollout_spec_turn": turn})
        writer.flush(step=2)  # a weight sync does not cut a sample that goes on
    writer.end("a")
    writer.flush(step=3)
    writer.flush(step=4)
    lines = list(read_trace(trace_file(tmp_path / "traces", 1)))
    expected = [
        *(([1, 2], [[3], [4, 4, 5]]), ([5], [[6, 7]]), ([9], [[1]])),
        *(([8, 8], [[1, 0, 0, 2, 3, 4]]), ([8, 1], [[5]])),
    ]
    assert lines[3].turns_of(0) == [[0, 1], [3, 4], [4, 6]] and lines[4].turns == []
    assert [(line.step, *tokens(line)) for line in lines] == [
        (2 + (line[0][0] == 8), *line) for line in expected
    ]
    assert [line.group for line in lines][:2] == ["first", "second"]
    assert lines[0].names == [None, [7, 1, "train"]] and lines[2].names == ["b'raw'"]
    monkeypatch.delenv(DIR_VARIABLE)
    idle = Recorder(replica_rank=1)
    idle.add([1], [2], {})
    assert not idle._samples, "a run that records nothing keeps nothing"


def test_a_disk_that_cannot_be_written_ends_the_recording_alone(small_disk, monkeypatch, caplog):
    """A full one, and a path that is no folder; inside a weight sync an error would end a training."""
    (small_disk / "file").touch()
    for folder, reason in ((small_disk / "traces", "No space left"), (small_disk / "file", "exists")):
        monkeypatch.setenv(DIR_VARIABLE, str(folder))
        recorder = Recorder(replica_rank=0)
        for step in range(3):
            recorder.add([step], range(20_000), {})
            recorder.flush(step)
        [message] = caplog.messages
        assert reason in message
        caplog.clear()
        assert not recorder._samples
    assert len(list(read_trace(trace_file(small_disk / "traces", 0)))) <= 1, "what was whole is read"


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
def test_the_reference_run_counts_the_drafts_of_a_model(scheduler, num_decoded, server_of, monkeypatch):
    """An engine that does not count is asked for nothing."""
    counts = {"num_decoded_tokens": 8, "num_decode_steps": 4, "num_drafts": 3, "num_draft_tokens": 9}

    async def generate(self, *_):
        self._windows.admit()
        sent = {"kv_transfer_params": {"rollout_spec": dict(counts)}} if scheduler else {}
        return SimpleNamespace(token_ids=[8] * 9, extra_fields=sent, stop_reason="completed")

    async def take_aborted(method):
        return {"num_decoded_tokens": 4, "num_decode_steps": 1}

    monkeypatch.setattr(server_of.__mro__[1], "generate", generate)
    engine = SimpleNamespace(engine_core=SimpleNamespace(call_utility_async=take_aborted))
    server = server_of(engine if scheduler else None, {"method": "off"}, scheduler=scheduler)
    output = asyncio.run(server.generate([1, 2], {}, "one"))
    asyncio.run(server._end_window())
    report = asyncio.run(server.take_rollout_report())
    assert (report.engine, report.num_generated_tokens) == (None, 9)
    assert sum(one.num_decoded_tokens for one in (*report.requests, report.aborted)) == num_decoded
    assert output.extra_fields.get("spec_num_draft_tokens") == (9 if scheduler else None)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"extra_args": {"rollout_spec_key": "mine"}, "seed": 5}, ("key", '"mine"')),
        ({"seed": 5}, ("seed", 5)),
        ({"extra_args": {"rollout_spec_key": None}, "seed": 0}, ("seed", 0)),
        ({}, ("key", '["unnamed", 0, 3, null, 1]')),
        ({"extra_args": {"rollout_spec_key": None}, "seed": None}, ("key", '["unnamed", 0, 3, null, 1]')),
    ],
)
@pytest.mark.parametrize("method", ["sam", "keyed"])
def test_the_noise_follows_from_the_name_else_the_callers_seed(
    sent, expected, method, server_of, monkeypatch
):
    keys: list[int] = []

    async def generate(self, _, sampling_params, request_id):
        params = SimpleNamespace(**{"seed": None, "extra_args": None, **sampling_params})
        keys.append(RequestKeys(0).new_key(params))
        return SimpleNamespace(token_ids=[8], extra_fields={}, stop_reason="completed")

    monkeypatch.setattr(server_of.__mro__[1], "generate", generate)
    asyncio.run(server_of(None, {"method": method}).generate([1, 2], sent, "one"))
    assert keys == [make_key(*expected)]


def test_a_samples_name_is_its_own_and_the_same_in_every_run():
    sample = {"index": 4, "raw_prompt": [{"role": "user", "content": "2 + 2"}], "session_id": 0, "uid": "x"}
    step = {"step": 3, "validate": False, "rollout_n": 0}
    name = sample_name(7, step, 0, sample)
    assert name == sample_name(7, dict(step), 0, sample | {"uid": "another"})
    # A run that is repeated with another release gets the same tokens.
    assert name == [7, 3, "train", "4", "119630b4882f7920", 0, 0]
    assert sample_name(7, {"step": 3.0, "validate": True}, 2, sample) == [7, 3, "val", *name[3:5], 2, 0]
    others = [sample_name(8, step, 0, sample), sample_name(7, step, 1, sample)]
    others += [sample_name(7, step | change, 0, sample) for change in ({"step": 4}, {"validate": True})]
    changes = {"session_id": 1}, {"index": 5}, {"raw_prompt": [{"role": "user", "content": "2 + 3"}]}
    others += [sample_name(7, step, 0, sample | change) for change in changes]
    assert len({json.dumps(other) for other in [name, *others]}) == 8
    windows, unnamed = Windows(), (None, "val", ["unnamed", 0, 0, 3, 1])
    for windows.is_validating in (False, True):
        assert windows.is_validation(sample_name(7, step | {"validate": True}, 0, sample))
        assert not windows.is_validation(name)
        assert [windows.is_validation(each) for each in unnamed] == [windows.is_validating] * 3


def test_prompts_of_one_text_with_other_images_are_two_though_they_have_no_index():
    def digest(image):
        return prompt_name(None, [{"role": "user", "content": [{"type": "image", "image": image}]}])[1]

    pictures = [np.full((2, 2, 3), shade, np.uint8) for shade in (1, 2)]
    for kind in (Image.fromarray, torch.from_numpy, np.array, np.ndarray.tobytes):
        assert [digest(kind(each)) for each in pictures] == [digest(kind(each.copy())) for each in pictures]
        assert digest(kind(pictures[0])) != digest(kind(pictures[1])) != digest(object())
    assert digest(object()) == "8665f43eda0bcee1"


def test_a_legacy_trainer_is_refused_before_its_engines_start(monkeypatch):
    """It has not joined verl's TransferQueue, whatever `trainer.use_v1` says."""
    config = composed("+rollout.spec=off").actor_rollout_ref.rollout

    def init(self, replica_rank, config):
        self.is_reward_model = self.is_teacher_model = False

    monkeypatch.setattr(replica.vLLMReplica, "__init__", init)
    with pytest.raises(
        ConfigError, match=r"^this is verl's legacy trainer: .*use_v1=True\. .*V1 trainer only"
    ):
        replica.SpecReplica(0, config)
    monkeypatch.setattr(transfer_queue, "get_client", lambda: "that of the V1 trainer")
    serves: Any = replica.SpecReplica(0, config).server_class
    assert serves.__ray_actor_class__ is verl_server.SpecHttpServer


def test_the_manager_numbers_prompts_that_are_drawn_again(monkeypatch):
    """Ours around verl's own, whose next step is only looked at: it would need Ray."""
    prompt = [{"role": "user", "content": "2 + 2"}]
    sent: list[Any] = []
    monkeypatch.setattr(AgentLoopManagerTQ, "generate_sequences", lambda self, prompts: sent.append(prompts))
    manager = KeyedAgentLoopManager(composed("+rollout.spec=sam"), llm_client=None)
    workers: Any = manager.agent_loop_workers_class
    assert workers.__ray_actor_class__ is KeyedAgentLoopWorker
    for indices, step, validate, numbers in (
        ([4, 4], 3, False, [0, 1]),
        ([4, 4], 3, False, [2, 3]),  # more of the step
        ([4, 4], 3, True, [0, 1]),  # and what validates it
        ([4, 5], 3, True, [2, 0]),  # alike, but of two places
        ([4, 5], 4, True, [0, 0]),
    ):
        batch = tu.get_tensordict({"raw_prompt": [prompt, prompt], "index": indices, "uid": ["a", "b"]})
        tu.assign_non_tensor_data(batch, "global_steps", step)
        if validate:
            tu.assign_non_tensor_data(batch, "validate", True)
        manager.generate_sequences(batch)
        assert list(tu.get(sent[-1], "rollout_spec_occurrence")) == numbers
        assert "rollout_spec_occurrence" not in batch
    columns = dict(sent[0].chunk(2)[1].items())  # as verl's worker reads them
    assert columns["rollout_spec_occurrence"][0].data == 1


def test_the_worker_names_samples(monkeypatch):
    async def run(self, sampling_params, trajectory, **kwargs):
        worker._calls.named([1, 2], sampling_params)
        assert len(worker._calls._samples) == 1 and trajectory["step"] == 3
        return sampling_params, kwargs

    verls: Any = KeyedAgentLoopWorker.__mro__[1]
    monkeypatch.setattr(
        verls, "__init__", lambda self, fields, llm_client: vars(self).update(fields, llm_client=llm_client)
    )
    monkeypatch.setattr(AgentLoopWorker, "_run_agent_loop", run)
    client = object.__new__(LLMServerClient)
    config = composed("+rollout.spec=sam", "actor_rollout_ref.rollout.seed=7")
    worker: Any = KeyedAgentLoopWorker({"config": config}, llm_client=client)
    assert worker.llm_client is client and client._calls is worker._calls
    prompt = [{"role": "user", "content": "2 + 2"}]
    sample = {"index": np.int64(4), "raw_prompt": np.array(prompt, dtype=object), "agent_name": "any"}
    given = {"temperature": 1.0, "extra_args": {"mine": 1}}
    digest = "119630b4882f7920"
    drawn, step = {"rollout_spec_occurrence": 1}, {"step": 3, "validate": False}
    for session, occurrence in ((0, drawn), (1, drawn), (0, {})):
        sampling, kwargs = asyncio.run(
            worker._run_agent_loop(dict(given), step, session_id=session, **occurrence, **sample)
        )
        assert "rollout_spec_occurrence" not in kwargs and kwargs["session_id"] == session
        assert sampling["temperature"] == 1.0 and sampling["extra_args"] == {
            "mine": 1,
            "rollout_spec_key": [7, 3, "train", "4", digest, len(occurrence), session],
            "rollout_spec_group": f"4:{digest}",
        }
        json.dumps(sampling)
    assert not worker._calls._samples, "a sample is forgotten when it ends"


def test_what_verl_itself_dumps_is_read(tmp_path):
    """Its rollout_data_dir and validation_data_dir, with token ids instead of texts."""
    inputs, outputs = [[7], [7], [7], [8]], [[1], [2, 3], [4], [5]]
    scores = [np.float32(1), float("nan"), 0, 0]
    extra = {"uid": ["u_0_0", "u_1_0", "v_0_0", "w_0_0"], "acc": [np.bool_(True)] * 4}
    for step in (2, 10):
        PPOTrainer._write_generations(inputs, outputs, [None] * 4, scores, extra, str(tmp_path), step)
    read = list(read_rollouts([tmp_path]))
    of_step = [([7], [[1], [2, 3]]), ([7], [[4]]), ([8], [[5]])]
    assert [(one.step, *tokens(one)) for one in read] == [
        (step, *line) for step in (2, 10) for line in of_step
    ]
    assert len({one.group for one in read}) == 2, "the prompts come back"
