"""What is to be trained: clients' local work as a flat list of jobs, and the order in which to do it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedlaw._random import hashed


@dataclass(frozen=True)
class LocalWork:
    """What every client does with a model it is sent: E epochs of mini-batch SGD (Algorithm 1 of the paper).

    psi <- psi - lr * grad of the mean cross-entropy over each batch in turn, starting from psi = theta; the last
    batch of an epoch may be smaller than the others and is kept.

    Settings:
        epochs: passes over the client's data.
        batch_size: examples in a batch.
        lr: learning rate alpha.
        loss_point: where the reported loss is taken, over the client's full data: ``"after"`` at psi, as
            Algorithm 1 returns it, or ``"before"`` at theta, as the weight step is written.

    Reference: *Byzantine-Robust Federated Learning with Learnable Aggregation Weights*, ICLR 2026.

    >>> LocalWork(epochs=1, lr=0.02)
    LocalWork(epochs=1, batch_size=64, lr=0.02, loss_point='after')
    """

    epochs: int = 3
    batch_size: int = 64
    lr: float = 0.01
    loss_point: Literal["before", "after"] = "after"

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"lr must be a positive number, got {self.lr!r}")
        if self.loss_point not in ("before", "after"):
            raise ValueError(f"loss_point must be 'before' or 'after', got {self.loss_point!r}")


@dataclass(frozen=True, eq=False)
class Jobs:
    """C local trainings, of any number of clients, models and experiments, in one flat list.

    Attributes:
        start: (C,) the row of the parameters (R, d) that each job starts from.
        order: (C, epochs, L) for every epoch the job's examples, as indices into the pool, in the order in which
            they are visited; from position ``sizes`` on, padding (-1).
        sizes: (C,) number of examples of each job, at least 1.

    Two experiments of one shape, each with its own model, train together by `Jobs.stack`:

    >>> order = torch.tensor([[[0, 1, 2]], [[3, 4, -1]]])
    >>> one = Jobs(torch.tensor([0, 0]), order, torch.tensor([3, 2]))
    >>> Jobs.stack([one, one], rows=[1, 1]).start
    tensor([0, 0, 1, 1])
    """

    start: Tensor
    order: Tensor
    sizes: Tensor

    def __post_init__(self) -> None:
        if self.order.ndim != 3 or not self.start.shape == self.sizes.shape == self.order.shape[:1]:
            raise ValueError(
                f"jobs need start (C,), order (C, epochs, L), sizes (C,); got {tuple(self.start.shape)}, "
                f"{tuple(self.order.shape)}, {tuple(self.sizes.shape)}"
            )
        for name in ("start", "order", "sizes"):
            if getattr(self, name).dtype != torch.int64:
                raise ValueError(f"jobs.{name} must be int64, got {getattr(self, name).dtype}")
        if len(self) == 0:
            return
        least, most = self.sizes.min().item(), self.sizes.max().item()
        if least < 1:
            job = int(self.sizes.argmin())
            raise ValueError(f"job {job} has {least} examples; leave out clients that have no data")
        if most > self.order.shape[-1]:
            raise ValueError(f"jobs.sizes go up to {most}, but jobs.order holds {self.order.shape[-1]} a job")
        filled = torch.arange(self.order.shape[-1], device=self.order.device) < self.sizes[:, None, None]
        if bool((filled & (self.order < 0)).any()):
            raise ValueError("jobs.order has padding (negative indices) before the end of a job's examples")

    def __len__(self) -> int:
        return len(self.sizes)

    @staticmethod
    def stack(parts: Sequence[Jobs], rows: Sequence[int]) -> Jobs:
        """The jobs of all `parts`, part i starting from the next ``rows[i]`` rows of the stacked parameters."""
        longest = max(part.order.shape[-1] for part in parts)
        starts, orders, offset = [], [], 0
        for part, count in zip(parts, rows, strict=True):
            starts.append(part.start + offset)
            pad = longest - part.order.shape[-1]
            orders.append(torch.nn.functional.pad(part.order, (0, pad), value=-1))
            offset += count
        return Jobs(torch.cat(starts), torch.cat(orders), torch.cat([part.sizes for part in parts]))


class Trained(NamedTuple):
    """What C jobs come back with.

    Attributes:
        updates: (C, d) pseudo-gradients (theta - psi) / lr.
        losses: (C,) mean cross-entropy over each job's full data, at theta or at psi.
    """

    updates: Tensor
    losses: Tensor


def shuffled(index: Tensor, sizes: Tensor, epochs: int, keys: Tensor) -> Tensor:
    """A fresh order of every client's examples for every epoch: (n, epochs, L), padded with -1.

    Each client's orders follow from its key alone: they do not depend on how far `index` is padded, on who trains
    beside whom, in what chunks or on which device.

    Args:
        index: (n, L) each client's examples, indices into the pool; anything after the client's size.
        sizes: (n,) number of examples of each client.
        epochs: orders per client.
        keys: (n,) int64, what each client's orders are drawn from (`fedlaw._random.client_keys`).

    >>> index = torch.tensor([[0, 1, 2], [3, 4, -1]])
    >>> shuffled(index, torch.tensor([3, 2]), 2, torch.tensor([5, 6])).tolist()
    [[[2, 0, 1], [2, 1, 0]], [[3, 4, -1], [3, 4, -1]]]
    """
    n, length = index.shape
    place = torch.arange(length, device=index.device)
    epoch = torch.arange(epochs, device=index.device).unsqueeze(-1)
    drawn = hashed(keys[:, None, None], (epoch << 40) + place)
    filled = (place < sizes[:, None]).unsqueeze(1)
    position = drawn.masked_fill_(~filled, (1 << 63) - 1).argsort(dim=-1, stable=True)
    order = index.unsqueeze(1).expand(n, epochs, length).gather(-1, position)
    return order.masked_fill_(~filled, -1)


class Run(NamedTuple):
    """One SGD step of a chunk's jobs lo..hi-1 on positions at..at+width-1 of their order."""

    lo: int
    hi: int
    at: int
    width: int


def schedule(sizes: Sequence[int], batch_size: int, multiple: int, together: bool) -> list[Run]:
    """The steps of one epoch for a chunk of jobs of these sizes.

    The last batch of a job is padded up to a `multiple` (never past `batch_size`), a width that the job's own
    size determines: what is computed for a job never depends on its neighbours. Neighbours of equal width step
    together, unless `together` is off.

    >>> schedule([10, 10, 7], batch_size=4, multiple=2, together=True)
    [Run(lo=0, hi=3, at=0, width=4), Run(lo=0, hi=3, at=4, width=4), Run(lo=0, hi=2, at=8, width=2)]
    """
    runs = []
    for at in range(0, max(sizes), batch_size):
        widths = [min(batch_size, -(-(size - at) // multiple) * multiple) for size in sizes]
        lo = 0
        for width, members in groupby(widths):
            hi = lo + len(list(members))
            if width > 0 and together:
                runs.append(Run(lo, hi, at, width))
            elif width > 0:
                runs += [Run(job, job + 1, at, width) for job in range(lo, hi)]
            lo = hi
    return runs


def visited(size: int, batch_size: int, multiple: int) -> int:
    """Positions that `schedule` visits for a job of that size: its examples and the padding of the last batch.

    >>> [visited(size, batch_size=4, multiple=2) for size in (4, 5, 7)]
    [4, 6, 8]
    """
    full, rest = divmod(size, batch_size)
    return full * batch_size + min(batch_size, -(-rest // multiple) * multiple)


def shares(sizes: Tensor, length: int, batch_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What the example at each position counts in the mean over its batch, and over its job: (k, length) each.

    >>> shares(torch.tensor([3]), length=4, batch_size=2, dtype=torch.float32)
    (tensor([[0.5000, 0.5000, 1.0000, 0.0000]]), tensor([[0.3333, 0.3333, 0.3333, 0.0000]]))
    """
    position = torch.arange(length, device=sizes.device)
    filled = position < sizes[:, None]
    batch_count = (sizes[:, None] - position // batch_size * batch_size).clamp(1, batch_size)
    return filled / batch_count.to(dtype), filled / sizes[:, None].to(dtype)
