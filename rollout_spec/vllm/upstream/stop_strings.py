"""Stop strings inside a draft: vLLM before 0.32 looks for them once a step, not once a token."""

import copy
from typing import Any

from rollout_spec.patches import Patch, wrap
from rollout_spec.vllm.upstream import WITH_DRAFTS

WHERE = {WITH_DRAFTS: "vllm.v1.engine.output_processor"}
PATCH = Patch(
    name="vllm-stop-strings",
    reason="vLLM looks for stop strings once a step: with drafts, tokens and log-probabilities go on after "
    "the stop, and of two stop strings the first of the list ends the text, not the first in the text",
    upstream="vllm/v1/engine/output_processor.py, OutputProcessor.process_outputs",
    until="vLLM drops the tokens after a stop string (0.32 does)",
)


def applies(module: Any) -> bool:
    return not hasattr(module.OutputProcessor, "_trim_surplus_tokens")


def fix(module: Any) -> None:
    """Hand on a request's tokens one by one where it has stop strings: none comes after a stop."""

    @wrap(module.OutputProcessor, "process_outputs", PATCH, "8cade4e4", "a4fe06cf")  # 0.23, 0.24; 0.29
    def process_token_by_token(
        process: Any, self: Any, engine_core_outputs: list[Any], *args: Any, **kwargs: Any
    ) -> Any:
        parts = [
            part
            for output in engine_core_outputs
            for part in (one_by_one(output) if _may_stop_inside(self, output) else [output])
        ]
        return process(self, parts, *args, **kwargs)


def _may_stop_inside(processor: Any, output: Any) -> bool:
    """Whether it has several tokens, and its request has stop strings."""
    state = processor.request_states.get(output.request_id)
    return len(output.new_token_ids) > 1 and bool(getattr(getattr(state, "detokenizer", None), "stop", None))


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
