"""Linear algebra that rules, server and attacks share. All of it on (..., n, d), in column blocks.

On a CPU large inputs are cut into pieces by their shape alone and the pieces done by `_threads.each`: results do
not depend on the number of threads, and nothing of size (n, d) is made. An accelerator is handed operations as few
and as large as memory allows, and is waited for only where the next step depends on what was found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlaw._gram import CLOSE, DEVICE_ELEMENTS, digits_to_spare
from fedlaw._gram import gram as gram
from fedlaw._gram import on_cpu as on_cpu
from fedlaw._threads import each

BLOCK_ELEMENTS = 1 << 20  # of one float64 column block: 8 MiB, so that temporaries stay small
_LARGE = 1 << 17  # elements from which a matrix on a CPU is cut into pieces
_COLUMNS = 1 << 15  # of a piece of a product with one vector: long enough to stream, short enough to share
_NORM_COLUMNS = 1 << 14  # of a piece of a row whose float32 sum of squares keeps 1e-7
_EQUAL = 2.0**-46  # squared distance over squared lengths that float64 cannot tell from zero
_ROWS = 25  # of a piece that is read row by row
_TILE_ROWS, _TILE_COLUMNS = 16, 1 << 16  # of differences from one point: 4 MiB in float32
_SORT_COLUMNS = 1 << 10  # of a block sorted on a CPU: with 200 rows 800 KiB in float32, which stays in cache
_SORT_ROWS = 40  # transposed at a time: their cache lines are not evicted before they are used up
_CACHED_ELEMENTS = 1 << 23  # of products that are summed up while they are in an accelerator's cache


def block_columns(x: Tensor, elements: int = BLOCK_ELEMENTS) -> int:
    """Columns (one at least) of a block of x (..., n, d) with all rows: of `elements` elements on a CPU, of as many
    as memory allows on an accelerator."""
    return max(1, (elements if on_cpu(x) else DEVICE_ELEMENTS) // max(1, x[..., :1].numel()))


def column_blocks(x: Tensor, elements: int = BLOCK_ELEMENTS) -> Iterator[Tensor]:
    """Views of x (..., n, d) with all rows and `block_columns` columns each."""
    yield from torch.split(x, block_columns(x, elements), dim=-1)


def _by_expansion(x: Tensor) -> bool:
    return x.numel() >= _LARGE and not (x.requires_grad and torch.is_grad_enabled())


def _in_pieces(x: Tensor) -> bool:
    return on_cpu(x) and _by_expansion(x)


def row_norms(x: Tensor) -> Tensor:
    """Euclidean norms (..., n) of the rows of x (..., n, d); infinite where the square leaves the type's range
    (float32: norms above 1.8e19)."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return norms


def centered_gram(x: Tensor) -> Tensor:
    """(X - 1 c^T)(X - 1 c^T)^T (..., n, n) in float64, c the mean of the rows clipped to their median norm.

    For what does not depend on the origin (distances, covariances). Subtracting c removes what all rows
    share. The plain mean would do that too, but one row of norm 1e18 would carry it away, and with it every
    digit in which the other rows differ; c stays among the rows. Where the product has digits to spare, c is zero.
    """
    if digits_to_spare(x):
        return gram(x)
    norms = row_norms(x)
    factors = clip_factors(norms, median(norms).unsqueeze(-1)) / x.shape[-2]
    return gram(x, origin=weighted_sum(factors, x))


def pairwise_sq_distances(x: Tensor) -> Tensor:
    """Squared distances (..., n, n), float64, between the rows of x (..., n, d); zero diagonal, symmetric.

    One centred Gram product: |x_i - x_j|^2 = K_ii + K_jj - 2 K_ij. Centring removes what all rows share, and
    float64 (for close pairs at least, see `gram`) what is left of cancellation; without centring, what rounding
    leaves of equal rows is made zero.
    """
    k = centered_gram(x)
    diagonal = k.diagonal(dim1=-2, dim2=-1).clone()
    lengths = diagonal.unsqueeze(-1) + diagonal.unsqueeze(-2)
    squared = k.mul_(-2).add_(lengths)
    squared = squared * (squared > lengths * _EQUAL) if digits_to_spare(x) else squared.clamp_(min=0)
    # To the bit, so that equal scores are equal and ties fall to the lowest index.
    squared = torch.minimum(squared, squared.mT)
    squared.diagonal(dim1=-2, dim2=-1).zero_()
    return squared


def weighted_sum(weights: Tensor, x: Tensor) -> Tensor:
    """sum_i w_i x_i (..., d) of the rows of x (..., n, d) with weights (..., n)."""
    return weighted_sums(weights.unsqueeze(-2), x).squeeze(-2)


def weighted_sums(weights: Tensor, x: Tensor) -> Tensor:
    """W X (..., m, d): m weighted sums of the rows of x (..., n, d), weights (..., m, n)."""
    weights = weights.to(x.dtype)
    if not _in_pieces(x):
        return weights @ x
    flat, d = x.reshape(-1, *x.shape[-2:]), x.shape[-1]
    each_weights = weights.expand(*x.shape[:-2], *weights.shape[-2:]).reshape(-1, *weights.shape[-2:])
    m = weights.shape[-2]
    out = x.new_empty((len(flat), m, d))

    def piece(at: tuple[int, int]) -> None:
        b, start = at
        columns = flat[b, :, start : start + _COLUMNS]
        target = out[b, :, start : start + _COLUMNS]
        if m == 1:
            torch.mv(columns.mT, each_weights[b, 0], out=target[0])
        else:
            torch.mm(each_weights[b], columns, out=target)

    _run([(b, start) for b in range(len(flat)) for start in range(0, d, _COLUMNS)], piece)
    return out.reshape(*x.shape[:-2], m, d)


def _run(places: list[Any], piece: Callable[[Any], None]) -> None:
    for _ in each(places, lambda: piece):
        pass


def clip_factors(norms: Tensor, radius: Tensor | float) -> Tensor:
    """min(1, radius / norm): what each row is multiplied by to be clipped to `radius`; 1 for a zero row."""
    radius = torch.as_tensor(radius, dtype=norms.dtype, device=norms.device)
    return torch.where(norms > radius, radius / norms, torch.ones_like(norms))


def distances_to(x: Tensor, point: Tensor, *, squares: Tensor | None = None) -> Tensor:
    """|x_i - point| (..., n), float64, for the rows of x (..., n, d) and one point (..., d).

    Differences are taken before squaring, so rows close to the point keep their digits; only one tile of them
    exists at a time. Of a large x only rows closer than 1/16 of |x_i|^2 + |point|^2 are done that way, the others
    by |x_i|^2 - 2 x_i . point + |point|^2, which is faster. `squares` (..., n) are the |x_i|^2 of `row_squares`,
    for who asks again and again; without them an accelerator takes all differences, and is not waited for.
    """
    if not _by_expansion(x) or (squares is None and not on_cpu(x)):
        total = torch.zeros(x.shape[:-1], dtype=torch.float64, device=x.device)
        parts = torch.split(point.unsqueeze(-2), block_columns(x), dim=-1)
        for block, part in zip(column_blocks(x), parts, strict=True):
            total += row_norms(block - part).to(torch.float64).square()
        return total.sqrt()
    squares = row_squares(x) if squares is None else squares
    length = torch.linalg.vector_norm(point, dim=-1, keepdim=True, dtype=torch.float64).square()
    squared = squares - 2 * row_products(x, point) + length
    near = ~(squared >= CLOSE * (squares + length)).reshape(-1, x.shape[-2])
    if bool(near.any()):
        flat = x.reshape(-1, *x.shape[-2:])
        points = point.expand(x[..., 0, :].shape).reshape(-1, x.shape[-1])
        found = squared.reshape(near.shape)
        for b in near.any(-1).nonzero().flatten().tolist():
            rows = near[b].nonzero().flatten()
            found[b, rows] = sq_differences(flat[b], points[b], rows)
        squared = found.reshape(squared.shape)
    distances: Tensor = squared.sqrt()
    return distances


def sq_differences(x: Tensor, point: Tensor, rows: Tensor, factors: Tensor | None = None) -> Tensor:
    """|a_i x_i - point|^2 (m,), float64, for rows of x (n, d) given by index (m,), with factors a (m,) or without:
    a tile of differences at a time."""
    d = x.shape[-1]
    rows_at_once = _TILE_ROWS if on_cpu(x) else len(rows)
    width = min(_TILE_COLUMNS if on_cpu(x) else max(1, DEVICE_ELEMENTS // max(1, len(rows))), max(1, d))

    def make() -> Callable[[slice], Tensor]:
        tile = x.new_empty(rows_at_once * width)

        def of(places: slice) -> Tensor:
            some = rows[places]
            total = torch.zeros(len(some), dtype=torch.float64, device=x.device)
            for start in range(0, d, width):
                part = point[start : start + width]
                difference = tile[: len(some) * len(part)].view(len(some), -1)
                torch.index_select(x[:, start : start + len(part)], 0, some, out=difference)
                if factors is not None:
                    difference *= factors[places].unsqueeze(-1)
                difference -= part
                total += row_norms(difference).to(torch.float64).square()
            return total

        return of

    tiles = [slice(first, first + rows_at_once) for first in range(0, len(rows), rows_at_once)]
    return torch.cat(list(each(tiles, make)))


def row_squares(x: Tensor) -> Tensor:
    """|x_i|^2 (..., n), float64, of the rows of x (..., n, d): of tiles of columns, summed in float64 (a norm of a
    million float32 entries in one go is 1e-5 off). An accelerator adds up tiles by itself."""
    if not on_cpu(x):
        return row_norms(x).to(torch.float64).square()
    total = torch.zeros(x.shape[:-1], dtype=torch.float64, device=x.device)
    for block in torch.split(x, _NORM_COLUMNS, dim=-1):
        total += row_norms(block).to(torch.float64).square()
    return total


def row_products(x: Tensor, v: Tensor) -> Tensor:
    """x_i . v (..., n), float64, for the rows of x (..., n, d) and a vector v (..., d).

    Formed in x's own type with v / |v|, so that no product leaves its range, and added up in float64.
    """
    length = torch.linalg.vector_norm(v, dim=-1, keepdim=True, dtype=torch.float64)
    unit = (v / length.clamp(min=torch.finfo(torch.float64).tiny)).to(x.dtype)
    if not on_cpu(x):
        products = torch.mv(x, unit) if x.ndim == 2 else (x @ unit.unsqueeze(-1)).squeeze(-1)
        return products.to(torch.float64).mul_(length)
    total = torch.zeros(x.shape[:-1], dtype=torch.float64)
    if _in_pieces(x):
        flat, units = x.reshape(-1, *x.shape[-2:]), unit.expand(x[..., 0, :].shape).reshape(-1, x.shape[-1])
        sums = total.reshape(-1, x.shape[-2])

        def rows(at: tuple[int, int]) -> None:
            b, first = at
            some = flat[b, first : first + _ROWS]
            for start in range(0, x.shape[-1], _TILE_COLUMNS):
                columns = slice(start, start + _TILE_COLUMNS)
                sums[b, first : first + _ROWS] += torch.mv(some[:, columns], units[b, columns])

        _run([(b, first) for b in range(len(flat)) for first in range(0, x.shape[-2], _ROWS)], rows)
        return total.mul_(length)
    parts = torch.split(unit.unsqueeze(-2), _COLUMNS, dim=-1)
    for block, part in zip(torch.split(x, _COLUMNS, dim=-1), parts, strict=True):
        total += (block @ part.mT).squeeze(-1)
    return total.mul_(length)


def paired_products(x: Tensor, y: Tensor) -> Tensor:
    """x_i . y_i (m,), float64, for the rows of x (m, d) and of y (m, d), without an (m, d) temporary."""
    if not on_cpu(x):
        # A few rows at a time: their products are summed up before they leave the cache.
        step = max(1, _CACHED_ELEMENTS // max(1, x.shape[-1]))
        sums = [(a * b).sum(-1) for a, b in zip(torch.split(x, step), torch.split(y, step), strict=True)]
        return torch.cat(sums).to(torch.float64)
    pairs = list(zip(x, y, strict=True))
    some = [pairs[i : i + _ROWS] for i in range(0, len(pairs), _ROWS)]
    # Row by row: a batched product of single rows is several times slower than reading them.
    dots = each(some, lambda: lambda group: [torch.dot(a, b) for a, b in group])
    return torch.stack([dot for group in dots for dot in group]).to(torch.float64)


def median(values: Tensor) -> Tensor:
    """Median (...) over the last axis of `values` (..., n); of an even number the mean of the middle two."""
    n = values.shape[-1]
    ordered = values.sort(dim=-1).values
    return (ordered[..., (n - 1) // 2] + ordered[..., n // 2]) / 2


def reduce_sorted_columns(
    x: Tensor, reduce: Callable[[Tensor], Tensor], *, rows: Tensor | None = None
) -> Tensor:
    """reduce(each column of x (..., n, d) in ascending order): (..., d).

    `reduce` maps sorted columns (c, n) to (c,), column by column. `rows` (..., m) takes part of the rows, by index.

    On a CPU, narrow blocks are transposed and sorted in cache, by NumPy, whose sort is vectorised: several times
    faster than sorting along the strided axis. Memory beyond the input: the blocks being sorted.
    """
    lead, (n, d) = x.shape[:-2], x.shape[-2:]
    flat = x.reshape(-1, n, d)
    chosen = None if rows is None else rows.reshape(-1, rows.shape[-1])
    out = x.new_empty((flat.shape[0], d))
    here = on_cpu(x)
    width = _SORT_COLUMNS if here else block_columns(flat[:1])
    places = [(b, start) for b in range(flat.shape[0]) for start in range(0, d, width)]

    def taken(b: int, start: int) -> Tensor:
        block = flat[b, :, start : start + width]
        return block if chosen is None else block.index_select(0, chosen[b])

    if not here:
        for b, start in places:
            out[b, start : start + width] = reduce(taken(b, start).mT.sort(dim=-1).values)
        return out.reshape(*lead, d)

    # NumPy has no bfloat16, and sorts half precision slowly: such blocks are widened.
    dtype = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
    arrays = flat.detach().numpy() if x.dtype == dtype else None

    def make() -> Callable[[tuple[int, int]], None]:
        buffer = torch.empty((min(width, d), n if chosen is None else chosen.shape[-1]), dtype=dtype)

        def block(at: tuple[int, int]) -> None:
            b, start = at
            columns = buffer[: min(width, d - start)]
            array = columns.numpy()
            if chosen is None and arrays is not None:
                block_rows = arrays[b, :, start : start + width]
            else:
                block_rows = taken(b, start).detach().to(dtype).numpy()
            for first in range(0, array.shape[-1], _SORT_ROWS):
                some = slice(first, first + _SORT_ROWS)
                np.copyto(array[:, some], block_rows[some].T)
            array.sort(axis=-1)
            out[b, start : start + width] = reduce(columns)

        return block

    for _ in each(places, make):
        pass
    return out.reshape(*lead, d)


def scatter_weights(indices: Tensor, n: int, like: Tensor) -> Tensor:
    """Weights (..., n) that average the rows with `indices` (..., m), distinct; dtype and device of `like`."""
    weights = torch.zeros((*indices.shape[:-1], n), dtype=like.dtype, device=like.device)
    return weights.scatter_(-1, indices, 1.0 / indices.shape[-1])
