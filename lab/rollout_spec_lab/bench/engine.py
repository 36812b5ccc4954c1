"""Whole rollouts side by side: the load, the methods, and one engine after the other.

Knows neither torch nor vLLM: `engine_worker` serves a rollout in a process of its own, and `timeline` reads
what its steps say.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout_spec.config import ConfigError, SpecConfig, UserError, parse_threshold
from rollout_spec.environment import environment
from rollout_spec.predict.simulate import Cluster, simulate
from rollout_spec.predict.step_times import StepTimes, Times
from rollout_spec.report.runs import plain, ratio
from rollout_spec.trace import Rollout
from rollout_spec_lab.bench.drafters import require_arctic_inference
from rollout_spec_lab.bench.jobs import answers, last
from rollout_spec_lab.bench.timeline import Timeline, measure, step_times, summarise

MIN_RESPONSE_TOKENS = 8
RANDOM_PROMPT_TOKENS = 64
WORKER = "rollout_spec_lab.bench.engine_worker"
RECORDS = "sam+model"  # the method with which `record_proposals` asks a model

Served = dict[str, list[dict[str, Any]]]
"""By method what `engine_worker.run` gave of each repeat."""


@dataclasses.dataclass(frozen=True)
class Method:
    """One competitor.

    `off` is plain vLLM, `off:coupled` the same with the noise of verify=coupled, `ngram` and `suffix` are
    vLLM's own drafters, `sam` is ours, `sam:N` and `sam:auto` ours with that `batch_threshold`. `model` is a
    model's drafts with verify=coupled, `sam+model`, which takes thresholds too, ours beside it. /v1 or /v2
    after it: on that model runner, not on the one that vLLM chooses.

    Raises ConfigError: there is no such method, or it takes no such variant.
    """

    label: str

    def __post_init__(self) -> None:
        if self.drafting in ("off", "off:coupled", "ngram", "suffix", "model"):
            return
        if not self.is_ours:
            raise ConfigError(
                f"method {self.label!r}: must be off, off:coupled, ngram, suffix, model, sam, sam+model, "
                "sam:THRESHOLD or sam+model:THRESHOLD"
            )
        self.options({})

    @property
    def drafting(self) -> str:
        """The label without a model runner."""
        return self.label.removesuffix("/v1").removesuffix("/v2")

    @property
    def environment(self) -> dict[str, str]:
        """Of its engine."""
        runner = self.label.removeprefix(self.drafting)
        return {"VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "/v2"))} if runner else {}

    @property
    def name(self) -> str:
        return self.drafting.partition(":")[0]

    @property
    def is_ours(self) -> bool:
        return self.name in ("sam", "sam+model")

    @property
    def has_model(self) -> bool:
        return self.name in ("model", "sam+model")

    def options(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of `rollout.spec` for ours: those given, and the method's threshold."""
        _, _, threshold = self.drafting.partition(":")
        options = dict(spec)
        if threshold:
            options["batch_threshold"] = parse_threshold(threshold)
        SpecConfig.from_mapping(options)
        return options


def require(method: str) -> None:
    """Raise MissingError where a method needs more than vLLM, and that is not installed."""
    if method == "suffix":
        require_arctic_inference()


@dataclasses.dataclass(frozen=True)
class Load:
    """Requests shaped like GRPO's: groups of samples of one prompt, a few of them much longer than the rest.

    Args:
        prompts: token ids of each prompt.
        group_size: samples of each prompt.
        median_tokens, sigma: of the log-normal distribution that response lengths are drawn from. Every
            request generates exactly its length, whatever the method: ends of text are ignored.
        max_tokens: no response is longer.
        natural_ends: responses end where the model ends them, or at `max_tokens`; the method changes lengths.
        recorded: responses to each prompt, which come whatever is sampled. They decide on the lengths; of
            the other fields only `temperature` and `seed` count then.
    """

    prompts: Sequence[Sequence[int]]
    group_size: int = 8
    median_tokens: float = 96.0
    sigma: float = 0.9
    max_tokens: int = 512
    natural_ends: bool = False
    temperature: float = 1.0
    seed: int = 0
    recorded: Sequence[Sequence[Sequence[int]]] | None = None

    def requests(self, repeat: int) -> list[dict[str, Any]]:
        """The requests of one repeat, the same for every method, siblings next to each other.

        Returns:
            Of each: `prompt`, the number of its prompt; `max_tokens`; `name`, which keys its noise.
        """
        return [
            {"prompt": i, "max_tokens": int(length), "name": ["bench", self.seed, repeat, i, sample]}
            for i, lengths in enumerate(self._lengths(repeat))
            for sample, length in enumerate(lengths)
        ]

    def _lengths(self, repeat: int) -> list[list[int]]:
        if self.recorded is not None:
            return [[len(response) for response in responses] for responses in self.recorded]
        shape = len(self.prompts), self.group_size
        if self.natural_ends:
            return np.full(shape, self.max_tokens).tolist()
        rng = np.random.default_rng([self.seed, repeat])
        drawn = self.median_tokens * np.exp(self.sigma * rng.standard_normal(shape))
        return np.clip(drawn.astype(int), min(MIN_RESPONSE_TOKENS, self.max_tokens), self.max_tokens).tolist()

    @property
    def all_recorded(self) -> list[Sequence[int]] | None:
        """The responses to all requests, in their order."""
        return None if self.recorded is None else list(itertools.chain.from_iterable(self.recorded))

    def lines(self, repeat: int, responses: Sequence[Sequence[int]]) -> list[Rollout]:
        """The responses to the requests of a repeat as recorded rollouts, a line for each prompt."""
        found = [Rollout(str(i), None, np.array(each, np.int32), []) for i, each in enumerate(self.prompts)]
        for request, response in zip(self.requests(repeat), responses, strict=True):
            found[request["prompt"]].responses.append(np.array(response, np.int32))
        return found


def recorded_load(lines: Sequence[Rollout], max_tokens: int, model: str) -> Load:
    """A recording to be served again, no response longer than `max_tokens`; a UserError if the vocabulary of
    `model`, a folder with config.json, lacks a token."""
    vocab_size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    prompts = [line.prompt_token_ids.tolist() for line in lines]
    recorded = [[each[:max_tokens].tolist() for each in line.responses] for line in lines]
    largest = max(map(max, [*prompts, *itertools.chain.from_iterable(recorded)]))
    if largest >= vocab_size:
        raise UserError(f"the recording has the token {largest}, the model's vocabulary is of {vocab_size}")
    longest = max(len(response) for responses in recorded for response in responses)
    return Load(prompts, group_size=max(map(len, recorded)), max_tokens=longest, recorded=recorded)


def rollout_of(lines: Sequence[Rollout], limit: int | None) -> list[Rollout]:
    """The lines of the first training step, without empty responses; a UserError if there are no others."""
    found = [
        dataclasses.replace(line, responses=[each for each in line.responses if len(each)])
        for line in lines
        if line.step == lines[0].step and len(line.prompt_token_ids)
    ][:limit]
    if not any(line.responses for line in found):
        raise UserError("no token in any response of the trace")
    return found


def first_responses(lines: Sequence[Rollout], number: int) -> list[Rollout]:
    """The first `number` responses of a rollout; a UserError if it has fewer."""
    found, left = list[Rollout](), number
    for line in lines:
        if taken := line.responses[:left]:
            found.append(dataclasses.replace(line, responses=taken))
            left -= len(taken)
    if left:
        raise UserError(f"--rows {number}: the recording has {number - left} responses in its first step")
    return found


def random_prompts(number: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Prompts without any structure: token ids drawn alike from the whole vocabulary."""
    rng = np.random.default_rng([seed, vocab_size])
    return rng.integers(0, vocab_size, (number, RANDOM_PROMPT_TOKENS)).tolist()


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is served, by which methods, in which engines."""

    load: Load
    methods: Sequence[str]  # labels of `Method`; the others are compared with the first
    model: str
    dtype: str
    engine: Mapping[str, Any]  # further arguments of vLLM's
    spec: Mapping[str, Any]  # fields of `rollout.spec` for sam
    num_speculative_tokens: int | None = None  # None: each method's default
    model_drafter: Mapping[str, Any] | None = None  # of `model_drafter`, for the methods that have one
    repeats: int = 3
    tail_threshold: int = 8  # the tail comes after the last step with more running requests

    def job(self, repeat: int, method: str) -> dict[str, Any]:
        """What `engine_worker.run` takes."""
        load = self.load
        names = ("model", "dtype", "engine", "spec", "num_speculative_tokens", "model_drafter")
        return {name: getattr(self, name) for name in names} | {
            "method": method, "seed": load.seed + repeat, "prompts": load.prompts,
            "requests": load.requests(repeat), "temperature": load.temperature,
            "natural_ends": load.natural_ends, "recorded": load.all_recorded,
        }  # fmt: skip

    def serve(self, repeat: int, method: str, folder: Path, seconds: float = math.inf) -> dict[str, Any]:
        """What `engine_worker.run` gives in the end."""
        job, environment = self.job(repeat, method), Method(method).environment
        return last(answers(WORKER, job, method, folder, seconds, environment))


def turns(methods: Sequence[str], repeats: int) -> list[tuple[int, str]]:
    """Repeat and method: every method once a repeat, each time another one first."""
    return [
        (repeat, methods[(repeat + i) % len(methods)])
        for repeat in range(repeats)
        for i in range(len(methods))
    ]


def take_turns(
    methods: Sequence[str], repeats: int, serve: Callable[[int, str], dict[str, Any]],
    tracked: Callable[[list[Any]], Iterable[Any]] = iter,
) -> Iterator[Served]:  # fmt: skip
    """What was served so far, after each repeat of `turns`; `tracked` shows progress through them."""
    served: Served = {method: [] for method in methods}
    for repeat, method in tracked(turns(methods, repeats)):
        served[method].append(serve(repeat, method))
        if all(len(done) > repeat for done in served.values()):
            yield served


def record_proposals(plan: Plan, folder: Path) -> dict[str, Any]:
    """The first repeat's `responses`, each token with what the model drafts after it (`proposals`)."""
    method = f"{RECORDS}:{plan.engine['max_num_seqs']}"  # whose gate is always open
    return last(answers(WORKER, plan.job(0, method) | {"records": True}, method, folder))


def make_record(plan: Plan, served: Served) -> dict[str, Any]:
    """What `rollout-spec-lab bench engine --json` prints, but for the names of the load and `predict`."""
    lines = {method: [Timeline(**one["timeline"]) for one in served[method]] for method in plan.methods}
    runs: dict[str, list[dict[str, Any]]] = {
        method: [
            measure(line, plan.tail_threshold) | {name: one[name] for name in ("draft_cpu_s", "counters")}
            for line, one in zip(lines[method], served[method], strict=True)
        ]
        for method in plan.methods
    }
    # vLLM's other drafters take time of their own in each step.
    comparable = [line for method in _comparable(plan) for line in lines[method]]
    load, described = plan.load, ("group_size", "median_tokens", "sigma", "max_tokens", "natural_ends")
    return {
        "environment": environment(),
        "engines": {method: served[method][0]["settings"] for method in plan.methods},
        "load": {name: getattr(load, name) for name in (*described, "temperature", "seed")} | {
            "num_prompts": len(load.prompts),
            "num_requests": len(load.requests(0)),
            "is_recorded": load.recorded is not None,
            "max_num_seqs": plan.engine["max_num_seqs"],
            "dtype": plan.dtype,
            "repeats": len(served[plan.methods[0]]),
            "tail_threshold": plan.tail_threshold,
        },
        "num_speculative_tokens": plan.num_speculative_tokens,
        "model_drafter": plan.model_drafter,
        "spec": plan.spec,
        "results": summarise(runs),
        "step_times": step_times(comparable),
    }  # fmt: skip


def _comparable(plan: Plan) -> list[str]:
    return [method for method in plan.methods if Method(method).name in ("off", "sam")]


def predict(record: Mapping[str, Any], plan: Plan, served: Served, rooflines: Mapping[str, Times]) -> None:
    """Add to results of plain vLLM and ours the tokens per second that `simulate` says.

    predicted_tokens_per_s: with these step times, a repeat with those of the others, if there are any; and
    with the device's roofline, if there is one.

    Args:
        record: of `make_record`.
        rooflines: by model runner, "V1" (MRV1) and "V2" (MRV2).
    """
    for result in record["results"] if record["step_times"] else ():
        if (method := result["method"]) in _comparable(plan):
            settings = served[method][0]["settings"]
            roofline = rooflines.get(settings["model_runner"])
            result["predicted_tokens_per_s"] = {
                "step_times": _predicted(plan, served, settings, None),
                "roofline": roofline and _predicted(plan, served, settings, roofline),
            }


def _predicted(plan: Plan, served: Served, settings: Mapping[str, Any], times: Times | None) -> float | None:
    config = SpecConfig.from_mapping(settings["options"] or {"method": "off"})
    cluster = Cluster(1, plan.engine["max_num_seqs"])
    seconds, num_tokens, first = 0.0, 0, served[plan.methods[0]]
    for repeat, one in enumerate(first):
        others = [
            Timeline(**other["timeline"])
            for method in _comparable(plan)
            for i, other in enumerate(served[method])
            if i != repeat or len(first) == 1
        ]
        lines = plan.load.lines(repeat, one["responses"])
        found = simulate(
            lines, cluster, config, times or StepTimes.of_rows(step_times(others)), plan.tail_threshold
        )
        seconds += found["makespan_s"]
        num_tokens += sum(map(len, one["responses"]))
    return plain(ratio(num_tokens, seconds))
