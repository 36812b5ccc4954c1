"""vLLM's samplers, told which request each of their rows belongs to. An adapter, no algorithm.

Both of vLLM's samplers get `SamplingMetadata`, whose `generators` are the one thing in it that says what
noise a row is to have. So that is where a step's keys and positions travel: hooks on the two modules, which
torch offers, put a `RowGenerators` there, and what draws the tokens looks for it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import json
import sys
from collections.abc import Callable, Collection
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from rollout_spec import keyed, noise, verify
from rollout_spec.noise import make_key
from rollout_spec.patches import Patch, misfit, record, replace_function
from rollout_spec.vllm_ascend_patches import MODULE as ASCEND
from rollout_spec.vllm_logprobs import KEPT_LOGPROBS, PARAMETERS, kept_logprobs

KEY = "rollout_spec_key"  # in `SamplingParams.extra_args`

logger = init_logger(f"vllm.{__name__}")

_KEYED = Patch(
    name="vllm-keyed-sampler",
    reason="vLLM draws from generators whose state depends on what was drafted, so the same seed gives other "
    "tokens with drafts than without (the runner's sampler gets our top-k-top-p sampler and a hook)",
    upstream="vllm/v1/sample/ops/topk_topp_sampler.py, TopKTopPSampler",
    until="vLLM's noise is a function of the request and the position",
)
_COUPLED = Patch(
    name="vllm-coupled-verification",
    reason="rejection sampling needs noise that a plain step does not, so the same seed gives other tokens "
    "with drafts than without; used by engines with rollout.spec.verify=coupled only",
    upstream="vllm/v1/sample/rejection_sampler.py, rejection_sample",
    until="vLLM's noise is a function of the request and the position",
)
_MIN_TOKENS = Patch(
    name="vllm-min-tokens-bonus",
    reason="behind an accepted draft that reaches min_tokens, vLLM forbids the stop tokens once more: the "
    "bonus token is masked by the number of tokens before the draft",
    upstream="vllm/v1/sample/logits_processor/builtin.py, MinTokensLogitsProcessor.apply",
    until="MinTokensLogitsProcessor counts the draft tokens for the bonus token",
)
# What an engine's processes apply to themselves: all but _MIN_TOKENS with rollout.spec.verify=coupled only.
ENGINE_PATCHES = (_KEYED, _COUPLED, _MIN_TOKENS, KEPT_LOGPROBS)


# What hooks and our top-k-top-p sampler take vLLM's calls to pass on.
_PARAMETERS = {
    _KEYED: (
        (Sampler, "forward", ("logits", "sampling_metadata")),
        (TopKTopPSampler, "forward_native", ("logits", "generators", "k", "p")),
    ),
    _MIN_TOKENS: (
        (Sampler, "forward", ("logits", "sampling_metadata", "predict_bonus_token")),
        (rejection_sampler.RejectionSampler, "forward",
         ("metadata", "draft_probs", "logits", "sampling_metadata")),
    ),
    KEPT_LOGPROBS: ((rejection_sampler.RejectionSampler, "_get_logprobs_tensors", PARAMETERS),),
}  # fmt: skip


def check_engine_patches() -> None:
    """See, without an engine, that `ENGINE_PATCHES` fit the installed packages.

    Raises:
        PatchError: one of them does not.
    """
    for patch in _PARAMETERS:
        _check_parameters(patch)
    for module in _rejection_samplers():
        _checked_to_logits(module)


def _check_parameters(patch: Patch, *modules: torch.nn.Module) -> None:
    """See that a patch fits the modules, or vLLM's own classes where none is given."""
    for base, name, expected in _PARAMETERS[patch]:
        # A platform may have a class of its own.
        owner = next((type(module) for module in modules if isinstance(module, base)), base)
        names = tuple(inspect.signature(getattr(owner, name)).parameters)[1:]
        if names[: len(expected)] != expected:
            raise misfit(patch, f"{owner.__name__}.{name} takes {', '.join(names)}")


class RowGenerators(dict[int, torch.Generator]):
    """A batch's generators, and what vLLM's samplers are not told about its rows.

    Attributes:
        step: the rows' keyed sampling; None where vLLM's own noise is used.
        num_draft_tokens: per row; all 0 in a step without drafts.
    """

    def __init__(
        self,
        generators: dict[int, torch.Generator],
        step: keyed.KeyedStep | None,
        num_draft_tokens: list[int],
    ) -> None:
        super().__init__(generators)
        self.step = step
        self.num_draft_tokens = num_draft_tokens


def key_of_name(name: Any) -> int:
    """The noise key of a request whose `extra_args["rollout_spec_key"]` is `name`, any JSON value."""
    try:
        text = json.dumps(name, sort_keys=True, default=str)
    except (TypeError, ValueError):
        text = repr(name)  # whatever a caller sends, it must not cost the engine its life
    return make_key("key", text)


def with_numbered_key(params: Any, index: int) -> Any:
    """The sampling parameters of one of a request's n samples: its key is [the request's key, its number]."""
    extra_args = params.extra_args or {}
    if extra_args.get(KEY) is None:
        return params
    params = copy.copy(params)  # vLLM hands the same one to all samples
    params.extra_args = {**extra_args, KEY: [extra_args[KEY], index]}
    return params


class RequestKeys:
    """The noise key of every request in an engine."""

    def __init__(self, engine_seed: int) -> None:
        self._engine_seed = engine_seed
        self._num_unnamed = 0
        self._keys: dict[str, int] = {}

    def rows(self, request_ids: Collection[str], live: dict[str, Any]) -> list[int]:
        """The keys of a batch's rows.

        Args:
            request_ids: the rows' requests.
            live: every request in the engine, in the order in which they came to it.
        """
        if self._keys.keys() != live.keys():
            self._keys = {
                name: self._keys[name] if name in self._keys else self._new_key(request.sampling_params)
                for name, request in live.items()
            }
        return [self._keys[name] for name in request_ids]

    def _new_key(self, params: Any) -> int:
        named = (getattr(params, "extra_args", None) or {}).get(KEY)
        if named is not None:
            return key_of_name(named)
        if getattr(params, "seed", None) is not None:
            return make_key("seed", params.seed)
        self._num_unnamed += 1
        return make_key("arrival", self._engine_seed, self._num_unnamed)


class RowSampling:
    """Tells a model runner's samplers about their rows, step by step."""

    def __init__(self, runner: Any, coupled: bool) -> None:
        self._runner = runner
        self._coupled = coupled
        self._keys = RequestKeys(runner.model_config.seed)
        self._request_ids: list[str] = []
        self._row_keys: list[int] = []

    def install(self) -> None:
        """Hook the runner's samplers; once in a runner's life."""
        sampler, verifier = self._runner.sampler, getattr(self._runner, "rejection_sampler", None)
        if verifier is not None:
            _check_parameters(_MIN_TOKENS, sampler, verifier)
            verifier.register_forward_pre_hook(self._before_verification, with_kwargs=True)
            verifier.register_forward_hook(_after_verification)
            sampler.register_forward_pre_hook(_before_bonus_token, with_kwargs=True)
            record(_MIN_TOKENS)
        if not self._coupled:
            return
        # Only here, where verification waits for the device anyway.
        if verifier is not None:
            _check_parameters(KEPT_LOGPROBS, verifier)
            verifier._get_logprobs_tensors = functools.partial(kept_logprobs, verifier)
            record(KEPT_LOGPROBS)
        _check_parameters(_KEYED, sampler, sampler.topk_topp_sampler)
        noise.check(self._runner.device)
        for module in _rejection_samplers():
            let_rejection_sample_be_coupled(module)
        sampler.topk_topp_sampler = KeyedTopKTopPSampler(sampler.topk_topp_sampler, sampler.logprobs_mode)
        sampler.register_forward_pre_hook(self._before_plain_step, with_kwargs=True)
        record(_KEYED)
        logger.info("rollout_spec: the noise of every token is keyed by its request and its position")

    def _before_verification(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        metadata, draft_probs, logits, sampling = args
        rows = self._rows(sampling.generators, metadata.num_draft_tokens)
        if rows is None:
            return None
        return (metadata, draft_probs, logits, dataclasses.replace(sampling, generators=rows)), kwargs

    def _before_plain_step(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        sampling = kwargs["sampling_metadata"]
        if isinstance(sampling.generators, RowGenerators):  # the bonus tokens of a verification
            return None
        rows = self._rows(sampling.generators, [0] * kwargs["logits"].shape[0])
        if rows is None:
            return None
        return args, {**kwargs, "sampling_metadata": dataclasses.replace(sampling, generators=rows)}

    def _rows(
        self, generators: dict[int, torch.Generator], num_draft_tokens: list[int]
    ) -> RowGenerators | None:
        """What is known of the step's rows; None in a warm-up, which has no requests."""
        batch = self._runner.input_batch
        if not batch.num_reqs:
            return None
        if batch.num_reqs != len(num_draft_tokens):
            raise RuntimeError(
                f"rollout_spec: {len(num_draft_tokens)} rows are sampled, the batch has {batch.num_reqs}; "
                "set rollout.spec.verify=standard and run `rollout-spec doctor`"
            )
        if not self._coupled:
            return RowGenerators(generators, None, num_draft_tokens)
        if batch.req_ids != self._request_ids:
            self._request_ids = list(batch.req_ids)
            self._row_keys = self._keys.rows(batch.req_ids, self._runner.requests)
        positions = batch.num_tokens_no_spec[: batch.num_reqs]
        # Nothing draws from the generators, and on the CPU vLLM fails on a seeded request whose prompt comes
        # in chunks: it sets the generator back, and a CPU generator has no offset.
        batch.generators.clear()
        step = keyed.KeyedStep(self._row_keys, positions, num_draft_tokens)
        return RowGenerators({}, step, num_draft_tokens)


class KeyedTopKTopPSampler(torch.nn.Module):
    """vLLM's top-k-top-p sampler, drawing with keyed noise where the rows have keys."""

    def __init__(self, plain: torch.nn.Module, logprobs_mode: str) -> None:
        super().__init__()
        self.plain = plain
        self.logprobs_mode = logprobs_mode

    def forward(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not isinstance(generators, RowGenerators) or generators.step is None:
            return self.plain(logits, generators, k, p)
        # vLLM's, not a platform's own: verification uses it as well, and both must leave the same tokens.
        logits = apply_top_k_top_p(logits, k, p)
        processed = None
        if self.logprobs_mode == "processed_logits":
            processed = logits
        elif self.logprobs_mode == "processed_logprobs":
            processed = logits.log_softmax(dim=-1, dtype=torch.float32)
        return generators.step.sample_behind(logits), processed


def _rejection_samplers() -> list[Any]:
    """The modules whose `rejection_sample` is called: vLLM's, and vllm-ascend's sampler calls its own."""
    return [rejection_sampler, *([sys.modules[ASCEND]] if ASCEND in sys.modules else [])]


def let_rejection_sample_be_coupled(module: Any) -> None:
    """Let a module's `rejection_sample` be coupled verification in steps whose rows have keys.

    Raises:
        PatchError: it takes other arguments than vLLM's or vllm-ascend's that are known here.
    """
    standard, to_logits = module.rejection_sample, _checked_to_logits(module)
    signature = inspect.signature(standard)
    target = list(signature.parameters)[_TARGET]

    @functools.wraps(standard)
    def rejection_sample(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = signature.bind(*args, **kwargs).arguments
        rows = given["sampling_metadata"].generators
        if not isinstance(rows, RowGenerators) or rows.step is None:
            return standard(*args, **kwargs)
        return verify.coupled_sample(
            given["draft_token_ids"],
            given["max_spec_len"],
            to_logits(given[target]),
            given["bonus_token_ids"],
            given["sampling_metadata"],
            rows.step,
        )

    replace_function(module, "rejection_sample", rejection_sample, patch=_COUPLED)


def _checked_to_logits(module: Any) -> Callable[[Any], torch.Tensor]:
    """What makes logits of that which a module's `rejection_sample` takes for the target."""
    names = tuple(inspect.signature(module.rejection_sample).parameters)[: len(_ARGUMENTS)]
    to_logits = _TO_LOGITS.get(names[_TARGET]) if len(names) > _TARGET else None
    if to_logits is None or names != (*_ARGUMENTS[:_TARGET], names[_TARGET], *_ARGUMENTS[_TARGET + 1 :]):
        raise misfit(_COUPLED, f"{module.__name__}.rejection_sample takes {', '.join(names)}")
    return to_logits


def _whole(target: Any) -> torch.Tensor:
    """vllm-ascend hands logits on with the token ids that it has kept, None for all."""
    logits, token_ids = target if isinstance(target, tuple) else (target, None)
    if token_ids is not None:
        raise RuntimeError(
            "rollout_spec: vllm-ascend's enable_reduce_sample keeps a part of the vocabulary; switch it off "
            "or set rollout.spec.verify=standard"
        )
    return logits


_ARGUMENTS = (
    "draft_token_ids", "num_draft_tokens", "max_spec_len", "cu_num_draft_tokens", "draft_probs",
    "target_logits", "bonus_token_ids", "sampling_metadata",
)  # fmt: skip
_TARGET = _ARGUMENTS.index("target_logits")
_TO_LOGITS: dict[str, Callable[[Any], torch.Tensor]] = {
    "target_logits": _whole,
    "target_logits_or_tuple": _whole,  # vllm-ascend 0.22
    "target_probs": torch.log,  # vllm-ascend 0.11
}


def _after_verification(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """See that a step's tokens behind the drafts are not the zeros that stood for them."""
    rows = args[3].generators
    if isinstance(rows, RowGenerators) and rows.step is not None and rows.step.owes_tokens:
        raise RuntimeError(
            f"rollout_spec: {type(module).__name__} has not called rejection_sample, which draws the tokens "
            "behind the drafts; set rollout.spec.verify=standard and run `rollout-spec doctor`"
        )


def _before_bonus_token(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Let min_tokens count the draft tokens before the bonus token."""
    sampling = kwargs["sampling_metadata"]
    rows = sampling.generators
    if not kwargs.get("predict_bonus_token") or not isinstance(rows, RowGenerators):
        return None
    processors = sampling.logitsprocs.non_argmax_invariant
    if not any(isinstance(p, MinTokensLogitsProcessor) and p.min_toks for p in processors):
        return None
    counting = copy.copy(sampling.logitsprocs)
    counting.non_argmax_invariant = [
        MinTokensBehindDrafts(p, rows.num_draft_tokens) if isinstance(p, MinTokensLogitsProcessor) else p
        for p in processors
    ]
    return args, {**kwargs, "sampling_metadata": dataclasses.replace(sampling, logitsprocs=counting)}


class MinTokensBehindDrafts:
    """vLLM's processor of min_tokens for the tokens that follow whole drafts."""

    def __init__(self, plain: MinTokensLogitsProcessor, num_draft_tokens: list[int]) -> None:
        self._plain = plain
        self._num_draft_tokens = num_draft_tokens

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (min_tokens, output_token_ids, stop_token_ids) in self._plain.min_toks.items():
            if stop_token_ids and len(output_token_ids) + self._num_draft_tokens[row] < min_tokens:
                logits[row, list(stop_token_ids)] = -torch.inf
        return logits
