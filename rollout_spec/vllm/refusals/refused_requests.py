"""Requests that vLLM takes and cannot serve together with drafts: refused one by one."""

from typing import Any

from rollout_spec.patches import Patch, wrap
from rollout_spec.vllm.options import asked_method, has_our_drafter, names_our_proposer
from rollout_spec.vllm.upstream import reasoning_end

MODULE = "vllm.v1.engine.input_processor"
PATCH = Patch(
    name="vllm-refuse-requests",
    reason="vLLM lets requests pass that it cannot serve together with drafts: they come out wrong, or end "
    "the engine",
    upstream="vllm/v1/engine/input_processor.py, InputProcessor.process_inputs",
    until="vLLM refuses them as it refuses min_p and logit_bias, or serves them",
)


def refusal(vllm_config: Any, request: Any) -> str | None:
    """Why an engine with drafts does not take this EngineCoreRequest of vLLM's; None where it does."""
    is_ours = names_our_proposer(vllm_config) or asked_method(vllm_config) != "off"
    if not is_ours or vllm_config.speculative_config is None:  # whoever drafts
        return None
    if request.resumable:
        return "streaming input (resumable): vLLM takes what comes after a stop for a part of the turn"
    if getattr(request.sampling_params, "logprob_token_ids", None):
        return "logprob_token_ids: vLLM cannot compute them for draft tokens"
    structured = getattr(request.sampling_params, "structured_outputs", None)
    if structured and _overlooks_reasoning_end(vllm_config):
        return "a grammar after reasoning: vLLM's own drafts run past the end of the reasoning"
    if structured and _opens_its_mask(structured):
        return "structured_outputs of outlines: any token passes after a draft, until vLLM 0.32"
    return None


def _overlooks_reasoning_end(vllm_config: Any) -> bool:
    """Whether a draft of vLLM's own goes past the end of reasoning.

    Where it schedules ahead it verifies what the workers hold, whatever the scheduler cuts.
    """
    if has_our_drafter(vllm_config) or not vllm_config.scheduler_config.async_scheduling:
        return False  # `reasoning_end` cuts those
    outputs = vllm_config.structured_outputs_config
    is_asked_for = outputs.reasoning_parser and not outputs.enable_in_reasoning
    return bool(is_asked_for) and reasoning_end.applies(None)


def _opens_its_mask(structured: Any) -> bool:
    """Whether a grammar thinks that it has ended: vLLM asks it twice a position, and outlines counts that."""
    if structured._backend != "outlines":
        return False
    from vllm.v1.structured_output.backend_outlines import OutlinesGrammar

    return hasattr(OutlinesGrammar, "_prev_finished")


def refuse_requests(module: Any) -> None:
    """Refuse single requests where vLLM checks them: the caller gets a ValueError, the engine nothing."""

    @wrap(module.InputProcessor, "process_inputs", PATCH)
    def process_supported_inputs(process: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        request = process(self, *args, **kwargs)
        reason = refusal(self.vllm_config, request)
        if reason is not None:
            raise ValueError(f"rollout_spec: not supported together with drafts: {reason}")
        return request
