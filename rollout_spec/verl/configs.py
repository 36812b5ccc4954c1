"""The configurations that this package brings for Hydra and for verl's router."""

from importlib import resources

CONFIGS = "rollout_spec_configs"


def group_router_file() -> str:
    """The absolute path of the packaged configuration with which verl takes `GroupRouter`."""
    return str(resources.files(CONFIGS).joinpath("rollout_spec_router/group.yaml"))
