"""Random streams keyed by what they are for, so that no draw can shift another."""

from __future__ import annotations

import hashlib

import torch


def generator(
    seed: int, round: int, phase: int, purpose: str, device: torch.device | str = "cpu"
) -> torch.Generator:
    """A generator of its own for each (seed, round, phase, purpose).

    The four are hashed (BLAKE2b, 64 bits) into the seed of a new generator. What is drawn for one purpose
    therefore never depends on whether, when or how much was drawn for another: a run resumed at round 57, or
    with one attack more, sees the same shuffles.

    Args:
        seed: the run's seed.
        round: model update, from 1; 0 for what is drawn before the first.
        phase: exchange within the round, from 1; 0 where it does not matter.
        purpose: a word for what is drawn, such as ``"shuffle"``.
        device: where the generator draws. The same key gives different numbers on different kinds of device.

    >>> a, b = generator(0, 1, 1, "shuffle"), generator(0, 1, 2, "shuffle")
    >>> a.initial_seed() == generator(0, 1, 1, "shuffle").initial_seed(), a.initial_seed() == b.initial_seed()
    (True, False)
    """
    key = repr((int(seed), int(round), int(phase), str(purpose))).encode()
    digest = hashlib.blake2b(key, digest_size=8).digest()
    made = torch.Generator(device=device)
    made.manual_seed(int.from_bytes(digest, "little") >> 1)  # 63 bits: every device's generator takes them
    return made
