"""What a certificate judges by: how wrong logits must have been."""

import math
from collections.abc import Callable, Sequence
from itertools import combinations

import torch

from rollout_spec.verification import coupled

Shortfall = Callable[..., torch.Tensor]
NUM_MOVABLE = 6  # in float32 hardly two tokens are that near to a boundary; in bfloat16 there may be more


def rounding(dtype: str, logits: torch.Tensor, temperature: float) -> float:
    """The gap up to which bfloat16 and float16 explain a difference.

    The logits themselves are rounded, each by up to half the dtype's epsilon times its size, so that two of
    them change places within an epsilon of the largest; once more as much for what was rounded on the way to
    them. The temperature divides it.
    """
    epsilon = torch.finfo(getattr(torch, dtype)).eps
    return 2 * epsilon * float(logits[logits.isfinite()].abs().max()) / (temperature or 1.0)


def explain(
    logits: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    key: int,
    position: int,
    token_ids: Sequence[int],
    tolerance: float,
    shortfall: Shortfall = coupled.shortfall,
) -> float:
    """How wrong the logits must have been for each of the tokens to be drawn.

    Args:
        logits: float32 [vocab_size], the target's, before temperature, top-k and top-p.
        token_ids: the tokens that were drawn; -1, no token at all, has no explanation, nor has any token of
            logits that are not all numbers.
        tolerance: tokens that are less than that from a boundary of top-k or top-p may be on its other side.
        shortfall: of the model runner's noise.

    Returns:
        The largest of their gaps, in units of logit / temperature + noise. A token's is its shortfall
        (`coupled.shortfall`) among the tokens that top-k and top-p leave, or, where that is less, among those
        they would leave if some of the NUM_MOVABLE tokens nearest to a boundary were on its other side, or
        the distance to that boundary if it is more.
    """
    if min(token_ids) < 0 or bool(logits.isnan().any()):
        return math.inf
    if not temperature:
        return max(float(logits.max() - logits[token]) for token in token_ids)
    logits = logits / temperature
    kept, distances = _boundaries(logits, top_k, top_p)
    near = [token for token in distances.argsort()[:NUM_MOVABLE].tolist() if distances[token] < tolerance]
    moves = [list(moved) for number in range(len(near) + 1) for moved in combinations(near, number)]

    def gap(token: int, moved: list[int]) -> float:
        left = kept.clone()
        left[moved] = ~left[moved]
        left[token] = True
        crossed = distances[left != kept]
        masked = torch.where(left, logits, -torch.inf).unsqueeze(0)
        missed = shortfall(masked, *(torch.tensor([x]) for x in (key, position, token)))
        return max(float(missed), float(crossed.max()) if len(crossed) else 0.0)

    return max(min(gap(token, moved) for moved in moves) for token in token_ids)


def _boundaries(logits: torch.Tensor, top_k: int, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens top-k and top-p leave, and how far each is from the other side; inf: there is none."""
    order = logits.argsort(descending=True)
    ranked = logits.double()[order]
    kept = torch.ones(len(logits), dtype=torch.bool)
    distances = torch.full_like(ranked, torch.inf)
    if 0 < top_k < len(logits):
        kept = ranked >= ranked[top_k - 1]
        # Where several are equal at the boundary, more than top_k are left, and each could be one too many.
        distances = torch.where(kept, ranked - ranked[top_k], ranked[top_k - 1] - ranked)
    if top_p < 1.0:
        shares = ranked.masked_fill(~kept, -torch.inf).softmax(0)
        # By how much the logits of the tokens before a token must fall or rise for it to change sides.
        ahead = torch.logit((shares.cumsum(0) - shares).clamp(0, 1)) - math.log(top_p / (1.0 - top_p))
        # What top-k leaves out could take the place of the last that it leaves.
        ahead = torch.where(kept, ahead, ahead[kept].max())
        outside = torch.where(kept, ahead, torch.maximum(distances, ahead))
        distances = torch.where(kept & (ahead < 0), torch.minimum(distances, -ahead), outside)
        kept = kept & (ahead < 0)
    found = torch.empty_like(kept), torch.empty_like(distances)
    found[0][order], found[1][order] = kept, distances
    return found
