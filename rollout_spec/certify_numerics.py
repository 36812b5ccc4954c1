"""What a certificate judges by: how wrong logits must have been, and whether two samplers are alike."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from rollout_spec import keyed

FALSE_ALARM_RATE = 1e-6  # of all tests of two samplers together


def explain(
    logits: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    key: int,
    position: int,
    token_ids: Sequence[int],
) -> float:
    """How wrong the logits must have been for each of the tokens to be drawn.

    Args:
        logits: float32 [vocab_size], the target's, before temperature, top-k and top-p.
        token_ids: the tokens that were drawn; -1, no token at all, has no explanation.

    Returns:
        The largest of their shortfalls (`keyed.shortfall`) in units of logit / temperature + noise; for a
        token that top-k or top-p excludes, by how many logits / temperature it misses that boundary.
    """
    if min(token_ids) < 0:
        return math.inf
    if not temperature:
        return max(float(logits.max() - logits[token]) for token in token_ids)
    logits = logits / temperature
    kept, distances = _boundaries(logits, top_k, top_p)
    masked = torch.where(kept, logits, -torch.inf).unsqueeze(0)
    shortfalls = [
        float(keyed.shortfall(masked, *(torch.tensor([x]) for x in (key, position, token))))
        if kept[token]
        else float(distances[token])
        for token in token_ids
    ]
    return max(shortfalls)


def _boundaries(logits: torch.Tensor, top_k: int, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens top-k and top-p leave, and how far each of the others is from being left."""
    order = logits.argsort(descending=True)
    sorted_logits = logits.double()[order]
    distances = torch.zeros(len(logits), dtype=torch.float64)
    if top_k > 0:
        distances[order] = (sorted_logits[min(top_k, len(logits)) - 1] - sorted_logits).clamp(min=0)
        sorted_logits = torch.where(distances[order] > 0, -torch.inf, sorted_logits)
    beyond = torch.zeros_like(distances)
    if top_p < 1.0:
        before = sorted_logits.softmax(0).cumsum(0) - sorted_logits.softmax(0)
        # Lower by so much, the logits of the tokens before it would have left it.
        beyond[order] = (torch.logit(before.clamp(0, 1)) - math.log(top_p / (1.0 - top_p))).clamp(min=0)
    return (distances == 0) & (beyond == 0), torch.maximum(distances, beyond)


def p_values(one: list[list[int]], other: list[list[int]]) -> list[float]:
    """A chi-square test of homogeneity for each position but the first; rare tokens are one class.

    Args:
        one, other: samples of as many tokens each, from two samplers.
    """
    values = []
    for columns in islice(zip(zip(*one, strict=True), zip(*other, strict=True), strict=True), 1, None):
        counts = [Counter(column) for column in columns]
        common = [token for token, count in (counts[0] + counts[1]).items() if count >= 20]
        rows = [[*(count[token] for token in common)] for count in counts]
        table = np.array([[*row, len(one) - sum(row)] for row in rows])
        table = table[:, table.sum(axis=0) > 0]
        if table.shape[1] > 1:
            values.append(_chi_square(table))
    return values


def _chi_square(table: np.ndarray[Any, Any]) -> float:
    """The p-value of homogeneity: two rows of counts, no column empty."""
    expected = table.sum(axis=1, keepdims=True) * table.sum(axis=0) / table.sum()
    statistic = ((table - expected) ** 2 / expected).sum()
    degrees = torch.tensor(table.shape[1] - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees / 2, torch.tensor(statistic / 2)))
