"""Noise that is a function of (key, position, index) and of nothing else: no state, any order, any device.

The bits are SplitMix64's (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014;
the generator of Java's SplittableRandom), whose i-th output is a mix of seed + i x gamma and needs none of
those before. The request's key seeds one whose outputs, one for each position, seed those that the words of
a row come from. SplitMix64 passes TestU01's BigCrush; what dieharder says of these words is in
benchmarks/record/noise.md. It takes a quarter of the tensor operations of a Philox, each of which is a launch
on an accelerator.

Words are int64 and every device gives the same bits: sums and products are meant to wrap, and `check` says
whether a device's arithmetic does. Operations, views and copies apart, all of which torch_npu has: add,
arange, bitwise_and, bitwise_xor, clamp, irshift, log1p, mul, neg, sub.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_WORD = 0xFFFFFFFF
# The constants of SplitMix64, of 64 bits without a sign; int64 holds them less 2**64.
_GAMMA = 0x9E3779B97F4A7C15
_SHIFTS_AND_MULTIPLIERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
_LARGEST_UNIFORM = 1 - 2**-24  # the largest float32 below 1
# So few are drawn on the host: elsewhere each operation is a launch, and on a CPU torch's take longer.
HOST_WORDS = 1 << 14


def make_key(*parts: int | str | bool) -> int:
    """A 63-bit noise key from whatever names a request: the same parts, the same key, in any process.

    Args:
        parts: told apart by type as well, so "1" and 1 are different parts.
    """
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def splitmix(seeds: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The outputs of SplitMix64 with such numbers, counted from 1: int64, 64 bits each.

    Args:
        seeds, numbers: int64, broadcast against each other.
    """
    words = seeds + numbers * (_GAMMA - 2**64)
    shifted = torch.empty_like(words)  # one for all: new memory costs more than what is done with it
    for shift, multiplier in _SHIFTS_AND_MULTIPLIERS:
        _xor_shift(words, shift, shifted).mul_(multiplier - 2**64)
    return _xor_shift(words, _LAST_SHIFT, shifted)


def _xor_shift(words: torch.Tensor, shift: int, shifted: torch.Tensor) -> torch.Tensor:
    """words ^= words >> shift, with zeros shifted in."""
    shifted.copy_(words)
    shifted >>= shift
    return words.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1))


def check(device: torch.device) -> None:
    """Compute a known answer, one that implementations of SplitMix64 are tested with, and round as the host.

    Raises:
        RuntimeError: the device's int64 arithmetic does not give it, or other float32 numbers of its words.
    """
    seed = torch.tensor([1234567], device=device)
    word = splitmix(seed, torch.tensor([5], device=device)).item() % 2**64
    if word != 16408922859458223821:
        raise RuntimeError(
            f"rollout_spec: int64 arithmetic on {device} gives {word} for a known answer of SplitMix64; "
            "set rollout.spec.verify=standard"
        )
    words = np.array([0, 1, 2**24 + 1, 2**24 + 3, 2**31 + 129, 2**32 - 1])
    expected = _minus_uniform(words.astype(np.float32))
    numbers = _minus_uniform(torch.from_numpy(words).to(device).to(torch.float32)).cpu().numpy()
    if (numbers != expected).any():
        raise RuntimeError(
            f"rollout_spec: {device} rounds int64 to float32 otherwise than the host, so steps of different "
            "sizes would have different noise; set rollout.spec.verify=standard"
        )


def row_seeds(keys: npt.ArrayLike, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """What a row's noise is drawn from, [n]: of its key's SplitMix64 the output with its position's number.

    On the host: elsewhere each operation on so few numbers is a launch, and on a CPU torch's take longer.

    Args:
        keys: int64 [n], not negative.
        positions: int64 [n], not negative, counted from 0.
    """
    return _host_splitmix(np.asarray(keys, np.int64), np.asarray(positions, np.int64) + 1).view(np.int64)


def _host_splitmix(seeds: npt.NDArray[np.int64], numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """`splitmix` on the host."""
    words = (seeds + numbers * (_GAMMA - 2**64)).view(np.uint64)
    for shift, multiplier in _SHIFTS_AND_MULTIPLIERS:
        words ^= words >> shift
        words *= multiplier
    words ^= words >> _LAST_SHIFT
    return words


def random_words(seeds: npt.NDArray[np.int64], num: int, device: torch.device) -> torch.Tensor:
    """Words of 32 random bits.

    Args:
        seeds: int64 [n], of `row_seeds`, on the host.
        num: how many for each row.
        device: where the words are to be.

    Returns:
        int64 [n, num]; element i depends on the row's seed and on i, not on n or num.
    """
    numbers = torch.arange(1, num + 1, device=device)
    words = splitmix(torch.from_numpy(seeds).to(device).unsqueeze(-1), numbers)
    words >>= 32
    return words.bitwise_and_(_WORD)


def exponential(seeds: npt.NDArray[np.int64], num: int, device: torch.device) -> torch.Tensor:
    """Exp(1) noise, float32 [n, num], of `random_words` with the same arguments.

    Values are finite and positive, from 2**-33 to 16.6; the small ones, which win races, are the finest: one
    word's 2**-32 apart. Up to HOST_WORDS values come from the host, the same bits as a larger step's: all
    before the logarithm is exact or rounded as IEEE 754 says (`check`).
    """
    if len(seeds) * num > HOST_WORDS:
        uniform = _minus_uniform(random_words(seeds, num, device).to(torch.float32))
        uniform.clamp_(min=-_LARGEST_UNIFORM)
    else:
        words = _host_splitmix(seeds[:, np.newaxis], np.arange(1, num + 1)) >> 32
        uniform = np.maximum(_minus_uniform(words.astype(np.float32)), np.float32(-_LARGEST_UNIFORM))
        uniform = torch.from_numpy(uniform).to(device)
    return uniform.log1p_().neg_()


def _minus_uniform(words: Any) -> Any:
    """Half a word more than 0, of 2**32; float32, of numpy or torch, in place."""
    words *= -(2.0**-32)
    words -= 2.0**-33
    return words
