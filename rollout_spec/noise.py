"""Noise that is a function of (key, position, index) and of nothing else: no state, any order, any device.

The bits are Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC
2011; constants and known answers as in Random123), the generator that torch, JAX and cuRAND use too; it
passes TestU01's BigCrush. The 128-bit counter holds the index (in units of 4) and the position, the key is
the request's.

Words are int64 and every device gives the same bits. A product of two words takes up to 64 bits and is meant
to wrap; `check` says whether a device's arithmetic does. Operations, views and copies apart, all of which
torch_npu has: add, arange, bitwise_and, bitwise_xor, clamp, flip, log1p, mul, neg, rshift, stack.
"""

from __future__ import annotations

import functools
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
        int64 [..., 4], words of 32 bits.
    """
    multipliers, weyl, word, half = _constants(_MULTIPLIERS, counter.dim(), counter.device)
    even, odd = counter[0::2], counter[1::2]
    for round_key in (key + weyl).bitwise_and_(word):
        product = (even * multipliers).flip(0)
        even = (product >> half).bitwise_xor_(odd).bitwise_xor_(round_key).bitwise_and_(word)
        odd = product  # its lower word counts: the upper one goes with the mask
    (first, third), (second, fourth) = even, odd & word
    return torch.stack([first, second, third, fourth], dim=-1)


@functools.cache
def _constants(
    multipliers: tuple[int, int], dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The multipliers, what each round adds to the key, the mask and the shift: moved to the device once."""
    shape = (2,) + (1,) * (dim - 1)
    added = torch.tensor([[i * word for word in _WEYL] for i in range(_NUM_ROUNDS)], device=device)
    word, half = (torch.tensor(value, device=device) for value in (_WORD, 32))
    return torch.tensor(multipliers, device=device).view(shape), added.view(-1, *shape), word, half


def check(device: torch.device) -> None:
    """Compute one of Random123's known answers.

    Raises:
        RuntimeError: the device's int64 arithmetic does not give it.
    """
    one = torch.full((1,), _WORD, device=device)
    words = philox(one.expand(4, 1), one.expand(2, 1))[0].tolist()
    if words != [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]:
        raise RuntimeError(
            f"rollout_spec: int64 arithmetic on {device} gives {words} for a known answer of Philox4x32-10; "
            "set rollout.spec.verify=standard"
        )


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
    return philox(counter, key).flatten(-2)[:, :num]


def exponential(keys: torch.Tensor, positions: torch.Tensor, num: int) -> torch.Tensor:
    """Exp(1) noise, float32 [n, num], of `random_words` with the same arguments.

    Values are finite and positive, from 2**-33 to 16.6; the small ones, which win races, are the finest: one
    word's 2**-32 apart.
    """
    minus_uniform = random_words(keys, positions, num).to(torch.float32).add_(0.5).mul_(-(2.0**-32))
    return minus_uniform.clamp_(min=-_LARGEST_UNIFORM).log1p_().neg_()
