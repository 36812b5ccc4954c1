"""What engines would refuse and the driver does before Ray starts; what vLLM is told where a model drafts."""

import contextlib
import itertools
import json
import sys
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.workers.rollout.vllm_rollout.utils import build_mtp_speculative_config

from rollout_spec.config import ConfigError, SpecConfig
from rollout_spec.verl.check_config import check_config
from rollout_spec.verl.check_overrides import check_overrides
from rollout_spec.verl.settings import say
from rollout_spec.vllm import SCHEDULER, speculative_config
from tests.configs import ENGINE, composed

OWN = "actor_rollout_ref.model.mtp"
MTP = {f"{OWN}.enable": True, f"{OWN}.enable_rollout": True, f"{OWN}.num_speculative_tokens": 2}
TRAINED = {**MTP, f"{OWN}.enable_train": True}
LOADED, DUMMY = ({"actor_rollout_ref.rollout.load_format": kind} for kind in ("auto", "dummy"))
KEYED = {"rollout.spec.method": "keyed"}
HEAD: tuple[str, dict[str, Any]] = ("eagle3", {})
SAM, OFF = ("+rollout.spec=sam",), ("+rollout.spec=off", "model_engine=megatron")
SAM_MEGATRON = (*SAM, "model_engine=megatron")
MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
NPU = {"trainer.device": "npu"}
FSDP = {"actor_rollout_ref.actor.strategy": "fsdp2"}
DELTA = {f"{ROLLOUT}.checkpoint_engine.backend": "delta_sharded"}
SCHEDULED = {f"{ENGINE}.scheduler_cls": "my.Scheduler"}
PROCESSORS = {f"{ENGINE}.logits_processors": ["my.Processor"]}
OVERRIDE = f"{ENGINE}.override_generation_config"
MIN_P, MIN_P_TEXT, PATH = ({OVERRIDE: value} for value in ({"min_p": 0.1}, '{"min_p": 0.1}', "a/path"))
AHEAD, SYNCHRONOUS = ({f"{ENGINE}.async_scheduling": value} for value in (True, False))
PIECES = {f"{ENGINE}.long_prefill_token_threshold": 8}
RANKS = {f"{ROLLOUT}.data_parallel_size": 2}
ADAPTERS, MORE_ADAPTERS = {f"{MODEL}.lora_rank": 8}, {f"{MODEL}.lora.rank": 8}
MERGED = {f"{MODEL}.lora.merge": True}
ONE = {f"{OWN}.num_speculative_tokens": 1}
BY_V1, BY_V2 = ({"architectures": [name]} for name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"))
EXPERTS = {"num_experts": 8}
MODULES = {"num_nextn_predict_layers": 2}
SIZES = {"max_position_embeddings": 4096, "vocab_size": 20}
LLAMA3, YARN = ({"rope_scaling": {"rope_type": kind, "factor": 8.0}} for kind in ("llama3", "yarn"))
SMALL: tuple[str, dict[str, Any]] = ("draft_model", {})
SHORT = {"max_position_embeddings": 2048}
ALONE = {**MTP, **KEYED, **SYNCHRONOUS}  # the policy's head, verified with our noise

NO_PROCESSORS = r"vllm\.logits_processors: vLLM does not run custom logits processors"
NO_MIN_P = r"vllm\.override_generation_config\.min_p: vLLM refuses min_p"
NOT_AHEAD = r"async_scheduling: must be False with vLLM's MRV1, which vLLM 0\.\S+ has"
NEWER = r"^vllm 0\.33\.0: is newer than .*0\.32\.0.*: set rollout\.spec\.untested_vllm=true to"
TOO_SHORT = r"vllm\.long_prefill_token_threshold=8: must be 0, or at least 1 \+ num_speculative_tokens, \d"
WHOLE = "the MTP head of this model as a whole"
NO_ADAPTER = "LoRA: vLLM cannot apply a LoRA adapter"
NO_EXPERTS = "the data-parallel ranks of experts would not run the same passes"
NO_MODULES = "an MTP head of several modules is not supported"
FEW = r"the drafter takes 2048 positions, max_model_len is \d+: set max_model_len to at most 2048"
OTHER = "its vocabulary is of 10 tokens, the policy's of 20"


def changed(groups, *values, drafter=None):
    config = composed(*groups)
    for key, value in itertools.chain(*(each.items() for each in values)):
        OmegaConf.update(config, key, value, force_add=key.startswith(ENGINE))
    config.rollout.spec.model_drafter = drafter
    return config


def case(refusal, groups, *values, **others):
    """A configuration that is refused so; None: that passes. `policy`: its config.json; `own`: the method and
    config.json of a drafter of the user's own, and `asked` what is said of it besides; `vllm`: the driver's
    version, None where it has none."""
    defaults = {"policy": None, "own": None, "asked": {}, "vllm": "0.24.0", "runner": None}
    return refusal, groups, values, defaults | others


CASES = [
    case(NO_PROCESSORS, SAM, PROCESSORS),
    case(NO_PROCESSORS, OFF, PROCESSORS, LOADED, own=HEAD),
    case(NO_MIN_P, SAM, MIN_P),
    case(NO_MIN_P, SAM, MIN_P_TEXT),
    case(NO_MIN_P, OFF, MIN_P, LOADED, own=HEAD),
    case(None, SAM, PATH),
    case(None, OFF, MIN_P, PROCESSORS),
    case(NEWER, SAM, vllm="0.33.0"),
    case(None, SAM, {"rollout.spec.untested_vllm": True}, vllm="0.33.0"),
    case(None, SAM, vllm="0.32.1"),
    case(None, OFF, vllm="0.33.0"),
    # Of SAM's 15 draft tokens; before 0.29 vLLM has no padded rows that it cuts.
    case(TOO_SHORT, SAM, PIECES, vllm="0.29.0"),
    case(None, SAM, PIECES),
    case(None, SAM, {f"{ENGINE}.long_prefill_token_threshold": 16}, vllm="0.32.0"),
    case(None, OFF, PIECES, vllm="0.32.0"),
    # MRV1 does not schedule ahead with drafts; where the model cannot be looked at, its engine says so.
    case(NOT_AHEAD, SAM, AHEAD, policy=BY_V1),
    case(None, SAM, AHEAD, policy=BY_V2),
    case(None, SAM, AHEAD),
    case(None, SAM, AHEAD, policy=EXPERTS),
    case(None, SAM, SYNCHRONOUS, policy=BY_V1),
    case(None, OFF, AHEAD, policy=BY_V1),
    case(None, SAM, AHEAD, policy=BY_V1, vllm="0.29.0"),
    case(None, SAM, AHEAD, policy=BY_V1, vllm=None),
    case(None, SAM, AHEAD, policy=BY_V1, runner="1"),
    case(NOT_AHEAD, SAM, AHEAD, policy=BY_V2, runner="0"),
    case(NOT_AHEAD, SAM, AHEAD, NPU, policy=BY_V2),
    case(NOT_AHEAD, SAM, AHEAD, ADAPTERS, policy=BY_V2),
    case(None, SAM, AHEAD, ADAPTERS, MERGED, policy=BY_V2),
    case(None, SAM, AHEAD, RANKS, policy=BY_V2 | EXPERTS),
    # A head is scheduled ahead by default, a small model not; MRV2 runs small models from 0.32 on.
    case(NOT_AHEAD, OFF, MTP, KEYED, policy=BY_V1),
    case(None, OFF, ALONE, policy=BY_V1),
    case(WHOLE, OFF, MTP, KEYED, policy=BY_V1 | {"model_type": "deepseek_v3"}),
    case(None, OFF, MTP, policy=BY_V1),
    case(None, SAM_MEGATRON, MTP, policy=BY_V1),
    *(
        case(refusal, groups, LOADED, AHEAD, method, policy=BY_V2, own=SMALL, vllm=vllm)
        for vllm, refusal in (("0.24.0", NOT_AHEAD), ("0.29.0", NOT_AHEAD), ("0.32.0", None))
        for groups, method in ((SAM, {}), (OFF, KEYED))
    ),
    case(None, SAM, LOADED, AHEAD, policy=BY_V2, own=HEAD),
    case(None, OFF, LOADED, KEYED, policy=BY_V1, own=SMALL),
    # Beside a model that drafts.
    case("this platform has a model runner of its own", SAM, LOADED, NPU, own=HEAD),
    case(NO_ADAPTER, SAM, LOADED, ADAPTERS, own=HEAD),
    case(NO_ADAPTER, SAM, LOADED, MORE_ADAPTERS, own=HEAD),
    case(None, SAM, LOADED, MORE_ADAPTERS, MERGED, own=HEAD),
    case(None, OFF, LOADED, ADAPTERS, NPU, RANKS, policy=EXPERTS, own=HEAD),  # vLLM's own run
    case(NO_EXPERTS, SAM_MEGATRON, MTP, RANKS, policy=EXPERTS),
    case(NO_EXPERTS, SAM_MEGATRON, MTP, RANKS, policy={"text_config": EXPERTS}),
    case(None, SAM_MEGATRON, MTP, RANKS, policy=BY_V2),
    case(None, SAM_MEGATRON, MTP, policy=EXPERTS),
    # The policy's MTP head, and one of the user's own; of several modules vLLM 0.24 takes the first.
    *(
        one
        for refusal, head in (
            ("Gemma 4's drafter shares the target's KV cache", {"model_type": "gemma4_assistant"}),
            ("Step 3.5's drafter has a layer for each token", {"model_type": "step3p5"}),
            (NO_MODULES, MODULES),
            (None, {"num_nextn_predict_layers": 1}),
            (None, MODULES | {"architectures": ["MiMoV2FlashForCausalLM"]}),
        )
        for one in (
            case(refusal, SAM_MEGATRON, MTP, policy=head, vllm="0.29.0"),
            case(refusal, OFF, ALONE, policy=head, vllm="0.29.0"),
            case(refusal, SAM, LOADED, own=("mtp", head), vllm="0.29.0"),
            case(None, OFF, MTP, policy=head, vllm="0.29.0"),
            case(None, SAM, LOADED, own=("eagle3", head), vllm="0.29.0"),
        )
    ),
    case(None, SAM_MEGATRON, MTP, policy=MODULES),
    case(None, SAM_MEGATRON, MTP, policy=MODULES, vllm=None),
    case(None, OFF, ALONE, ONE, policy=MODULES, vllm="0.29.0"),
    case(NO_MODULES, SAM_MEGATRON, MTP, ONE, policy=MODULES, vllm="0.29.0"),  # the text asks for more
    # A model of the user's own.
    case(FEW, SAM, LOADED, policy=SIZES, own=("eagle3", SHORT)),
    case(FEW, SAM, LOADED, policy=SIZES, own=("eagle3", SHORT | LLAMA3)),
    case(FEW, SAM, LOADED, policy=SIZES, own=("eagle3", {"text_config": SHORT})),
    case(None, SAM, LOADED, policy=SIZES, own=("eagle3", SHORT | YARN)),
    case(None, SAM, LOADED, {f"{ROLLOUT}.max_model_len": 2048}, policy=SIZES, own=("eagle3", SHORT)),
    case(None, OFF, LOADED, policy=SIZES, own=("eagle3", SHORT)),  # vLLM's own drafts
    case(OTHER, SAM, LOADED, policy=SIZES, own=("draft_model", {"vocab_size": 10})),
    case(OTHER, OFF, LOADED, policy={"text_config": SIZES}, own=("draft_model", {"vocab_size": 10})),
    case(None, SAM, LOADED, policy=SIZES, own=("draft_model", SIZES)),
    case(None, SAM, LOADED, policy=SIZES, own=("eagle3", {"vocab_size": 10})),  # a head has a map
    *(
        case(refusal, SAM, LOADED, own=HEAD, asked=asked)
        for asked, refusal in (
            ({"method": "ngram"}, r"drafter\.method=ngram: must be one of mtp, eagle, eagle3, draft_model"),
            ({"num_speculative_tokens": 16}, r"num_speculative_tokens=16: must be between 1 and 15"),
            ({"num_speculative_tokens": "many"}, r"num_speculative_tokens=many: must be between 1 and 15"),
            ({"model": "head"}, r"model_drafter\.model=head: must be the absolute path of a folder"),
            ({"model": "/nowhere"}, r"drafter\.model=/nowhere: must be the absolute path of a folder"),
            ({"colour": "red"}, r"drafter=.*must have the keys method, model, num_speculative_tokens"),
        )
    ),
    case("use one of the two", SAM, LOADED, MTP, own=HEAD),
    case(r"load_format=dummy: .* random weights.* set auto", SAM, DUMMY, own=HEAD),
    case("delta weight transfer refuses any", OFF, LOADED, DELTA, own=HEAD),
    case(r"mtp\.method=eagle: must be mtp", SAM_MEGATRON, MTP, {f"{OWN}.method": "eagle"}),
    case(r"scheduler_cls=my\.Scheduler: rollout\.spec sets it", OFF, MTP, SCHEDULED),
    case(r"scheduler_cls=my\.Scheduler: rollout\.spec sets it", OFF, LOADED, SCHEDULED, own=HEAD),
    case(None, OFF, SCHEDULED),
    # Without Megatron no sync brings the weights of an MTP head. verl's own run is verl's.
    case("load_format=dummy", SAM, MTP, DUMMY),
    case(None, SAM, MTP, {f"{ROLLOUT}.load_format": None}),
    case("load_format=dummy", OFF, MTP, DUMMY, KEYED, FSDP),
    case(None, OFF, MTP, DUMMY, FSDP),
]


def write_model(folder, fields):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


@pytest.fixture
def with_vllm(monkeypatch):
    def install(version):
        for module in ("vllm.versions", "verl.check_engine"):
            monkeypatch.setattr(f"rollout_spec.{module}.version", lambda: version)
        listed = "vllm.config.vllm.DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES"
        modules = "vllm.config.SpeculativeConfig.use_multi_module_mtp"
        if version == "0.24.0":
            monkeypatch.setattr(listed, frozenset(BY_V2["architectures"]), raising=False)
            monkeypatch.delattr(modules, raising=False)
        elif version is None:
            monkeypatch.setitem(sys.modules, "vllm.config", None)
        else:
            monkeypatch.delattr(listed, raising=False)
            monkeypatch.setattr(modules, lambda self: True, raising=False)

    return install


@pytest.mark.parametrize(("refusal", "groups", "values", "others"), CASES)
def test_what_an_engine_would_refuse(refusal, groups, values, others, tmp_path, with_vllm, monkeypatch):
    policy, own = others["policy"], others["own"]
    with_vllm(others["vllm"])
    if others["runner"] is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", others["runner"])
    path = {} if policy is None else {f"{MODEL}.path": write_model(tmp_path / "policy", policy)}
    drafter = own and {"method": own[0], "model": write_model(tmp_path / "own", own[1])} | others["asked"]
    config = changed(groups, path, *values, drafter=drafter)
    with pytest.raises(ConfigError, match=refusal) if refusal else contextlib.nullcontext():
        check_config(config)


def test_the_driver_looks_at_a_model_of_the_hub(tmp_path, monkeypatch, with_vllm):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with_vllm("0.24.0")
    folder = tmp_path / "models--some--model"
    write_model(folder / "snapshots/1", BY_V1)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("1")
    with pytest.raises(ConfigError, match=NOT_AHEAD):
        check_config(changed(SAM, AHEAD, {f"{MODEL}.path": "some/model"}))


def test_steps_with_drafts_that_have_no_graphs_are_named(capsys):
    """On NPUs drafts are padded to a graph's length."""
    full, piecewise = ({"cudagraph_mode": mode} for mode in ("FULL_DECODE_ONLY", "PIECEWISE"))
    for groups, value, others, is_named in (
        (SAM, full, {}, True),
        (SAM, json.dumps(full), {}, True),
        (OFF, full, ALONE, False),
        (SAM, piecewise, {}, False),
        (SAM, full, NPU, False),
    ):
        say.cache_clear()
        check_config(changed(groups, {f"{ENGINE}.compilation_config": value}, others))
        said = capsys.readouterr().err
        assert said.count("cudagraph_mode=FULL_DECODE_ONLY: steps with drafts run without") == is_named


@pytest.fixture
def head(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return {"method": "eagle3", "model": str(tmp_path)}


def told_to_vllm(config):
    """Of a run that passes: its `speculative_config` as verl completes it, `model_tokens` and scheduler."""
    spec = check_config(config)
    OmegaConf.resolve(config)  # as verl's trainer does
    rollout = OmegaConf.to_container(config.actor_rollout_ref.rollout)
    engine, mtp = rollout["engine_kwargs"]["vllm"], rollout["mtp"]
    assert SpecConfig.from_mapping(engine["additional_config"]["rollout_spec"]) == spec
    speculative = engine["speculative_config"]
    if mtp["enable"] and mtp["enable_rollout"]:
        speculative = build_mtp_speculative_config(mtp["method"], mtp["num_speculative_tokens"], speculative)
    return speculative, spec.model_tokens, engine["scheduler_cls"]


def test_a_model_drafts_beside_the_text_and_whatever_drafts_is_counted(head):
    asked, default = head | {"num_speculative_tokens": 4}, SpecConfig.model_tokens
    only_trained = {f"{OWN}.enable": True}
    one, few = ({"rollout.spec.num_speculative_tokens": num} for num in (1, 4))
    for config, expected in (
        (changed(SAM_MEGATRON, MTP), ({"method": "mtp", "num_speculative_tokens": 15}, 2, SCHEDULER)),
        (changed(OFF, MTP), ({"method": "mtp", "num_speculative_tokens": 2}, default, SCHEDULER)),
        (changed(OFF, MTP, KEYED, one), ({"method": "mtp", "num_speculative_tokens": 2}, default, SCHEDULER)),
        (changed(SAM_MEGATRON, only_trained, few), (speculative_config(4), default, SCHEDULER)),
        (changed(OFF, only_trained), (None, default, None)),
        (changed(SAM, LOADED, drafter=asked), ({**head, "num_speculative_tokens": 15}, 4, SCHEDULER)),
        (changed(SAM, LOADED, drafter=head), ({**head, "num_speculative_tokens": 15}, 3, SCHEDULER)),
        (changed(OFF, LOADED, drafter=asked), (asked, default, SCHEDULER)),
        (changed(OFF, LOADED, KEYED, drafter=asked), (asked, default, SCHEDULER)),
    ):
        assert told_to_vllm(config) == expected
    asked = f"rollout.spec.model_drafter={{method: eagle3, model: {head['model']}}}"
    check_overrides([*SAM, asked])
    assert composed(*SAM, asked).rollout.spec.model_drafter == head


def test_who_drafts_untrained_is_warned_once(head, capsys):
    """verl trains MTP heads with Megatron only, where it is asked to."""
    for config, num_lines in (
        (changed(SAM_MEGATRON, TRAINED), 0),
        (changed(SAM_MEGATRON, MTP), 1),
        (changed(SAM, TRAINED, LOADED), 1),
        (changed(SAM_MEGATRON, LOADED, drafter=head), 1),
        (changed(OFF, MTP), 0),
    ):
        say.cache_clear()
        check_config(config)
        said = capsys.readouterr().err
        assert said.count("\n") == said.count("this drafter is not trained") == num_lines
