"""The history between rollout servers and in verl's checkpoints, with Ray's own actors and objects."""

import asyncio
import shutil
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from omegaconf import OmegaConf
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from rollout_spec.drafting.history import History, prompt_key
from rollout_spec.verl import trainer_history
from rollout_spec.verl.trainer_history import FILE, load_history, save_history, share_history
from tests.text import merged

PROMPT = prompt_key(np.array([1, 2, 3], np.int32))


class Server:
    """A rollout server as far as its history goes."""

    async def restart(self):
        self._history = History(8, 1 << 20)
        self._drafts = True

    async def serve(self, response):
        self._history.add(PROMPT, np.array(response, np.int32))

    async def take_history(self):
        return list(self._history.take_new())

    async def add_history(self, *contents):
        for content in chain.from_iterable(contents):
            self._history.merge(content)

    async def pack_history(self):
        return list(self._history.all_pieces()) if self._drafts else []

    async def stop_drafting(self):
        self._drafts = False

    async def texts(self):
        return [response.tolist() for response in self._history.get(PROMPT)]


SERVERS: list[Any] = []  # of all tests; a trainer restarts those that it has


@pytest.fixture(scope="module", autouse=True)
def servers():
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    # Else each of them would import this file, and verl and vLLM with it.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    SERVERS[:] = [ray.remote(num_cpus=0)(Server).remote() for _ in range(3)]
    yield
    SERVERS.clear()
    ray.shutdown()


def make_trainer(folder=Path(), num_servers=2, step=5, **options):
    options = {"default_local_dir": str(folder), "resume_mode": "auto", **options}
    handles = SERVERS[:num_servers]
    ray.get([handle.restart.remote() for handle in handles])
    return SimpleNamespace(
        config=OmegaConf.create({"trainer": options, "rollout": {"spec": {"method": "sam", "history": 8}}}),
        global_steps=step,
        handles=handles,
        _rollout_server_managers=lambda: [SimpleNamespace(server_handles=handles)],
    )


def texts_of(trainer):
    return [sorted(texts) for texts in ray.get([handle.texts.remote() for handle in trainer.handles])]


def served(*args, **options):
    trainer = make_trainer(*args, **options)
    ray.get([handle.serve.remote([i]) for i, handle in enumerate(trainer.handles)])
    return trainer


def test_every_server_learns_once_what_the_others_served():
    trainer = make_trainer(num_servers=3)
    for step in (0, 10):
        ray.get([server.serve.remote([step + i]) for i, server in enumerate(trainer.handles)])
        share_history(trainer)
    for i, server in enumerate(trainer.handles):
        others = [j for j in range(3) if j != i]
        expected = [[i], *([j] for j in others), [10 + i], *([10 + j] for j in others)]
        assert ray.get(server.texts.remote()) == expected


def test_a_server_shares_with_its_own_ranks_alone():
    ranks = "actor_rollout_ref.rollout.data_parallel_size"
    for num_ranks, left in ((1, [[1]]), (2, [])):
        trainer = make_trainer(num_servers=1)
        OmegaConf.update(trainer.config, ranks, num_ranks, force_add=True)
        [server] = trainer.handles
        ray.get(server.serve.remote([1]))
        share_history(trainer)
        taken = merged(*ray.get(server.take_history.remote()))
        assert [text.tolist() for text in taken.get(PROMPT)] == left, "taken when it is asked to share"


def test_a_checkpoint_has_what_all_served_and_any_number_of_servers_resumes(tmp_path):
    trainer = served(tmp_path)
    save_history(trainer)
    assert texts_of(trainer) == [[[0], [1]]] * 2
    assert [path.name for path in (tmp_path / "global_step_5").iterdir()] == [FILE]
    resumed = make_trainer(tmp_path, num_servers=3)
    load_history(resumed)
    assert texts_of(resumed) == [[[0], [1]]] * 3
    elsewhere = str(tmp_path / "global_step_5")
    chosen = make_trainer(tmp_path / "new", resume_mode="resume_path", resume_from_path=elsewhere)
    load_history(chosen)
    assert texts_of(chosen) == [[[0], [1]]] * 2


def test_an_engine_that_does_not_draft_any_more_leaves_the_file_to_another(tmp_path, caplog):
    trainer = served(tmp_path)
    ray.get(trainer.handles[0].stop_drafting.remote())
    save_history(trainer)
    assert not caplog.messages
    ray.get(trainer.handles[1].stop_drafting.remote())
    save_history(trainer)
    assert "the checkpoint has no history: no engine gives one" in caplog.text
    resumed = make_trainer(tmp_path)
    load_history(resumed)
    assert texts_of(resumed) == [[[0], [1]]] * 2


def test_a_history_goes_with_its_checkpoint(tmp_path):
    """Whatever other folders there are, and whichever step was saved last (a run may be rolled back). The
    actor of step 4 is on another node."""
    for name in ("3", "4", "5", "20", "40", "10_best"):
        file = tmp_path / f"global_step_{name}" / FILE
        file.parent.mkdir()
        file.write_bytes(b"a history")
        if name != "4":
            (file.parent / "actor").mkdir()
    trainer = make_trainer(tmp_path, step=20, num_servers=0)
    trainer_history.remove_orphans(trainer)
    for name in ("3", "20"):
        (tmp_path / f"global_step_{name}/actor").rmdir()
    trainer_history.remove_orphans(trainer)
    left = sorted(file.parent.name for file in tmp_path.glob(f"*/{FILE}"))
    assert left == [f"global_step_{step}" for step in ("10_best", "20", "4", "40", "5")]
    trainer_history.remove_orphans(make_trainer(tmp_path / "nowhere", step=20, num_servers=0))


@pytest.mark.parametrize(
    ("method", "history", "kept"),
    [("sam", 2, True), ("sam", 0, False), ("off", 2, False), ("keyed", 2, False)],
)
def test_history_is_kept_where_it_is_drafted_from(method, history, kept):
    with_spec = {"rollout": {"spec": {"method": method, "history": history}}}
    for config, expected in ((with_spec, kept), ({"trainer": {}}, False)):
        assert trainer_history.keeps_history(SimpleNamespace(config=OmegaConf.create(config))) == expected


@pytest.mark.parametrize(
    ("content", "message"), [(b"a foreign file", "not a history of this version"), (None, "has no history")]
)
def test_training_resumes_without_a_file_that_cannot_be_used(tmp_path, caplog, content, message):
    file = tmp_path / "global_step_5" / FILE
    file.parent.mkdir()
    if content is not None:
        file.write_bytes(content)
    trainer = make_trainer(tmp_path)
    load_history(trainer)
    assert message in caplog.text
    assert str(file.parent) in caplog.text
    assert texts_of(trainer) == [[], []]


def test_a_full_disk_costs_the_history_and_leaves_the_rest_of_it_to_the_checkpoint(small_disk, caplog):
    trainer = make_trainer(small_disk)
    save_history(trainer)
    before, free = (small_disk / "global_step_5" / FILE).read_bytes(), shutil.disk_usage(small_disk).free
    text = np.random.default_rng(0).integers(0, 1 << 30, 50_000).tolist()
    ray.get(trainer.handles[0].serve.remote(text))
    save_history(trainer)
    why = f"{small_disk}/global_step_5/{FILE}: No space left on device"
    assert f"the checkpoint has no history: {why}" in caplog.text
    assert [file.name for file in (small_disk / "global_step_5").iterdir()] == [FILE]
    assert (small_disk / "global_step_5" / FILE).read_bytes() == before
    assert shutil.disk_usage(small_disk).free == free


class Called:
    """A rollout server as far as a client goes."""

    def __init__(self):
        self.sent, self.ended = [], []

    async def generate(self, sampling_params, **_):
        self.sent.append(sampling_params["extra_args"])
        return SimpleNamespace(extra_fields={})

    async def end_sample(self, name):
        self.ended.append(name)

    async def seen(self):
        return self.sent, self.ended


def test_a_client_that_is_sent_to_a_task_counts_its_calls_where_the_sample_began():
    """Its number of the turn, its group's tokens, and the servers that are told of the end."""

    def begin(_, client):
        from rollout_spec.verl.sample_calls import Call, calls_here

        calls_here.begin("sample")
        calls_here.add("sample", Call("r", "its digest", 100, {}, False))
        return client

    def end(_):
        """Once a task has told where its call goes, which it does not wait for."""
        from rollout_spec.verl.sample_calls import calls_here

        is_told = bool(calls_here._samples["sample"].servers)
        if is_told:
            calls_here.end("sample")
        return is_told

    def turn(client, extra_args):
        async def call():
            await client.generate("r", prompt_ids=[1] * 600, sampling_params={"extra_args": extra_args})

        asyncio.run(call())

    server = ray.remote(num_cpus=0)(Called).remote()
    balancer = ray.remote(num_cpus=0)(GlobalRequestLoadBalancer).remote({"s": server})
    rollout = {"name": "vllm", "seed": 0}
    spec = {"rollout": {"spec": {"method": "sam"}}, "actor_rollout_ref": {"rollout": rollout}}
    worker, task = SERVERS[0], ray.remote(num_cpus=0)(turn)
    client = ray.get(worker.__ray_call__.remote(begin, LLMServerClient(OmegaConf.create(spec), balancer)))
    ray.get([task.remote(client, named) for named in (2 * [{"rollout_spec_sample": "sample"}]) + [{}]])
    while not ray.get(worker.__ray_call__.remote(end)):
        pass
    while not ray.get(server.seen.remote())[1]:
        pass
    sent, ended = ray.get(server.seen.remote())
    names = ("rollout_spec_call", "rollout_spec_key", "rollout_spec_group_tokens")
    nobodys, first, second = sorted([each[name] for name in names] for each in sent)
    assert [first[0], first[1][0], first[1][2:], first[2]] == [1, "sample", [0], 100]
    assert [second[0], second[1][0], second[1][2:], second[2]] == [2, "sample", [1], 100]
    assert nobodys[0] == 0 and (nobodys[1][0], nobodys[1][3]) == ("prompt", 0)
    assert ended == ["sample"]
