"""Min-Max and Min-Sum: as far from the honest mean as the honest clients' own spread hides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedlaw._checks import check_choice
from fedlaw._linalg import column_blocks, gram
from fedlaw.attacks._common import honest_rows, mean_std, repeat
from fedlaw.attacks.base import Attack, Forged, View, registry


@dataclass(frozen=True)
class _Spread(Attack, ABC):
    """mu + gamma p with the largest gamma that a bound on distances to the honest rows allows."""

    direction: Literal["unit", "sign", "std"] = "unit"

    def __post_init__(self) -> None:
        check_choice("direction", self.direction, ("unit", "sign", "std"))

    def forge(self, view: View) -> Forged:
        rows = honest_rows(view)
        mean, std = mean_std(rows)
        if self.direction == "unit":
            length = torch.linalg.vector_norm(mean)
            p = -mean / torch.where(length > 0, length, torch.ones_like(length))
        else:
            p = -mean.sign() if self.direction == "sign" else -std
        products = gram(rows, center=True)  # (h, h) of x_i - mu
        size = p.double().square().sum()
        gamma = self._largest(products, _along(rows, p), size) if float(size) > 0 else size
        return Forged(repeat(mean + gamma.to(p.dtype) * p, view), view.own_losses)

    @staticmethod
    @abstractmethod
    def _largest(products: Tensor, along: Tensor, size: Tensor) -> Tensor:
        """Largest gamma, from (x_i - mu).(x_j - mu), (x_i - mu).p and |p|^2 > 0, all float64."""


@registry.register("min_max")
@dataclass(frozen=True)
class MinMax(_Spread):
    """Mean moved as far as no honest client is farther from it than two honest clients are apart.

    mu + gamma p, the largest gamma with max_i |mu + gamma p - x_i| <= max_ij |x_i - x_j| over honest clients.
    Each i allows gamma up to the root of a quadratic equation; the least of these roots is the answer, and
    exact, where the original searches by halving steps.

    Settings:
        direction: p: "unit" is -mu / |mu|, "sign" -sign(mu), "std" minus the standard deviation (ddof 0).

    Reference: Shejwalkar, Houmansadr, "Manipulating the Byzantine: optimizing model poisoning attacks and
    defenses for federated learning", NDSS 2021.

    >>> view = View(torch.tensor([[1.0], [3.0], [9.0]]), torch.ones(3), torch.tensor([False, False, True]),
    ...             torch.zeros(1))
    >>> MinMax().forge(view).updates.tolist()  # 2 from the farther one, which is 3
    [[1.0]]
    """

    @staticmethod
    def _largest(products: Tensor, along: Tensor, size: Tensor) -> Tensor:
        squares = products.diagonal()
        apart = squares[:, None] + squares[None, :] - 2 * products
        room = (apart.max() - squares).clamp(min=0)
        # |gamma p - (x_i - mu)|^2 <= D^2 is size gamma^2 - 2 along gamma - room <= 0; which form of its
        # larger root does not cancel depends on the sign of `along`.
        root = (along.square() + size * room).sqrt()
        below = torch.where(root > along, root - along, torch.ones_like(root))
        return torch.where(along >= 0, (along + root) / size, room / below).min()


@registry.register("min_sum")
@dataclass(frozen=True)
class MinSum(_Spread):
    """Mean moved as far as its squared distances to the honest clients add up to no more than theirs do.

    mu + gamma p, the largest gamma with sum_i |mu + gamma p - x_i|^2 <= max_i sum_j |x_i - x_j|^2 over honest
    clients. Both sides are sums around mu, and what is left of them is gamma = max_i |x_i - mu| / |p|.

    Settings:
        direction: as for `MinMax`.

    Reference: as for `MinMax`.

    >>> view = View(torch.tensor([[1.0], [3.0], [9.0]]), torch.ones(3), torch.tensor([False, False, True]),
    ...             torch.zeros(1))
    >>> MinSum().forge(view).updates.tolist()  # 1 + 1 is spent at the mean, 4 is allowed
    [[1.0]]
    """

    @staticmethod
    def _largest(products: Tensor, along: Tensor, size: Tensor) -> Tensor:
        return (products.diagonal().max() / size).sqrt()


def _along(rows: Tensor, p: Tensor) -> Tensor:
    """(h,) float64 products (x_i - mu).p, without a float64 copy of the rows."""
    out = rows.new_zeros(len(rows), dtype=torch.float64)
    for block, part in zip(
        column_blocks(rows), torch.split(p, next(column_blocks(rows)).shape[-1]), strict=True
    ):
        wide = block.double()
        out += (wide - wide.mean(dim=0)) @ part.double()
    return out
