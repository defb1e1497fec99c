"""Who holds which training example: the paper's q-groups, Dirichlet, iid, shards, natural keys."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedlaw._registry import Registry


@dataclass(frozen=True, eq=False)
class Partition:
    """The training examples of every client.

    Attributes:
        indices: one sorted int64 array a client; together every example exactly once, none of them empty.
        groups: (n,) int64, the group of each client, where the partition has groups; else None.
    """

    indices: tuple[NDArray[np.int64], ...]
    groups: NDArray[np.int64] | None = None

    @property
    def counts(self) -> NDArray[np.int64]:
        """(n,) how many examples each client holds."""
        return np.array([len(own) for own in self.indices], np.int64)

    def __len__(self) -> int:
        return len(self.indices)


class _Task(NamedTuple):
    """What is to be divided, checked."""

    labels: NDArray[np.int64]
    clients: int
    classes: int
    keys: ArrayLike | None
    generator: np.random.Generator


class Partitioner(ABC):
    """A way to divide examples among clients. Subclasses are frozen dataclasses whose fields are the settings."""

    @abstractmethod
    def _owners(self, task: _Task) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """(N,) the client of each example, and the groups (n,) or None."""

    def __call__(
        self,
        labels: ArrayLike,
        clients: int,
        *,
        generator: np.random.Generator,
        classes: int | None = None,
        keys: ArrayLike | None = None,
    ) -> Partition:
        """Divide the examples with these `labels` (N,) among `clients`.

        Args:
            labels: (N,) integers in 0 .. classes-1, of the training examples.
            clients: how many; each gets at least one example.
            generator: the only source of randomness.
            classes: number of labels; without it the largest label decides.
            keys: (N,) for `natural`; the others do not look at it.
        """
        y = np.asarray(labels)
        if y.ndim != 1 or y.dtype.kind not in "iu" or not len(y) or y.min() < 0:
            raise ValueError(f"labels must be integers (N,) of at least 0, got {y.dtype} of shape {y.shape}")
        if isinstance(clients, bool) or not 1 <= clients <= len(y):
            raise ValueError(
                f"clients must lie between 1 and the number of training examples, {len(y)}, got {clients}"
            )
        classes = int(y.max()) + 1 if classes is None else classes
        if y.max() >= classes:
            raise ValueError(f"labels must lie below classes, {classes}, got {int(y.max())}")
        owners, groups = self._owners(_Task(y.astype(np.int64), int(clients), classes, keys, generator))
        return _partition(owners, int(clients), groups)


def _partition(owners: NDArray[np.int64], clients: int, groups: NDArray[np.int64] | None = None) -> Partition:
    order = np.argsort(owners, kind="stable")
    ends = np.cumsum(np.bincount(owners, minlength=clients))[:-1]
    return Partition(tuple(np.split(order.astype(np.int64), ends)), groups)


registry: Registry[Partitioner] = Registry("partition", "partitions")


@registry.register("q_groups")
@dataclass(frozen=True)
class QGroups(Partitioner):
    """The paper's partition: one group of clients per label, which gets that label's examples with probability q.

    An example of label l goes to group l with probability q and to each of the L - 1 others with probability
    (1 - q) / (L - 1); within its group, to a client drawn uniformly. q = 1/L is iid; q = 1 leaves every group
    with its label only. n clients form groups of n/L neighbours in roster order, sizes at most one apart. With
    fewer clients than labels, neighbouring groups share one client, and `groups` numbers the clients.

    A client left without any example is given one, drawn from the largest client of its group (of all, if the
    group has none to spare).

    Settings:
        q: probability of an example's own group, between 0 and 1.

    >>> labels = np.repeat(np.arange(10), 100)
    >>> parts = QGroups(q=0.9)(labels, 20, generator=np.random.default_rng(0))
    >>> parts.groups.tolist()[:4], int(parts.counts.sum())
    ([0, 0, 1, 1], 1000)

    Reference: Cao, Jia, Gong, "Provably Secure Federated Learning against Malicious Clients", AAAI 2021;
    FedLAW, ICLR 2026, with q = 0.6 and 0.9.
    """

    q: float = 0.6

    def __post_init__(self) -> None:
        if not 0 <= self.q <= 1:
            raise ValueError(f"q must lie between 0 and 1, got {self.q}")

    def _owners(self, task: _Task) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        labels, n, classes, generator = task.labels, task.clients, task.classes, task.generator
        total = len(labels)
        group = labels
        if classes > 1:
            other = generator.integers(0, classes - 1, total)
            other += other >= labels  # uniform over the groups that are not the label's own
            group = np.where(generator.random(total) < self.q, labels, other)
        place = generator.random(total)
        if n < classes:
            owners, groups = group * n // classes, np.arange(n)
        else:
            groups = np.arange(n) * classes // n
            first = np.searchsorted(groups, np.arange(classes + 1))
            size = np.diff(first)[group]
            owners = first[group] + np.minimum((place * size).astype(np.int64), size - 1)
        return _fill_empty(owners, n, groups, generator), groups


def _fill_empty(
    owners: NDArray[np.int64], clients: int, groups: NDArray[np.int64], generator: np.random.Generator
) -> NDArray[np.int64]:
    """Give every client without examples one of the largest client's of its group, or of all."""
    owners = owners.copy()
    counts = np.bincount(owners, minlength=clients)
    for empty in np.flatnonzero(counts == 0):
        spare = np.where(groups == groups[empty], counts, 0)
        donor = int(np.argmax(spare if spare.max() > 1 else counts))
        moved = generator.choice(np.flatnonzero(owners == donor))
        owners[moved] = empty
        counts[donor] -= 1
        counts[empty] += 1
    return owners


@registry.register("dirichlet")
@dataclass(frozen=True)
class Dirichlet(Partitioner):
    """Each label is divided among the clients in proportions drawn from a Dirichlet distribution.

    For each label, p ~ Dir(alpha, ..., alpha) over the n clients, and client i gets the share p_i of its
    examples. Small alpha: few labels a client, very unequal sizes; large alpha: iid. The whole draw is repeated
    until every client has `minimum` examples.

    Settings:
        alpha: concentration, above 0.
        minimum: fewest examples a client may have, at least 1.
        tries: draws before giving up with an error.

    >>> labels = np.repeat(np.arange(10), 100)
    >>> int(Dirichlet(alpha=1.0)(labels, 20, generator=np.random.default_rng(0)).counts.sum())
    1000

    Reference: Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", ICML 2019.
    """

    alpha: float = 0.5
    minimum: int = 1
    tries: int = 100

    def __post_init__(self) -> None:
        if not (0 < self.alpha < float("inf")):
            raise ValueError(f"alpha must be above 0 and finite, got {self.alpha}")
        if self.minimum < 1 or self.tries < 1:
            raise ValueError(f"minimum and tries must be at least 1, got {self.minimum} and {self.tries}")

    def _owners(self, task: _Task) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        labels, clients, classes, generator = task.labels, task.clients, task.classes, task.generator
        if clients * self.minimum > len(labels):
            raise ValueError(
                f"minimum {self.minimum} for {clients} clients needs {clients * self.minimum} examples, "
                f"there are {len(labels)}"
            )
        of_label = [np.flatnonzero(labels == label) for label in range(classes)]
        for _ in range(self.tries):
            owners = np.empty(len(labels), np.int64)
            for own in of_label:
                shares = generator.dirichlet(np.full(clients, self.alpha))
                ends = np.floor(np.cumsum(shares)[:-1] * len(own) + 0.5)
                owners[generator.permutation(own)] = np.searchsorted(ends, np.arange(len(own)), side="right")
            if np.bincount(owners, minlength=clients).min() >= self.minimum:
                return owners, None
        raise ValueError(
            f"alpha {self.alpha} left a client with fewer than {self.minimum} examples in each of {self.tries} "
            f"draws for {clients} clients; raise alpha, lower minimum or take fewer clients"
        )


@registry.register("iid")
@dataclass(frozen=True)
class IID(Partitioner):
    """Every client gets a random sample of the same size (at most one example more or less).

    >>> IID()(np.zeros(10, int), 4, generator=np.random.default_rng(0)).counts.tolist()
    [3, 3, 2, 2]
    """

    def _owners(self, task: _Task) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        total = len(task.labels)
        owners = np.empty(total, np.int64)
        owners[task.generator.permutation(total)] = np.arange(total) % task.clients
        return owners, None


@registry.register("shards")
@dataclass(frozen=True)
class Shards(Partitioner):
    """Examples sorted by label are cut into equal shards, and every client is dealt a few of them.

    Settings:
        per_client: shards a client is dealt; with 2, most clients hold two labels.

    >>> labels = np.repeat(np.arange(10), 100)
    >>> parts = Shards(per_client=2)(labels, 20, generator=np.random.default_rng(0))
    >>> max(len(np.unique(labels[own])) for own in parts.indices) <= 2
    True

    Reference: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
    AISTATS 2017.
    """

    per_client: int = 2

    def __post_init__(self) -> None:
        if self.per_client < 1:
            raise ValueError(f"per_client must be at least 1, got {self.per_client}")

    def _owners(self, task: _Task) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        labels, clients, generator = task.labels, task.clients, task.generator
        shards = clients * self.per_client
        if shards > len(labels):
            raise ValueError(
                f"per_client {self.per_client} for {clients} clients makes {shards} shards of {len(labels)} "
                "examples; lower per_client or take fewer clients"
            )
        shuffled = generator.permutation(len(labels))
        by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
        owner_of_shard = generator.permutation(shards) % clients
        owners = np.empty(len(labels), np.int64)
        owners[by_label] = owner_of_shard[np.arange(len(labels)) * shards // len(labels)]
        return owners, None


@registry.register("natural")
@dataclass(frozen=True)
class Natural(Partitioner):
    """Every client holds the examples of one key (a writer, a hospital), or of several.

    With as many clients as distinct keys, client i holds the i-th key in sorted order. With fewer, the keys are
    dealt to the clients in random order, as evenly as they go. The keys come with the data set
    (`from_arrays(..., keys=...)`).

    >>> keys = ["b", "a", "b", "c"]
    >>> parts = Natural()([0, 1, 0, 1], 3, generator=np.random.default_rng(0), keys=keys)
    >>> [own.tolist() for own in parts.indices]
    [[1], [0, 2], [3]]
    """

    def _owners(self, task: _Task) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        if task.keys is None:
            raise ValueError(
                "partition 'natural' needs keys: give the data set some (from_arrays(..., keys=...))"
            )
        found, key_of = np.unique(np.asarray(task.keys), return_inverse=True)
        if key_of.shape != task.labels.shape:
            raise ValueError(f"keys must have the shape of labels, {task.labels.shape}, got {key_of.shape}")
        if task.clients > len(found):
            raise ValueError(
                f"clients must be at most the number of keys, {len(found)}, for the partition 'natural', "
                f"got {task.clients}"
            )
        owner_of_key = np.arange(len(found))
        if task.clients < len(found):
            owner_of_key = task.generator.permutation(len(found)) % task.clients
        return owner_of_key[key_of], None


def partition(
    name: str,
    labels: ArrayLike,
    clients: int,
    *,
    generator: np.random.Generator,
    classes: int | None = None,
    keys: ArrayLike | None = None,
    **settings: Any,
) -> Partition:
    """Divide training examples among clients, by the name of the partition and its settings.

    >>> labels = np.repeat(np.arange(10), 30)
    >>> len(partition("q_groups", labels, 30, q=0.9, generator=np.random.default_rng(0)))
    30
    """
    chosen = registry.create(name, **settings)
    return chosen(labels, clients, generator=generator, classes=classes, keys=keys)
