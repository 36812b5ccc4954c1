"""Gives Hydra this package's configuration groups, the defaults of the options, and `${rollout_spec.*}`."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import verl
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rollout_spec.config import ConfigError, SpecConfig
from rollout_spec.patches import wrap
from rollout_spec.verl import settings
from rollout_spec.verl.changes import PLAIN_OPTIONS
from rollout_spec.verl.check_config import check_config, num_places, refuse_plain_options
from rollout_spec.verl.check_overrides import check_overrides
from rollout_spec.verl.model_drafter import OPTION, engine_scheduler, engine_speculative_config, spec_options
from rollout_spec.verl.recurrent_policy import default_tokens, said_of_memory
from rollout_spec.verl.settings import CONFIGS, V1_TRAINER_ONLY, group_router_file, say

_LEGACY_TRAINER = "verl.trainer.main_ppo_v0"  # verl's own command imports it after this check only

checked_spec = SpecConfig()  # the options of the configuration that this process has checked last


def install() -> None:
    """Safe to call again."""
    Plugins.instance().register(RolloutSpecSearchPath)
    # `routing` is a group of its own. The values are plain: OmegaConf would make those of a frozen class
    # read-only, and convert those of a wrong type.
    tokens = {"num_speculative_tokens": "${rollout_spec.default_tokens:}"}
    defaults = {**SpecConfig().to_dict(), OPTION: None, **tokens}
    del defaults["model_tokens"], defaults["routing"]
    ConfigStore.instance().store("rollout_spec_options", defaults, package="rollout.spec")
    # OmegaConf keeps no mappings but its own.
    for name, resolve in (
        ("options", lambda *asked: OmegaConf.create(spec_options(*asked))),
        (
            "speculative_config",
            lambda *asked: (found := engine_speculative_config(*asked)) and OmegaConf.create(found),
        ),
        ("scheduler", engine_scheduler),
        ("default_tokens", default_tokens),
        ("group_router", group_router),
        ("max_imbalance", lambda: checked_spec.max_imbalance),  # as verl loads the router's own file
        ("checked", check_whole),
        ("job_checked", check_job),
    ):
        OmegaConf.register_new_resolver(f"rollout_spec.{name}", resolve, replace=True)


class RolloutSpecSearchPath(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Hydra calls this before it composes, so an unknown option is refused here in our own words."""
        with one_line_errors():
            check_overrides(sys.argv[1:])
        # verl's branches know routers by names.
        if any((Path(each) / "workers/rollout/router/base.py").is_file() for each in verl.__path__):
            search_path.append("rollout-spec", f"pkg://{CONFIGS}/rollout_spec_registry")
        search_path.append("rollout-spec", f"pkg://{CONFIGS}")


def check_job() -> str:
    """Check the job that Hydra is about to run; a fault ends the command with one line."""
    with one_line_errors():
        check_whole(_root_=HydraConfig.get()._get_root())  # Hydra's node hangs in the job's configuration
    return "1"


def check_whole(*, _root_: DictConfig) -> bool:
    """`check_config` as a resolver: whoever resolves the configuration has it checked."""
    global checked_spec
    if settings.plugin_failure is not None:
        raise ConfigError(f"{settings.plugin_failure}; run `rollout-spec doctor`")
    if _LEGACY_TRAINER in sys.modules:  # whatever trainer.use_v1 says
        raise ConfigError(f"this command runs {_LEGACY_TRAINER}: {V1_TRAINER_ONLY}")
    # Whoever only asks for the configuration would get a traceback of Hydra's.
    with one_line_errors() if {"--cfg", "-c"} & {*sys.argv[1:]} else contextlib.nullcontext():
        spec = checked_spec = check_config(_root_)
    if spec.enabled:
        say(f"drafting is on, with up to {spec.num_speculative_tokens} draft tokens a request and step")
    if said := said_of_memory(_root_, spec):
        say(said)
    return True


def group_router(*, _root_: DictConfig) -> str | None:
    """The router that routing=group takes, as a resolver: verl's own where all requests go to one place."""
    return None if num_places(_root_) == 1 else group_router_file()


def check_before_ray(device: ModuleType) -> None:
    """Let what verl's commands call first, with a configuration, refuse options of ours that do nothing."""

    @wrap(device, "auto_set_device", PLAIN_OPTIONS)
    def check_and_set_device(set_device: Any, config: Any) -> None:
        if isinstance(config, DictConfig):
            with one_line_errors():
                refuse_plain_options(config)
        set_device(config)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """An error ends the command: one line on stderr, exit code 2."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OmegaConfBaseException) and error.full_key:  # as of ${oc.env:NAME} without NAME
            kind, text = f"{error.full_key}: ", str(error).partition("\n")[0]
        else:
            kind = "" if isinstance(error, ConfigError) else f"the check failed with {type(error).__name__}: "
            text = " ".join(str(error).split())
        print(f"rollout_spec: {kind}{text}", file=sys.stderr)
        raise SystemExit(2) from error
