"""A policy with recurrent layers: whether it drafts, how far, and how many of its requests fit the memory."""

import os
from pathlib import Path

from omegaconf import DictConfig

from rollout_spec import recurrent
from rollout_spec.config import SpecConfig
from rollout_spec.verl.settings import ENGINE, ROLLOUT, of_text, policy_fields, value
from rollout_spec.vllm.versions import is_before

_NUM_TOKENS = "rollout.spec.num_speculative_tokens"
_REPLAY = (
    "; vLLM's use_replayssm, with FlashInfer and without prefix caching, keeps no states for drafts, but was "
    "never run with ours"
)
_SHARE = 10 << 30  # bytes, of which is spoken where the cache's size is not known
_STATES = (  # entries of a config.json
    "linear_num_value_heads",  # Qwen3-Next, Qwen3.5, OLMo hybrid
    "mamba_d_state",  # Bamba, Falcon-H1, Granite, Jamba, Zamba2
    "ssm_state_size",  # Nemotron-H
    "state_size",  # Mamba
    "conv_L_cache",  # LFM2
    "linear_attn_config",  # Kimi Linear
)


def has_recurrent_state(config: DictConfig) -> bool:
    """Whether the policy is recurrent; False where its files cannot be read here: then the engine says so."""
    fields = of_text(policy_fields(config))
    only_attends = set(fields.get("layer_types") or ()) == {"attention"}  # as the smallest Granite
    return not only_attends and any(map(fields.get, _STATES))


def default_tokens(*, _root_: DictConfig) -> int:
    """The default of K, as a resolver."""
    is_recurrent = has_recurrent_state(_root_)
    return recurrent.DEFAULT_RECURRENT_TOKENS if is_recurrent else SpecConfig.num_speculative_tokens


def said_of_memory(config: DictConfig, spec: SpecConfig) -> str | None:
    """How many requests the states of such a policy leave room for; None where that is not known.

    vLLM lets the others wait without a word.
    """
    if not (spec.enabled and has_recurrent_state(config)) or (states := states_of(config)) is None:
        return None
    k, cached = spec.num_speculative_tokens, value(config, f"{ROLLOUT}.enable_prefix_caching") is not False
    drafted, plain = (states.num_bytes(each, cached) for each in (k, 0))
    num_bytes = _cache_bytes(config)
    where = f"the {num_bytes / 2**30:.0f} GiB" if num_bytes else "each 10 GiB"
    num_bytes = num_bytes or _SHARE
    is_nemotron = policy_fields(config).get("architectures") == ["NemotronHForCausalLM"]
    can_replay = is_nemotron and not is_before(32)
    return (
        f"{_NUM_TOKENS}={k}: the recurrent states of a request take {recurrent.mib(drafted)} MiB "
        f"({recurrent.mib(plain)} without drafts), so {where} of vLLM's cache hold at most "
        f"{int(num_bytes // drafted)} requests ({int(num_bytes // plain)} without drafts); "
        f"requests above this number wait (max_num_seqs={value(config, f'{ROLLOUT}.max_num_seqs')})"
        f"{_REPLAY if can_replay else ''}"
    )


def states_of(config: DictConfig) -> recurrent.States | None:
    dtype = value(config, f"{ENGINE}.mamba_ssm_cache_dtype") or "auto"
    ranks = value(config, f"{ROLLOUT}.tensor_model_parallel_size") or 1
    return recurrent.states_of(of_text(policy_fields(config)), dtype, ranks)


def _cache_bytes(config: DictConfig) -> float | None:
    """What the weights leave of a device's share; None where no GPU or no weights can be seen from here."""
    from vllm.platforms import current_platform

    folder = Path(os.path.expanduser(str(value(config, "actor_rollout_ref.model.path"))))
    num_weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if not num_weights or not current_platform.is_cuda():
        return None
    share = value(config, f"{ROLLOUT}.gpu_memory_utilization") * current_platform.get_device_total_memory()
    left = share - num_weights / (value(config, f"{ROLLOUT}.tensor_model_parallel_size") or 1)
    return left if left > 0 else None
