"""Linear algebra that rules, server and attacks share. All of it on (..., n, d), in column blocks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 20  # of one float64 column block: 8 MiB, so that temporaries stay small


def column_blocks(x: Tensor, elements: int = _BLOCK_ELEMENTS) -> Iterator[Tensor]:
    """Views of x (..., n, d) with all rows and at most `elements` elements each (one column at least)."""
    rows = max(1, x[..., :1].numel())
    yield from x.split(max(1, elements // rows), dim=-1)


def row_norms(x: Tensor) -> Tensor:
    """Euclidean norms (..., n) of the rows of x (..., n, d); no overflow short of the result's own."""
    return torch.linalg.vector_norm(x, dim=-1)


def gram(x: Tensor, *, center: bool = False) -> Tensor:
    """X X^T (..., n, n) in float64, of the rows of x (..., n, d) less their mean if `center`.

    Products are formed and summed in float64, block of columns by block, so that a difference of rows far
    smaller than the rows themselves survives; nothing of size (n, d) is made.
    """
    n = x.shape[-2]
    out = x.new_zeros((*x.shape[:-2], n, n), dtype=torch.float64)
    for block in column_blocks(x):
        wide = block.to(torch.float64)
        if center:
            wide = wide - wide.mean(dim=-2, keepdim=True)
        out += wide @ wide.mT
    return out


def pairwise_sq_distances(x: Tensor) -> Tensor:
    """Squared distances (..., n, n), float64, between the rows of x (..., n, d); zero diagonal, symmetric.

    One centred Gram product: |x_i - x_j|^2 = K_ii + K_jj - 2 K_ij. Centring removes what all rows share, and
    float64 what is left of cancellation: distances are right to about 1e-8 of the largest centred row.
    """
    k = gram(x, center=True)
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
