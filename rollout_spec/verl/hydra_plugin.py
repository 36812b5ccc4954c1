"""Puts this package's configuration groups on Hydra's search path, and resolves their `${rollout_spec.*}`."""

from __future__ import annotations

import sys

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from rollout_spec.verl.launch import CONFIGS, config_file
from rollout_spec.verl.model_drafter import drafter_options, engine_drafter, engine_scheduler


def install() -> None:
    """Safe to call again."""
    Plugins.instance().register(RolloutSpecSearchPath)
    # OmegaConf keeps no mappings but its own.
    for name, resolve in (
        ("file", config_file),
        ("options", lambda *asked: OmegaConf.create(drafter_options(*asked))),
        ("drafter", lambda *asked: (drafter := engine_drafter(*asked)) and OmegaConf.create(drafter)),
        ("scheduler", engine_scheduler),
    ):
        OmegaConf.register_new_resolver(f"rollout_spec.{name}", resolve, replace=True)


class RolloutSpecSearchPath(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Hydra calls this before it composes, so an unknown option is refused here in our own words."""
        from rollout_spec.verl.check_config import check_overrides, one_line_errors

        with one_line_errors():
            check_overrides(sys.argv[1:])
        search_path.append("rollout-spec", f"pkg://{CONFIGS}")
