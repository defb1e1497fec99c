"""Random streams by key, so that no draw depends on what was drawn before it."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

_GOLDEN, _MIX_A, _MIX_B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def generator(seed: int, *key: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator for the stream named by `seed` and `key`, for example (seed, round, phase, purpose).

    Streams of different keys are independent; the same key gives the same stream on every machine.

    >>> a = torch.rand(2, generator=generator(0, 3, "shuffle"))
    >>> bool((a == torch.rand(2, generator=generator(0, 3, "shuffle"))).all())
    True
    """
    return torch.Generator(device=device).manual_seed(_number(seed, key) >> 1)


def client_keys(n: int, seed: int, *key: int | str) -> Tensor:
    """(n,) int64: a key of its own for each of n clients, for draws that are made where the data lie (`hashed`).

    >>> client_keys(2, 0, 3, "shuffle").equal(client_keys(5, 0, 3, "shuffle")[:2])
    True
    """
    places = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return torch.from_numpy((places + np.uint64(_number(seed, key))).view(np.int64))


def hashed(keys: Tensor, counters: Tensor) -> Tensor:
    """Pseudo-random int64 from 0 to 2^63 - 1 for every key and counter, the same on every device.

    The finaliser of SplitMix64 on key + golden * counter, twice, keys and counters broadcast.

    Reference: Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014.

    >>> hashed(torch.tensor([1, 2]), torch.tensor([0, 0])).tolist()
    [6466913776677652822, 2766427728767297593]
    """
    mixed = _mix(keys + counters * _signed(_GOLDEN))
    return _mix(mixed.add_(keys)).bitwise_and_((1 << 63) - 1)


def _mix(x: Tensor) -> Tensor:
    """The finaliser, in int64 with logical shifts; `x` is used up."""
    for shift, factor in ((30, _MIX_A), (27, _MIX_B), (31, None)):
        x ^= (x >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        if factor is not None:
            x *= _signed(factor)
    return x


def _signed(value: int) -> int:
    """An unsigned 64-bit number as int64 holds it."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _number(seed: int, key: tuple[int | str, ...]) -> int:
    digest = hashlib.blake2b(repr((int(seed), *key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
