"""What no reply may get past, and what a reply may be suspected of.

*Screening* refuses the malformed only: a reply that cannot be used at all. Norms, copies and outlying losses
are *evidence*: functions here measure them, a judge decides what they mean. Everything is a pure function over
(..., n) or (..., n, d), with reasons as integer codes, so that many experiments can be screened at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlaw._linalg import clip_factors, gram, row_norms, sq_differences

MAX_COUNT = 1e9  # example counts above this are absurd for any client
_MAD_TO_SIGMA = 1.48  # 1 / Phi^-1(3/4): the MAD of a normal variable times this is its standard deviation
_MAD_FLOOR = 1e-6
_POOL = 32  # entries summed for a bound on distances: the product of such sums costs 1/32 of that of the rows
_FEW = 2048  # entries of an update up to which all products cost less than looking at sums first
_ROUNDING = 1e-4  # of squared lengths: more than float32 can be off in them


class Reason(IntEnum):
    """Why a reply was refused; USABLE where it was not."""

    USABLE = 0
    NOT_ASKED = 1
    DUPLICATE = 2
    LATE = 3
    WRONG_TYPE = 4
    WRONG_DTYPE = 5
    WRONG_SHAPE = 6
    NOT_FINITE = 7
    LOSS_MISSING = 8
    LOSS_INVALID = 9
    COUNT_ABSURD = 10

    @property
    def words(self) -> str:
        """The reason in words."""
        return _WORDS[self]


_WORDS = {
    Reason.USABLE: "usable",
    Reason.NOT_ASKED: "client was not asked",
    Reason.DUPLICATE: "second reply in the same phase",
    Reason.LATE: "answers another round or phase",
    Reason.WRONG_TYPE: "update is not an array",
    Reason.WRONG_DTYPE: "update is not floating point",
    Reason.WRONG_SHAPE: "update has the wrong shape",
    Reason.NOT_FINITE: "update is not finite or overflows its own norm",
    Reason.LOSS_MISSING: "loss is missing",
    Reason.LOSS_INVALID: "loss is negative or not finite",
    Reason.COUNT_ABSURD: "example count is not a number from 1 to 1e9",
}


def screen(
    updates: Tensor,
    losses: Tensor | None,
    counts: Tensor | None,
    *,
    needs_loss: bool,
    norms: Tensor | None = None,
) -> Tensor:
    """Codes (..., m) of `Reason` for the rows of a block of replies.

    Args:
        updates: (..., m, d) floating point. A row passes if its norm is finite: an entry that is NaN or infinite
            fails, and so does a row so large that nothing can be computed with it.
        losses: (..., m) or None. Looked at only if `needs_loss`.
        counts: (..., m) or None (not told).
        needs_loss: whether a reply without a finite loss >= 0 is of no use.
        norms: (..., m) norms of the rows, where they are known.

    >>> screen(torch.tensor([[1.0, 2.0], [float("nan"), 0.0]]), None, None, needs_loss=False)
    tensor([0, 7])
    """
    norms = row_norms(updates) if norms is None else norms
    codes = torch.zeros(updates.shape[:-1], dtype=torch.int64, device=norms.device)

    def refuse(bad: Tensor, reason: Reason) -> None:
        nonlocal codes
        codes = torch.where((codes == 0) & bad, int(reason), codes)

    refuse(~torch.isfinite(norms), Reason.NOT_FINITE)
    if needs_loss:
        if losses is None:
            refuse(torch.ones_like(codes, dtype=torch.bool), Reason.LOSS_MISSING)
        else:
            refuse(~(torch.isfinite(losses) & (losses >= 0)), Reason.LOSS_INVALID)
    if counts is not None:
        refuse(~((counts >= 1) & (counts <= MAX_COUNT)), Reason.COUNT_ABSURD)
    return codes


def read_update(update: Any, dimension: int, *, like: Tensor) -> tuple[Reason, Tensor | None]:
    """An untrusted update as a (dimension,) tensor of `like`'s dtype and device, or the reason it is none.

    Dense tensors, numpy arrays and flat lists of numbers are read; integers, booleans, complex numbers, strings
    and anything that would have to be broadcast are refused, and so is whatever raises when it is looked at.
    Finiteness is `screen`'s business.

    >>> read_update([1, 2], 2, like=torch.zeros(2))[0].words
    'update is not floating point'
    """
    try:
        return _read_update(update, dimension, like)
    except Exception:  # an object made to raise is no better than one that is no array
        return Reason.WRONG_TYPE, None


def _read_update(update: Any, dimension: int, like: Tensor) -> tuple[Reason, Tensor | None]:
    if type(update) in (list, tuple):
        if len(update) != dimension:
            return Reason.WRONG_SHAPE, None
        if not all(type(x) in (float, int) for x in update):
            return Reason.WRONG_TYPE, None
        if not any(type(x) is float for x in update):
            return Reason.WRONG_DTYPE, None
        update = np.asarray(update, dtype=np.float64)
    if type(update) is np.ndarray:
        if not np.issubdtype(update.dtype, np.floating):
            return Reason.WRONG_DTYPE, None
        if update.shape != (dimension,):
            return Reason.WRONG_SHAPE, None
        with np.errstate(over="ignore"):
            wide = np.float64 if update.dtype.itemsize > 8 else update.dtype.newbyteorder("=")
            update = torch.from_numpy(np.array(update, dtype=wide))
    if type(update) not in (Tensor, torch.nn.Parameter):
        return Reason.WRONG_TYPE, None
    if update.layout != torch.strided or update.is_quantized or update.is_nested or update.is_meta:
        return Reason.WRONG_TYPE, None
    if not update.is_floating_point():
        return Reason.WRONG_DTYPE, None
    if tuple(update.shape) != (dimension,):
        return Reason.WRONG_SHAPE, None
    return Reason.USABLE, update.detach().to(dtype=like.dtype, device=like.device)


def read_number(value: Any) -> float | None:
    """An untrusted scalar as a float: NaN if it is there but is not a number, None if it is missing.

    >>> read_number("12"), read_number(None), read_number(torch.tensor(2.5))
    (nan, None, 2.5)
    """
    if value is None:
        return None
    try:
        if isinstance(value, np.ndarray | np.generic):
            return float(value.item()) if value.size == 1 and value.dtype.kind in "iuf" else float("nan")
        if isinstance(value, Tensor):
            real = value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool
            return float(value.item()) if real else float("nan")
        return float(value) if type(value) in (int, float) else float("nan")
    except OverflowError:
        return float("inf")
    except Exception:  # an object made to raise is no number
        return float("nan")


def check_buffers(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise a ValueError that names every tensor which is not floating point: it cannot be averaged.

    >>> check_buffers([("fc.weight", torch.zeros(2)), ("bn.num_batches_tracked", torch.tensor(0))])
    Traceback (most recent call last):
    ValueError: cannot average what is not floating point: bn.num_batches_tracked (torch.int64); use a model ...
    """
    bad = [f"{name} ({tensor.dtype})" for name, tensor in named if not tensor.is_floating_point()]
    if bad:
        raise ValueError(
            f"cannot average what is not floating point: {', '.join(bad)}; use a model without such buffers "
            "(group norm in place of batch norm, for example)"
        )


# ---------------------------------------------------------------------------------------------- evidence


def masked_median(values: Tensor, mask: Tensor) -> Tensor:
    """Median (...) of the entries of values (..., n) where `mask`; even number: mean of the two middle ones.

    NaN where the mask is empty.

    >>> masked_median(torch.tensor([1.0, 9.0, 2.0, 4.0]), torch.tensor([True, False, True, True]))
    tensor(2.)
    """
    ordered = torch.where(mask, values, torch.nan).sort(dim=-1).values  # NaN comes last
    count = mask.sum(-1, keepdim=True)
    middle = torch.cat([count - 1, count], dim=-1) // 2
    return ordered.gather(-1, middle.clamp(min=0)).mean(-1)


def loss_scores(
    losses: Tensor, mask: Tensor, *, bound: float | None = None, block: tuple[int, int] | None = None
) -> Tensor:
    r"""How far each loss (..., n) lies from the median, in robust standard deviations.

    .. math:: l_i = (f_i - \text{median}) / (1.48\ \max(\text{MAD}, 10^{-6}))

    Median and MAD over `mask`; clipped to +-bound where one is given.

    Equal losses are a kind of copy: attackers that all report one value can make it the median, and the MAD as
    small as they like. With `block` = (least, most), a group of equal losses of that size counts once if it is the
    only one; several such groups mean that losses are rounded, and then all of them count.

    >>> loss_scores(torch.tensor([1.0, 2.0, 3.0, 40.0]), torch.ones(4, dtype=torch.bool), bound=3)
    tensor([-1.0135, -0.3378,  0.3378,  3.0000])
    """
    once = mask if block is None else _block_once(losses, mask, *block)
    center = masked_median(losses, once).unsqueeze(-1)
    spread = masked_median((losses - center).abs(), once).unsqueeze(-1).clamp(min=_MAD_FLOOR)
    scores = (losses - center) / (_MAD_TO_SIGMA * spread)
    return scores if bound is None else scores.clamp(-bound, bound)


def _block_once(values: Tensor, mask: Tensor, least: int, most: int) -> Tensor:
    """`mask` with the group of `least` to `most` equal values, if there is one only, reduced to its first entry."""
    ordered, order = torch.where(mask, values, torch.inf).sort(dim=-1, stable=True)
    begins = torch.cat([torch.ones_like(mask[..., :1]), ordered[..., 1:] != ordered[..., :-1]], dim=-1)
    run = begins.long().cumsum(-1) - 1
    lengths = torch.zeros_like(run).scatter_add(-1, run, torch.ones_like(run)).gather(-1, run)
    sizes = torch.zeros_like(run).scatter(-1, order, lengths)
    first = mask & torch.zeros_like(mask).scatter(-1, order, begins)
    grouped = mask & (sizes >= least) & (sizes <= most)
    alone = (grouped & first).sum(-1, keepdim=True) == 1
    return mask & ~(grouped & ~first & alone)


def copy_clusters(updates: Tensor, factors: Tensor, radius: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Clusters of near-identical updates: label and size (..., n) of the cluster each client is in.

    Two clients are joined if their updates, each multiplied by its factor, are nearer than `radius`; clusters
    are the connected components. Clients outside `mask` are alone. The label of a cluster is its lowest index.

    Most pairs are told apart without a product of all rows: sums s of 32 consecutive entries can only shrink
    distances, |s_i - s_j| <= sqrt(32) |x_i - x_j| (Cauchy and Schwarz), so whoever is apart in them by
    sqrt(32) radius is apart by radius. That is a bound, not an estimate: no choice of updates gets past it, and
    what it leaves open is looked at in full.

    Args:
        updates: (..., n, d), on any device; the others, and what is returned, are on one of their own.
        factors: (..., n) what clipping multiplies each row by.
        radius: (...) distance under which two updates are near-identical.
        mask: (..., n) who is compared at all.
    """
    n = updates.shape[-2]
    here = mask.cpu()
    pairs = here.unsqueeze(-1) & here.unsqueeze(-2) & ~torch.eye(n, dtype=torch.bool)
    near_of = _near_by_sums if updates.shape[-1] > _FEW else _near
    each = zip(
        updates.reshape(-1, *updates.shape[-2:]), factors.to("cpu", torch.float64).reshape(-1, n),
        radius.to("cpu", torch.float64).reshape(-1), pairs.reshape(-1, n, n), strict=True,
    )  # fmt: skip
    labels = torch.stack([_components(near_of(*one)) for one in each]).reshape(mask.shape)
    sizes = torch.zeros_like(labels).scatter_add(-1, labels, torch.ones_like(labels)).gather(-1, labels)
    return labels.to(mask.device), sizes.to(mask.device)


def _near(updates: Tensor, factors: Tensor, radius: Tensor, pairs: Tensor) -> Tensor:
    """(n, n) which `pairs` of rows (n, d), each times its factor, are nearer than radius: by one Gram product.

    Here and below all but the updates, and what has their device do most of it, is on the CPU.
    """
    _, distances = _distances(updates, factors)
    return (distances < float(radius) ** 2).cpu() & pairs


def _distances(rows: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Squared lengths (n,) and squared distances (n, n), float64, of rows (n, d) times their factors."""
    scale = factors.to(rows.device)
    products = gram(rows) * scale.unsqueeze(-1) * scale
    squared = products.diagonal()
    return squared, squared.unsqueeze(-1) + squared - 2 * products


def _near_by_sums(updates: Tensor, factors: Tensor, radius: Tensor, pairs: Tensor) -> Tensor:
    """(n, n) links that join the same rows of updates (n, d) as `_near` does, though not every one of its links."""
    whole = updates.shape[-1] // _POOL * _POOL
    pools = updates[:, :whole].unflatten(-1, (-1, _POOL))  # type: ignore[no-untyped-call]
    squared, apart = _distances(pools.sum(-1), factors)
    slack = _ROUNDING * (squared.unsqueeze(-1) + squared)
    possible = ~(apart - slack >= _POOL * float(radius) ** 2).cpu() & pairs
    groups = _components(possible)
    links = torch.zeros_like(possible)
    for label in sorted(set(groups[groups != torch.arange(len(groups))].tolist())):
        members = (groups == label).nonzero().flatten()
        some, scaled = members.to(updates.device), factors[members].to(updates)
        # Copies are usually all near the first of them; then that settles it.
        first = updates[label] * scaled[0]
        if bool((sq_differences(updates, first, some, scaled).cpu() < radius.square()).all()):
            links[label, members] = links[members, label] = True
        else:
            among = (members.unsqueeze(-1), members)
            links[among] = _near(updates[some], factors[members], radius, pairs[among])
    return links


def _components(near: Tensor) -> Tensor:
    """Lowest index (..., n) in each one's connected component of the graph (..., n, n)."""
    n = near.shape[-1]
    labels = torch.arange(n, device=near.device).expand(near.shape[:-1])
    if not bool(near.any()):
        return labels
    near = near | torch.eye(n, dtype=torch.bool, device=near.device)
    while True:  # lowest label among neighbours, until nothing changes: a few passes for real clusters
        spread = torch.where(near, labels.unsqueeze(-2), n).amin(-1)
        spread = spread.gather(-1, spread)
        if torch.equal(spread, labels):
            return labels
        labels = spread


def clip_to_median(norms: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Median norm (...) over `mask`, and the factors (..., n) that clip every row to it."""
    median = masked_median(norms, mask)
    return median, clip_factors(norms, torch.nan_to_num(median).unsqueeze(-1))
