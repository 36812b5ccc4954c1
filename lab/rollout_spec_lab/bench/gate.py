"""A judge of gates: an engine made of time, with the automatic gate, without drafts, and with an oracle.

The engine prefills prompts in chunks beside rows that decode, starts cold, drifts and is disturbed, as its
scenario says. It has no texts, as `predict`'s engine has: what is accepted is drawn. So the oracle knows what
every step would take and how likely each draft token is. It takes what is best for each single step, so a
gate can be a little above it.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rollout_spec.config import UserError
from rollout_spec.drafting.gate.gate import AutoGate
from rollout_spec.drafting.gate.step import EndedStep
from rollout_spec.metrics import EngineCounters
from rollout_spec.report.page import png

K = 8  # draft tokens of a row, at most
SCENARIOS = Path(__file__).with_name("gate_scenarios.json")
FULL = 0.75  # of max_num_seqs: with so many rows a batch counts as full

_Nums = npt.NDArray[np.int32]
_Floats = npt.NDArray[np.float64]
_Rows = npt.NDArray[np.void]
_ROWS = [  # of a batch's requests: tokens to say, of context, to prefill; turns; drafts, how likely each is
    *((name, np.int64) for name in ("left", "context", "behind", "turns")), ("drafts", np.int32),
    ("true", np.float64, (K,)),
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A device, its load, and what its text repeats. Times are seconds."""

    base: float = 8e-3  # of the smallest step
    knee: int = 300  # tokens up to which a step takes no longer
    slope: float = 25e-6  # of a token beyond
    stairs: int = 1  # tokens are padded up to a multiple of this
    context: float = 4e-10  # of a token of context
    prompt_token: float = 1.0  # a prompt's token counts as so many
    drafted: float = 0.0  # that a step with drafts takes longer
    drafted_from: int = 0  # the first step for which that is so
    noise: float = 0.03  # lognormal sigma
    spikes: tuple[float, float] = (0.0, 1.0)  # a share of steps takes so many times as long
    cold: tuple[int, float] = (0, 1.0)  # so many first steps take so many times as long
    cold_sizes: float = 0.0  # that the first step of each 16 numbers of tokens takes longer
    drift: tuple[float, float] = (1.0, 1.0)  # the device's slowness in the first and in the last rollout
    disturbed: tuple[int, float] = (0, 1.0)  # every second rollout's first steps take so many times as long
    rows: int = 64  # max_num_seqs
    budget: int = 8192  # max_num_batched_tokens
    requests: int = 256
    prompt: int = 500  # tokens; 8 requests share it
    length: tuple[float, float] = (5.8, 0.8)  # of responses, lognormal
    rollouts: int = 3
    turns: int = 1  # of an agent's request; each next one comes 40 steps later, with 500 tokens of prompt
    repeats: tuple[float, float, float] = (0.35, 0.92, 0.25)  # share of text; acceptance there; elsewhere
    calibrated: float = 1.0  # survivals promise p ** calibrated
    ahead: bool = False  # scheduled ahead: steps that may have drafts wait, and take `drafted` longer


def read_scenarios(path: Path, names: list[str]) -> dict[str, Scenario]:
    """Scenarios of a JSON file, by name: the fields in which each differs from `Scenario`'s defaults.

    names: those to take; empty: all. Raises UserError: the file or a name is wrong.
    """
    try:
        found = {}
        for name, fields in json.loads(path.read_text()).items():
            given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
            found[name] = Scenario(**given)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: no scenarios: {error}") from None
    if unknown := sorted(set(names) - set(found)):
        raise UserError(f"{unknown[0]!r}: no scenario of {path}; there are: {', '.join(found)}")
    return {name: found[name] for name in names or found}


class Served(NamedTuple):
    tokens_per_s: float
    share_full_drafted: float  # of the steps with a full batch and without prompts, those with drafts


class Situation(NamedTuple):
    """What may be drafted for the step that begins: of its rows, [n]; and what only an oracle knows of it."""

    numbers: _Nums
    true: _Floats  # [n, K]: how likely each token is to be accepted, with all before it
    promised: npt.NDArray[np.float32]  # [n, K]: what their survivals say
    num_prompt_tokens: int
    mean_seconds: Callable[[npt.ArrayLike, int, npt.ArrayLike], _Floats]  # of the engine


class Plain:
    """Never drafts. The others choose otherwise what is drafted."""

    drafts_wanted = False

    def choose(self, step: EndedStep, situation: Situation, takes_drafts: bool) -> _Nums:
        """Draft tokens of each row, int32 [n], after this step; or none if that takes none."""
        return np.zeros_like(situation.numbers)


class Oracle(Plain):
    """Takes the drafts with which this step gives most per second."""

    drafts_wanted = True

    def choose(self, step: EndedStep, situation: Situation, takes_drafts: bool) -> _Nums:
        is_draft = np.arange(K) < situation.numbers[:, None]
        order = np.sort(situation.true[is_draft])[::-1]
        tokens = step.num_rows + np.arange(len(order) + 1) + situation.num_prompt_tokens
        seconds = situation.mean_seconds(tokens, step.num_context, np.arange(len(order) + 1) > 0)
        best = int(np.argmax((step.num_rows + np.concatenate([[0.0], order.cumsum()])) / seconds))
        self.drafts_wanted = best > 0
        if not (best and takes_drafts):
            return np.zeros_like(situation.numbers)
        return ((situation.true >= order[best - 1]) & is_draft).sum(axis=1).astype(np.int32)


class Gated(Plain):
    """The product's gate, asked as `Drafter` asks it."""

    def __init__(self) -> None:
        self._gate, self._promised = AutoGate(EngineCounters()), 0.0

    def choose(self, step: EndedStep, situation: Situation, takes_drafts: bool) -> _Nums:
        promised, self._promised = self._promised, 0.0
        least, probe_in_two, _ = self._gate.begin(dataclasses.replace(step, promised=promised))
        none = np.zeros_like(situation.numbers)
        if least is None:
            self.drafts_wanted = False
            return none
        proposed = np.minimum(situation.numbers, (situation.promised >= least).sum(axis=1)).astype(np.int32)
        choice = self._gate.choose(step, situation.promised, proposed)
        self.drafts_wanted = (takes_drafts or bool(choice.lengths.any())) and not probe_in_two
        if not takes_drafts:
            return none
        self._promised = choice.promised
        return choice.lengths


class DrawnEngine:
    """An engine without texts that serves the rollouts of a scenario, one after the other."""

    def __init__(self, scenario: Scenario, chooser: Plain, seed: int) -> None:
        self._scenario, self._chooser = scenario, chooser
        self._rng, self._lengths = np.random.default_rng(seed), np.random.default_rng(seed + 1)
        self._slowness, self._sizes = 1.0, set[tuple[int, bool]]()
        self._num_steps = self._num_full = self._num_full_drafted = self._num_tokens = 0
        self._seconds = 0.0

    def _mean_seconds(self, tokens: npt.ArrayLike, context: int, drafted: npt.ArrayLike) -> _Floats:
        s = self._scenario
        padded = np.ceil(np.asarray(tokens) / s.stairs) * s.stairs
        extra = s.drafted * np.asarray(drafted) * (self._num_steps >= s.drafted_from)
        over = np.maximum(0, padded - s.knee) * s.slope
        return np.asarray(self._slowness * (s.base + over + context * s.context + extra))

    def _took(self, tokens: float, size: int, context: int, drafted: bool, step: int, rollout: int) -> float:
        s = self._scenario
        seconds = float(self._mean_seconds(tokens, context, drafted) * np.exp(self._rng.normal(0, s.noise)))
        seconds *= s.spikes[1] if self._rng.random() < s.spikes[0] else 1.0
        seconds *= s.cold[1] if self._num_steps < s.cold[0] else 1.0
        seconds *= s.disturbed[1] if step < s.disturbed[0] and rollout % 2 else 1.0
        kind = (size // 16, drafted)
        seconds += s.cold_sizes if kind not in self._sizes else 0.0
        self._sizes.add(kind)
        return seconds

    def serve(self) -> Served:
        for rollout in range(self._scenario.rollouts):
            first, last = self._scenario.drift
            self._slowness = first + (last - first) * rollout / max(1, self._scenario.rollouts - 1)
            self._serve_rollout(rollout)
        share = self._num_full_drafted / max(1, self._num_full)
        return Served(self._num_tokens / self._seconds, share)

    def _serve_rollout(self, rollout: int) -> None:
        s, rows = self._scenario, np.zeros(0, _ROWS)
        lengths = np.clip(self._lengths.lognormal(*s.length, s.requests), 8, 4000).astype(int)
        # Tokens to prefill and to say, turns left, and the step at which it comes.
        queue = [(s.prompt if i % 8 == 0 else 1, int(n), s.turns, 0) for i, n in enumerate(lengths)]
        sleeping: list[tuple[int, int, int, int]] = []
        wanted = [not s.ahead] * 2  # of the next steps
        number, was_busy = 0, False
        while len(rows) or queue or sleeping:
            queue = [x for x in sleeping if x[3] <= number] + queue
            sleeping = [x for x in sleeping if x[3] > number]
            num_verified = int((rows["behind"] == 0).sum() + rows["drafts"].sum())
            rows, num_prompt = self._prefill(rows, queue, s.budget - num_verified)
            number += 1
            if not len(rows):
                was_busy = False
                continue
            gets = rows["behind"] == 0
            drafted = bool(rows["drafts"].any()) or (s.ahead and wanted[0])
            accepted = (self._rng.random(rows["true"].shape) < rows["true"]).cumprod(axis=1)
            accepted[np.arange(K) >= rows["drafts"][:, None]] = 0
            nums = np.minimum(np.where(gets, 1 + accepted.sum(axis=1), 0), rows["left"])
            num_tokens, context = num_verified + num_prompt, int(rows["context"][gets].sum())
            weighed = num_verified + num_prompt * s.prompt_token
            took = self._took(weighed, num_tokens, context, drafted, number - 1, rollout)
            self._seconds += took
            self._num_steps += 1
            self._num_tokens += int(nums.sum())
            is_full = len(rows) >= FULL * s.rows and not num_prompt
            self._num_full += is_full
            self._num_full_drafted += is_full and bool(rows["drafts"].any())
            rows["left"] -= nums
            rows["context"] += nums
            step = EndedStep(
                num_tokens, num_prompt, drafted, None, int(gets.sum()), int(rows["context"][gets].sum()),
                int(nums.sum()), took if was_busy else None,
            )  # fmt: skip
            was_busy = True
            wanted = [wanted[1], self._draft(rows, gets, step, wanted[1]) or not s.ahead]
            ended = gets & (rows["left"] <= 0)
            sleeping += [
                (500, 150, int(turns) - 1, number + 40) for turns in rows["turns"][ended] if turns > 1
            ]
            rows = rows[~ended]

    def _prefill(self, rows: _Rows, queue: list[Any], room: int) -> tuple[_Rows, int]:
        """Spend `room` tokens on prompts; returns the rows with those that begin, and how many tokens."""
        spent = 0
        for row in np.flatnonzero(rows["behind"]):
            part = min(room - spent, int(rows["behind"][row]))
            rows["behind"][row] -= part
            spent += part
        while queue and len(rows) < self._scenario.rows and spent < room:
            to_prefill, to_say, turns, _ = queue.pop(0)
            part = min(room - spent, to_prefill)
            spent += part
            row = (to_say, self._scenario.prompt, to_prefill - part, turns, 0, np.zeros(K))
            rows = np.append(rows, np.array([row], _ROWS))
        return rows, spent

    def _draft(self, rows: _Rows, gets: npt.NDArray[np.bool_], step: EndedStep, takes_drafts: bool) -> bool:
        """Let the chooser draft for the next step; returns whether the one after it gets room."""
        s, n = self._scenario, len(rows)
        does_repeat = self._rng.random(n) < s.repeats[0]
        wrong = 1.0 - np.where(does_repeat, s.repeats[1], s.repeats[2])
        p = np.clip(1.0 - wrong * np.exp(self._rng.normal(0, 0.3, n)), 0.01, 0.995)  # no two rows are alike
        rows["true"] = np.repeat(p[:, None], K, axis=1)
        rows["drafts"] = np.zeros(n, np.int32)
        if not step.num_rows:
            return self._chooser.drafts_wanted
        most = np.minimum(np.where(does_repeat, K, 2), np.maximum(rows["left"] - 1, 0))
        survivals = p[gets, None] ** np.arange(1, K + 1)
        promised = (survivals**s.calibrated).astype(np.float32)
        numbers, num_prompt_tokens = most[gets].astype(np.int32), int(min(s.budget, rows["behind"].sum()))
        situation = Situation(numbers, survivals, promised, num_prompt_tokens, self._mean_seconds)
        rows["drafts"][gets] = self._chooser.choose(step, situation, takes_drafts)
        return self._chooser.drafts_wanted


def judge(scenarios: Mapping[str, Scenario], num_seeds: int) -> Iterator[dict[str, Any]]:
    """The row of each scenario: tokens per second, the means over seeds, and the ratios."""
    for name, scenario in scenarios.items():
        speeds = {
            each.__name__.lower(): [DrawnEngine(scenario, each(), seed).serve() for seed in range(num_seeds)]
            for each in (Plain, Gated, Oracle)
        }
        plain, gated, oracle = (np.mean([run.tokens_per_s for run in runs]) for runs in speeds.values())
        yield {
            "scenario": name,
            "gate_over_plain": float(gated / plain),
            "gate_over_oracle": float(gated / oracle),
            "oracle_over_plain": float(oracle / plain),
            "full_drafted_gate": float(np.mean([run.share_full_drafted for run in speeds["gated"]])),
            "full_drafted_oracle": float(np.mean([run.share_full_drafted for run in speeds["oracle"]])),
        }


def draw(results: Sequence[Mapping[str, Any]]) -> bytes:
    """A PNG: of each scenario what the gate and plain steps reach of the oracle."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.6 + 0.25 * len(results)), layout="constrained")
    axes, names = figure.subplots(), [row["scenario"] for row in results]
    axes.barh(names, [row["gate_over_oracle"] for row in results], label="gate")
    axes.barh(names, [1 / row["oracle_over_plain"] for row in results], 0.3, label="no drafts")
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second / the oracle's")
    axes.legend(loc="lower left")
    return png(figure, dpi=110)
