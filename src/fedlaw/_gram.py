"""Gram products of rows: fast where digits are to spare, in float64 where they are not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from fedlaw._threads import each

_EXACT_ELEMENTS = 1 << 18  # up to so many, float64 costs next to nothing
CLOSE = 2.0**-4  # squared distance over squared lengths under which float32 would lose too many digits
_RANGE = (1e-24, 1e30)  # of squared lengths that float32 products keep clear of underflow and overflow
_BLOCK_ELEMENTS = 1 << 19  # of one block of rows: 2 MiB in float32
_BLOCK_COLUMNS = (
    1 << 10,
    1 << 12,
)  # fewest and most columns of one: products are fast, float32 sums stay short
_TASK_COLUMNS = 1 << 15  # of what one thread does at a time
_STRIPS = 3  # of rows: the product is symmetric, and strips from the diagonal on are two thirds of it
DEVICE_ELEMENTS = 1 << 26  # of a block on an accelerator: few and large ones, for a bounded memory
_DEVICE_COLUMNS = 1 << 11  # of one product there: as many products at once as there are such stretches


def on_cpu(x: Tensor) -> bool:
    """Whether x lies on a CPU, where blocks are to stay in cache; an accelerator wants few and large ones."""
    return x.device.type == "cpu"


def gram(x: Tensor, *, center: bool = False, origin: Tensor | None = None) -> Tensor:
    """X X^T (..., n, n) in float64, of the rows of x (..., n, d) less their mean if `center`, less `origin`
    (..., d) if given; symmetric to the bit on a CPU.

    Block of columns by block, so that nothing of size (n, d) is made, and sums over blocks in float64. Products
    within a block are formed in float64 too, unless x is large, float32 and on a CPU: then they are formed in
    float32, and once more in float64 for the rows that are close to another one (|x_i - x_j|^2 less than 1/16 of
    |x_i|^2 + |x_j|^2, after the origin is subtracted) or of extreme length. So a squared distance
    K_ii + K_jj - 2 K_ij is right to about 1e-6 of itself wherever it lies, as the rows themselves are.
    """
    if center and not digits_to_spare(x):  # roughly here, so that no digits are lost; and exactly below
        origin = x.mean(dim=-2)
    flat = x.reshape(-1, *x.shape[-2:])
    about = None if origin is None else origin.reshape(len(flat), x.shape[-1])
    if not on_cpu(x):
        k = _on_device(flat, about)
    else:
        origins = [None] * len(flat) if about is None else about
        products = [_of_rows(rows, point) for rows, point in zip(flat, origins, strict=True)]
        k = torch.stack(products) if len(products) != 1 else products[0]
    k = k.reshape(*x.shape[:-1], x.shape[-2])
    if center:
        means = k.mean(dim=-1, keepdim=True)
        k = k - means - means.mT + means.mean(dim=-2, keepdim=True)
    return k


def digits_to_spare(x: Tensor) -> bool:
    """Whether `gram` forms float64 products of narrower numbers, as it does on an accelerator: what rows share then
    takes no digits that they had, and need not be subtracted first."""
    return not on_cpu(x) and x.dtype != torch.float64


def _of_rows(x: Tensor, origin: Tensor | None) -> Tensor:
    """The product for one x (n, d) on a CPU."""
    if x.dtype != torch.float32 or x.numel() <= _EXACT_ELEMENTS:
        return _product(x, origin, torch.float64)
    k = _product(x, origin, torch.float32)
    squares = k.diagonal()
    lengths = squares.unsqueeze(-1) + squares
    close = (lengths - 2 * k).fill_diagonal_(torch.inf) < lengths.mul_(CLOSE)
    members = close.any(-1) | ~((squares >= _RANGE[0]) & (squares <= _RANGE[1]))
    if bool(members.any()):
        rows = members.nonzero().flatten()
        k[rows.unsqueeze(-1), rows] = _product(x, origin, torch.float64, rows)
    return k


def _product(x: Tensor, origin: Tensor | None, dtype: torch.dtype, rows: Tensor | None = None) -> Tensor:
    """(n, n) float64, products formed in `dtype` within a block; of the given rows alone if any are given."""
    n, d = x.shape if rows is None else (len(rows), x.shape[-1])
    least, most = _BLOCK_COLUMNS
    width = min(max(_BLOCK_ELEMENTS // max(1, n), least), most, max(1, d))
    step = max(1, _TASK_COLUMNS // width) * width
    edges = [n * i // _STRIPS // 16 * 16 for i in range(_STRIPS)] + [n]
    strips = [(a, b) for a, b in pairwise(edges) if b > a]

    def make() -> Callable[[int], Tensor]:
        buffer = torch.empty((n, width), dtype=dtype)
        tiles = [torch.empty((b - a, n - a), dtype=dtype) for a, b in strips]

        def columns(first: int) -> Tensor:
            total = torch.zeros((n, n), dtype=torch.float64)
            for start in range(first, min(first + step, d), width):
                block = x[:, start : start + width]
                wide = buffer[:, : block.shape[-1]]
                if rows is None and origin is not None and x.dtype == dtype:
                    torch.sub(block, origin[start : start + width], out=wide)
                else:
                    wide.copy_(block if rows is None else block.index_select(0, rows))
                    if origin is not None:
                        wide -= origin[start : start + width]
                for (a, b), tile in zip(strips, tiles, strict=True):
                    total[a:b, a:] += torch.mm(wide[a:b], wide[a:].mT, out=tile)
            return total

        return columns

    k = torch.zeros((n, n), dtype=torch.float64)
    for part in each(range(0, d, step), make):
        k += part
    return k.triu_() + k.triu(1).mT


def _on_device(x: Tensor, origins: Tensor | None) -> Tensor:
    """The products (b, n, n) in float64 on an accelerator, of x (b, n, d) less origins (b, d).

    Every stretch of columns is a product of its own, all of a block at once: one product with few rows and a
    million columns would leave most of the accelerator idle. Where there are units for it, float64 is as fast as
    float32; and unlike float32 it does not depend on whether TF32 is allowed.
    """
    b, n, d = x.shape
    half = n // 2
    # The product is symmetric: its upper rows and its lower right corner are three quarters of the work.
    upper = x.new_zeros((b, half, n), dtype=torch.float64)
    corner = x.new_zeros((b, n - half, n - half), dtype=torch.float64)
    most = max(1, DEVICE_ELEMENTS // max(1, b * n * _DEVICE_COLUMNS)) * _DEVICE_COLUMNS
    for start in range(0, d, most):
        block = x[..., start : start + most]
        if origins is not None:
            block = block.to(torch.float64) - origins[:, start : start + most].unsqueeze(-2)
        wide = _stretches(block)
        parts, rows = wide.shape[1], wide.flatten(0, 1)
        upper += torch.bmm(rows[:, :half], rows.mT).view(b, parts, half, n).sum(1)
        corner += torch.bmm(rows[:, half:], rows[:, half:].mT).view(b, parts, n - half, n - half).sum(1)
    lower = torch.cat([upper[..., half:].mT, corner], dim=-1)
    return torch.cat([upper, lower], dim=-2)


def _stretches(x: Tensor) -> Tensor:
    """Columns of x (b, n, c) as (b, c / width, n, width) in float64, the last stretch filled up with zeros."""
    b, n, c = x.shape
    width = min(_DEVICE_COLUMNS, c)
    whole, rest = divmod(c, width)
    wide = x.new_empty((b, whole + (rest > 0), n, width), dtype=torch.float64)
    wide[:, :whole] = x[..., : whole * width].unflatten(-1, (whole, width)).transpose(1, 2)  # type: ignore[no-untyped-call]
    if rest:
        wide[:, whole, :, :rest] = x[..., whole * width :]
        wide[:, whole, :, rest:] = 0
    return wide
