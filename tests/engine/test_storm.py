"""Two rollout servers whose requests are aborted and go on, again and again."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from rollout_spec.drafting.history import group_key
from rollout_spec.metrics import RequestCounters, RolloutReport
from tests.engine.conftest import EOS_TOKEN_ID, proposer_of
from tests.engine.test_life_cycle import PROMPTS
from tests.text import merged


class Storm:
    """Samples on two servers that abort all they have again and again, at random points and apart.

    Each sample goes on where it finds itself placed, as verl's client does it. Some aborts are weight syncs,
    and then the servers exchange what they have served.
    """

    NUM_AT_A_TIME = 14

    def __init__(self, servers: list[Any], num_interruptions: int) -> None:
        self.servers, self.num_interruptions = servers, num_interruptions
        self.rng = random.Random(7)
        self.is_over = False
        self.texts: dict[int, list[int]] = {}
        self.parts: list[tuple[int, bool]] = []  # tokens, and whether it was aborted
        self.reports: list[RolloutReport] = []
        self.shared: list[list[int]] = []  # what servers handed to one another
        self.memory: list[int] = []  # bytes in use, of C and Python, every 250 interruptions

    @property
    def num_aborted(self) -> int:
        return sum(is_aborted and num > 0 for num, is_aborted in self.parts)

    async def run(self) -> None:
        engines = [asyncio.create_task(server.engine.run()) for server in self.servers]
        numbers = itertools.count()
        await asyncio.gather(*(server.set_global_steps(0) for server in self.servers))
        await self.share()
        interrupters = [asyncio.create_task(self.interrupt(server)) for server in self.servers]
        await asyncio.gather(*(self.clients(numbers) for _ in range(self.NUM_AT_A_TIME)))
        self.is_over = True
        await asyncio.gather(*interrupters)
        for server in self.servers:
            await self.sync(server, 0)
        await self.share()
        for task in engines:
            task.cancel()

    async def clients(self, numbers: Iterator[int]) -> None:
        while self.num_aborted < self.num_interruptions:
            number = next(numbers)
            self.texts[number] = await self.finish(number)

    async def finish(self, number: int) -> list[int]:
        sampling, prompt = storm_sampling(number)
        tokens, is_aborted = list[int](), True
        while is_aborted:
            params = sampling | {"max_tokens": sampling["max_tokens"] - len(tokens)}
            server = self.rng.choice(self.servers)
            output = await server.generate(prompt + tokens, params, f"{number}x{len(self.parts)}")
            is_aborted = output.stop_reason == "aborted"
            self.parts.append((len(output.token_ids), is_aborted))
            tokens += output.token_ids
            await asyncio.sleep(self.rng.random() * 0.01)
        return tokens

    async def interrupt(self, server: Any) -> None:
        version = 0
        while not self.is_over:
            version += 1
            for _ in range(self.rng.randrange(30)):
                await asyncio.sleep(0)
            await server.abort_all_requests(reject_request=self.rng.random() < 0.3)
            if version % 4 == 0:
                await self.sync(server, version)
                await self.share()
            await server.resume_generation()

    async def sync(self, server: Any, version: int) -> None:
        await server.set_global_steps(version)
        self.reports.append(await server.take_rollout_report())
        if self.num_aborted // 250 > len(self.memory):
            gc.collect()
            self.memory.append(allocated_bytes())

    async def share(self) -> None:
        """What `verl.history.share_history` has the servers do, whatever they are doing."""
        taken = [await server.take_history() for server in self.servers]
        for server, others in zip(self.servers, taken[::-1], strict=True):
            await server.add_history(others)
        history = merged(*itertools.chain.from_iterable(taken))
        self.shared += [text.tolist() for name in "0123" for text in history.get(group_key(name))]


class MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _names = (*"abcd", "hblkhd", *"ef", "uordblks", *"gh")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


def allocated_bytes() -> int:
    """What is in use of malloc's memory, mapped too; resident memory also has what was in use at a time."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = MallInfo
    found = libc.mallinfo2()
    return found.uordblks + found.hblkhd


def storm_sampling(number: int) -> tuple[dict[str, Any], list[int]]:
    """The parameters of a sample, and its prompt."""
    prompt = PROMPTS[number % 4]
    extra_args = {"rollout_spec_key": [0, 1, "train", number], "rollout_spec_group": str(number % 4)}
    extra_args |= dict.fromkeys(("rollout_spec_group_tokens", "rollout_spec_turn_tokens"), len(prompt))
    max_tokens = 20 + number * 37 % 100
    return {"max_tokens": max_tokens, "temperature": 1.0, "extra_args": extra_args}, prompt


@pytest.mark.parametrize("num_interruptions", [300, pytest.param(3000, marks=pytest.mark.long)])
def test_a_storm_of_interruptions_loses_and_repeats_nothing(
    num_interruptions: int, make_server: Any, make_engine: Any
) -> None:
    """The longer one also sees that memory stays as it is, behind 2000 interruptions to warm up."""
    from vllm import SamplingParams

    servers = [make_server({"history": 32, "max_index_mb": 16}, is_stepping=True) for _ in range(2)]
    storm = Storm(servers, num_interruptions)
    asyncio.run(storm.run())
    reference = make_engine(additional_config={"rollout_spec": {"method": "off", "verify": "coupled"}})
    samples = [storm_sampling(number) for number in storm.texts]
    params = [SamplingParams(**sampling, detokenize=False) for sampling, _ in samples]
    prompts = [{"prompt_token_ids": prompt} for _, prompt in samples]
    plain = [list(out.outputs[0].token_ids) for out in reference.generate(prompts, params, use_tqdm=False)]
    assert storm.num_aborted >= num_interruptions
    assert list(storm.texts.values()) == plain, "as if nothing had been interrupted"
    # What was drafted behind a stop token, and sampled as drafted, is remembered too.
    shared = [text[: text.index(EOS_TOKEN_ID) + 1] if EOS_TOKEN_ID in text else text for text in storm.shared]
    remembered, generated = (Counter(map(tuple, texts)) for texts in (shared, plain))
    assert (remembered - generated, generated - remembered) == ({}, {}), "each is remembered once, and whole"

    served = [num for num, _ in storm.parts if num]
    counts, total = RequestCounters(), RolloutReport()
    for report in storm.reports:
        total.add(report)
    for request in (*total.requests, total.aborted):
        counts.add(request)
    assert total.num_generated_tokens == sum(served) == sum(map(len, plain))
    assert len(total.requests) == len(plain)
    assert storm.num_aborted <= total.num_interrupted <= len(storm.parts) - len(plain)
    assert counts.num_decoded_tokens == sum(served) - len(served), "a part's first is of its prefill"
    num_behind_stops = sum(map(len, storm.shared)) - sum(map(len, shared))
    num_accepted = counts.num_accepted_tokens - num_behind_stops
    assert counts.num_decoded_tokens == counts.num_decode_steps + num_accepted
    assert counts.num_accepted_tokens > 0 == total.engine.num_failed_steps

    for server in servers:
        drafter = proposer_of(server.engine.llm)._drafter
        scheduler = server.engine.llm.llm_engine.engine_core.engine_core.scheduler
        left = (
            server._windows._requests,
            *server._drafters.take_ended(),
            server._history._shared,
            server._history.received,
        )
        assert not any((*left, drafter.request_ids, scheduler._request_counters, scheduler.requests))
        stats = drafter.index.stats()
        assert (stats.num_groups, stats.num_sequences, stats.num_tokens) == (0, 0, 0)
        assert stats.num_bytes < 4 << 20, "what was learned, an eighth of the budget"
    mib = [used >> 20 for used in storm.memory]
    print(f"{storm.num_aborted} interruptions of {len(plain)} responses; memory {mib} MiB")
    assert num_interruptions < 3000 or max(mib[8:]) - max(mib[:8]) < 8
