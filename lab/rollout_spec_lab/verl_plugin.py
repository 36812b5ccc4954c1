"""Entry point of group `verl.plugins`: the demo's Hydra groups, and the platform `cpu` where needed."""

import traceback

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from rollout_spec_lab.verl_cpu import activation


class LabSearchPath(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("rollout-spec-lab", "pkg://rollout_spec_lab.configs")


def activate() -> None:
    """Load both parts. Where that fails, the process ends: verl would log the error at DEBUG and go on."""
    try:
        Plugins.instance().register(LabSearchPath)
        if activation.asks_for_cpu_platform():
            activation.activate()
    except Exception as error:
        traceback.print_exc()
        raise SystemExit(f"rollout_spec_lab: verl's platform for CPUs cannot be used: {error}") from error


activate()
