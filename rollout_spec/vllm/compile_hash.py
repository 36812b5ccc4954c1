"""An engine's options of ours are no part of what torch.compile compiles."""

import copy
from typing import Any

from rollout_spec.patches import Patch, wrap
from rollout_spec.vllm.options import OPTIONS_KEY, asked_options

PATCH = Patch(
    name="vllm-compile-hash",
    reason="vLLM finds what it has compiled by a hash of additional_config too: when an option of ours "
    "changes, it would compile the policy again, for 30 to 120 seconds",
    upstream="vllm/config/vllm.py, VllmConfig.compute_hash",
    until="a plugin says which of its options change the graph",
)
MODULE = "vllm.config.vllm"


def fix(module: Any) -> None:
    @wrap(module.VllmConfig, "compute_hash", PATCH)
    def hash_others(compute_hash: Any, self: Any, *args: Any, **kwargs: Any) -> str:
        if asked_options(self.additional_config) is not None:
            others = {key: value for key, value in self.additional_config.items() if key != OPTIONS_KEY}
            self = copy.copy(self)
            self.additional_config = others
        found: str = compute_hash(self, *args, **kwargs)
        return found
