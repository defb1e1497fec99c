"""Who attacks: whole label groups, as in the paper, random clients, or those listed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedlaw.data.partitioning import Partition


def malicious_count(clients: int, malicious: int | float) -> int:
    """How many of `clients` attack: an int is a count, a float a fraction, rounded down.

    >>> malicious_count(30, 0.4), malicious_count(30, 12), malicious_count(9, 0.25)
    (12, 12, 2)
    """
    if isinstance(malicious, bool):
        raise ValueError(f"malicious must be a count or a fraction, got {malicious!r}")
    if isinstance(malicious, float):
        if not 0 <= malicious <= 1:
            raise ValueError(f"malicious must be a fraction between 0 and 1 (or a count), got {malicious}")
        return math.floor(malicious * clients + 1e-9)  # 0.29 * 100 is 28.999999999999996
    if not 0 <= malicious <= clients:
        raise ValueError(f"malicious must be a count between 0 and {clients}, the clients, got {malicious}")
    return int(malicious)


def choose_malicious(
    partition: Partition,
    malicious: int | float = 0,
    *,
    how: str | Sequence[int] = "groups",
    generator: np.random.Generator | None = None,
) -> NDArray[np.bool_]:
    """(n,) bool: which clients attack.

    Args:
        partition: the clients' data.
        malicious: how many: a fraction (float, rounded down) or a count (int); not looked at when `how` lists
            the clients.
        how: "groups": attackers fill one group of the partition after the other, in random order, the last
            perhaps in part, and so hold most of what there is of their labels (the paper's choice, and the
            hardest one); "random": any; or a list of client numbers, from 0.
        generator: the source of randomness, for the first two.

    >>> from fedlaw.data import partition
    >>> rng = np.random.default_rng(0)
    >>> parts = partition("q_groups", np.repeat(np.arange(10), 30), 30, q=0.9, generator=rng)
    >>> attackers = choose_malicious(parts, 0.4, generator=rng)
    >>> int(attackers.sum()), len(np.unique(parts.groups[attackers]))
    (12, 4)

    Reference: FedLAW, ICLR 2026, appendix on data heterogeneity and malicious clients.
    """
    n = len(partition)
    mask = np.zeros(n, np.bool_)
    if not isinstance(how, str):
        ids = np.asarray(how)
        if ids.size and (ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= n):
            raise ValueError(f"how must list client numbers from 0 to {n - 1}, got {list(how)}")
        if len(np.unique(ids)) != ids.size:
            raise ValueError(f"how lists a client twice: {list(how)}")
        mask[ids.astype(np.int64)] = True
        return mask
    count = malicious_count(n, malicious)
    if how not in ("groups", "random"):
        raise ValueError(f"how must be 'groups', 'random' or a list of client numbers, got {how!r}")
    if count == 0:
        return mask
    if generator is None:
        raise ValueError(f"how={how!r} draws at random: it needs a generator")
    order = generator.permutation(n)
    if how == "groups":
        if partition.groups is None:
            raise ValueError(
                "how='groups' needs a partition with groups, such as 'q_groups'; use 'random' or a list"
            )
        names = np.unique(partition.groups)
        turn = generator.permutation(len(names))[np.searchsorted(names, partition.groups)]
        order = order[np.argsort(turn[order], kind="stable")]
    mask[order[:count]] = True
    return mask
