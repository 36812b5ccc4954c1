"""The patch by which our server is guarded. `doctor` reads it where no server can be imported."""

from rollout_spec.patches import Patch

PRIVATE_METHODS = Patch(
    name="verl-private-methods",
    reason="our server overrides methods that verl does not promise",
    upstream="verl/workers/rollout/vllm_rollout/vllm_async_server.py, vLLMHttpServer",
    until="verl has public methods in their place",
)
