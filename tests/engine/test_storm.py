"""Two rollout servers whose requests are aborted and go on, again and again."""

import asyncio
import ctypes
import gc
import itertools
import random
from collections import Counter, defaultdict
from typing import NamedTuple

import pytest

from rollout_spec.drafting.history import group_key
from rollout_spec.metrics import RequestCounters, RolloutReport
from tests.engine.conftest import EOS_TOKEN_ID, KEYED, core_of, proposer_of
from tests.engine.serving import PROMPTS, generate, sampling
from tests.text import merged


class Part(NamedTuple):
    of: tuple[int, int]
    num_tokens: int
    is_aborted: bool
    is_validation: bool


def is_validation(number):
    return number % 5 == 0


class Storm:
    """Samples on two servers that abort all they have again and again, at random points and apart.

    Each sample goes on where it finds itself placed, as verl's client does it. Some aborts are weight syncs,
    and then the servers exchange what they have served.
    """

    NUM_AT_A_TIME = 14

    def __init__(self, servers, num_interruptions):
        self.servers, self.num_interruptions = servers, num_interruptions
        self.rng = random.Random(7)
        self.is_over = False
        self.steps = itertools.count(1)  # of the training, which all servers have in common
        self.texts: dict[int, list[int]] = {}
        self.parts: list[Part] = []
        self.reports = defaultdict[tuple[int, int], RolloutReport](RolloutReport)  # by server and version
        self.shared: list[list[int]] = []  # what servers handed to one another
        self.memory: list[int] = []  # bytes in use, of C and Python, every 250 interruptions

    @property
    def num_aborted(self):
        return sum(part.is_aborted and part.num_tokens > 0 for part in self.parts)

    async def run(self):
        numbers = itertools.count()
        await asyncio.gather(*(server.set_global_steps(0) for server in self.servers))
        await self.share()
        interrupters = [asyncio.create_task(self.interrupt(server)) for server in self.servers]
        await asyncio.gather(*(self.clients(numbers) for _ in range(self.NUM_AT_A_TIME)))
        self.is_over = True
        await asyncio.gather(*interrupters)
        for server in self.servers:
            await self.sync(server)
            await server.end_validation()
        await self.share()

    async def clients(self, numbers):
        while self.num_aborted < self.num_interruptions:
            number = next(numbers)
            self.texts[number] = await self.finish(number)

    async def finish(self, number):
        asked, prompt = storm_sampling(number)
        tokens, is_aborted = list[int](), True
        while is_aborted:
            params = asked | {"max_tokens": asked["max_tokens"] - len(tokens)}
            at = self.rng.randrange(len(self.servers))
            output = await self.servers[at].generate(prompt + tokens, params, f"{number}x{len(self.parts)}")
            is_aborted = output.stop_reason == "aborted"
            of = at, output.extra_fields["global_steps"]
            self.parts.append(Part(of, len(output.token_ids), is_aborted, is_validation(number)))
            tokens += output.token_ids
            await asyncio.sleep(self.rng.random() * 0.01)
        return tokens

    async def interrupt(self, server):
        for number in itertools.count(1):
            if self.is_over:
                return
            for _ in range(self.rng.randrange(30)):
                await asyncio.sleep(0)
            await server.abort_all_requests(reject_request=self.rng.random() < 0.3)
            if number % 4 == 0:
                await self.sync(server)
                await self.share()
            await server.resume_generation()

    async def sync(self, server):
        of = self.servers.index(server), server.global_steps
        await server.set_global_steps(next(self.steps))
        self.reports[of].add(await server.take_rollout_report())
        if self.num_aborted // 250 > len(self.memory):
            gc.collect()
            self.memory.append(allocated_bytes())

    async def share(self):
        """What `verl.trainer_history.share_history` has the servers do, whatever they are doing."""
        taken = [await server.take_history() for server in self.servers]
        for server, others in zip(self.servers, taken[::-1], strict=True):
            await server.add_history(others)
        history = merged(*itertools.chain.from_iterable(taken))
        self.shared += [text.tolist() for name in "0123" for text in history.get(group_key(name))]


class MallInfo(ctypes.Structure):
    _names = (*"abcd", "hblkhd", *"ef", "uordblks", *"gh")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


def allocated_bytes():
    """What is in use of malloc's memory, mapped too; resident memory also has what was in use at a time."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = MallInfo
    found = libc.mallinfo2()
    return found.uordblks + found.hblkhd


def storm_sampling(number):
    prompt = PROMPTS[number % 4]
    name = [0, 1, "val" if is_validation(number) else "train", number]
    extra_args = dict.fromkeys(("rollout_spec_key", "rollout_spec_sample"), name)
    extra_args |= {"rollout_spec_group": str(number % 4)}
    extra_args |= dict.fromkeys(("rollout_spec_group_tokens", "rollout_spec_call_tokens"), len(prompt))
    max_tokens = 20 + number * 37 % 100
    asked = {"max_tokens": max_tokens, "temperature": 1.0, "extra_args": extra_args, "ignore_eos": False}
    return asked, prompt


def check_versions(storm):
    """Both sides: what clients got of each server and version, and what the server and its engine counted."""
    total = RequestCounters()
    for of, report in storm.reports.items():
        parts = [part for part in storm.parts if part.of == of and not part.is_validation]
        served = [part.num_tokens for part in parts if part.num_tokens]
        counts = report.requests + report.aborted
        total.add(counts)
        assert report.num_generated_tokens == sum(served)
        assert counts.num_decoded_tokens == sum(served) - len(served), "a part's first is of its prefill"
    return total


@pytest.mark.parametrize("num_interruptions", [100, pytest.param(3000, marks=pytest.mark.long)])
@pytest.mark.timeout(3600)
def test_a_storm_of_interruptions_loses_and_repeats_nothing(num_interruptions, make_server, make_engine):
    """The longer one also sees that memory stays as it is, after 2000 interruptions to warm up."""
    spec = {"history": 32, "max_index_mb": 4}
    servers = [make_server(spec, fresh=True) for _ in range(2)]
    storm = Storm(servers, num_interruptions)
    asyncio.run(storm.run())
    reference = make_engine(**KEYED)
    params, prompts = zip(*map(storm_sampling, storm.texts), strict=True)
    plain = generate(reference, prompts, [sampling(asked | {"detokenize": False}) for asked in params])
    assert storm.num_aborted >= num_interruptions
    assert list(storm.texts.values()) == plain, "as if nothing had been interrupted"
    # What was drafted after a stop token, and sampled as drafted, is remembered too.
    shared = [text[: text.index(EOS_TOKEN_ID) + 1] if EOS_TOKEN_ID in text else text for text in storm.shared]
    remembered, generated = (Counter(map(tuple, texts)) for texts in (shared, plain))
    assert (remembered - generated, generated - remembered) == ({}, {}), "each is remembered once, and whole"
    counts, total = check_versions(storm), RolloutReport()
    for report in storm.reports.values():
        total.add(report)
    trained = [text for number, text in storm.texts.items() if not is_validation(number)]
    parts = [part for part in storm.parts if not part.is_validation]
    num_aborted = sum(part.is_aborted and part.num_tokens > 0 for part in parts)
    assert num_aborted <= total.num_interrupted <= len(parts) - len(trained)
    # Accepted after a stop is counted too, and is no token of the response.
    num_behind = counts.num_decode_steps + counts.num_accepted_tokens - counts.num_decoded_tokens
    assert 0 <= num_behind <= 8 * len(trained)
    assert counts.num_accepted_tokens > 0 == total.engine.num_failed_steps
    for server in servers:
        drafter = proposer_of(server.engine.llm).drafter
        scheduler = core_of(server.engine.llm).scheduler
        history = server._history
        left = (server._windows._requests, *server._drafters.take_ended(), history._shared, history._received)
        assert not any((*left, drafter.request_ids, scheduler._request_counters, scheduler.requests))
        stats = drafter.index.stats()
        assert stats.num_sequences == 0 and stats.num_bytes <= 4 << 20, "the texts stay, within the budget"
    mib = [used >> 20 for used in storm.memory]
    print(f"{storm.num_aborted} interruptions of {len(plain)} responses; memory {mib} MiB")
    assert num_interruptions < 3000 or max(mib[8:]) - max(mib[:8]) < 8
