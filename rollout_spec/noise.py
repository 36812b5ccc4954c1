"""Noise that is a function of (key, position, index) and of nothing else: no state, any order, any device.

The bits are Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC
2011; constants and known answers as in Random123), the generator that torch, JAX and cuRAND use too; it
passes TestU01's BigCrush. The 128-bit counter holds the index (in units of 4) and the position, the key is
the request's.

Integers are int64 and never exceed 2**49, so nothing overflows and every device gives the same bits. Only
these operations are used, all of which torch_npu has: arange, add, mul, bitwise and/or/xor, shifts by a
scalar, stack, flip, to, clamp, log1p, neg.
"""

from __future__ import annotations

import hashlib

import torch

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # of counter words 0 and 2
_WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key words after each round
_NUM_ROUNDS = 10
_LARGEST_UNIFORM = 1 - 2**-24  # the largest float32 below 1


def make_key(*parts: int | str | bool) -> int:
    """A 63-bit noise key from whatever names a request: the same parts, the same key, in any process.

    Args:
        parts: told apart by type as well, so "1" and 1 are different parts.
    """
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def philox(counter: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Philox4x32-10.

    Args:
        counter: int64 [4, ...], words of 32 bits.
        key: int64 [2, ...], words of 32 bits; broadcast against a counter word.

    Returns:
        int64 [4, ...], words of 32 bits.
    """
    shape = (2,) + (1,) * (counter.dim() - 1)
    low = torch.tensor([m & 0xFFFF for m in _MULTIPLIERS], device=counter.device).view(shape)
    high = torch.tensor([m >> 16 for m in _MULTIPLIERS], device=counter.device).view(shape)
    weyl = torch.tensor(_WEYL, device=counter.device).view(shape)
    even, odd = counter[0::2], counter[1::2]
    for round_ in range(_NUM_ROUNDS):
        # The 64-bit product in two halves of 32 bits, by 16-bit limbs of the multiplier.
        part = even * low
        rest = even * high + (part >> 16)
        upper, lower = rest >> 16, ((rest & 0xFFFF) << 16) | (part & 0xFFFF)
        even, odd = upper.flip(0) ^ odd ^ ((key + weyl * round_) & _WORD), lower.flip(0)
    return torch.stack([even[0], odd[0], even[1], odd[1]])


def random_words(keys: torch.Tensor, positions: torch.Tensor, num: int) -> torch.Tensor:
    """Words of 32 random bits.

    Args:
        keys: int64 [n], not negative.
        positions: int64 [n], 0 to 2**32 - 1.
        num: how many for each row.

    Returns:
        int64 [n, num]; element i depends on the row's key and position and on i, not on n or num.
    """
    block = torch.arange((num + 3) // 4, device=keys.device).expand(keys.shape[0], -1)
    zero = torch.zeros_like(block)
    counter = torch.stack([block, positions.unsqueeze(-1).expand_as(block), zero, zero])
    key = torch.stack([keys & _WORD, keys >> 32]).unsqueeze(-1)
    return philox(counter, key).movedim(0, -1).flatten(-2)[:, :num]


def exponential(keys: torch.Tensor, positions: torch.Tensor, num: int) -> torch.Tensor:
    """Exp(1) noise, float32 [n, num], of `random_words` with the same arguments.

    Values are finite and positive, from 2**-33 to 16.6; the small ones, which win races, are the finest: one
    word's 2**-32 apart.
    """
    uniform = (random_words(keys, positions, num).to(torch.float32) + 0.5) * 2.0**-32
    return -torch.log1p(-uniform.clamp_(max=_LARGEST_UNIFORM))
