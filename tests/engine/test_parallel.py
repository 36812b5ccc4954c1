"""Engines of several workers: data-parallel ranks behind one client, tensor-parallel ranks in one core."""

import asyncio
import functools
import itertools

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import DPLBAsyncMPClient

from rollout_spec.config import SpecConfig
from rollout_spec.drafting.history import group_key
from rollout_spec.metrics import RequestCounters
from rollout_spec.vllm import SCHEDULER
from rollout_spec.vllm.engine_cores import EngineCores, check_client
from rollout_spec.vllm.versions import version
from tests.engine.conftest import KEYED, close, engine_settings, make_tiny, new_engine, proposer_of, runner_of
from tests.engine.rollout_server import EXTENSION
from tests.engine.serving import PROMPTS, Request, generate, greedy, sampling
from tests.engine.serving import serve as serve_requests
from tests.text import merged

pytestmark = pytest.mark.usefixtures("own_process_groups")

LENGTH = 40
GROUPS = {f"group {i}": prompt for i, prompt in enumerate(PROMPTS[:4])}
NUMBERS = itertools.count()  # of requests
TWO_RANKS = {
    "tensor_parallel_size": 2, "distributed_executor_backend": "mp", "worker_extension_cls": EXTENSION
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny_experts(tmp_path_factory):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    return make_tiny("Qwen3Moe", tmp_path_factory.mktemp("models"), **experts)


@pytest.mark.skipif(version() not in ("0.23.0", "0.24.0"), reason="later, MRV1 returns none on CPUs")
@pytest.mark.parametrize("spec", [None, {"history": 8}], ids=["off", "sam"])
def test_the_experts_that_are_returned_are_each_tokens_own(tiny_experts, chat_model, spec):
    """Also where an end cuts accepted tokens off. On CPUs vLLM notes no experts: what stands for them are
    the token and its position."""
    arguments = {"tokenizer": chat_model, "enable_return_routed_experts": True}
    llm = new_engine(tiny_experts, spec, model=tiny_experts, **arguments)
    runner = runner_of(llm)
    capturer = runner.routed_experts_capturer

    def note():
        rows = len(capturer.device_buffer)
        capturer.device_buffer[:, :, 0] = runner.input_ids.gpu[:rows, None]
        capturer.device_buffer[:, :, 1] = runner.positions[:rows, None]
        return capturer.device_buffer

    capturer.get_device_buffer = note
    ask = functools.partial(SamplingParams, temperature=0, ignore_eos=True, max_tokens=LENGTH)
    prompt = {"prompt_token_ids": PROMPTS[0]}
    for _ in range(2):  # the second time drafts go on after each end
        [free] = llm.generate([prompt], ask(), use_tqdm=False)
        text, tokens = free.outputs[0].text, free.outputs[0].token_ids
        ends = [ask(), ask(max_tokens=23), ask(stop_token_ids=[tokens[20]], min_tokens=20)]
        ends += [ask(stop=[text[i : i + 2]]) for i in (19, 20, 21, 22)]
        ends.append(ask(routed_experts_prompt_start=2))
        for output, asked in zip(llm.generate([prompt] * len(ends), ends, use_tqdm=False), ends, strict=True):
            [sample] = output.outputs
            own = [*PROMPTS[0], *sample.token_ids][:-1]  # the last one was in no step
            first = asked.routed_experts_prompt_start or 0
            found = [tuple(row) for row in sample.routed_experts[:, 1].tolist()]
            assert found == [(token, i) for i, token in enumerate(own)][first:]
    if spec is not None:
        assert proposer_of(llm).take_counters().num_accepted_tokens > 100
    close([llm])


def test_every_data_parallel_rank_is_counted_shared_and_checked(tiny_experts, make_engine, server_of):
    prompts = list(GROUPS.values())
    plain = generate(make_engine(model=tiny_experts, skip_tokenizer_init=True), prompts, greedy(LENGTH))
    asyncio.run(check_ranks(tiny_experts, server_of, plain))


async def check_ranks(model, server_of, plain):
    from rollout_spec.verl.server import spread_groups

    spec = {"method": "sam", "batch_threshold": 64, "num_speculative_tokens": 8, "history": 4}
    arguments = engine_settings(model, spec) | {"data_parallel_size": 2, "scheduler_cls": SCHEDULER}
    arguments["worker_extension_cls"] = "tests.engine.cpu_experts.Extension"
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    try:
        server, cores = server_of(engine, spec), EngineCores(engine)
        assert len(cores) == 2
        await server.set_global_steps(0)
        await server.take_history()  # it begins to share
        assert await serve(server, 2) == plain
        assert server._drafters._decoded == {0, 1}
        await server.set_global_steps(1)
        check_counts(first := await server.take_rollout_report())
        of_cores = [nums_kept(content) for content in await server.take_history()]
        assert [sum(nums) for nums in zip(*of_cores, strict=True)] == [2] * 4
        for core in range(2):
            [packed] = await cores.call_workers(core, "rollout_spec_call", "pack_history")
            assert nums_kept(packed) == [2] * 4, "its own and the other's"
        spread_groups(engine, SpecConfig(routing="group"))
        assert await serve(server, 2) == plain
        await server.set_global_steps(2)
        check_counts(report := await server.take_rollout_report())
        # The first tokens are drafted from what the group has said before, wherever that was.
        assert report.engine.num_accepted_tokens > 1.1 * first.engine.num_accepted_tokens
        of_cores = [nums_kept(content) for content in await server.take_history()]
        assert [sorted(nums) for nums in of_cores if any(nums)] == [[0, 0, 2, 2]] * 2
        # Every rank knows of all steps, also of those that it runs without requests.
        for _ in range(100):  # until the ranks rest
            seen = [await cores.call_workers(core, "last_step_of_the_ranks") for core in range(2)]
            if seen[0] == seen[1]:
                break
            await asyncio.sleep(0.1)
        assert seen[0] == seen[1]
        assert seen[0][0][0] > report.engine.num_steps // 2
        long = {"max_tokens": 480, "temperature": 1.0}
        samples = asyncio.gather(*(respond(server, *group, **long) for group in GROUPS.items()))
        requests = engine.output_processor.request_states.values()
        while len(requests) < len(GROUPS) or any(request.is_prefilling for request in requests):
            await asyncio.sleep(0)
        await server.abort_all_requests()
        lengths = [len(sample) for sample in await samples]
        await server.set_global_steps(3)
        report = await server.take_rollout_report()
        assert 0 < min(lengths) <= max(lengths) < 480
        assert (report.num_generated_tokens, report.requests) == (sum(lengths), RequestCounters())
        # The tokens of the very last step may not have come through.
        assert 0 <= report.aborted.num_decoded_tokens - (sum(lengths) - 4) <= 4 * 9
        await server.resume_generation()
        await cores.call_workers(1, "pass_the_drafter_by")
        await serve(server, 1)
        await server.set_global_steps(4)
        message = r"engine core 1 of replica 3 decoded without calling its drafter"
        with pytest.raises(RuntimeError, match=message):
            await server.take_rollout_report()
    finally:
        engine.shutdown()


def check_counts(report):
    assert report.engine.num_draft_tokens > 0
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert getattr(report.engine, name) == getattr(report.requests, name), name


def nums_kept(content):
    history = merged(content)
    return [len(history.get(group_key(group))) for group in GROUPS]


async def respond(server, group, prompt, **params):
    params = {"max_tokens": LENGTH, "temperature": 0, "ignore_eos": True} | params
    params["extra_args"] = {"rollout_spec_group": group}
    return list((await server.generate(prompt, params, f"{next(NUMBERS)}")).token_ids)


async def serve(server, num_samples):
    """The response to each of PROMPTS' groups, which must be the same for all its samples."""
    requests = [request for request in GROUPS.items() for _ in range(num_samples)]
    outputs = await asyncio.gather(*(respond(server, *request) for request in requests))
    samples = [outputs[i : i + num_samples] for i in range(0, len(outputs), num_samples)]
    assert all(response == responses[0] for responses in samples for response in responses)
    return [responses[0] for responses in samples]


def test_a_client_of_several_cores_that_cannot_call_each_is_refused(monkeypatch):
    check_client()
    monkeypatch.setattr(DPLBAsyncMPClient, "_call_utility_async", lambda self, method, args: None)
    with pytest.raises(RuntimeError, match=r"takes \['self', 'method', 'args'\], expected .*'engine'"):
        check_client()


@pytest.mark.long
def test_tensor_parallel_ranks_draft_the_same_with_a_model(tiny_model, make_engine):
    """It is the target, so that it is always right; the scheduler tells both how many passes to take."""
    kinds = [{"temperature": t, "max_tokens": num} for t, num in ((0.0, 16), (0.7, 24), (1.0, 80), (1.0, 80))]
    asked = [Request(PROMPTS[i], sampling(kind, key=i)) for i, kind in enumerate(kinds)]
    plain = [one["tokens"] for one in serve_requests(make_engine(**KEYED), asked)]
    drafter = {"method": "draft_model", "model": tiny_model, "num_speculative_tokens": 8}
    llm = make_engine({"batch_threshold": 2}, speculative_config=drafter, **TWO_RANKS)
    llm.collective_rpc(note_drawn)
    assert [one["tokens"] for one in serve_requests(llm, asked)] == plain
    first, second = llm.collective_rpc(drawn)
    assert first == second
    assert 2 in map(len, first), "the gate has opened for two rows"
    counters, nothing = llm.collective_rpc("rollout_spec_call", args=("take_counters",))
    assert counters["num_model_accepted_tokens"] == counters["num_model_draft_tokens"] > 20
    assert counters["num_model_passes_left_out"] > 0
    assert nothing is None


def note_drawn(worker):
    runner = worker.model_runner
    draw, runner.drawn = runner.drafter._sample_draft_tokens, []

    def draw_and_keep(*args):
        tokens, probabilities = draw(*args)
        runner.drawn.append(tokens.tolist())
        return tokens, probabilities

    runner.drafter._sample_draft_tokens = draw_and_keep


def drawn(worker):
    return worker.model_runner.drawn
