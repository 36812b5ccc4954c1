"""What cannot work is refused before an engine starts, with the reason."""

import functools
import inspect
import re
from types import SimpleNamespace
from typing import Any

from vllm import envs
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.platforms import current_platform

from rollout_spec import recurrent
from rollout_spec.config import AUTO, ConfigError, SpecConfig
from rollout_spec.drafting.corpus import read_corpus
from rollout_spec.drafting.index import make_index
from rollout_spec.patches import PatchError
from rollout_spec.vllm.ascend import PARTIAL_LOGITS
from rollout_spec.vllm.both_runners.logit_rows import most_logit_rows
from rollout_spec.vllm.options import engine_options, has_model_drafter
from rollout_spec.vllm.refusals.table import OWN_RUNNER, facts_both_see, refuse
from rollout_spec.vllm.versions import frees_keys_early, is_before

_TRAINED_LENGTH = "original_max_position_embeddings"


def check_options(vllm_config: VllmConfig) -> None:
    """Check all that can be checked before an engine's process is launched; reads the corpus through.

    Raises ConfigError, which names the option or vLLM's setting; PatchError: our classes do not fit MRV1.
    """
    config = engine_options(vllm_config)
    if config is None:
        return
    refuse_unsupported(vllm_config, config)
    if config.enabled and config.corpus:
        _check_corpus(config, config.corpus, vllm_config.model_config.get_vocab_size())
    if config.keyed and not vllm_config.use_v2_model_runner:
        if current_platform.is_cuda_alike():
            from rollout_spec.vllm.mrv1.runner import check_runner as check
        else:  # here a worker changes what MRV1's module takes, before it imports that
            from rollout_spec.vllm.mrv1.sampler import check_samplers as check
        check()


@functools.cache
def mrv2_misfit() -> str | None:
    """Why our drafter does not fit this vLLM's MRV2; None where it does."""
    if current_platform.is_out_of_tree():
        return OWN_RUNNER
    try:
        if current_platform.is_cpu():
            import vllm.v1.worker.cpu.shm  # noqa: F401 (before MRV2's modules, which take what it replaces)
        from rollout_spec.vllm.mrv2 import runner as mrv2_runner

        mrv2_runner.check_runner()
    except (ImportError, PatchError) as error:
        return str(error).rstrip(".")
    return None


def unsupported_on_mrv2(vllm_config: VllmConfig) -> list[str]:
    """Why an engine with our drafter is not to have MRV2, as an entry of vLLM's own list.

    vLLM warns: "Model Runner V2 does not yet support ENTRY; using the V1 model runner instead". Where
    VLLM_USE_V2_MODEL_RUNNER asks for MRV2, it raises the first half.
    """
    reason = mrv2_misfit()
    if reason is None and vllm_config.lora_config is not None:
        reason = "MRV2 applies LoRA per request, not per draft token"
    if reason is None:
        return []
    fix = "set VLLM_USE_V2_MODEL_RUNNER=0; " if envs.VLLM_USE_V2_MODEL_RUNNER else ""
    return [f"rollout_spec's drafter ({reason}; {fix}MRV1 schedules synchronously, which is slower)"]


def refuse_unsupported(vllm_config: VllmConfig, config: SpecConfig) -> None:
    """Raise a ConfigError for what vLLM would refuse only request by request, or not use at all; a PatchError
    where a model drafts in another way."""
    if not config.keyed:
        return
    speculative, has_model = vllm_config.speculative_config, has_model_drafter(vllm_config)
    method, is_mrv2 = getattr(speculative, "method", None), vllm_config.use_v2_model_runner
    option = f"speculative_config.method={method} with rollout_spec"
    if config.enabled:  # first: what follows asks vLLM's own code, which a newer one may not have
        model, longest = vllm_config.model_config, vllm_config.scheduler_config.long_prefill_token_threshold
        policy = model.architecture if model.is_hybrid or model.is_attention_free else None
        refuse(facts_both_see(config, policy, current_platform.is_out_of_tree(), longest), option)
    misfit = mrv2_misfit() if is_mrv2 else None
    facts = {
        "misfit": misfit and not has_model and SimpleNamespace(method=config.method, why=misfit),
        "others_draft": speculative and not config.enabled and not has_model
        and SimpleNamespace(method=method, ours=config.method),
        "partial_logits": next(filter((vllm_config.additional_config or {}).get, PARTIAL_LOGITS), None),
    }  # fmt: skip
    if config.enabled:
        facts |= _facts_of_our_drafter(vllm_config, config)
    if has_model:
        facts |= _facts_of_model(vllm_config, misfit)
    if config.enabled or has_model:
        facts |= _facts_of_any_drafts(vllm_config, config, method)
    refuse(facts, option)
    if has_model:
        if is_mrv2:
            from rollout_spec.vllm.mrv2.speculators import check_speculator as check_model_drafter
        else:
            from rollout_spec.vllm.mrv1.runner import check_model_drafter
        check_model_drafter()
    if config.enabled and vllm_config.model_config.is_hybrid:
        recurrent.check_settings(config, vllm_config.cache_config.mamba_cache_mode)


def _facts_of_our_drafter(vllm_config: VllmConfig, config: SpecConfig) -> dict[str, Any]:
    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    model, graphs = vllm_config.model_config, vllm_config.compilation_config.cudagraph_mode
    policy, is_mrv2 = model.is_hybrid and model.architecture, vllm_config.use_v2_model_runner
    has_lossy_kernels = policy and current_platform.is_cpu() and _kernels_lack_counts(model)
    num_stages = parallel.pipeline_parallel_size
    num_parts = getattr(parallel, "prefill_context_parallel_size", 1)
    is_launched = parallel.distributed_executor_backend == "external_launcher"
    verified_by = getattr(speculative, "rejection_sample_method", "standard")
    return {
        "recurrent_on_mrv2": is_mrv2 and is_before(29) and policy,
        "recurrent_on_cpus": has_lossy_kernels and SimpleNamespace(policy=policy, dtype=model.dtype),
        "stages": num_stages > 1 and num_stages,
        "prefill_parts": num_parts > 1 and num_parts,
        "full_graphs": graphs == CUDAGraphMode.FULL and is_mrv2 and is_before(32),
        "launched": is_launched and parallel.tensor_parallel_size > 1 and config.batch_threshold == AUTO,
        "lossy": verified_by not in ("standard", "block") and verified_by,
        # From 0.24 on.
        "own_gate": getattr(speculative, "num_speculative_tokens_per_batch_size", None),
    }


def _facts_of_model(vllm_config: VllmConfig, misfit: str | None) -> dict[str, Any]:
    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    model, is_mrv2 = vllm_config.model_config, vllm_config.use_v2_model_runner
    num_positions = speculative.draft_model_config.max_model_len
    # What was asked for: on MRV2 vLLM 0.33 lowers it to the drafter's, so that responses would end earlier.
    most = model.get_and_verify_max_len(model.original_max_model_len)
    return {
        "model_on_own_runner": current_platform.is_out_of_tree(),
        # Methods; for a vLLM without such a drafter `bool`, which returns False.
        "gemma4_head": getattr(speculative, "use_gemma4_mtp", bool)(),
        "step3p5_head": getattr(speculative, "use_step3p5_mtp", bool)(),
        "several_modules": getattr(speculative, "use_multi_module_mtp", bool)(),
        "adapters": vllm_config.lora_config is not None and "enable_lora",
        "parallel_experts": parallel.data_parallel_size > 1 and model.is_moe,
        "few_positions": num_positions < most and SimpleNamespace(most=num_positions, asked=most),
        "parallel_drafting": speculative.parallel_drafting,
        "adaptive": getattr(speculative, "enable_adaptive_verification", False),  # of 0.32
        "local_argmax": speculative.use_local_argmax_reduction,
        "model_lossy": speculative.rejection_sample_method != "standard",
        "watermark": getattr(vllm_config, "watermark_config", None) is not None,  # from 0.32 on
        "other_vocabulary": getattr(speculative, "use_heterogeneous_vocab", False),  # from 0.29 on
        "model_stages": parallel.pipeline_parallel_size > 1,
        "model_misfit": misfit and SimpleNamespace(why=misfit),
        "unpadded": not is_mrv2 and speculative.disable_padded_drafter_batch,
    }


def _facts_of_any_drafts(vllm_config: VllmConfig, config: SpecConfig, method: str | None) -> dict[str, Any]:
    model, cache = vllm_config.model_config, vllm_config.cache_config.cache_dtype
    old_window = frees_keys_early(model) and "a sliding window before vLLM 0.29"
    bar_to_ahead = old_window if vllm_config.use_v2_model_runner else "vLLM's MRV1"
    policy, loops = model.architecture, getattr(model.hf_text_config, "recurrent_kv_cache_mode", None)
    return {
        "last_loop": loops == "last_loop" and loops,
        "packed_cache": cache.startswith(("turboquant", "ultraquant")) and cache,
        "m3_cache": policy.startswith("MiniMaxM3") and cache.startswith("nvfp4") and cache,
        "open_regions": policy.startswith("Step5") and method != "mtp" and policy,
        "growing_rope": _growing_rope(model),
        "wide_logits": _wide_logits(vllm_config, config),
        "processors": model.logits_processors,
        "min_p": model.get_diff_sampling_param().get("min_p"),
        "ahead": vllm_config.scheduler_config.async_scheduling and bar_to_ahead,
    }


def _wide_logits(vllm_config: VllmConfig, config: SpecConfig) -> SimpleNamespace | None:
    """max_num_batched_tokens, and the most that 0.24's MRV2 can count the logits of, if that is less."""
    scheduler, k = vllm_config.scheduler_config, vllm_config.speculative_config.num_speculative_tokens
    given, most = scheduler.max_num_batched_tokens, (2**31 - 1) // vllm_config.model_config.get_vocab_size()
    rows = min(given, scheduler.max_num_seqs * (1 + k))
    if config.enabled:
        rows = most_logit_rows(vllm_config, config)
    is_wide = rows > most and vllm_config.use_v2_model_runner and is_before(29)
    return SimpleNamespace(asked=given, most=most) if is_wide else None


def _growing_rope(model: Any) -> SimpleNamespace | None:
    """The positions that a row may have, and those up to which no other row changes it; None: none does.

    Transformers' `dynamic_rope_update` computes frequencies for the longest row of a step.
    """
    text = model.hf_text_config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    ropes = [one for one in (rope, *rope.values()) if isinstance(one, dict)]  # or of each type of layers
    grow = [one for one in ropes if re.search("dynamic|longrope", str(one.get("rope_type", one.get("type"))))]
    if not grow or not model.using_transformers_backend():
        return None
    trained = getattr(text, _TRAINED_LENGTH, None) or text.max_position_embeddings
    most = min(one.get(_TRAINED_LENGTH) or trained for one in grow)
    asked = model.max_model_len
    return SimpleNamespace(asked=asked, most=most) if asked > most else None


def _kernels_lack_counts(model: Any) -> bool:
    """Whether vLLM's recurrent kernels for CPUs are not told how many draft tokens were accepted."""
    if model.architecture.startswith("Qwen3"):  # which has none in float32: our tests replace the layers
        return str(model.dtype) in ("torch.float16", *(["torch.bfloat16"] if is_before(33) else []))
    from vllm.model_executor.layers.mamba import mamba_mixer2

    return "num_accepted_tokens" not in inspect.signature(mamba_mixer2.causal_conv1d_update).parameters


def _check_corpus(config: SpecConfig, corpus: str, vocab_size: int) -> None:
    texts = read_corpus(corpus)
    make_index(config, texts)  # is there room for them?
    largest = max(int(text.max()) for text in texts)
    if largest >= vocab_size:
        raise ConfigError(
            f"rollout.spec.corpus={corpus!r}: has the token {largest}, the model's vocabulary "
            f"is of {vocab_size}: build it from texts of the model's own tokenizer"
        )
