"""What verl's server counts and checks, on a real engine."""

import asyncio
import logging
import multiprocessing
import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError
from verl.checkpoint_engine import CheckpointEngineManager
from verl.trainer.ppo.ray_trainer import compute_spec_decode_metrics
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from rollout_spec.metrics import RolloutReport
from rollout_spec.verl import trainer_hooks, trainer_servers
from rollout_spec.verl.server import SpecHttpServer
from rollout_spec.vllm.keys import NAME_KEY, SAMPLE_KEY
from tests.engine.conftest import KEYED, core_of, engine_settings, proposer_of
from tests.engine.recurrent_layers import replace_layers
from tests.engine.serving import PROMPTS, num_accepted
from tests.engine.tiny_heads import loaded
from tests.engine.tiny_recurrent import make_recurrent
from tests.text import merged

GREEDY = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}


def serve_a_step(server):
    for prompt in PROMPTS[:2] * 2:
        asyncio.run(server.generate(prompt, dict(GREEDY), "id"))
    asyncio.run(server.set_global_steps(1))
    return asyncio.run(server.take_rollout_report())


def test_a_server_reports_its_rollout_when_a_weight_sync_has_ended_it(make_server):
    server = make_server({})
    index = proposer_of(server.engine.llm).drafter.index
    asyncio.run(server.generate(PROMPTS[0], {"max_tokens": 1}, "id"))
    assert index.stats().num_groups == 1
    assert asyncio.run(server.take_rollout_report()) == RolloutReport()
    asyncio.run(server.set_global_steps(0))
    assert asyncio.run(server.take_rollout_report()).num_generated_tokens == 1
    report = serve_a_step(server)
    assert report.num_generated_tokens == 4 * 40
    assert report.requests.num_decoded_tokens == 4 * 39
    assert report.requests.num_accepted_tokens > 0
    assert report.engine.num_steps == report.requests.num_decode_steps + 4
    assert (server.global_steps, index.stats().num_groups) == (1, 2)
    asyncio.run(server.set_global_steps(2))
    assert asyncio.run(server.take_rollout_report()) == RolloutReport()


def test_verl_logs_the_drafts_that_it_looks_for_where_mtp_drafts(make_server, caplog):
    """It would take them from a field that no vLLM has."""
    fields = asyncio.run(make_server({}).generate(PROMPTS[0], dict(GREEDY), "id")).extra_fields
    given = [[fields[f"spec_num_{name}"]] for name in ("draft_tokens", "accepted_tokens", "verify_steps")]
    metrics = compute_spec_decode_metrics(*given)
    assert 0 < metrics["rollout/spec_accept_rate"] <= 1 < metrics["rollout/spec_accept_length"]
    assert "request_spec_decode_stats" not in caplog.text


def test_siblings_differ_though_full_determinism_gives_them_one_seed(make_server, caplog):
    """Requests as verl's agent loops send them, with names, and others without."""
    server = make_server({}, full_determinism=True)
    logging.getLogger("vllm.rollout_spec.verl.server").addHandler(caplog.handler)

    def respond(number):
        params: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0, "ignore_eos": True}
        if number is not None:
            params["extra_args"] = {SAMPLE_KEY: [0, 1, "train", "4", "ab", 0, number]}
        return tuple(asyncio.run(server.generate(PROMPTS[0], params, "id")).token_ids)

    named = [respond(number) for number in range(4)]
    assert "has neither a name" not in caplog.text
    unnamed = [respond(None) for _ in range(4)]
    # vLLM's logger may hand a record to its parents as well: one record, said once.
    assert len({id(record) for record in caplog.records if "has neither a name" in record.getMessage()}) == 1
    assert server.engine.seeds == {server.replica_rank}, "verl's seed and the replica's number"
    assert len({*named, *unnamed}) == 8
    assert [respond(number) for number in (3, 0)] == [named[3], named[0]]


def test_no_engine_step_waits_for_what_servers_share(make_server):
    server = make_server({"history": 100})

    def respond(number, max_tokens):
        return server.generate(PROMPTS[number], GREEDY | {"max_tokens": max_tokens}, str(number))

    async def serve_and_share():
        await server.set_global_steps(0)
        await server.take_history()  # it begins to share
        await respond(0, 20)
        taken = await server.take_history()
        assert len(merged(*taken)._texts) == 1
        await respond(1, 20)
        running = asyncio.create_task(respond(2, 100))
        while not server.engine.last:
            await asyncio.sleep(0)
        assert await server.take_history() == []
        await server.add_history(taken)
        assert server._history._received == taken
        await running
        assert len(merged(*await server.take_history())._texts) == 2

    asyncio.run(serve_and_share())


def test_an_engine_without_the_drafter_fails_the_run(make_server):
    with pytest.raises(RuntimeError, match=r"engine core 0 of replica 3 has no drafter of rollout_spec"):
        serve_a_step(make_server(None))


@pytest.mark.usefixtures("own_process_groups")
def test_a_recurrent_policy_gets_new_weights_between_two_rounds(tmp_path, make_server, monkeypatch):
    """States and texts of the first round are of older weights."""
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)  # as in `recurrent_scenarios`
    replace_layers()
    model = make_recurrent("qwen3_next", tmp_path)
    # The experts stay: on CPUs this vLLM takes no new ones.
    weights = {name: value for name, value in loaded(tmp_path).items() if ".experts." not in name}
    changed = {name: value.flip(1) for name, value in weights.items() if name.endswith("_proj.weight")}
    found = []
    for spec, more in ((None, KEYED), ({"num_speculative_tokens": 3, "history": 2}, {})):
        arguments = {"skip_tokenizer_init": True, "enable_prefix_caching": False} | more
        server = make_server(spec, fresh=True, model=model, kv_cache_memory_bytes=256 << 20, **arguments)
        worker = core_of(server.engine.llm).model_executor.driver_worker.worker
        found += [[asyncio.run(one_round(server))], [num_accepted(server.engine.llm)] if spec else []]
        asyncio.run(server.abort_all_requests())
        worker._update_weights(list((weights | changed).items()), peft_config=None, base_sync_done=True)
        # As verl does after the last bucket.
        for each, model_config in worker._iter_all_models_with_config():
            process_weights_after_loading(each, model_config, worker.device)
        asyncio.run(server.set_global_steps(1))
        asyncio.run(server.resume_generation())
        found[-2].append(asyncio.run(one_round(server)))
        found[-1] += [num_accepted(server.engine.llm)] if spec else []
    plain, _, drafted, accepted = found
    assert drafted == plain
    assert plain[0] != plain[1]
    assert min(accepted) > 20


async def one_round(server):
    params = [{"temperature": 0.0 if j == 2 else 0.8, "max_tokens": 40, "ignore_eos": True} for j in range(3)]
    outputs = [
        server.generate(prompt, params[j] | {"extra_args": {NAME_KEY: [i, j]}}, f"{i}-{j}")
        for i, prompt in enumerate(PROMPTS)
        for j in range(3)
    ]
    return [list(output.token_ids) for output in await asyncio.gather(*outputs)]


@pytest.mark.timeout(300)
def test_a_weight_sync_ends_when_what_it_sends_to_fails_or_dies(tiny_model, monkeypatch):
    """By verl's own manager, whose sender waits forever: a worker fails, engine and server are killed."""

    class Server(SpecHttpServer):
        def __init__(self):
            self.node_rank, self._failure = 0, None

        async def start(self, settings):
            self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))
            return [child.pid for child in multiprocessing.active_children()] + [os.getpid()]

    class Sender:
        def update_weights(self):
            time.sleep(600)

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        server, sender = ray.remote(Server).remote(), ray.remote(Sender).remote()
        trainer_hooks.install()
        monkeypatch.setattr(trainer_servers, "POLL_S", 0.2)
        manager = object.__new__(CheckpointEngineManager)
        manager.backend = "naive"
        manager.replicas = [SimpleNamespace(has_spec_servers=True, servers=[server])]
        manager.actor_wg = SimpleNamespace(update_weights=lambda **_: sender.update_weights.remote())
        engine, own = ray.get(server.start.remote(engine_settings(tiny_model)))
        with pytest.raises(Exception, match="no_such_method"):
            ray.get(server.collective_rpc.remote("no_such_method"))
        with pytest.raises(Exception, match="no_such_method"):
            manager.update_weights(0)
        for pid, error in ((engine, EngineDeadError), (own, ActorDiedError)):
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(error):
                manager.update_weights(1)
    finally:
        ray.shutdown()
