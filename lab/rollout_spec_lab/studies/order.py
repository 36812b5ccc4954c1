"""The order of requests, in virtual time: what would it save with the same tokens?

    python lab/rollout_spec_lab/studies/order.py RECORDINGS --output FILE

Every recorded response is taken through the suffix index once, beside its siblings: how many tokens a step
gives with drafts, and how many it verifies. A rollout is then computed from event to event (a response ends,
the KV cache is full, a chunk is over): between two of them the rows advance evenly. Step times: a roofline.
Texts are stretched. `lab/tests/test_order.py` compares it with `simulate`, which runs every step.

Policies order the queue of each server; first come, first served is what all are compared with:

- `mean`, `max`, `spread` (mean + standard deviation): the longest first, by what the prompt's responses took
  one recorded step earlier; in recordings of one step, by the other half of its responses;
- `siblings`: by siblings that have ended, or run on; `both`: the larger of this and `mean`;
- `early`: as many rows as the KV cache holds; `rounds`: a response yields to waiting ones after a chunk, and
  is prefilled again;
- `tokens`, `together`: servers get like numbers of expected tokens, or whole prompts;
- `moves`: a server without work takes half of the rows of the fullest, and prefills them;
- `oracle`: the longest first.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from rollout_spec.config import SpecConfig
from rollout_spec.predict.replay import IndexProposer
from rollout_spec.predict.roofline import DEVICES, Model, Roofline
from rollout_spec.trace import Rollout, read_trace

K = 16
ROWS = 32  # max_num_seqs
MODELS = {  # config, tensor-parallel devices
    "32B": ("recipes/models/qwen3_32b.json", 8),
    "8B": ("recipes/models/qwen3_8b.json", 1),
}


@dataclasses.dataclass(frozen=True)
class Response:
    """One request, and what is known of it beforehand."""

    name: str
    group: str
    prompt: int  # tokens
    length: int
    rate: float  # tokens a step with drafts
    drafts: float  # draft tokens a step
    earlier: tuple[int, ...]  # lengths of earlier responses to its prompt


def measured(recording: Sequence[Rollout]) -> list[Response]:
    """The responses of the last step of a recording; of one without steps, the first half of each group."""
    last = max((line.step or 0 for line in recording), default=0)
    before = {line.group: line.responses for line in recording if (line.step or 0) < last}
    found = []
    with contextlib.closing(IndexProposer(SpecConfig(num_speculative_tokens=K))) as proposer:
        for line in recording:
            if (line.step or 0) < last:
                continue
            earlier, responses = before.get(line.group, []), line.responses
            if not last:
                half = len(responses) // 2
                responses, earlier = responses[:half], responses[half:]
            rates = _with_drafts(proposer, line, responses, earlier if last else [])
            lengths = tuple(map(len, earlier))
            found += [
                Response(
                    f"{line.group}.{i}", line.group, len(line.prompt_token_ids), len(each), *rate, lengths
                )
                for i, (each, rate) in enumerate(zip(responses, rates, strict=True))
                if len(each)
            ]
    return found


def _with_drafts(
    proposer: IndexProposer, line: Rollout, responses: Sequence[np.ndarray], earlier: Sequence[np.ndarray]
) -> list[tuple[float, float]]:
    """Tokens and draft tokens a step of each response, all in lockstep."""
    prompt, num_rows = line.prompt_token_ids, len(responses)
    ends = np.array([len(prompt) + len(each) for each in responses], np.int32)
    token_ids = np.zeros((num_rows, int(ends.max())), np.int32)
    for row, each in enumerate(responses):
        token_ids[row, : ends[row]] = np.concatenate([prompt, each])
    levels = np.full(num_rows, len(prompt), np.int32)
    steps, drafted = np.zeros(num_rows), np.zeros(num_rows)
    proposer.start(dataclasses.replace(line, responses=list(responses)), earlier)
    while (rows := np.flatnonzero(levels < ends).astype(np.int32)).size:
        drafts, numbers = proposer.step(rows, token_ids, levels[rows], ends[rows] - levels[rows] - 1)
        for row, draft, number in zip(rows, drafts, numbers, strict=True):
            recorded = token_ids[row, levels[row] : levels[row] + number]
            wrong = np.flatnonzero(recorded != draft[:number])
            levels[row] += 1 + (wrong[0] if len(wrong) else number)
            drafted[row] += number
        steps[rows] += 1
    proposer.finish()
    lengths = ends - len(prompt)
    return [(n / max(s, 1), d / max(s, 1)) for n, s, d in zip(lengths, steps, drafted, strict=True)]


@dataclasses.dataclass(eq=False)
class Row:
    """A request on its way."""

    request: Response
    number: int  # in the order of arrival
    done: float = 0.0  # tokens
    chunk: float = 0.0  # tokens since it was admitted

    @property
    def context(self) -> float:
        return self.request.prompt + self.done


@dataclasses.dataclass
class Load:
    times: Roofline
    max_num_seqs: int
    num_servers: int
    drafts: bool
    chunk: float = math.inf


Key = Callable[[Row, "Known"], float]


class Known:
    """What a rollout has shown so far of each prompt: lengths of what has ended, progress of what runs."""

    def __init__(self) -> None:
        self.ended: dict[str, list[int]] = {}
        self.running: dict[str, list[Row]] = {}

    def siblings(self, group: str) -> float:
        seen = [*self.ended.get(group, ()), *(row.done for row in self.running.get(group, ()))]
        return max(seen, default=math.inf)  # a prompt that nothing is known of goes first


class Server:
    def __init__(self, load: Load, key: Key | None, known: Known) -> None:
        self.load, self.key, self.known = load, key, known
        self.clock = 0.0
        self.queue: deque[Row] = deque()
        self.rows: list[Row] = []
        self.prefilled: set[str] = set()

    @property
    def has_work(self) -> bool:
        return bool(self.rows or self.queue)

    def admit(self) -> None:
        """Fill the batch; a prompt is prefilled once, what a request has done already each time."""
        prefill, context = 0.0, sum(row.context + 1 for row in self.rows)
        while self.queue and len(self.rows) < self.load.max_num_seqs:
            row = self._next()
            context += row.context + 1
            if self.rows and context > self.load.times.kv_tokens:
                break
            self.queue.remove(row)
            self.take(row)
            is_new = row.request.group not in self.prefilled
            self.prefilled.add(row.request.group)
            prefill += row.done + (row.request.prompt if is_new else 0)
        self.pay(prefill)

    def _next(self) -> Row:
        if self.key is None:
            return self.queue[0]
        values: dict[str, float] = {}
        for row in self.queue:
            if row.request.group not in values:
                values[row.request.group] = self.key(row, self.known)
        return max(self.queue, key=lambda row: values[row.request.group])

    def take(self, row: Row) -> None:
        row.chunk = 0.0
        self.rows.append(row)
        self.known.running.setdefault(row.request.group, []).append(row)

    def give(self, row: Row) -> None:
        self.rows.remove(row)
        self.known.running[row.request.group].remove(row)

    def pay(self, num_tokens: float) -> None:
        """For a prefill beside the rows."""
        times, num_rows = self.load.times, len(self.rows)
        self.clock += times.seconds(int(num_rows + num_tokens), False) - times.seconds(num_rows, False)

    def advance(self) -> None:
        """To the next event."""
        self.admit()
        rates, seconds = self._speed()
        left = min(
            min(row.request.length - row.done, self.load.chunk - row.chunk if self.queue else math.inf) / rate
            for row, rate in zip(self.rows, rates, strict=True)
        )
        context = sum(row.context for row in self.rows)
        if len(self.rows) > 1:
            left = min(left, max(1.0, (self.load.times.kv_tokens - context) / sum(rates)))
        steps = max(1.0, math.ceil(left - 1e-9))
        grown = context + sum(rates) * steps / 2
        self.clock += steps * seconds(grown)
        for row, rate in zip(list(self.rows), rates, strict=True):
            row.done = min(row.request.length, row.done + rate * steps)
            row.chunk += rate * steps
            if row.done >= row.request.length - 1e-6:
                self.give(row)
                self.known.ended.setdefault(row.request.group, []).append(row.request.length)
            elif row.chunk >= self.load.chunk - 1e-6 and self.queue:
                self.give(row)
                self.queue.append(row)
        while len(self.rows) > 1 and sum(row.context for row in self.rows) >= self.load.times.kv_tokens:
            newest = self.rows[-1]
            self.give(newest)
            self.queue.appendleft(newest)

    def _speed(self) -> tuple[list[float], Callable[[float], float]]:
        """Tokens a step of every row; the seconds of a step by its context. With drafts where these pay."""
        times, num_rows = self.load.times, len(self.rows)
        context = int(sum(row.context for row in self.rows))
        plain = [1.0] * num_rows
        if self.load.drafts:
            rates = [row.request.rate for row in self.rows]
            num_tokens = round(num_rows + sum(row.request.drafts for row in self.rows))
            gain = sum(rates) / num_rows * times.seconds(num_rows, False, context)
            if gain > times.seconds(num_tokens, True, context):
                return rates, lambda grown: times.seconds(num_tokens, True, int(grown))
        return plain, lambda grown: times.seconds(num_rows, False, int(grown))


def makespan(
    requests: Sequence[Response],
    load: Load,
    *,
    longest_first: Callable[[Response], float] | None = None,
    key: Key | None = None,
    place: Callable[[Response, list[list[Response]]], int] | None = None,
    moves: bool = False,
) -> float:
    """Seconds until the last request has ended.

    Args:
        longest_first: what is known of a request's length before the rollout; orders all requests.
        key: what is known of the length of a waiting request while others run; orders a server's queue.
        place: the server of a request, by the requests of each server; by default the one with the fewest.
        moves: whether servers without work take running requests.
    """
    known = Known()
    servers = [Server(load, key, known) for _ in range(load.num_servers)]
    parts: list[list[Response]] = [[] for _ in servers]
    if longest_first is not None:
        requests = sorted(requests, key=longest_first, reverse=True)
    for number, request in enumerate(requests):
        i = place(request, parts) if place else min(range(len(parts)), key=lambda i: len(parts[i]))
        parts[i].append(request)
        servers[i].queue.append(Row(request, number))
    while busy := [server for server in servers if server.has_work]:
        server = min(busy, key=lambda server: server.clock)
        server.advance()
        if moves:
            _move(servers)
    return max(server.clock for server in servers)


def _move(servers: Sequence[Server]) -> None:
    for idle in servers:
        fullest = max(servers, key=lambda server: len(server.rows))
        if idle.has_work or fullest.queue or len(fullest.rows) < 2 or fullest.clock < idle.clock:
            continue
        idle.clock = fullest.clock
        moved = fullest.rows[::2]
        for row in moved:
            fullest.give(row)
            idle.take(row)
        idle.pay(sum(row.context for row in moved))


def expected(request: Response) -> float:
    return sum(request.earlier) / max(1, len(request.earlier))


BEFOREHAND: dict[str, Callable[[Response], float]] = {
    "mean": expected,
    "max": lambda request: max(request.earlier, default=0),
    "spread": lambda request: expected(request) + statistics.pstdev(request.earlier or (0,)),
    "oracle": lambda request: request.length,
}


def _siblings(row: Row, known: Known) -> float:
    return known.siblings(row.request.group)


def _both(row: Row, known: Known) -> float:
    seen = known.siblings(row.request.group)
    return max(expected(row.request), seen if math.isfinite(seen) else 0.0)


def _least(parts: list[list[Response]], weight: Callable[[Response], float]) -> int:
    return min(range(len(parts)), key=lambda i: sum(map(weight, parts[i])))


def _together(request: Response, parts: list[list[Response]]) -> int:
    homes = [i for i, part in enumerate(parts) if any(each.group == request.group for each in part)]
    least = min(map(len, parts))
    near = [i for i in homes if len(parts[i]) - least < 16]
    return near[0] if near else min(range(len(parts)), key=lambda i: len(parts[i]))


def policies(load: Load, longest: float) -> dict[str, dict]:
    """What `makespan` is given, by policy."""
    mean, oracle = BEFOREHAND["mean"], BEFOREHAND["oracle"]
    early = {"load": dataclasses.replace(load, max_num_seqs=10_000)}
    rounds = {"load": dataclasses.replace(load, chunk=longest / 8)}
    found: dict[str, dict] = {"fcfs": {}}
    found |= {name: {"longest_first": length} for name, length in BEFOREHAND.items()}
    found |= {"siblings": {"key": _siblings}, "both": {"key": _both}}
    found |= {"early": early, "early mean": early | {"longest_first": mean}}
    found |= {"rounds": rounds, "rounds siblings": rounds | {"key": _siblings}}
    if load.num_servers > 1:
        found["tokens"] = {"longest_first": mean, "place": lambda request, parts: _least(parts, expected)}
        found["together"] = {"place": _together}
        found["moves"] = {"moves": True}
        found["oracle tokens"] = {
            "longest_first": oracle,
            "place": lambda request, parts: _least(parts, oracle),
        }
    return found


def requests_for(responses: Sequence[Response], number: int, seed: int) -> list[Response]:
    """So many requests: prompts in a random order, siblings together, all copied as often as needed."""
    groups: dict[str, list[Response]] = {}
    for response in responses:
        groups.setdefault(response.group, []).append(response)
    rng, found = np.random.default_rng(seed), []
    for copy in itertools.count():
        for group in rng.permutation(sorted(groups)):
            name = f"{group}/{copy}"
            found += [dataclasses.replace(each, group=name) for each in groups[group]]
            if len(found) >= number:
                return found[:number]
    raise AssertionError


def loads(longest: float) -> Iterator[tuple[str, Load, int]]:
    """Name, load, and requests. The 8B's KV cache holds about a third of its rows at 34 k, the 32B's all."""
    root = Path(__file__).resolve().parents[1]
    for model, tokens in (("32B", 16384), ("32B", 34816), ("8B", 34816)):
        path, tp = MODELS[model]
        times = Roofline(
            Model.read(root / path), DEVICES["h100"], tp, memory_share=0.85, stretch=tokens / longest
        )
        for servers, waves, drafts in itertools.product((1, 2, 8), (1, 2, 4), (False, True)):
            name = f"{model} {tokens}, {servers} x {ROWS}, {waves}, {'sam' if drafts else 'off'}"
            yield name, Load(times, ROWS, servers, drafts), servers * ROWS * waves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path, nargs="+")
    parser.add_argument("--orders", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    results = []
    for path in args.recordings:
        responses = measured(list(read_trace(path)))
        longest = max(response.length for response in responses)
        cells = list(itertools.product(loads(longest), range(args.orders)))
        for (name, load, number), seed in tqdm(cells, desc=path.name):
            requests = requests_for(responses, number, seed)
            plans = policies(load, longest).items()
            seconds = {policy: makespan(requests, **{"load": load} | plan) for policy, plan in plans}
            ratios = {policy: value / seconds["fcfs"] for policy, value in seconds.items()}
            results.append({"recording": path.name, "load": name, "order": seed, "ratios": ratios})
    if args.output:
        args.output.write_text(json.dumps(results))
    _print(results)


def _print(results: Sequence[dict]) -> None:
    for method in ("off", "sam"):
        mine = [result for result in results if result["load"].endswith(method)]
        recordings = list(dict.fromkeys(result["recording"].split(".")[0] for result in mine))
        print(f"\n{method}: times first come, first served: mean (least to most) over loads and orders")
        print("| policy |", " | ".join(recordings), "| mean |")
        for policy in dict.fromkeys(name for result in mine for name in result["ratios"]):
            values = [
                [result["ratios"][policy] for result in mine
                 if result["recording"].startswith(recording) and policy in result["ratios"]]
                for recording in recordings
            ]  # fmt: skip
            cells = [f"{statistics.fmean(each):.3f} ({min(each):.2f} to {max(each):.2f})" for each in values]
            mean = statistics.fmean(map(statistics.fmean, values))
            print(f"| {policy} |", " | ".join(cells), f"| {mean:.3f} |")


if __name__ == "__main__":
    main()
