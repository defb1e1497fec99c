"""Random streams by key, so that no draw depends on what was drawn before it."""

from __future__ import annotations

import hashlib

import torch


def generator(seed: int, *key: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator for the stream named by `seed` and `key`, for example (seed, round, phase, purpose).

    Streams of different keys are independent; the same key gives the same stream on every machine.

    >>> a = torch.rand(2, generator=generator(0, 3, "shuffle"))
    >>> bool((a == torch.rand(2, generator=generator(0, 3, "shuffle"))).all())
    True
    """
    digest = hashlib.blake2b(repr((int(seed), *key)).encode(), digest_size=8).digest()
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest, "little") >> 1)
