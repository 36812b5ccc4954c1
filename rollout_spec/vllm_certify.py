"""The same requests without and with drafts, compared token by token, every difference explained."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from rollout_spec.certify_numerics import FALSE_ALARM_RATE, explain, p_values
from rollout_spec.metrics import RequestCounters
from rollout_spec.vllm_proposer import CLASS_PATH, OPTIONS_KEY
from rollout_spec.vllm_sampler import KEY, key_of_name
from rollout_spec.vllm_scheduler import CLASS_PATH as SCHEDULER
from rollout_spec.vllm_scheduler import COUNTERS_KEY

TOLERANCE = 1e-4  # in float32, of what `certify_numerics.explain` gives
DISTRIBUTION_TOKENS = 4  # of each sample in that test; the first, which comes from the prefill, is left out
# Of a configuration and of all of them; num_rejected_tokens are the draft tokens that were not accepted.
COUNTS = (
    "tokens_compared", "tokens_identical", "num_drafts", "num_draft_tokens", "num_accepted_tokens",
    "num_rejected_tokens",
)  # fmt: skip


class CertifyError(RuntimeError):
    """There is nothing to certify: nothing was drafted, or no draft token was rejected."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is compared. Every value of a list is combined with every value of the others."""

    model: str
    prompts: Sequence[Sequence[int]]
    temperatures: Sequence[float] = (1.0, 0.6, 0.0)
    nums_speculative_tokens: Sequence[int] = (8,)
    batch_thresholds: Sequence[int | str] = (8,)
    group_sizes: Sequence[int] = (8,)
    max_tokens: int = 256
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    seed: int = 0
    dtype: str = "float32"
    tolerance: float | None = None  # None: see `tolerance`
    distribution_samples: int = 0
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)  # further arguments of vLLM's

    @property
    def fixed_tolerance(self) -> float | None:
        """None: it goes by the logits."""
        return TOLERANCE if self.tolerance is None and self.dtype == "float32" else self.tolerance


@dataclasses.dataclass(frozen=True)
class Sample:
    """One of the requests: which prompt, at which temperature, which of the group."""

    prompt: int
    temperature: float
    number: int

    def name(self, seed: int) -> list[Any]:
        return ["certify", seed, self.prompt, self.temperature, self.number]


@dataclasses.dataclass(frozen=True)
class Response:
    token_ids: list[int]
    logprobs: list[float]
    text: str
    counters: RequestCounters


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first token of a response that is another one with drafts.

    Explained are gaps (`explain`) below the tolerance (`tolerance`).
    """

    prompt: int
    temperature: float
    number: int
    num_speculative_tokens: int
    batch_threshold: int | str
    group_size: int
    position: int  # in the response
    token_id_off: int
    token_id_on: int
    logit_gap: float = math.inf
    tolerance: float = 0.0

    @property
    def explained(self) -> bool:
        return self.logit_gap < self.tolerance

    @property
    def sample(self) -> Sample:
        return Sample(self.prompt, self.temperature, self.number)


# A configuration is a number of draft tokens, a threshold, a group size and a temperature: by their names.
Configuration = dict[str, Any]


def certify(plan: Plan) -> dict[str, Any]:
    """Run the plan.

    Returns:
        What `rollout-spec certify --json` prints.

    Raises:
        CertifyError: no configuration has rejected a draft token, or the distribution test has none.
    """
    distribution = _distribution(plan)
    samples = [
        Sample(prompt, temperature, number)
        for temperature in plan.temperatures
        for prompt in range(len(plan.prompts))
        for number in range(max(plan.group_sizes))
    ]
    with engine(plan, None) as llm:
        off = generate(llm, plan, samples)
    runs: list[tuple[Configuration, dict[Sample, Response]]] = []
    combinations = itertools.product(plan.nums_speculative_tokens, plan.batch_thresholds, plan.group_sizes)
    for k, threshold, size in combinations:
        options = {"num_speculative_tokens": k, "batch_threshold": threshold}
        with engine(plan, options) as llm:
            on = generate(llm, plan, [sample for sample in samples if sample.number < size])
        for temperature in plan.temperatures:
            where = {**options, "group_size": size, "temperature": temperature}
            runs.append((where, {sample: on[sample] for sample in on if sample.temperature == temperature}))
    configurations = [where | _counts(off, on) for where, on in runs]
    refuse_if_untested(configurations)
    differences = _explained(plan, [found for run in runs for found in _differences(*run, off)], off)
    tested = [pair for pair in zip(configurations, runs, strict=True) if is_tested(pair[0])]
    pairs = [pair for _, (_, on) in tested for pair in on.items()]
    return {
        **_totals(plan, off, configurations, pairs),
        "differences": [
            dataclasses.asdict(difference) | {"explained": difference.explained} for difference in differences
        ],
        "unexplained_differences": sum(not difference.explained for difference in differences),
        "tolerance": plan.fixed_tolerance,
        **_logprob_differences(off, pairs),
        "configurations": configurations,
        "untested": untested(configurations),
        "distribution": distribution,
        "texts": {
            "off": [off[sample].text for sample, _ in pairs],
            "on": [response.text for _, response in pairs],
        },
        "prompt_of_text": [sample.prompt for sample, _ in pairs],
    }


@contextlib.contextmanager
def engine(plan: Plan, options: dict[str, Any] | None, method: str = "coupled", **more: Any) -> Iterator[Any]:
    """An engine with drafts as `options` say, or without; it ends on leaving, and the next has its memory."""
    from vllm import LLM

    settings: dict[str, Any] = {
        "model": plan.model, "dtype": plan.dtype, "seed": plan.seed, "disable_log_stats": True,
        "scheduler_cls": SCHEDULER, "max_logprobs": -1,
    }  # fmt: skip
    if options is None:
        settings["additional_config"] = {OPTIONS_KEY: {"method": "off", "verify": method}}
    else:
        settings["additional_config"] = {OPTIONS_KEY: {"verify": method, **options}}
        settings["speculative_config"] = {
            "method": "custom_class",
            "model": CLASS_PATH,
            "num_speculative_tokens": options["num_speculative_tokens"],
        }
    llm = LLM(**settings | plan.engine | more)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def generate(llm: Any, plan: Plan, samples: Sequence[Sample]) -> dict[Sample, Response]:
    """Serve the samples."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=sample.temperature, top_k=plan.top_k, top_p=plan.top_p, max_tokens=plan.max_tokens,
            logprobs=0, extra_args={KEY: sample.name(plan.seed)},
            detokenize=not plan.engine.get("skip_tokenizer_init"),
        )
        for sample in samples
    ]  # fmt: skip
    inputs = [{"prompt_token_ids": list(plan.prompts[sample.prompt])} for sample in samples]
    responses = {}
    outputs = llm.generate(inputs, params, use_tqdm=False)
    for sample, output in zip(samples, outputs, strict=True):
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        logprobs = [step[token].logprob for step, token in zip(completion.logprobs, tokens, strict=True)]
        responses[sample] = Response(tokens, logprobs, completion.text, _counters(output))
    return responses


def device_name() -> str:
    """Of what vLLM runs on here."""
    from vllm.platforms import current_platform

    return str(current_platform.get_device_name())


def _counters(output: Any) -> RequestCounters:
    """What our scheduler counted of a request."""
    return RequestCounters(**output.kv_transfer_params[COUNTERS_KEY])


def _sum(counters: Iterable[RequestCounters]) -> RequestCounters:
    total = RequestCounters()
    for one in counters:
        total.add(one)
    return total


def num_agreed(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the common beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (left, right) in pairs if left != right), min(len(one), len(other)))


def _num_compared(off: Response, on: Response) -> int:
    """The common beginning and the first difference behind it, if there is one."""
    longest = max(len(off.token_ids), len(on.token_ids))
    return min(num_agreed(off.token_ids, on.token_ids) + 1, longest)


def _counts(off: dict[Sample, Response], on: dict[Sample, Response]) -> dict[str, Any]:
    counters = _sum(response.counters for response in on.values())
    return {
        "tokens_compared": sum(_num_compared(off[sample], on[sample]) for sample in on),
        "tokens_identical": sum(num_agreed(off[sample].token_ids, on[sample].token_ids) for sample in on),
        "num_drafts": counters.num_drafts,
        "num_draft_tokens": counters.num_draft_tokens,
        "num_accepted_tokens": counters.num_accepted_tokens,
        "num_rejected_tokens": counters.num_draft_tokens - counters.num_accepted_tokens,
        "tokens_per_step": counters.num_decoded_tokens / max(counters.num_decode_steps, 1),
    }


def _totals(
    plan: Plan,
    off: dict[Sample, Response],
    configurations: Sequence[Configuration],
    pairs: Sequence[tuple[Sample, Response]],
) -> dict[str, Any]:
    """The counts of the configurations that are tested, together and by temperature.

    `reference_tokens` are the tokens of the run without drafts that were compared, in one configuration or in
    several; `pairs` are what was compared.
    """
    reached: dict[Sample, int] = {}
    for sample, on in pairs:
        compared = min(_num_compared(off[sample], on), len(off[sample].token_ids))
        reached[sample] = max(reached.get(sample, 0), compared)

    def total(temperatures: Collection[float]) -> dict[str, int]:
        entries = [c for c in configurations if is_tested(c) and c["temperature"] in temperatures]
        reference = sum(n for sample, n in reached.items() if sample.temperature in temperatures)
        return {"reference_tokens": reference} | {name: sum(c[name] for c in entries) for name in COUNTS}

    by_temperature = [{"temperature": one} | total([one]) for one in plan.temperatures]
    return total(plan.temperatures) | {"temperatures": by_temperature}


def _logprob_differences(
    off: dict[Sample, Response], pairs: Sequence[tuple[Sample, Response]]
) -> dict[str, float]:
    gaps = []
    for sample, on in pairs:
        agreed = num_agreed(off[sample].token_ids, on.token_ids)
        gaps.append(np.abs(np.subtract(off[sample].logprobs[:agreed], on.logprobs[:agreed])))
    found = np.concatenate(gaps)
    return {
        "mean_logprob_difference": float(found.mean()) if len(found) else 0.0,
        "max_logprob_difference": float(found.max()) if len(found) else 0.0,
    }


def is_tested(configuration: Configuration) -> bool:
    """Whether a configuration says anything: some of its draft tokens were rejected."""
    return bool(configuration["num_rejected_tokens"])


def untested(configurations: Sequence[Configuration]) -> list[str]:
    """The configurations that say nothing, and why."""
    return [
        f"num_speculative_tokens={c['num_speculative_tokens']}, batch_threshold={c['batch_threshold']}, "
        f"group_size={c['group_size']}, temperature={c['temperature']}: "
        + ("no draft token was rejected" if c["num_draft_tokens"] else "nothing was drafted")
        for c in configurations
        if not is_tested(c)
    ]


def refuse_if_untested(configurations: Sequence[Configuration]) -> None:
    """Raise CertifyError where not one configuration has tested a rejection."""
    reasons = untested(configurations)
    if len(reasons) == len(configurations):
        raise CertifyError(f"there is nothing to certify: {'; '.join(reasons)}")


def _differences(
    where: Configuration, on: dict[Sample, Response], off: dict[Sample, Response]
) -> Iterator[Difference]:
    """The responses that differ, without explanations."""

    def at(response: Response) -> int:
        return response.token_ids[position] if position < len(response.token_ids) else -1

    for sample, response in on.items():
        position = num_agreed(off[sample].token_ids, response.token_ids)
        if position < _num_compared(off[sample], response):
            yield Difference(
                **dataclasses.asdict(sample) | where, position=position, token_id_off=at(off[sample]),
                token_id_on=at(response),
            )  # fmt: skip


def _explained(plan: Plan, found: Sequence[Difference], off: dict[Sample, Response]) -> list[Difference]:
    """The differences with their gaps, from one more step of a plain engine at each of them."""
    from vllm import SamplingParams

    if not found:
        return []
    inputs = [
        [*plan.prompts[difference.prompt], *off[difference.sample].token_ids[: difference.position]]
        for difference in found
    ]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, detokenize=False)
    with engine(plan, None, logprobs_mode="raw_logits") as llm:
        outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in inputs], params, use_tqdm=False)
    result = []
    for difference, before, output in zip(found, inputs, outputs, strict=True):
        step = output.outputs[0].logprobs[0]
        logits = torch.tensor([step[token].logprob for token in range(len(step))])
        allowed = tolerance(plan, logits, difference.temperature)
        gap = explain(
            logits, difference.temperature, plan.top_k, plan.top_p,
            key_of_name(difference.sample.name(plan.seed)), len(before),
            (difference.token_id_off, difference.token_id_on), allowed,
        )  # fmt: skip
        result.append(dataclasses.replace(difference, logit_gap=gap, tolerance=allowed))
    return result


def tolerance(plan: Plan, logits: torch.Tensor, temperature: float) -> float:
    """The gap up to which numerics explain a difference: the plan's, or by its dtype.

    In bfloat16 and float16 the logits themselves are rounded, each by up to half the dtype's epsilon times
    its size, so that two of them change places within an epsilon of the largest; once more as much for what
    was rounded on the way to them. The temperature divides it.
    """
    if plan.fixed_tolerance is not None:
        return plan.fixed_tolerance
    epsilon = torch.finfo(getattr(torch, plan.dtype)).eps
    return 2 * epsilon * float(logits[logits.isfinite()].abs().max()) / (temperature or 1.0)


def _distribution(plan: Plan) -> dict[str, Any] | None:
    """Whether `verify=standard` samples as plain vLLM does: chi-square tests by position.

    Returns:
        None where it is not asked for, or nothing is random.

    Raises:
        CertifyError: it is asked for, but there is nothing to test.
    """
    if not plan.distribution_samples or not max(plan.temperatures):
        return None
    with engine(plan, None, "standard") as llm:
        off, _ = _draw(llm, plan)
    options = {"num_speculative_tokens": plan.nums_speculative_tokens[0], "batch_threshold": 1 << 20}
    with engine(plan, options, "standard", seed=plan.seed + 1) as llm:  # independent of the others
        on, counters = _draw(llm, plan)
    asked = f"distribution_samples={plan.distribution_samples}"
    if counters.num_accepted_tokens == counters.num_draft_tokens:
        raise CertifyError(f"{asked}: no draft token was rejected, so there is nothing to test (0: no test)")
    values = p_values(off, on)
    if not values:
        raise CertifyError(f"{asked}: too few, or hardly random, so there is nothing to test (0: no test)")
    return {
        "temperature": max(plan.temperatures),
        "num_samples": len(off),
        "num_draft_tokens": counters.num_draft_tokens,
        "num_accepted_tokens": counters.num_accepted_tokens,
        "num_tests": len(values),
        "smallest_p_value": min(values),
        "false_alarm_rate": FALSE_ALARM_RATE,
        "passed": min(values) > FALSE_ALARM_RATE / len(values),
    }


def _draw(llm: Any, plan: Plan) -> tuple[list[list[int]], RequestCounters]:
    """Samples of the first prompt for the distribution test, each with noise of its own."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=max(plan.temperatures), top_k=plan.top_k, top_p=plan.top_p,
        max_tokens=DISTRIBUTION_TOKENS, ignore_eos=True, detokenize=False,
    )  # fmt: skip
    # One token behind whole blocks, which the samples share: all but one of them computes one token only.
    prompt, block_size = list(plan.prompts[0]), llm.llm_engine.vllm_config.cache_config.block_size
    shared = (len(prompt) - 1) // block_size * block_size
    inputs = [{"prompt_token_ids": prompt[: shared + 1] if shared else prompt}] * plan.distribution_samples
    outputs = llm.generate(inputs, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs], _sum(map(_counters, outputs))
