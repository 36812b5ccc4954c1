"""Engines of policies with recurrent layers: what is refused, and the fix that their drafts need."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.platforms import current_platform

from rollout_spec import recurrent
from rollout_spec.config import ConfigError, SpecConfig
from rollout_spec.vllm import reasons
from rollout_spec.vllm.upstream import recurrent_chunks, recurrent_counts, recurrent_rows
from rollout_spec.vllm.versions import minor, version


def refuse_recurrent(vllm_config: VllmConfig, config: SpecConfig) -> None:
    """Raise a ConfigError where our drafter would change such a policy's tokens, or was never run with it."""
    model = vllm_config.model_config
    if not (model.is_hybrid or model.is_attention_free):
        return
    number, method = minor(version() or ""), f"rollout.spec.method={config.method}"
    if reason := recurrent.refusal(model.architecture, number):
        raise ConfigError(f"{method}: {reason}")
    if current_platform.is_out_of_tree():
        raise ConfigError(f"{method}: {model.architecture} has recurrent layers, and {reasons.OWN_RUNNER}")
    if vllm_config.use_v2_model_runner and number is not None and number < 29:
        raise ConfigError(
            f"{method}: {model.architecture} has recurrent layers, whose drafts need MRV1 before vLLM 0.29: "
            "set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    recurrent.check_settings(config, vllm_config.cache_config.mamba_cache_mode)


def keep_states_right(vllm_config: VllmConfig) -> None:
    """Fix what vLLM does with the states of a worker's policy, if it drafts; the worker has its runner.

    Raises:
        PatchError: the installed vLLM is not one that the fix was written for.
    """
    model = vllm_config.model_config
    if model.is_hybrid and vllm_config.speculative_config is not None:
        recurrent_rows.fix(vllm_config.use_v2_model_runner)
        if not vllm_config.use_v2_model_runner:
            recurrent_counts.fix()
            if recurrent.has_mamba_2(model.architecture):
                recurrent_chunks.fix()
