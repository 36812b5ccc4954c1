"""Whole rollouts side by side: the methods, and one engine after the other.

Knows neither torch nor vLLM: `engine_worker` serves a rollout in a process of its own, and `timeline` reads
what its steps say.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout_spec.config import ConfigError, SpecConfig, parse_threshold
from rollout_spec.environment import environment
from rollout_spec.predict.engine import Cluster
from rollout_spec.predict.simulate import simulate
from rollout_spec.predict.step_times import StepTimes, Times
from rollout_spec.report.runs import for_json, ratio
from rollout_spec_lab.bench.drafters import require_arctic_inference
from rollout_spec_lab.bench.jobs import EngineJob, answers, last
from rollout_spec_lab.bench.load import Load
from rollout_spec_lab.bench.timeline import Timeline, step_times, summarise

WORKER = "rollout_spec_lab.bench.engine_worker"

Rooflines = Mapping[str, Times]  # by model runner ("MRV1", "MRV2")
Served = dict[str, list[dict[str, Any]]]  # by method what `engine_worker.run` gave of each repeat


@dataclasses.dataclass(frozen=True)
class Method:
    """One competitor.

    `off` is plain vLLM, `keyed` the same with our noise (method=keyed), `ngram` and `suffix` are
    vLLM's own drafters, `sam` is ours, `sam:N` and `sam:auto` ours with that `batch_threshold`. `model` is a
    model's drafts with our noise, `sam+model`, which takes thresholds too, ours beside it. /mrv1 or /mrv2
    after it: on that model runner, not on the one that vLLM chooses.

    Raises ConfigError: there is no such method, or it takes no such variant.
    """

    label: str

    def __post_init__(self) -> None:
        if self.drafting in ("off", "keyed", "ngram", "suffix", "model"):
            return
        if not self.is_ours:
            raise ConfigError(
                f"method {self.label!r}: must be off, keyed, ngram, suffix, model, sam, sam+model, "
                "sam:THRESHOLD or sam+model:THRESHOLD"
            )
        self.options({})

    @property
    def drafting(self) -> str:
        """The label without a model runner."""
        return self.label.removesuffix("/mrv1").removesuffix("/mrv2")

    @property
    def environment(self) -> dict[str, str]:
        """Variables of its engine's process."""
        runner = self.label.removeprefix(self.drafting)
        return {"VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "/mrv2"))} if runner else {}

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
class EnginePlan:
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

    def job(self, repeat: int, method: str) -> EngineJob:
        load = self.load
        return EngineJob(
            model=self.model, dtype=self.dtype, method=method, engine=self.engine, spec=self.spec,
            num_speculative_tokens=self.num_speculative_tokens, model_drafter=self.model_drafter,
            seed=load.seed + repeat, natural_ends=load.natural_ends, prompts=load.prompts,
            requests=load.requests(repeat), temperature=load.temperature, recorded=load.all_recorded,
        )  # fmt: skip

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


def make_record(plan: EnginePlan, served: Served) -> dict[str, Any]:
    """What `rollout-spec-lab bench engine --json` prints, but for the names of the load and predictions."""
    lines = {method: [Timeline(**one["timeline"]) for one in served[method]] for method in plan.methods}
    runs: dict[str, list[dict[str, Any]]] = {
        method: [
            line.figures(plan.tail_threshold) | {name: one[name] for name in ("draft_cpu_s", "counters")}
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


def _comparable(plan: EnginePlan) -> list[str]:
    return [method for method in plan.methods if Method(method).name in ("off", "keyed", "sam")]


def predict(record: Mapping[str, Any], plan: EnginePlan, served: Served, rooflines: Rooflines) -> None:
    """Add to a record's results of plain vLLM and ours the tokens per second that `simulate` says.

    predicted_tokens_per_s: with these step times, a repeat with those of the others, if there are any; and
    with the device's roofline, if there is one of its model runner.
    """
    for result in record["results"] if record["step_times"] else ():
        if (method := result["method"]) in _comparable(plan):
            settings = served[method][0]["settings"]
            roofline = rooflines.get(settings["model_runner"])
            result["predicted_tokens_per_s"] = {
                "step_times": _predicted(plan, served, settings, None),
                "roofline": roofline and _predicted(plan, served, settings, roofline),
            }


def _predicted(
    plan: EnginePlan, served: Served, settings: Mapping[str, Any], times: Times | None
) -> float | None:
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
        found = simulate(lines, cluster, config, times or StepTimes.of_rows(step_times(others)))
        seconds += found["makespan_s"]
        num_tokens += sum(map(len, one["responses"]))
    return for_json(ratio(num_tokens, seconds))
