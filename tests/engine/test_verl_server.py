"""What verl's server counts and checks, on a real engine."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from rollout_spec.drafting.history import group_key, prompt_key
from rollout_spec.metrics import RequestCounters, RolloutReport
from rollout_spec.verl.launch import verl_is_older
from rollout_spec.vllm.keys import KEY
from tests.engine.conftest import proposer_of
from tests.engine.test_life_cycle import PROMPTS
from tests.text import merged


def serve(server: Any) -> None:
    for prompt in PROMPTS[:2] * 2:
        params = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
        asyncio.run(server.generate(prompt, params, "id"))


def serve_a_step(server: Any) -> RolloutReport:
    serve(server)
    asyncio.run(server.set_global_steps(1))
    return asyncio.run(server.take_rollout_report())


def test_a_server_reports_its_rollout_when_a_weight_sync_has_ended_it(make_server: Any) -> None:
    server = make_server({})
    index = proposer_of(server.engine.llm)._drafter.index
    asyncio.run(server.generate(PROMPTS[0], {"max_tokens": 1}, "id"))
    assert index.stats().num_groups == 1
    assert asyncio.run(server.take_rollout_report()) == RolloutReport()
    asyncio.run(server.set_global_steps(0))
    assert asyncio.run(server.take_rollout_report()).num_generated_tokens == 1
    report = serve_a_step(server)
    assert len(report.requests) == 4
    assert report.num_generated_tokens == 4 * 40
    assert sum(request.num_decoded_tokens for request in report.requests) == 4 * 39
    assert sum(request.num_accepted_tokens for request in report.requests) > 0
    assert report.engine.num_steps == sum(request.num_decode_steps + 1 for request in report.requests)
    assert (server.global_steps, index.stats().num_groups) == (1, 0)
    asyncio.run(server.set_global_steps(2))
    assert asyncio.run(server.take_rollout_report()) == RolloutReport()


def test_verl_logs_the_drafts_that_it_looks_for_where_mtp_drafts(
    make_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It would take them from a field that no vLLM has."""
    from verl.trainer.ppo.ray_trainer import compute_spec_decode_metrics

    server = make_server({})
    params = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    fields = asyncio.run(server.generate(PROMPTS[0], params, "id")).extra_fields
    given = [[fields[f"spec_num_{name}"]] for name in ("draft_tokens", "accepted_tokens", "verify_steps")]
    metrics = compute_spec_decode_metrics(*given)
    assert 0 < metrics["rollout/spec_accept_rate"] <= 1 < metrics["rollout/spec_accept_length"]
    assert "request_spec_decode_stats" not in caplog.text


def test_the_turns_of_a_trajectory_and_of_its_siblings_are_one_group(make_server: Any) -> None:
    server = make_server({})
    proposer = proposer_of(server.engine.llm)
    index = proposer._drafter.index

    def respond(prompt: list[int], group: str = "first") -> list[int]:
        extra_args = {"rollout_spec_group": group, "rollout_spec_group_tokens": len(PROMPTS[0])}
        params = {"max_tokens": 20, "temperature": 0, "ignore_eos": True, "extra_args": extra_args}
        return list(asyncio.run(server.generate(prompt, params, "id")).token_ids)

    response = respond(PROMPTS[0])
    proposer.take_counters()
    respond(PROMPTS[0] + response + [9, 10, 11])
    respond(PROMPTS[0] + response[:7] + [12] + response[8:] + [9, 10])
    assert index.stats().num_groups == 1
    assert proposer.take_counters().num_accepted_tokens > 0
    respond(PROMPTS[1], "second")
    assert index.stats().num_groups == 2


def test_siblings_differ_though_full_determinism_gives_them_one_seed(
    make_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests as verl's agent loops send them, with names, and others without."""
    from rollout_spec.verl.agent_loop import sample_name

    server = make_server({}, full_determinism=True)
    logging.getLogger("vllm.rollout_spec.verl.server").addHandler(caplog.handler)

    def respond(number: int | None) -> tuple[int, ...]:
        params: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0, "ignore_eos": True}
        if number is not None:
            sample = {"index": 4, "raw_prompt": [{"role": "user", "content": "?"}], "session_id": number}
            params["extra_args"] = {KEY: sample_name(0, {"validate": False, "step": 1}, 0, sample)}
        return tuple(asyncio.run(server.generate(PROMPTS[0], params, "id")).token_ids)

    named = [respond(number) for number in range(4)]
    assert "has neither a name" not in caplog.text
    unnamed = [respond(None) for _ in range(4)]
    # vLLM's logger may hand a record to its parents as well: one record, said once.
    said = {id(record) for record in caplog.records if "has neither a name" in record.getMessage()}
    assert len(said) == 1
    assert server.engine.seeds == {server.replica_rank}, "verl's seed and the replica's number"
    assert len({*named, *unnamed}) == 8
    assert [respond(number) for number in (3, 0)] == [named[3], named[0]]


def test_history_outlives_weight_syncs_and_a_restart(make_server: Any) -> None:
    """Packed before the sync, as for a checkpoint: the engine still takes its last request for running."""
    packed: list[bytes] = []
    for num_kept in (2, 3):
        server = make_server({"history": 3})
        asyncio.run(server.add_history(packed))
        asyncio.run(server.set_global_steps(0))
        serve(server)  # twice two prompts
        packed = [asyncio.run(server.pack_history())]
        kept = merged(*packed)
        assert len(kept) == 2
        for prompt in PROMPTS[:2]:
            responses = kept.get(prompt_key(np.array(prompt, np.int32)))
            assert [len(response) for response in responses] == [40] * num_kept
        asyncio.run(server.set_global_steps(1))
        history = proposer_of(server.engine.llm)._drafter.history
        assert len(history) == 2
        serve(server)  # and it goes on


def test_a_response_that_was_interrupted_is_remembered_once(make_server: Any) -> None:
    server = make_server({"history": 3})

    def respond(prompt: list[int], request_id: str) -> Any:
        extra_args = {"rollout_spec_group": "one", "rollout_spec_group_tokens": len(PROMPTS[0])}
        params = {"max_tokens": 40 - len(prompt) + len(PROMPTS[0]), "temperature": 0, "ignore_eos": True}
        return asyncio.run(server.generate(prompt, params | {"extra_args": extra_args}, request_id))

    server.engine.num_steps_to_abort = 5
    before = respond(PROMPTS[0], "first")
    assert before.stop_reason == "aborted" and 5 <= len(before.token_ids) < 40
    asyncio.run(server.set_global_steps(1))
    server.engine.num_steps_to_abort = 0
    after = respond(PROMPTS[0] + list(before.token_ids), "second")
    [response] = merged(*asyncio.run(server.take_history())).get(group_key("one"))
    assert response.tolist() == list(before.token_ids) + list(after.token_ids)


def test_an_engine_without_the_drafter_fails_the_run(make_server: Any) -> None:
    with pytest.raises(RuntimeError, match=r"engine core 0 of replica 3 has no drafter of rollout_spec"):
        serve_a_step(make_server(None))


def test_an_engine_that_never_calls_its_drafter_fails_the_run(make_server: Any) -> None:
    server = make_server({})
    proposer_of(server.engine.llm)._runner.effective_drafter_max_model_len = 0
    with pytest.raises(RuntimeError, match=r"engine core 0 of replica 3 decoded without calling its drafter"):
        serve_a_step(server)


class Balancer:
    """verl's, over one server: as its client sees both through Ray."""

    def __init__(self, server: Any) -> None:
        self.require_acquire_fields = self.require_release_fields = remote(list)
        self.acquire_server = remote(
            lambda request_id: ("one", SimpleNamespace(generate=remote(server.generate)))
        )
        self.release_server = SimpleNamespace(remote=lambda **_: None)


def remote(function: Callable[..., Any]) -> Any:
    async def answer(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    return SimpleNamespace(remote=answer)


def test_each_call_of_one_sample_is_a_draw_of_its_own(make_server: Any) -> None:
    """verl's client, server and engine: three at once and a retry, twice, and once with an abort in it."""
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient

    from rollout_spec.verl.client import Calls, name_calls

    server = make_server({}, is_stepping=True)
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm", "response_length": 30}}})
    extra_args = {"rollout_spec_key": [0, 1, "train", "4"], "rollout_spec_group": "4"}
    params = {"temperature": 1.0, "ignore_eos": True, "extra_args": extra_args}
    aborts: list[int] = []

    async def respond(client: Any) -> tuple[int, ...]:
        output = await client.generate("id", prompt_ids=PROMPTS[0], sampling_params=dict(params))
        return tuple(output.token_ids)

    async def sample(is_aborted: bool) -> list[tuple[int, ...]]:
        client = name_calls(FullyAsyncLLMServerClient(config, Balancer(server)), Calls())
        steps = asyncio.create_task(server.engine.run())
        calls = asyncio.gather(*(respond(client) for _ in range(3)))
        if is_aborted:
            while len(server.engine.last) < 3 or server._admitting:  # verl would wait 10 ms for those
                await asyncio.sleep(0)
            aborts.append((await server.abort_all_requests())["aborted_count"])
            await server.resume_generation()
        responses = [*await calls, await respond(client)]
        steps.cancel()
        return responses

    asyncio.run(server.set_global_steps(0))
    first = asyncio.run(sample(is_aborted=False))
    assert [len(response) for response in first] == [30] * 4 and len(set(first)) == 4
    assert asyncio.run(sample(is_aborted=False)) == first
    assert asyncio.run(sample(is_aborted=True)) == first and aborts == [3]


MAX_TOKENS = 120
needs_gate = pytest.mark.skipif(verl_is_older(), reason="requests come in the middle of a weight sync")


async def finish(server: Any, number: int, kind: str, parts: list[tuple[int, int, str]]) -> list[int]:
    """Generate as verl's client does, which goes on behind an abort; adds (version, tokens, kind) by part."""
    prompt, tokens, stop = PROMPTS[number % 4], [], "aborted"
    extra_args = {"rollout_spec_key": [0, 1, kind, number], "rollout_spec_group": str(number % 4)}
    extra_args |= dict.fromkeys(("rollout_spec_group_tokens", "rollout_spec_turn_tokens"), len(prompt))
    while stop == "aborted":
        params = {"max_tokens": MAX_TOKENS - len(tokens), "temperature": 1.0, "ignore_eos": True}
        params["extra_args"] = extra_args
        output = await server.generate(prompt + tokens, params, f"{kind}{number}x{len(parts)}")
        parts.append((output.extra_fields["global_steps"], len(output.token_ids), kind))
        tokens += output.token_ids
        stop = output.stop_reason
        await asyncio.sleep(0.01)
    return tokens


async def train(server: Any, num_syncs: int, pause_s: float) -> tuple[list[Any], list[Any], dict[int, Any]]:
    """Twelve samples, four of them of a validation, while the weights change `num_syncs` times.

    Returns:
        The texts, the parts that they came in, and the servers' reports by version.
    """
    steps, parts, reports = asyncio.create_task(server.engine.run()), [], {}
    await server.set_global_steps(0)
    samples = [(number, "train") for number in range(8)] + [(number, "val") for number in range(4)]
    texts = asyncio.gather(*(finish(server, number, kind, parts) for number, kind in samples))
    for version in range(num_syncs + 1):
        while server._windows.is_untouched or server._admitting:
            await asyncio.sleep(0)
        for _ in range(6):
            await asyncio.sleep(0)
        await server.abort_all_requests(reject_request=version % 2 == 1)
        reports[version] = await server.take_rollout_report()
        await server.end_validation()
        await asyncio.sleep(pause_s)
        await server.set_global_steps(version + 1)
        await server.resume_generation()
    done = await texts
    await server.set_global_steps(version + 2)
    reports[version + 1] = await server.take_rollout_report()
    steps.cancel()
    return done, parts, reports


@needs_gate
def test_every_version_has_exactly_the_counts_of_what_it_generated(make_server: Any) -> None:
    """Both sides: what verl's clients got of each version, and what the server and its engine counted."""
    server = make_server({"history": 100}, is_stepping=True)
    started = time.monotonic()
    texts, parts, reports = asyncio.run(train(server, num_syncs=3, pause_s=0.2))
    seconds = time.monotonic() - started
    assert [len(text) for text in texts] == [MAX_TOKENS] * 12
    assert len(parts) > 24, "samples were interrupted, and more than once"
    for version, report in reports.items():
        served = [num for of, num, kind in parts if of == version and kind == "train" and num > 0]
        assert report.num_generated_tokens == sum(served)
        counts = RequestCounters()
        for request in (*report.requests, report.aborted):
            counts.add(request)
        assert counts.num_decoded_tokens == sum(served) - len(served), "a part's first is of its prefill"
        assert counts.num_decoded_tokens == counts.num_decode_steps + counts.num_accepted_tokens
    num_ended = sum(len(report.requests) for report in reports.values())
    assert num_ended == 8 and all(request.num_drafts for request in reports[4].requests)
    # The gate has turned some away, which were not interrupted then.
    num_interrupted = sum(report.num_interrupted for report in reports.values())
    assert 0 < num_interrupted <= sum(kind == "train" for *_, kind in parts) - 8
    assert sum(report.rollout_seconds for report in reports.values()) < seconds - 4 * 0.2


@needs_gate
def test_servers_share_whole_texts_and_only_between_two_versions(make_server: Any) -> None:
    server = make_server({"history": 100}, is_stepping=True)
    drafter = proposer_of(server.engine.llm)._drafter

    async def step() -> list[bytes]:
        assert await server.take_history() != [], "it begins to share"
        await train(server, num_syncs=2, pause_s=0.0)
        taken = await server.take_history()
        running = asyncio.create_task(server.engine.run())
        sample = asyncio.create_task(finish(server, 1, "train", []))
        while not drafter.request_ids:
            await asyncio.sleep(0)
        assert await server.take_history() == []
        await server.add_history(taken)
        assert server._history.received == taken, "no engine step waits for that"
        packed = await server.pack_history()
        assert drafter.request_ids, "its requests run on"
        await sample
        running.cancel()
        return [packed, *taken]

    packed, *taken = asyncio.run(step())
    for history, times in ((merged(packed), 2), (merged(*taken), 1)):
        texts = [text for name in "0123" for text in history.get(group_key(name))]
        assert [len(text) for text in texts] == [MAX_TOKENS] * 12 * times


def test_a_stop_string_ends_what_is_trained_on(make_server: Any, chat_model: str) -> None:
    """A trajectory's tokens and log-probabilities end where its text does, also behind accepted drafts."""

    def outputs(spec: dict[str, Any] | None) -> list[Any]:
        off = {} if spec else {"additional_config": {"rollout_spec": {"method": "off"}}}
        server = make_server(spec, model=chat_model, **off)
        params = {"max_tokens": 60, "temperature": 0.8, "ignore_eos": True, "logprobs": True}
        params["extra_args"] = {KEY: "one"}
        prompt = list(b"abcabcabcabd")
        free = asyncio.run(server.generate(prompt, dict(params), "free"))
        text = bytes(free.token_ids).decode()
        if spec is not None:
            proposer_of(server.engine.llm).take_counters()
        stops = [text[begin : begin + 2] for begin in (19, 20, 21, 22, 23)]
        found = [
            asyncio.run(server.generate(prompt, params | {"stop": [stop]}, f"{number}"))
            for number, stop in enumerate(stops)
        ]
        assert spec is None or proposer_of(server.engine.llm).take_counters().num_draft_tokens > 20
        return found

    drafted, plain = outputs({"num_speculative_tokens": 8}), outputs(None)
    for one, other in zip(drafted, plain, strict=True):
        assert (one.token_ids, one.stop_reason) == (other.token_ids, other.stop_reason)
        assert one.log_probs == pytest.approx(other.log_probs, abs=2e-4)
        assert len(one.log_probs) == len(one.token_ids)
