"""What several parts need at the start of a run; importing it changes nothing."""

import importlib.util
from importlib import resources

from rollout_spec.config import ConfigError
from rollout_spec.patches import Patch

CONFIGS = "rollout_spec_configs"
ASKED_VARIABLE = "ROLLOUT_SPEC_ASKED"  # set by the group `rollout.spec`, in Hydra's job and Ray's processes
V1_TRAINER_ONLY = (
    "rollout.spec supports verl's V1 trainer only; to roll out beside the training take "
    "trainer.use_v1=True with trainer.v1.trainer_mode=separate_async"
)

PRIVATE_METHODS = Patch(
    name="verl-private-methods",
    reason="our server and replay buffer override methods that verl does not promise",
    upstream="verl/workers/rollout/vllm_rollout/vllm_async_server.py; verl/trainer/ppo/v1/replay_buffer.py",
    until="verl has public methods in their place",
)

failure: str | None = None
"""Why this process has no plugin."""


def group_router_file() -> str:
    """The absolute path of the packaged configuration with which verl takes `GroupRouter`."""
    return str(resources.files(CONFIGS).joinpath("rollout_spec_router/group.yaml"))


def refuse_old_verl() -> None:
    """Raise a ConfigError for verl's main branch before 0.9.1: its requests do not wait for a weight sync."""
    if importlib.util.find_spec("verl.workers.rollout.router") is None:
        raise ConfigError("this verl has no verl.workers.rollout.router: take verl 0.9.1 or later")
