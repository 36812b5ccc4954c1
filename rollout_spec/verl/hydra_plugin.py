"""Puts this package's configuration groups on Hydra's search path, and lets them name its files."""

from __future__ import annotations

import sys

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from rollout_spec.verl.launch import CONFIGS, config_file


def install() -> None:
    """Safe to call again."""
    Plugins.instance().register(RolloutSpecSearchPath)
    OmegaConf.register_new_resolver("rollout_spec.file", config_file, replace=True)


class RolloutSpecSearchPath(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Hydra calls this before it composes, so an unknown option is refused here in our own words."""
        from rollout_spec.verl.check_config import check_overrides, one_line_errors

        with one_line_errors():
            check_overrides(sys.argv[1:])
        search_path.append("rollout-spec", f"pkg://{CONFIGS}")
