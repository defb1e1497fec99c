"""Bucketing: means of small random groups, handed on in place of the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedlaw._checks import check_integer
from fedlaw._gram import DEVICE_ELEMENTS, on_cpu
from fedlaw._linalg import BLOCK_ELEMENTS
from fedlaw._threads import each
from fedlaw.aggregators.base import (
    IDENTICAL,
    SCALE,
    TRANSLATION,
    Aggregate,
    PreAggregator,
    State,
    registry,
    require_generator,
)


def _bucket_means(rows: Tensor, order: Tensor, size: int) -> Tensor:
    """Means (m, d) of rows[order], `size` at a time."""
    out = rows.new_empty((-(-len(order) // size), rows.shape[-1]))
    if not on_cpu(rows):  # as many buckets at once as memory allows; a last, smaller one by itself
        whole = len(order) // size
        step = max(1, DEVICE_ELEMENTS // max(1, size * rows.shape[-1]))
        for first in range(0, whole, step):
            means = out[first : min(first + step, whole)]
            some = rows.index_select(0, order[first * size : (first + len(means)) * size])
            torch.mean(some.view(len(means), size, -1), dim=1, out=means)
        if whole < len(out):
            torch.mean(rows.index_select(0, order[whole * size :]), dim=0, out=out[whole])
        return out

    def write(bucket: tuple[Tensor, Tensor]) -> None:
        # A bucket and a stretch of columns at a time: a permuted copy of all rows would double the memory.
        members, mean = bucket
        width = max(1, BLOCK_ELEMENTS // len(members))
        for start in range(0, rows.shape[-1], width):
            some = rows[:, start : start + width].index_select(0, members)
            torch.mean(some, dim=0, out=mean[start : start + width])

    for _ in each(list(zip(torch.split(order, size), out, strict=True)), lambda: write):
        pass
    return out


@registry.register("bucketing")
@dataclass(frozen=True)
class Bucketing(PreAggregator):
    """Means of random buckets of rows (a pre-aggregator).

    A fresh permutation every call; rows are taken `size` at a time and each bucket replaced by its mean, the
    last, smaller one divided by its true size: ceil(n / size) rows are handed on. Every row is in exactly one
    bucket. f malicious rows can spoil up to f buckets, so the rule that follows in a Chain keeps its f, cut
    to the largest that it allows for so many rows, with a warning. The mean in a bucket does not use counts;
    the bucket's count is the sum of its members' counts.

    Settings:
        size: rows per bucket; 1 only shuffles.

    >>> x = torch.tensor([[0.0], [1.0], [2.0]])
    >>> rows = Bucketing(size=2)(x, generator=torch.Generator().manual_seed(0)).vector
    >>> rows.shape
    torch.Size([2, 1])

    Reference: Karimireddy, He, Jaggi, *Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing*,
    ICLR 2022.
    """

    size: int = 2

    invariants: ClassVar[frozenset[str]] = frozenset({TRANSLATION, SCALE, IDENTICAL})

    def __post_init__(self) -> None:
        check_integer("size", self.size, 1)

    def rows(self, n: int) -> int:
        return -(-n // self.size)

    def carry_counts(self, counts: Tensor, weights: Tensor) -> Tensor:
        # A sum, not a product: accelerators multiply no integer matrices, and counts are integers.
        return ((weights > 0) * counts.unsqueeze(-2)).sum(-1)

    def __call__(
        self,
        updates: Tensor,
        *,
        counts: Tensor | None = None,
        state: State | None = None,
        generator: torch.Generator | None = None,
        reference: Tensor | None = None,
    ) -> Aggregate:
        n = self._require(updates)
        generator = require_generator(self, generator)
        m = self.rows(n)
        flat = updates.reshape(-1, n, updates.shape[-1])
        weights = updates.new_zeros((flat.shape[0], m, n))
        bucket = torch.arange(n, device=updates.device) // self.size
        means = []
        for b in range(flat.shape[0]):
            order = torch.randperm(n, generator=generator, device=generator.device).to(updates.device)
            weights[b, bucket, order] = 1.0
            means.append(_bucket_means(flat[b], order, self.size))
        weights /= weights.sum(-1, keepdim=True)
        lead = updates.shape[:-2]
        vector = means[0] if len(means) == 1 else torch.stack(means)
        return Aggregate(vector.reshape(*lead, m, -1), weights.reshape(*lead, m, n))
