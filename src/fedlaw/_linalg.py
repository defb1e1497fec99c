"""Linear algebra that rules, server and attacks share. All of it on (..., n, d), in column blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 20  # of one float64 column block: 8 MiB, so that temporaries stay small
GRAM_ELEMENTS = 1 << 18  # of a block of a Gram product on a CPU: 2 MiB in float64, which stays in cache
DEVICE_ELEMENTS = 1 << 24  # the same on an accelerator, where few large products are faster
_SORT_COLUMNS = 2048  # of a block sorted on a CPU: with 200 rows 1.6 MiB in float32, which stays in cache
_SORT_ELEMENTS = 1 << 26  # of a block sorted on an accelerator


def column_blocks(x: Tensor, elements: int = BLOCK_ELEMENTS) -> Iterator[Tensor]:
    """Views of x (..., n, d) with all rows and at most `elements` elements each (one column at least)."""
    rows = max(1, x[..., :1].numel())
    yield from torch.split(x, max(1, elements // rows), dim=-1)


def _matching_blocks(v: Tensor, x: Tensor, elements: int = BLOCK_ELEMENTS) -> Iterator[Tensor]:
    """The columns of v (..., d) that go with each of `column_blocks(x, elements)`, as (..., 1, columns)."""
    rows = max(1, x[..., :1].numel())
    yield from torch.split(v.unsqueeze(-2), max(1, elements // rows), dim=-1)


def row_norms(x: Tensor) -> Tensor:
    """Euclidean norms (..., n) of the rows of x (..., n, d); infinite where the square leaves the type's range
    (float32: norms above 1.8e19)."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return norms


def gram(x: Tensor, *, center: bool = False, origin: Tensor | None = None) -> Tensor:
    """X X^T (..., n, n) in float64, of the rows of x (..., n, d) less their mean if `center`, less `origin`
    (..., d) if given.

    Products are formed and summed in float64, block of columns by block, so that a difference of rows far
    smaller than the rows themselves survives; nothing of size (n, d) is made.
    """
    n, half = x.shape[-2], x.shape[-2] // 2
    elements = GRAM_ELEMENTS if x.device.type == "cpu" else DEVICE_ELEMENTS
    # The product is symmetric: its upper rows and its lower right corner are three quarters of the work.
    upper = x.new_zeros((*x.shape[:-2], half, n), dtype=torch.float64)
    corner = x.new_zeros((*x.shape[:-2], n - half, n - half), dtype=torch.float64)
    origins = None if origin is None else _matching_blocks(origin, x, elements)
    for block in column_blocks(x, elements):
        wide = block.to(torch.float64)
        if center:
            wide = wide - wide.mean(dim=-2, keepdim=True)
        if origins is not None:
            wide = wide - next(origins)
        upper += wide[..., :half, :] @ wide.mT
        corner += wide[..., half:, :] @ wide[..., half:, :].mT
    lower = torch.cat([upper[..., half:].mT, corner], dim=-1)
    return torch.cat([upper, lower], dim=-2)


def centered_gram(x: Tensor) -> Tensor:
    """(X - 1 c^T)(X - 1 c^T)^T (..., n, n) in float64, c the mean of the rows clipped to their median norm.

    For what does not depend on the origin (distances, covariances). Subtracting c removes what all rows
    share. The plain mean would do that too, but one row of norm 1e18 would carry it away, and with it every
    digit in which the other rows differ; c stays among the rows.
    """
    norms = row_norms(x)
    factors = clip_factors(norms, median(norms).unsqueeze(-1)) / x.shape[-2]
    return gram(x, origin=weighted_sum(factors, x))


def pairwise_sq_distances(x: Tensor) -> Tensor:
    """Squared distances (..., n, n), float64, between the rows of x (..., n, d); zero diagonal, symmetric.

    One centred Gram product: |x_i - x_j|^2 = K_ii + K_jj - 2 K_ij. Centring removes what all rows share, and
    float64 what is left of cancellation: a distance is right to about 1e-8 of the larger of the two rows' own
    distances from the centre.
    """
    k = centered_gram(x)
    k = (k + k.mT) / 2  # to the bit, so that equal scores are equal and ties fall to the lowest index
    diagonal = k.diagonal(dim1=-2, dim2=-1)
    squared = (diagonal.unsqueeze(-1) + diagonal.unsqueeze(-2) - 2 * k).clamp_(min=0)
    squared.diagonal(dim1=-2, dim2=-1).zero_()
    return squared


def weighted_sum(weights: Tensor, x: Tensor) -> Tensor:
    """sum_i w_i x_i (..., d) of the rows of x (..., n, d) with weights (..., n)."""
    return (weights.to(x.dtype).unsqueeze(-2) @ x).squeeze(-2)


def clip_factors(norms: Tensor, radius: Tensor | float) -> Tensor:
    """min(1, radius / norm): what each row is multiplied by to be clipped to `radius`; 1 for a zero row."""
    radius = torch.as_tensor(radius, dtype=norms.dtype, device=norms.device)
    return torch.where(norms > radius, radius / norms, torch.ones_like(norms))


def distances_to(x: Tensor, point: Tensor) -> Tensor:
    """|x_i - point| (..., n), float64, for the rows of x (..., n, d) and one point (..., d).

    Differences are taken before squaring, so rows close to the point keep their digits; only one block of
    them exists at a time.
    """
    total = x.new_zeros(x.shape[:-1], dtype=torch.float64)
    for block, part in zip(column_blocks(x), _matching_blocks(point, x), strict=True):
        total += row_norms(block - part).to(torch.float64).square()
    return total.sqrt()


def row_products(x: Tensor, v: Tensor) -> Tensor:
    """x_i . v (..., n), float64, for the rows of x (..., n, d) and a vector v (..., d)."""
    total = x.new_zeros(x.shape[:-1], dtype=torch.float64)
    for block, part in zip(column_blocks(x), _matching_blocks(v, x), strict=True):
        total += (block.to(torch.float64) @ part.to(torch.float64).mT).squeeze(-1)
    return total


def median(values: Tensor) -> Tensor:
    """Median (...) over the last axis of `values` (..., n); of an even number the mean of the middle two."""
    n = values.shape[-1]
    ordered = values.sort(dim=-1).values
    return (ordered[..., (n - 1) // 2] + ordered[..., n // 2]) / 2


def reduce_sorted_columns(x: Tensor, reduce: Callable[[Any], Any], *, rows: Tensor | None = None) -> Tensor:
    """reduce(each column of x (..., n, d) in ascending order): (..., d).

    `reduce` maps sorted columns (c, n) to (c,), elementwise in c; it is given NumPy arrays for a CPU and
    tensors for an accelerator, so it may use only what the two share. `rows` (..., m) takes part of the rows,
    by index.

    On a CPU, narrow blocks are transposed and sorted in cache, one thread each: several times faster than
    sorting along the strided axis. Memory beyond the input: the blocks being sorted.
    """
    lead, (n, d) = x.shape[:-2], x.shape[-2:]
    flat = x.reshape(-1, n, d)
    chosen = None if rows is None else rows.reshape(-1, rows.shape[-1])
    out = x.new_empty((flat.shape[0], d))
    if x.device.type != "cpu":
        for b in range(flat.shape[0]):
            for start in range(0, d, max(1, _SORT_ELEMENTS // max(1, n))):
                stop = start + max(1, _SORT_ELEMENTS // max(1, n))
                block = flat[b, :, start:stop] if chosen is None else flat[b, chosen[b], start:stop]
                out[b, start:stop] = reduce(block.mT.sort(dim=-1).values)
        return out.reshape(*lead, d)

    # NumPy has no bfloat16, and sorts half precision slowly: such blocks are widened one by one.
    narrow = x.dtype not in (torch.float32, torch.float64)

    def work(task: tuple[int, int]) -> None:
        b, start = task
        block = flat[b, :, start : start + _SORT_COLUMNS]
        array = (block.float() if narrow else block).detach().numpy()
        columns = np.ascontiguousarray((array if chosen is None else array[chosen[b].numpy()]).T)
        columns = columns.copy() if np.shares_memory(columns, array) else columns
        columns.sort(axis=-1)
        out[b, start : start + _SORT_COLUMNS] = torch.from_numpy(np.asarray(reduce(columns)))

    tasks = [(b, start) for b in range(flat.shape[0]) for start in range(0, d, _SORT_COLUMNS)]
    threads = min(torch.get_num_threads(), len(tasks))
    if threads <= 1:
        for task in tasks:
            work(task)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, tasks))
    return out.reshape(*lead, d)


def scatter_weights(indices: Tensor, n: int, like: Tensor) -> Tensor:
    """Weights (..., n) that average the rows with `indices` (..., m), distinct; dtype and device of `like`."""
    weights = torch.zeros((*indices.shape[:-1], n), dtype=like.dtype, device=like.device)
    return weights.scatter_(-1, indices, 1.0 / indices.shape[-1])
