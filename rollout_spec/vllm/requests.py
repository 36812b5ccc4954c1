"""What vLLM does with a request outside its samplers, where a step with drafts gives it many tokens."""

from __future__ import annotations

import copy
import functools
from typing import Any

from rollout_spec.patches import Patch, guard_parameters, replace_function

_REFUSE = Patch(
    name="vllm-refuse-requests",
    reason="vLLM lets requests pass that it cannot serve together with drafts: they come out wrong, or end "
    "the engine",
    upstream="vllm/v1/engine/input_processor.py, InputProcessor.process_inputs",
    until="vLLM refuses them as it refuses min_p and logit_bias, or serves them",
)
_STOPS = Patch(
    name="vllm-stop-strings",
    reason="vLLM looks for stop strings once a step: with drafts, tokens and log-probabilities go on behind "
    "the stop, and of two stop strings the first of the list ends the text, not the first in the text",
    upstream="vllm/v1/engine/output_processor.py, OutputProcessor.process_outputs",
    until="vLLM drops the tokens behind a stop string (0.32 does)",
)
_REASONING = Patch(
    name="vllm-reasoning-end",
    reason="a grammar begins where reasoning ends, and vLLM looks for that once a step: behind an accepted "
    "draft that ends the reasoning, the answer breaks the grammar",
    upstream="vllm/v1/core/sched/scheduler.py, Scheduler.update_draft_token_ids",
    until="vLLM looks for the end of reasoning inside a draft (0.29 does)",
)

# Methods of vLLM's that came with what looks for the end of reasoning inside a draft: of 0.29, and of 0.32.
_SEES_REASONING_END = ("trim_reasoning_for_advance", "accept_tokens")


def refusal(vllm_config: Any, request: Any) -> str | None:
    """Why an engine with drafts does not take this EngineCoreRequest of vLLM's; None where it does."""
    from rollout_spec.vllm.options import guards_requests

    if not guards_requests(vllm_config):
        return None
    if request.resumable:
        return "streaming input (resumable): vLLM takes what comes behind a stop for a part of the turn"
    if getattr(request.sampling_params, "logprob_token_ids", None):
        return "logprob_token_ids: vLLM has no log-probabilities of them at a draft's tokens"
    if getattr(request.sampling_params, "structured_outputs", None) and _overlooks_reasoning_end(vllm_config):
        return "a grammar behind reasoning: vLLM's own drafts go on where the reasoning ends"
    return None


def _overlooks_reasoning_end(vllm_config: Any) -> bool:
    """Whether a draft of vLLM's own goes past the end of reasoning.

    Where it schedules ahead it verifies what the workers hold, whatever the scheduler cuts.
    """
    from rollout_spec.vllm.options import has_our_drafter

    if has_our_drafter(vllm_config) or not vllm_config.scheduler_config.async_scheduling:
        return False  # `cut_drafts_at_reasoning_end`
    outputs = vllm_config.structured_outputs_config
    return bool(outputs.reasoning_parser) and not outputs.enable_in_reasoning and not _sees_reasoning_end()


def _sees_reasoning_end() -> bool:
    from vllm.v1.structured_output import StructuredOutputManager

    return any(hasattr(StructuredOutputManager, name) for name in _SEES_REASONING_END)


def refuse_requests(input_processor: Any) -> None:
    """Refuse single requests where vLLM checks them: the caller gets a ValueError, the engine nothing."""
    processor = input_processor.InputProcessor
    process_inputs = processor.process_inputs

    @functools.wraps(process_inputs)
    def process_supported_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = process_inputs(self, *args, **kwargs)
        reason = refusal(self.vllm_config, request)
        if reason is not None:
            raise ValueError(f"rollout_spec: not supported together with drafts: {reason}")
        return request

    replace_function(processor, "process_inputs", process_supported_inputs, patch=_REFUSE)


def end_at_stop_strings(output_processor: Any) -> None:
    """Hand on a request's tokens one by one where it has stop strings: none comes behind a stop."""
    processor = output_processor.OutputProcessor
    if hasattr(processor, "_trim_surplus_tokens"):
        return
    guard_parameters(_STOPS, processor, "process_outputs", ("self", "engine_core_outputs"))
    process_outputs = processor.process_outputs

    @functools.wraps(process_outputs)
    def process_token_by_token(self: Any, engine_core_outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        parts = [
            part
            for output in engine_core_outputs
            for part in (
                one_by_one(output)
                if len(output.new_token_ids) > 1 and _has_stop_strings(self, output)
                else (output,)
            )
        ]
        return process_outputs(self, parts, *args, **kwargs)

    replace_function(processor, "process_outputs", process_token_by_token, patch=_STOPS)


def _has_stop_strings(processor: Any, output: Any) -> bool:
    state = processor.request_states.get(output.request_id)
    return bool(getattr(getattr(state, "detokenizer", None), "stop", None))


def one_by_one(output: Any) -> list[Any]:
    """An EngineCoreOutput of several tokens as those that steps of one token would have given.

    What is of the request and not of a token stays with every part: any may become the last one.
    """
    parts = [copy.copy(output) for _ in output.new_token_ids]
    for i, part in enumerate(parts):
        part.new_token_ids = [output.new_token_ids[i]]
        for name in ("new_logprobs", "new_sampling_mask"):
            if (rows := getattr(output, name, None)) is not None:
                setattr(part, name, rows.slice_request(i, 1))
        if output.routed_experts is not None:
            part.routed_experts = output.routed_experts[i : i + 1]
    for part in parts[1:]:
        part.events = part.prefill_stats = part.new_prompt_logprobs_tensors = None
    for part in parts[:-1]:
        part.finish_reason = part.stop_reason = None
    return parts


def cut_drafts_at_reasoning_end(scheduler: Any) -> None:
    """Cut a draft before the token that ends the reasoning: it comes last in its step, as without drafts."""
    if _sees_reasoning_end():
        return
    owner = scheduler.Scheduler
    guard_parameters(_REASONING, owner, "update_draft_token_ids", ("self", "draft_token_ids"))
    update_draft_token_ids = owner.update_draft_token_ids

    @functools.wraps(update_draft_token_ids)
    def update_with_cut_drafts(self: Any, draft_token_ids: Any) -> None:
        for request_id, draft in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            request = self.requests.get(request_id)
            if draft and request is not None and request.use_structured_output:
                del draft[_num_reasoning(self.structured_output_manager, request, draft) :]
        update_draft_token_ids(self, draft_token_ids)

    replace_function(owner, "update_draft_token_ids", update_with_cut_drafts, patch=_REASONING)


def _num_reasoning(manager: Any, request: Any, draft: list[int]) -> int:
    """How many tokens of a draft come before one that ends the reasoning; all, if none does."""
    reasoner = manager._get_reasoner(request)
    is_free = reasoner is not None and not manager.enable_in_reasoning
    if not is_free or request.structured_output_request.reasoning_ended:
        return len(draft)
    tokens = list(request.all_token_ids)
    for i, token in enumerate(draft):
        tokens.append(token)
        if reasoner.is_reasoning_end_streaming(tokens, [token]):
            return i
    return len(draft)
