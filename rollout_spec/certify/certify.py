"""The same requests without and with drafts, compared token by token, every difference explained."""

import contextlib
import dataclasses
import gc
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from vllm import LLM, SamplingParams, envs
from vllm.platforms import current_platform

from rollout_spec.certify import counts
from rollout_spec.certify.counts import Configuration, Pair, Response, Sample
from rollout_spec.certify.numerics import Shortfall, explain, rounding
from rollout_spec.config import SpecConfig
from rollout_spec.environment import environment
from rollout_spec.vllm import OPTIONS_KEY, SCHEDULER, speculative_config
from rollout_spec.vllm.keys import NAME_KEY, key_of_name
from rollout_spec.vllm.scheduler import counters_of
from rollout_spec.vllm.versions import is_before

TOLERANCE = 1e-4  # in float32, of what `numerics.explain` gives


@dataclasses.dataclass(frozen=True)
class CertifyPlan:
    """What is compared. Every value of a list is combined with every value of the others.

    Defaults are the command line's to give.
    """

    model: str
    prompts: Sequence[Sequence[int]]
    temperatures: Sequence[float]
    nums_speculative_tokens: Sequence[int]
    batch_thresholds: Sequence[int | str]
    group_sizes: Sequence[int]
    max_tokens: int
    top_k: int  # 0: all
    top_p: float
    seed: int
    dtype: str
    tolerance: float | None  # None: by the dtype
    engine: dict[str, Any]  # further arguments of vLLM's
    model_drafter: Mapping[str, Any] | None = None  # a `speculative_config`

    @property
    def fixed_tolerance(self) -> float | None:
        """None: it goes by the logits (`rounding`). 0: every bit counts."""
        if self.tolerance is None and envs.VLLM_BATCH_INVARIANT:
            return 0.0
        return TOLERANCE if self.tolerance is None and self.dtype == "float32" else self.tolerance

    @property
    def drafting(self) -> list[tuple[int, int | str, int]]:
        """Draft tokens, threshold and group size of each engine that drafts."""
        return list(itertools.product(self.nums_speculative_tokens, self.batch_thresholds, self.group_sizes))


def certify(plan: CertifyPlan, advance: Callable[[int], None] = lambda engines: None) -> dict[str, Any]:
    """Run the plan, and tell `advance` of each engine that has ended; returns what `rollout-spec certify
    --json` prints, but for the names of model and prompts.

    Raises UserError: no configuration has rejected a draft token.
    """
    is_mrv2, runs = _run(plan, advance)
    found = counts.of_runs(runs, _differences(plan, runs, is_mrv2)) | {"tolerance": plan.fixed_tolerance}
    return {
        "verdict": counts.verdict(found),
        "plan": dataclasses.asdict(plan),
        "model_runner": "MRV2" if is_mrv2 else "MRV1",
        "environment": environment() | {
            "torch": torch.__version__, "device": str(current_platform.get_device_name()),
        },
    } | found  # fmt: skip


def _run(plan: CertifyPlan, advance: Callable[[int], None]) -> tuple[bool, dict[Configuration, list[Pair]]]:
    """Whether the engines have MRV2, and every request of every configuration."""
    runs: dict[Configuration, list[Pair]] = {}
    samples = [
        Sample(prompt, temperature, number)
        for temperature in plan.temperatures
        for prompt in range(len(plan.prompts))
        for number in range(max(plan.group_sizes))
    ]
    with engine(plan, None) as llm:
        is_mrv2 = bool(llm.llm_engine.vllm_config.use_v2_model_runner)
        off = generate(llm, plan, samples)
    advance(1)
    for k, threshold, size in plan.drafting:
        with engine(plan, {"num_speculative_tokens": k, "batch_threshold": threshold}) as llm:
            on = generate(llm, plan, [sample for sample in samples if sample.number < size])
        advance(1)
        for sample, response in on.items():
            where = Configuration(k, threshold, size, sample.temperature)
            runs.setdefault(where, []).append(Pair(sample, off[sample], response))
    return is_mrv2, runs


@contextlib.contextmanager
def engine(plan: CertifyPlan, options: dict[str, Any] | None, **more: Any) -> Iterator[Any]:
    """An engine with drafts as `options` say, or without; it ends on leaving, and the next has its memory."""
    settings: dict[str, Any] = {
        "model": plan.model, "dtype": plan.dtype, "seed": plan.seed, "disable_log_stats": True,
        "max_logprobs": -1,
        "additional_config": {OPTIONS_KEY: {"method": "keyed"}},
        "scheduler_cls": SCHEDULER,
    }  # fmt: skip
    if options is not None:
        settings |= drafting_arguments(options, plan.model_drafter)
    llm = LLM(**settings | plan.engine | more)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def drafting_arguments(
    options: Mapping[str, Any], drafter: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """vLLM's arguments for fields of `rollout.spec`; `drafter`: the `speculative_config` of a model too."""
    options = {"untested_vllm": True, **options}  # by these engines a newer vLLM is judged
    num_speculative_tokens = SpecConfig(**options).num_speculative_tokens
    if drafter is None:
        speculative = speculative_config(num_speculative_tokens)
    else:
        speculative = {**drafter, "num_speculative_tokens": num_speculative_tokens}
        options = {**options, "model_tokens": drafter["num_speculative_tokens"]}
    return {"speculative_config": speculative, "additional_config": {OPTIONS_KEY: options}}


def generate(llm: Any, plan: CertifyPlan, samples: Sequence[Sample]) -> dict[Sample, Response]:
    params = [
        SamplingParams(
            temperature=sample.temperature, top_k=plan.top_k, top_p=plan.top_p, max_tokens=plan.max_tokens,
            logprobs=0, extra_args={NAME_KEY: sample.name(plan.seed)}, detokenize=False,
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
        responses[sample] = Response(tokens, logprobs, counters_of(output))
    return responses


def _differences(
    plan: CertifyPlan, runs: Mapping[Configuration, Sequence[Pair]], is_mrv2: bool
) -> list[dict[str, Any]]:
    """The first difference of each response that has one, explained."""
    found = [(where, pair) for where, pairs in runs.items() for pair in pairs if pair.differs]
    if not found:
        return []
    if is_mrv2:
        from rollout_spec.vllm.mrv2.shortfall import shortfall
    else:
        from rollout_spec.verification.coupled import shortfall
    logits = _logits(plan, [pair for _, pair in found], is_mrv2)
    return [_explained(plan, *one, values, shortfall) for one, values in zip(found, logits, strict=True)]


def _logits(plan: CertifyPlan, pairs: Sequence[Pair], is_mrv2: bool) -> list[torch.Tensor]:
    """[token id], of one more step of a plain engine at the first difference of each pair."""
    inputs = [{"prompt_token_ids": _before(plan, pair)} for pair in pairs]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, detokenize=False)
    # MRV2 of vLLM 0.24 does not give logits. Log-probabilities are these, but for a constant.
    mode = "raw_logprobs" if is_mrv2 and is_before(29) else "raw_logits"
    with engine(plan, None, logprobs_mode=mode) as llm:
        outputs = llm.generate(inputs, params, use_tqdm=False)
    steps = [output.outputs[0].logprobs[0] for output in outputs]
    return [torch.tensor([step[token].logprob for token in range(len(step))]) for step in steps]


def _before(plan: CertifyPlan, pair: Pair) -> list[int]:
    """The tokens before the first difference."""
    return [*plan.prompts[pair.sample.prompt], *pair.off.token_ids[: pair.agreement.num_identical]]


def _explained(
    plan: CertifyPlan, where: Configuration, pair: Pair, logits: torch.Tensor, shortfall: Shortfall
) -> dict[str, Any]:
    """The first difference of a pair. Explained are gaps (`explain`) below the tolerance; None is a gap that
    is not finite. `shortfall`: as for `explain`."""
    allowed = plan.fixed_tolerance
    if allowed is None:
        allowed = rounding(plan.dtype, logits, where.temperature)
    key, position = key_of_name(pair.sample.name(plan.seed)), len(_before(plan, pair))
    sampling = where.temperature, plan.top_k, plan.top_p
    gap = explain(logits, *sampling, key, position, pair.tokens, allowed, shortfall)
    return dataclasses.asdict(where) | {
        "prompt": pair.sample.prompt,
        "number": pair.sample.number,
        "position": pair.agreement.num_identical,
        "token_id_off": pair.tokens[0],
        "token_id_on": pair.tokens[1],
        "logit_gap": gap if math.isfinite(gap) else None,
        "tolerance": allowed,
        "explained": gap < allowed,
    }
