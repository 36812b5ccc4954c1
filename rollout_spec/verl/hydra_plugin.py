"""Gives Hydra this package's configuration groups, the defaults of the options, and `${rollout_spec.*}`."""

import sys

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from rollout_spec.config import SpecConfig
from rollout_spec.verl import check_config
from rollout_spec.verl.launch import CONFIGS
from rollout_spec.verl.model_drafter import OPTION, drafter_options, engine_drafter, engine_scheduler
from rollout_spec.verl.recurrent_policy import default_tokens


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
        ("options", lambda *asked: OmegaConf.create(drafter_options(*asked))),
        ("drafter", lambda *asked: (drafter := engine_drafter(*asked)) and OmegaConf.create(drafter)),
        ("scheduler", engine_scheduler),
        ("default_tokens", default_tokens),
        ("group_router", check_config.group_router),
        ("checked", check_config.check_whole),
        ("job_checked", check_config.check_job),
    ):
        OmegaConf.register_new_resolver(f"rollout_spec.{name}", resolve, replace=True)


class RolloutSpecSearchPath(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Hydra calls this before it composes, so an unknown option is refused here in our own words."""
        with check_config.one_line_errors():
            check_config.check_overrides(sys.argv[1:])
        search_path.append("rollout-spec", f"pkg://{CONFIGS}")
