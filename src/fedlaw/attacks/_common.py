"""What several attacks share: checks of settings, statistics that are always defined, draws."""

from __future__ import annotations

import torch
from torch import Tensor

from fedlaw._linalg import column_blocks
from fedlaw.attacks.base import View


def honest_rows(view: View) -> Tensor:
    """The honest updates; where nobody is honest, all of them: statistics need something to be taken of."""
    honest = view.honest
    return view.updates[honest] if bool(honest.any()) else view.updates


def mean_std(x: Tensor, ddof: int = 0) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over the rows of x (n, d) or (n,); of too few rows for `ddof` it is zero."""
    if x.ndim == 1:
        mean, std = mean_std(x.unsqueeze(1), ddof)
        return mean[0], std[0]
    means, variances = [], []
    # On a CPU the second pass over a block finds it in the cache, which makes it eight times as fast.
    for block in column_blocks(x, 1 << 18 if x.device.type == "cpu" else max(1, x.numel())):
        mean = block.mean(dim=0)
        means.append(mean)
        variances.append((block - mean).square_().sum(dim=0) / max(1, len(x) - ddof))
    return torch.cat(means), torch.cat(variances).sqrt_()


def repeat(row: Tensor, view: View) -> Tensor:
    """The same row (d,) for each of the m malicious clients: (m, d)."""
    return row.to(view.updates.dtype).repeat(int(view.malicious.sum()), 1)


def normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers, drawn in float32 so that float64 runs see the same ones."""
    source = require_generator(generator)
    return torch.randn(shape, generator=source, device=like.device, dtype=torch.float32).to(like.dtype)


def require_generator(generator: torch.Generator | None) -> torch.Generator:
    """The generator; none is an error, since results must not hang on global state."""
    if generator is None:
        raise ValueError("this attack draws at random and got generator=None; give it a torch.Generator")
    return generator
