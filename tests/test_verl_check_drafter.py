"""What the driver says of a model that drafts: of one of the user's own, and of a policy's MTP head."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest
from omegaconf import OmegaConf

from rollout_spec.config import ConfigError, SpecConfig
from rollout_spec.verl.check_config import check_config, check_overrides
from rollout_spec.vllm import SCHEDULER, speculative_config
from tests.test_verl_check_config import ENGINE, composed

OWN = "actor_rollout_ref.model.mtp"
MTP = {f"{OWN}.enable": True, f"{OWN}.enable_rollout": True, f"{OWN}.num_speculative_tokens": 2}
MEGATRON = "model_engine=megatron"
LOADED = {"actor_rollout_ref.rollout.load_format": "auto"}
# The model alone, verified with our noise.
COUPLED = {"rollout.spec.verify": "coupled", f"{ENGINE}.async_scheduling": False}
SPECULATIVE = "vllm.config.SpeculativeConfig"


@pytest.fixture
def head(tmp_path: pathlib.Path) -> dict[str, Any]:
    """A head of the user's own."""
    (tmp_path / "config.json").write_text("{}")
    return {"method": "eagle3", "model": str(tmp_path)}


composed_once = functools.cache(composed)


def changed(groups: Sequence[str], *values: dict[str, Any], drafter: Any = None) -> Any:
    """A composition of these groups with other values."""
    config = copy.deepcopy(composed_once(*groups))
    for key, value in itertools.chain(*(each.items() for each in values)):
        OmegaConf.update(config, key, value, force_add=key.startswith(ENGINE))
    config.rollout.spec.model_drafter = drafter
    return config


SAM, OFF = ["+rollout.spec=sam"], ["+rollout.spec=off", MEGATRON]
SAM_MEGATRON = [*SAM, MEGATRON]


def told_to_vllm(config: Any) -> tuple[dict[str, Any] | None, int]:
    """The `speculative_config` of a configuration that passes, as verl completes it, and `model_tokens`."""
    from verl.workers.rollout.vllm_rollout.utils import build_mtp_speculative_config

    spec = check_config(config)
    OmegaConf.resolve(config)  # as verl's trainer does
    rollout = OmegaConf.to_container(config.actor_rollout_ref.rollout)
    engine, mtp = rollout["engine_kwargs"]["vllm"], rollout["mtp"]
    assert SpecConfig.from_mapping(engine["additional_config"]["rollout_spec"]) == spec
    speculative = engine["speculative_config"]
    if mtp["enable"] and mtp["enable_rollout"]:
        speculative = build_mtp_speculative_config(mtp["method"], mtp["num_speculative_tokens"], speculative)
    return speculative, spec.model_tokens


def test_mtp_drafts_beside_the_text_as_verl_configures_it() -> None:
    both = {"method": "mtp", "num_speculative_tokens": 15}
    assert told_to_vllm(changed(SAM_MEGATRON, MTP)) == (both, 2)
    alone = {"method": "mtp", "num_speculative_tokens": 2}
    assert told_to_vllm(changed(OFF, MTP)) == (alone, SpecConfig.model_tokens)
    only_trained = changed(SAM_MEGATRON, {f"{OWN}.enable": True})
    assert told_to_vllm(only_trained) == (speculative_config(15), SpecConfig.model_tokens)


def test_a_model_of_the_users_own_drafts_beside_the_text(head: dict[str, Any]) -> None:
    asked = head | {"num_speculative_tokens": 4}
    assert told_to_vllm(changed(SAM, LOADED, drafter=asked)) == ({**head, "num_speculative_tokens": 15}, 4)
    assert told_to_vllm(changed(SAM, LOADED, drafter=head))[1] == SpecConfig.model_tokens
    assert told_to_vllm(changed(OFF, LOADED, drafter=asked))[0] == asked


def test_whatever_drafts_is_counted(head: dict[str, Any]) -> None:
    key = f"{ENGINE}.scheduler_cls"
    only_trained = changed(OFF, {f"{OWN}.enable": True})
    for config, scheduler in (
        (changed(OFF, MTP), SCHEDULER),
        (changed(OFF, LOADED, drafter=head), SCHEDULER),
        (changed(SAM_MEGATRON, MTP), SCHEDULER),
        (only_trained, None),
    ):
        check_config(config)
        assert OmegaConf.select(config, key) == scheduler
    own = {key: "my.Scheduler"}
    check_config(changed(OFF, own))
    for config in (changed(OFF, MTP, own), changed(OFF, LOADED, own, drafter=head)):
        with pytest.raises(ConfigError, match=r"scheduler_cls=my\.Scheduler: rollout\.spec sets it"):
            check_config(config)


def test_it_is_an_override_of_one_word(head: dict[str, Any]) -> None:
    asked = f"rollout.spec.model_drafter={{method: eagle3, model: {head['model']}}}"
    check_overrides([asked])
    assert composed(*SAM, asked).rollout.spec.model_drafter == head


def test_who_drafts_untrained_is_warned_once(
    head: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """verl trains MTP heads with Megatron only, where it is asked to."""
    is_trained = {f"{OWN}.enable_train": True}
    for config, num_lines in (
        (changed(SAM_MEGATRON, MTP, is_trained), 0),
        (changed(SAM_MEGATRON, MTP), 1),
        (changed(SAM, MTP, is_trained, LOADED), 1),
        (changed(SAM_MEGATRON, LOADED, drafter=head), 1),
        (changed(OFF, MTP), 0),
    ):
        check_config(config)
        said = capsys.readouterr().err
        assert said.count("\n") == said.count("this drafter is not trained") == num_lines


@pytest.mark.parametrize(
    ("asked", "refusal"),
    [
        ({"method": "ngram"}, r"model_drafter\.method=ngram: must be one of mtp, eagle, eagle3, draft_model"),
        ({"num_speculative_tokens": 16}, r"num_speculative_tokens=16: must be between 1 and 15"),
        ({"num_speculative_tokens": "many"}, r"num_speculative_tokens=many: must be between 1 and 15"),
        ({"model": "head"}, r"model_drafter\.model=head: must be the absolute path of a folder"),
        ({"model": "/nowhere"}, r"model_drafter\.model=/nowhere: must be the absolute path of a folder"),
        ({"colour": "red"}, r"model_drafter=.*must have the keys method, model, num_speculative_tokens"),
    ],
)
def test_a_drafter_that_vllm_could_not_load_is_refused(
    asked: dict[str, Any], refusal: str, head: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=refusal):
        check_config(changed(SAM, LOADED, drafter=head | asked))


@pytest.mark.parametrize(
    ("values", "refusal"),
    [
        ({"rollout.spec.verify": "standard"}, "its drafts share the target's noise"),
        ({"trainer.device": "npu"}, "vllm-ascend has a model runner of its own"),
        ({"actor_rollout_ref.model.lora_rank": 8}, "LoRA: a draft's token has no adapter"),
        ({"actor_rollout_ref.model.lora.rank": 8}, "LoRA: a draft's token has no adapter"),
        (MTP, "has a model draft already"),
        ({"actor_rollout_ref.rollout.load_format": "dummy"}, r"load_format=dummy: no weight sync .*set auto"),
    ],
)
def test_what_does_not_go_with_a_model_that_drafts_is_refused(
    values: dict[str, Any], refusal: str, head: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=refusal):
        check_config(changed(SAM, LOADED, values, drafter=head))


def test_where_an_engine_would_refuse_a_model_that_drafts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    path = {"actor_rollout_ref.model.path": str(tmp_path)}
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    coupled = {"rollout.spec.verify": "coupled"}
    with pytest.raises(ConfigError, match=r"set .*async_scheduling=False: vLLM .* model runner V1"):
        check_config(changed(OFF, MTP, path, coupled))
    for config in (changed(OFF, MTP, path), changed(SAM_MEGATRON, MTP, path)):
        check_config(config)
    ranks = {"actor_rollout_ref.rollout.data_parallel_size": 2}
    check_config(changed(SAM_MEGATRON, MTP, path, ranks))
    for fields in ({"num_experts": 8}, {"text_config": {"num_experts": 8}}):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        with pytest.raises(ConfigError, match="data-parallel ranks of experts would not run the same passes"):
            check_config(changed(SAM_MEGATRON, MTP, path, ranks))
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3"}')
    for config in (changed(SAM_MEGATRON, MTP, path), changed(OFF, MTP, path, coupled)):
        with pytest.raises(ConfigError, match="MTP head of this model takes no weight sync in parts"):
            check_config(config)
    check_config(changed(OFF, MTP, path))  # verl's own run


@pytest.mark.parametrize(
    ("fields", "is_recurrent"),
    [
        ({"text_config": {"linear_num_value_heads": 32}, "num_experts": 8}, True),
        ({"mamba_d_state": 128, "layer_types": ["mamba", "attention"]}, True),
        ({"mamba_d_state": 128, "layer_types": ["attention", "attention"]}, False),
        ({"linear_attn_config": None}, False),
    ],
)
def test_a_model_with_a_recurrent_state_has_no_drafts_of_ours(
    fields: dict[str, Any], is_recurrent: bool, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    path = {"actor_rollout_ref.model.path": str(tmp_path)}
    for config in (changed(OFF, MTP, path), changed(OFF, path)):
        check_config(config)
    refusal = pytest.raises(ConfigError, match=r"^rollout\.spec=sam: [^\n]* recurrent model [^\n]*$")
    with refusal if is_recurrent else contextlib.nullcontext():
        check_config(changed(SAM, path))


@pytest.mark.parametrize(("vllm", "has_v1"), [("0.24.0", True), ("0.29.0", True), ("0.32.0", False)])
def test_beside_a_small_model_the_driver_knows_the_model_runner(
    vllm: str, has_v1: bool, head: dict[str, Any], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3 alone has V2 in all of them."""
    monkeypatch.setattr("rollout_spec.vllm.versions.version", lambda: vllm)
    if vllm != "0.24.0":
        monkeypatch.delattr("vllm.config.vllm.DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES", raising=False)
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    path = {"actor_rollout_ref.model.path": str(tmp_path)}
    ahead, coupled = {f"{ENGINE}.async_scheduling": True}, {"rollout.spec.verify": "coupled"}
    small = head | {"method": "draft_model"}
    both = changed(SAM, LOADED, path, ahead, drafter=small), "does not schedule asynchronously"
    alone = changed(OFF, LOADED, path, ahead, coupled, drafter=small), "set .*async_scheduling=False"
    for config, refusal in (both, alone):
        with pytest.raises(ConfigError, match=refusal) if has_v1 else contextlib.nullcontext():
            check_config(config)
    check_config(changed(SAM, LOADED, path, ahead, drafter=head))
    check_config(changed(OFF, LOADED, path, coupled, drafter=small))  # vLLM 0.24 switches it off


def write_model(folder: pathlib.Path, name: str, **fields: Any) -> str:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "config.json").write_text(json.dumps(fields))
    return str(folder / name)


LLAMA3, YARN = ({"rope_type": kind, "factor": 8.0} for kind in ("llama3", "yarn"))


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"max_position_embeddings": 2048}, r"its 2048 positions are fewer than .*max_model_len=4096"),
        ({"max_position_embeddings": 2048, "rope_scaling": LLAMA3}, "its 2048 positions are fewer"),
        ({"text_config": {"max_position_embeddings": 8}}, "its 8 positions are fewer"),
        ({"max_position_embeddings": 4096}, None),
        ({"max_position_embeddings": 2048, "rope_scaling": YARN}, None),
        ({"vocab_size": 10}, None),  # a head has a map
    ],
)
def test_a_head_with_fewer_positions_than_the_rollout_is_refused(
    fields: dict[str, Any], refusal: str | None, tmp_path: pathlib.Path
) -> None:
    policy = write_model(tmp_path, "policy", max_position_embeddings=4096, vocab_size=20)
    head = {"method": "eagle3", "model": write_model(tmp_path, "head", **fields)}
    path = {"actor_rollout_ref.model.path": policy}
    with pytest.raises(ConfigError, match=refusal) if refusal else contextlib.nullcontext():
        check_config(changed(SAM, LOADED, path, drafter=head))
    shorter = {"actor_rollout_ref.rollout.max_model_len": 8}
    check_config(changed(SAM, LOADED, path, shorter, drafter=head))
    check_config(changed(OFF, LOADED, path, drafter=head))  # vLLM's own drafts


def test_a_small_model_has_the_policys_vocabulary(tmp_path: pathlib.Path) -> None:
    policy = write_model(tmp_path, "policy", text_config={"vocab_size": 20})
    path = {"actor_rollout_ref.model.path": policy}
    for size, groups in itertools.product((20, 10), (SAM, OFF)):
        small = {"method": "draft_model", "model": write_model(tmp_path, "small", vocab_size=size)}
        refusal = pytest.raises(ConfigError, match="its vocabulary is of 10 tokens, the policy's of 20")
        with refusal if size == 10 else contextlib.nullcontext():
            check_config(changed(groups, LOADED, path, drafter=small))


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"model_type": "gemma4_assistant"}, "Gemma 4's drafter shares the target's KV cache"),
        ({"model_type": "step3p5"}, "Step 3.5's drafter has a layer for each token"),
        ({"num_nextn_predict_layers": 2}, "an MTP head of several modules is not supported"),
        ({"num_nextn_predict_layers": 1}, None),
        ({"num_nextn_predict_layers": 3, "architectures": ["MiMoV2FlashForCausalLM"]}, None),
    ],
)
def test_an_mtp_head_that_an_engine_would_refuse_is_refused_by_what_its_file_shows(
    fields: dict[str, Any], refusal: str | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy's own head, and one of the user's own."""
    monkeypatch.setattr(f"{SPECULATIVE}.use_multi_module_mtp", lambda self: True, raising=False)
    model = write_model(tmp_path, "model", **fields)
    path = {"actor_rollout_ref.model.path": model}
    for config in (
        changed(SAM_MEGATRON, MTP, path),
        changed(OFF, MTP, path, COUPLED),
        changed(SAM, LOADED, drafter={"method": "mtp", "model": model}),
    ):
        with pytest.raises(ConfigError, match=f": {refusal}$") if refusal else contextlib.nullcontext():
            check_config(config)
    check_config(changed(OFF, MTP, path))  # verl's own run


def test_of_a_head_of_several_modules_the_first_may_draft(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone where one token is asked for, and where vLLM takes no other, as 0.24."""
    path = {"actor_rollout_ref.model.path": write_model(tmp_path, "model", num_nextn_predict_layers=2)}
    monkeypatch.delattr(f"{SPECULATIVE}.use_multi_module_mtp", raising=False)
    check_config(changed(SAM_MEGATRON, MTP, path))
    monkeypatch.setattr(f"{SPECULATIVE}.use_multi_module_mtp", lambda self: True, raising=False)
    one = {f"{OWN}.num_speculative_tokens": 1}
    check_config(changed(OFF, MTP, path, COUPLED, one))
    with pytest.raises(ConfigError, match="an MTP head of several modules"):
        check_config(changed(SAM_MEGATRON, MTP, path, one))  # the text asks for more


def test_off_with_a_drafter_of_ones_own_is_refused_what_verl_refuses(head: dict[str, Any]) -> None:
    backend = {"actor_rollout_ref.rollout.checkpoint_engine.backend": "delta_sharded"}
    with pytest.raises(ConfigError, match="delta weight transfer refuses any"):
        check_config(changed(OFF, LOADED, backend, drafter=head))


def test_an_mtp_head_that_no_sync_brings_is_not_drawn_at_random() -> None:
    reference = changed(
        OFF, MTP, {"rollout.spec.verify": "coupled", "actor_rollout_ref.actor.strategy": "fsdp2"}
    )
    for config in (changed(SAM, MTP), reference):
        with pytest.raises(ConfigError, match=r"load_format=dummy: no weight sync"):
            check_config(config)
    with pytest.raises(ConfigError, match=r"mtp\.method=eagle: must be mtp"):
        check_config(changed(SAM_MEGATRON, MTP, {f"{OWN}.method": "eagle"}))
    lora = "actor_rollout_ref.model.lora"
    check_config(changed(SAM_MEGATRON, MTP, {f"{lora}.rank": 8, f"{lora}.merge": True}))
