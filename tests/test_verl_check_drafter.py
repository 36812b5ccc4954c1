"""What the driver says of a model that drafts: of one of the user's own, and of a policy's MTP head."""

import itertools

import pytest
from omegaconf import OmegaConf
from verl.workers.rollout.vllm_rollout.utils import build_mtp_speculative_config

from rollout_spec.config import ConfigError, SpecConfig
from rollout_spec.verl.check_config import check_config
from rollout_spec.verl.check_overrides import check_overrides
from rollout_spec.verl.settings import say
from rollout_spec.vllm import SCHEDULER, speculative_config
from tests.test_verl_check_config import ENGINE, composed

OWN = "actor_rollout_ref.model.mtp"
MTP = {f"{OWN}.enable": True, f"{OWN}.enable_rollout": True, f"{OWN}.num_speculative_tokens": 2}
TRAINED = {**MTP, f"{OWN}.enable_train": True}
LOADED = {"actor_rollout_ref.rollout.load_format": "auto"}
DUMMY = {"actor_rollout_ref.rollout.load_format": "dummy"}
KEYED = {"rollout.spec.method": "keyed"}

SAM, OFF = ("+rollout.spec=sam",), ("+rollout.spec=off", "model_engine=megatron")
SAM_MEGATRON = (*SAM, "model_engine=megatron")


@pytest.fixture
def head(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return {"method": "eagle3", "model": str(tmp_path)}


def changed(groups, *values, drafter=None):
    config = composed(*groups)
    for key, value in itertools.chain(*(each.items() for each in values)):
        OmegaConf.update(config, key, value, force_add=key.startswith(ENGINE))
    config.rollout.spec.model_drafter = drafter
    return config


def refused(message, *args, **kwargs):
    with pytest.raises(ConfigError, match=message):
        check_config(changed(*args, **kwargs))


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
    own = {f"{ENGINE}.scheduler_cls": "my.Scheduler"}
    check_config(changed(OFF, own))
    for drafts, drafter in ((MTP, None), (LOADED, head)):
        refused(r"scheduler_cls=my\.Scheduler: rollout\.spec sets it", OFF, drafts, own, drafter=drafter)
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
def test_a_drafter_that_vllm_could_not_load_is_refused(asked, refusal, head):
    refused(refusal, SAM, LOADED, drafter=head | asked)


def test_what_does_not_go_with_a_model_that_drafts_is_refused(head):
    refused("use one of the two", SAM, LOADED, MTP, drafter=head)
    refused(r"load_format=dummy: .* random weights.* set auto", SAM, LOADED, DUMMY, drafter=head)
    delta = {"actor_rollout_ref.rollout.checkpoint_engine.backend": "delta_sharded"}
    refused("delta weight transfer refuses any", OFF, LOADED, delta, drafter=head)
    refused(r"mtp\.method=eagle: must be mtp", SAM_MEGATRON, MTP, {f"{OWN}.method": "eagle"})


def test_an_mtp_head_whose_weights_no_sync_brings_is_refused():
    """Without Megatron. verl's own run is verl's."""
    fsdp = {"actor_rollout_ref.actor.strategy": "fsdp2"}
    refused("load_format=dummy", SAM, MTP, DUMMY)
    check_config(changed(SAM, MTP, {"actor_rollout_ref.rollout.load_format": None}))
    refused("load_format=dummy", OFF, MTP, DUMMY, KEYED, fsdp)
    check_config(changed(OFF, MTP, DUMMY, fsdp))
