"""The patch by which our server and replay buffer are guarded."""

from rollout_spec.patches import Patch

PRIVATE_METHODS = Patch(
    name="verl-private-methods",
    reason="our server and replay buffer override methods that verl does not promise",
    upstream="verl/workers/rollout/vllm_rollout/vllm_async_server.py; verl/trainer/ppo/v1/replay_buffer.py",
    until="verl has public methods in their place",
)
