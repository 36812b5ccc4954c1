"""A response that ends in a loop: easy to draft for, so the demo reports how many there are."""

from __future__ import annotations

from collections.abc import Sequence


def is_looping(
    token_ids: Sequence[int], max_period: int = 32, min_repeats: int = 4, min_tokens: int = 24
) -> bool:
    """True when the text ends in one n-gram repeated without a break.

    Args:
        token_ids: the response.
        max_period: the longest n-gram looked for.
        min_repeats: how many times in a row it must stand at the end.
        min_tokens: and how many tokens the repetitions must cover together, which keeps
            short runs of one token ("----") from counting.
    """
    num_tokens = len(token_ids)
    for period in range(1, max_period + 1):
        covered = max(period * min_repeats, min_tokens)
        if covered > num_tokens:
            continue
        if all(token_ids[-i] == token_ids[-i - period] for i in range(1, covered - period + 1)):
            return True
    return False
