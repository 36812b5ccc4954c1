"""How wrong a logit must have been for MRV2 to draw another token; for `certify`."""

import torch
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.sample import gumbel

from rollout_spec.vllm.mrv2.signatures import HAS_SALT


def shortfall(
    logits: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """`coupled.shortfall` with MRV2's noise, of one row: how much the token's logit must rise to be drawn."""
    device = current_platform.device_type
    row, token = logits.to(device), int(token_ids)
    where = {"pos": positions.to(device) - 1, **({"is_drafting": False} if HAS_SALT else {})}
    fixed = [torch.zeros(1, dtype=torch.int32, device=device), torch.ones(1, device=device), keys.to(device)]

    def is_drawn(more: float) -> bool:
        raised = row.clone()
        raised[0, token] += more
        return int(gumbel.gumbel_sample(raised, *fixed, apply_temperature=False, **where)) == token

    low, high = 0.0, next((2.0**i for i in range(-10, 10) if is_drawn(2.0**i)), torch.inf)
    if is_drawn(low) or high == torch.inf:
        return torch.tensor([0.0 if is_drawn(low) else torch.inf])
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if is_drawn(middle) else (middle, high)
    return torch.tensor([high])
