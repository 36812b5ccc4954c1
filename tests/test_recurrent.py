"""Policies with recurrent layers, as the driver sees them: which draft, how far, what their states take."""

import json
from typing import Any

import pytest
from omegaconf import OmegaConf

from rollout_spec import recurrent
from rollout_spec.config import ConfigError, SpecConfig
from rollout_spec.verl.check_config import check_config
from rollout_spec.verl.recurrent_policy import said_of_memory
from rollout_spec.verl.settings import MTP, ROLLOUT
from tests.configs import ENGINE, composed

OFF, SAM, K = "+rollout.spec=off", "+rollout.spec=sam", "rollout.spec.num_speculative_tokens"
# Of the published config.json of Qwen3-Next-80B-A3B, with float32 states as Qwen3.5's has them.
QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 48, "full_attention_interval": 4,
    "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_value_head_dim": 128,
    "linear_key_head_dim": 128, "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32",
}  # fmt: skip
# 24 layers of 128 heads of 64 x 128.
NEMOTRON_H: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M-M*" * 12, "mamba_num_heads": 128,
    "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
}  # fmt: skip


def run_of(fields, folder, group, k=None):
    (folder / "config.json").write_text(json.dumps(fields))
    config = composed(group)
    config.actor_rollout_ref.model.path = str(folder)
    config.actor_rollout_ref.rollout.tensor_model_parallel_size = 1
    if k is not None:
        OmegaConf.update(config, K, k)
    return config


@pytest.mark.parametrize(
    ("fields", "num_mib"),
    [
        (QWEN3_NEXT, [74, 302, 621, 1314]),
        (QWEN3_NEXT | {"mamba_ssm_dtype": None}, [38, 158, 333, 738]),
        (NEMOTRON_H, [97, 396, 806, 1674]),
    ],
)
def test_what_the_states_of_a_request_take(fields, num_mib):
    states = recurrent.states_of(fields)
    assert states is not None
    assert [states.num_bytes(k) / 2**20 for k in (0, 3, 7, 15)] == pytest.approx(num_mib, rel=0.01)
    assert states.num_bytes(3, cached=True) / states.num_bytes(3) == 5 / 4
    halves = recurrent.states_of(fields, tensor_parallel_size=2)
    assert halves is not None and halves.num_bytes(3) * 2 == states.num_bytes(3)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"architectures": ["Qwen3_5ForConditionalGeneration"]}, "need vLLM 0.29 or later, this is 0.24"),
        ({"architectures": ["NemotronHForCausalLM"]}, "need vLLM 0.29 or later, this is 0.24"),
        ({"architectures": ["NemotronHPuzzleForCausalLM"]}, "have not been tested"),
        ({"architectures": ["JambaForCausalLM"]}, "Mamba 1, which drop the number of accepted tokens"),
        ({"architectures": ["Lfm2ForCausalLM"]}, "tokens that depend on the batch"),
        ({"architectures": ["KimiLinearForCausalLM"]}, "not been tested"),
        ({"architectures": ["MambaForCausalLM"]}, "has no attention"),
        ({}, "This policy has recurrent layers that have not been tested"),
    ],
)
def test_policies_whose_drafts_are_refused_by_name(fields, reason, tmp_path, monkeypatch):
    monkeypatch.setattr("rollout_spec.vllm.versions.version", lambda: "0.24.0")
    fields = {"text_config": {"linear_num_value_heads": 32}} | fields
    check_config(run_of(fields, tmp_path, OFF))
    message = rf"^rollout\.spec\.method=sam: [^\n]*{reason}[^\n]*; run it with off$"
    with pytest.raises(ConfigError, match=message):
        check_config(run_of(fields, tmp_path, SAM))


def test_no_policy_with_recurrent_layers_drafts_on_npus(tmp_path):
    config = run_of(QWEN3_NEXT, tmp_path, SAM, 3)
    config.trainer.device = "npu"
    message = r"^rollout\.spec\.method=sam: Qwen3NextForCausalLM has recurrent [^\n]*\Z"
    with pytest.raises(ConfigError, match=message):
        check_config(config)


def test_every_supported_policy_is_known_from_its_release_on():
    for architecture in ("Qwen3_5ForCausalLM", "Qwen3_5MoeForConditionalGeneration"):
        are_known = [recurrent.refusal(architecture, n) is None for n in (24, 28, 29, 32, None)]
        assert are_known == [False, False, True, True, True]
    assert [recurrent.refusal("Qwen3NextForCausalLM", n) is None for n in (23, 24)] == [False, True]
    assert [recurrent.refusal("NemotronHForCausalLM", n) is None for n in (24, 29)] == [False, True]
    assert [recurrent.refusal("FalconH1ForCausalLM", n) is None for n in (29, 32)] == [False, True]


@pytest.mark.parametrize(
    ("fields", "is_recurrent"),
    [
        ({"mamba_d_state": 128, "layer_types": ["attention", "attention"]}, False),
        ({"linear_attn_config": None}, False),
        (QWEN3_NEXT, True),
    ],
)
def test_how_many_tokens_such_a_policy_drafts(fields, is_recurrent, tmp_path):
    """3, and what the command line asks for, up to 7."""
    config = run_of(fields, tmp_path, SAM)
    assert check_config(config).num_speculative_tokens == (3 if is_recurrent else 15)
    for k in (7, 15):
        config = run_of(fields, tmp_path, SAM, k)
        if is_recurrent and k == 15:
            with pytest.raises(ConfigError, match=r"=15: must be at most 7 .*1314 MiB, 74 without[^\n]*\Z"):
                check_config(config)
        else:
            assert check_config(config).num_speculative_tokens == k


def test_a_cache_mode_that_was_never_tested_is_refused(tmp_path):
    for mode in ("align", "none", None, "all"):
        config = run_of(QWEN3_NEXT, tmp_path, SAM, 3)
        OmegaConf.update(config, f"{ENGINE}.mamba_cache_mode", mode, force_add=True)
        if mode == "all":
            with pytest.raises(ConfigError, match=r"^mamba_cache_mode=all: must be none or align [^\n]*\Z"):
                check_config(config)
        else:
            check_config(config)


def test_the_driver_says_how_many_requests_fit(tmp_path, monkeypatch):
    config, spec = run_of(QWEN3_NEXT, tmp_path, SAM, 3), SpecConfig(num_speculative_tokens=3)
    said = said_of_memory(config, spec)
    assert said is not None and "\n" not in said
    assert "take 377 MiB (147 without drafts)" in said, "verl caches prefixes, which takes one state more"
    assert "each 10 GiB of vLLM's cache hold at most 27 requests (69 without drafts)" in said
    monkeypatch.setattr("rollout_spec.verl.recurrent_policy._cache_bytes", lambda _: 24 << 30)
    assert "so the 24 GiB of vLLM's cache hold at most 65 requests" in str(said_of_memory(config, spec))
    OmegaConf.update(config, "actor_rollout_ref.rollout.enable_prefix_caching", False)
    assert "take 302 MiB (74 without drafts)" in str(said_of_memory(config, spec))
    assert said_of_memory(config, SpecConfig(method="off")) is None
    assert said_of_memory(run_of({}, tmp_path, SAM), spec) is None


def test_the_driver_names_what_spares_the_states_for_drafts(tmp_path, monkeypatch):
    """Only where vLLM has it beside drafts."""
    for release, fields, named in (("0.32.0", NEMOTRON_H, True), ("0.29.0", NEMOTRON_H, False),
                                   ("0.32.0", QWEN3_NEXT, False)):  # fmt: skip
        monkeypatch.setattr("rollout_spec.vllm.versions.version", lambda release=release: release)
        said = said_of_memory(run_of(fields, tmp_path, SAM, 3), SpecConfig(num_speculative_tokens=3))
        assert ("use_replayssm" in str(said)) == named


def test_its_own_head_drafts_beside_the_text(tmp_path):
    """verl's `model.mtp`: K stays what the recurrent layers allow."""
    config = run_of(QWEN3_NEXT | {"num_nextn_predict_layers": 1}, tmp_path, SAM)
    for name, given in (("enable", True), ("enable_rollout", True), ("num_speculative_tokens", 2)):
        OmegaConf.update(config, f"{MTP}.{name}", given)
    OmegaConf.update(config, f"{ROLLOUT}.load_format", "auto")
    spec = check_config(config)
    assert (spec.num_speculative_tokens, spec.model_tokens) == (3, 2)
    drafter = config.actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config
    assert (drafter.method, drafter.num_speculative_tokens) == ("mtp", 3)
