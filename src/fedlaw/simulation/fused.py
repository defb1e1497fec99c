"""The fused backend of a GPU: an MLP's whole local training in one kernel, one program a client."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedlaw.simulation.gram import PoolMemory
from fedlaw.simulation.jobs import Jobs, LocalWork, Trained

_WIDEST, _LARGEST_BATCH = 256, 128  # of a hidden layer and of a batch: registers
_ALIGN = 32  # numbers: a job's parameters begin on a cache line


class Shape(NamedTuple):
    """Widths of an MLP with one or two hidden layers (`second` is None with one)."""

    inputs: int
    first: int
    second: int | None
    classes: int


def mlp_shape(model: nn.Module) -> Shape | None:
    """The widths of a Sequential of Flatten, Linear, ReLU, Linear [, ReLU, Linear], all with bias; else None.

    >>> mlp_shape(nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)))
    Shape(inputs=784, first=128, second=None, classes=10)
    """
    if not isinstance(model, nn.Sequential):
        return None
    parts = [part for part in model if not isinstance(part, nn.Flatten)]
    linear, between = parts[::2], parts[1::2]
    if len(parts) not in (3, 5) or not all(type(part) is nn.ReLU for part in between):
        return None
    if not all(type(part) is nn.Linear and part.bias is not None for part in linear):
        return None
    widths = [int(part.out_features) for part in linear]  # type: ignore[arg-type]
    if any(a.out_features != b.in_features for a, b in pairwise(linear)):
        return None
    second = widths[1] if len(widths) == 3 else None
    return Shape(int(linear[0].in_features), widths[0], second, widths[-1])  # type: ignore[arg-type]


def supports(model: nn.Module, params: Tensor, inputs: Tensor, work: LocalWork) -> bool:
    """Whether `train_fused` can do it and is the fastest: TF32 on a CUDA device with Triton, an MLP that fits.

    In full float32 its products would not be on tensor cores, and batched products are faster.
    """
    if not params.is_cuda or params.dtype != torch.float32 or inputs.dtype != torch.float32:
        return False
    if torch.get_float32_matmul_precision() == "highest":
        return False
    shape = mlp_shape(model)
    if shape is None or max(shape[1], shape[2] or 0, shape[3]) > _WIDEST or work.batch_size > _LARGEST_BATCH:
        return False
    if inputs[0].numel() != shape.inputs:
        return False
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.get_device_capability(params.device) >= (8, 0)


def train_fused(
    model: nn.Module,
    params: Tensor,
    inputs: Tensor,
    labels: Tensor,
    jobs: Jobs,
    work: LocalWork,
    *,
    half: bool = False,
    memory: PoolMemory | None = None,
    **tuning: Any,
) -> Trained:
    """`train` for what `supports` allows: updates and losses, with products in TF32 where torch's own may be.

    With `half` their operands are rounded to half precision: as many digits as TF32 has, but nothing beyond 65504
    and fewer digits below 6e-5; sums and parameters stay in float32. Nothing waits for the device, and memory
    beyond the result is one more (C, d), and with `half` a copy of the inputs.
    """
    from fedlaw.simulation.fused_kernels import loss_kernel, train_kernel

    shape = mlp_shape(model)
    assert shape is not None
    second, d = shape.second or shape.first, params.shape[1]
    padded = -(-d // _ALIGN) * _ALIGN
    theta = nn.functional.pad(params, (0, padded - d))
    psi = theta.index_select(0, jobs.start)
    losses = params.new_empty(len(jobs))
    inputs = (memory or PoolMemory()).halved(inputs) if half else inputs.contiguous()
    order = jobs.order.contiguous()
    fixed = {
        "D0": shape.inputs, "H1": shape.first, "H2": second, "CLASSES": shape.classes, "DP": padded,
        "P1": _power(shape.first), "P2": _power(second), "PO": _power(shape.classes),
        "B": _power(work.batch_size), "DEEP": shape.second is not None, "HALF": half,
        "PRECISION": "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32",
    }  # fmt: skip
    fixed |= {"BK": 64 if half else 32, "num_warps": 8, "num_stages": 3} | tuning
    sizes, steps = jobs.sizes, (work.epochs, order.shape[-1], work.batch_size)

    def take_losses(rows: Tensor, at: Tensor) -> None:
        loss_kernel[(len(jobs),)](rows, at, order, sizes, inputs, labels, losses, *steps, **fixed)

    if work.loss_point == "before":
        take_losses(theta, jobs.start)
    largest_first = sizes.argsort(descending=True, stable=True)
    train_kernel[(len(jobs),)](
        jobs.start, order, sizes, largest_first, inputs, labels, psi, work.lr, *steps, **fixed
    )
    if work.loss_point == "after":
        take_losses(psi, torch.arange(len(jobs), device=psi.device))
    updates = params.index_select(0, jobs.start).sub_(psi[:, :d]).div_(work.lr)
    return Trained(updates, losses)


def _power(width: int) -> int:
    """The power of two, at least 16, that holds `width`."""
    return max(16, 1 << (width - 1).bit_length())
