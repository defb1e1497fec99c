"""What several attacks share: checks of settings, statistics that are always defined, draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedlaw._linalg import column_blocks
from fedlaw.attacks.base import View


def check_number(
    setting: str, value: Any, *, low: float = -math.inf, high: float = math.inf, open_low: bool = False
) -> None:
    """Refuse what is not a finite number from `low` to `high` (above `low` if `open_low`)."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if number and low <= value <= high and not (open_low and value == low):
        return
    bounds = [f"above {low:g}" if open_low else f"at least {low:g}"] if low > -math.inf else []
    bounds += [f"at most {high:g}"] if high < math.inf else []
    raise ValueError(
        f"{setting} must be a finite number {' and '.join(bounds)}".rstrip() + f", got {value!r}"
    )


def check_integer(setting: str, value: Any, *, low: int) -> None:
    """Refuse what is not an integer of `low` or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{setting} must be an integer of at least {low}, got {value!r}")


def check_choice(setting: str, value: Any, choices: Sequence[Any]) -> None:
    """Refuse what is not one of `choices`."""
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        raise ValueError(f"{setting} must be one of {', '.join(map(repr, choices))}, got {value!r}")


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
