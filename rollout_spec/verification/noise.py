"""Noise that is a function of (key, position, index) and of nothing else: no state, any order, any device.

The bits are SplitMix64's (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014;
the generator of Java's SplittableRandom). Its i-th output is a mix of seed + i x gamma and needs none of
those before. A request's key seeds one generator. Its outputs, one for each position, seed the generators
that the words of a row come from. SplitMix64 passes TestU01's BigCrush; lab/record/verify.md has what
dieharder says of these words.

Words are int64, and every device gives the same bits: sums and products are meant to wrap. `check` finds a
device where they do not.
"""

import hashlib

import numpy as np
import numpy.typing as npt
import torch

from rollout_spec.verification.transfers import to_device

# The constants of SplitMix64, of 64 bits without a sign; int64 holds them less 2**64.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_SHIFTS_AND_MULTIPLIERS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
_LAST_SHIFT = 31
# Devices that get their noise from the host: NPUs shift int64 on a slow core (triton-ascend#472).
SHIFTS_SLOWLY = ("npu",)
_HOST = torch.device("cpu")
_LARGEST_UNIFORM = 1 - 2**-24  # the largest float32 below 1


def make_key(*parts: int | str | bool) -> int:
    """A 63-bit noise key from whatever names a request: the same parts, the same key, in any process. Parts
    are told apart by type as well, such as "1" and 1."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def row_seeds(keys: npt.ArrayLike, positions: npt.ArrayLike) -> torch.Tensor:
    """The seed of each row's noise, int64 [n], on the host: on an accelerator each operation on so few
    numbers would be a launch.

    keys: int64 [n], not negative (`make_key`).
    positions: int64 [n], not negative: the token's place in its sequence, prompt included.
    """
    return seeds_at(*(torch.from_numpy(np.asarray(each, np.int64)) for each in (keys, positions)))


def seeds_at(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`row_seeds` of int64 tensors on any device, for positions that the host does not know yet."""
    return splitmix(keys, positions + 1)


def exponential(seeds: torch.Tensor, num: int, device: torch.device) -> torch.Tensor:
    """Exp(1) noise, float32 [n, num], of `random_words` with the same arguments.

    Values are finite and positive, from 2**-33 to 16.6. The small ones, which win races, are the finest: one
    word's 2**-32 apart.
    """
    if device.type in SHIFTS_SLOWLY:
        return to_device(exponential(seeds, num, _HOST), device)
    minus_uniform = random_words(seeds, num, device).to(torch.float32).mul_(-(2.0**-32)).sub_(2.0**-33)
    return minus_uniform.clamp_(min=-_LARGEST_UNIFORM).log1p_().neg_()


def random_words(seeds: torch.Tensor, num: int, device: torch.device) -> torch.Tensor:
    """Words of 32 random bits on a device, int64 [n, num], of seeds, int64 [n]. Word i of a row depends on
    the row's seed and on i, not on n or num."""
    words = splitmix(to_device(seeds, device).unsqueeze(-1), torch.arange(1, num + 1, device=device))
    words >>= 32
    return words.bitwise_and_(0xFFFFFFFF)


def splitmix(seeds: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The outputs of SplitMix64 with such numbers, counted from 1: 64 bits each. Both arguments are
    int64, broadcast against each other."""
    words = seeds + numbers * _GAMMA
    shifted = torch.empty_like(words)  # one for all: new memory costs more than what is done with it
    for shift, multiplier in _SHIFTS_AND_MULTIPLIERS:
        _xor_shift(words, shift, shifted).mul_(multiplier)
    return _xor_shift(words, _LAST_SHIFT, shifted)


def _xor_shift(words: torch.Tensor, shift: int, shifted: torch.Tensor) -> torch.Tensor:
    """words ^= words >> shift, with zeros shifted in."""
    shifted.copy_(words)
    shifted >>= shift
    return words.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1))


def check(device: torch.device) -> None:
    """Compute a known answer, one that implementations of SplitMix64 are tested with.

    Raises RuntimeError: the device's int64 arithmetic does not give it.
    """
    device = _HOST if device.type in SHIFTS_SLOWLY else device
    seed = torch.tensor([1234567], device=device)
    word = splitmix(seed, torch.tensor([5], device=device)).item() % 2**64
    if word != 16408922859458223821:
        raise RuntimeError(
            f"rollout_spec: int64 arithmetic on {device} gives {word} for a known answer of SplitMix64; "
            "take rollout.spec=off"
        )
