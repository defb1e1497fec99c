"""How good models are: accuracy, loss and accuracy per class on a set of examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedlaw.simulation.parallel import in_parallel
from fedlaw.simulation.training import Backend, Kernel, check_pool, kernel_for, stack_limit

_CPU_BATCH_BYTES = 8 << 20  # of the intermediates of one batch
_GPU_BATCH_SHARE = 0.1  # of the free memory, for the intermediates of one batch
_LARGEST_CPU_BATCH, _LARGEST_GPU_BATCH = 1024, 1 << 16


class Evaluation(NamedTuple):
    """What `evaluate` found, for R models; without the leading R for a single parameter vector.

    Attributes:
        accuracy: (R,) share of the examples that are classified right, float64.
        loss: (R,) mean cross-entropy, float64; NaN or infinite for a model that has diverged.
        per_class: (R, classes) accuracy among the examples of each class, float64; NaN for a class without any.
        finite: (R,) whether all parameters are finite. Where they are not, the scores mean nothing and the
            accuracy is that of whatever class comes first among them.
    """

    accuracy: Tensor
    loss: Tensor
    per_class: Tensor
    finite: Tensor


def evaluate(
    model: nn.Module,
    params: Tensor,
    inputs: Tensor,
    labels: Tensor,
    classes: int,
    *,
    batch: int | None = None,
    backend: Backend = "auto",
    threads: int | None = None,
) -> Evaluation:
    """Accuracy, mean cross-entropy and accuracy per class of models `params` on (inputs, labels).

    On a CPU every model is evaluated by itself, batch by batch over the threads: its figures depend neither on the
    other models nor on the number of threads. On a GPU the models go together, as far as memory lasts.

    Args:
        model: the network; its own parameter values are not used.
        params: (R, d) parameter vectors, or one (d,).
        inputs: (N, ...) examples.
        labels: (N,) their classes, int64, from 0 to classes - 1.
        classes: number of classes.
        batch: examples at once; None: chosen by size.
        backend: ``auto``, ``batched`` or ``vmap``, as in `train`.
        threads: Python threads on a CPU; None: as many as torch would use.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False))
    >>> found = evaluate(model, torch.eye(2).flatten(), torch.eye(2), torch.tensor([0, 0]), classes=2)
    >>> found.accuracy, found.per_class
    (tensor(0.5000, dtype=torch.float64), tensor([0.5000,    nan], dtype=torch.float64))
    """
    single = params.ndim == 1
    stacked = params.unsqueeze(0) if single else params
    check_pool(model, stacked, inputs, labels)
    if backend == "sequential":
        raise ValueError("evaluate has backends 'auto', 'batched' and 'vmap', not 'sequential'")
    if len(inputs) == 0:
        raise ValueError("there are no examples to evaluate on")
    if not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise ValueError(f"labels must be 0 to {classes - 1} for classes={classes}")
    shape = tuple(inputs.shape[1:])
    kind = kernel_for(model, shape, backend, params)
    cpu = params.device.type == "cpu"
    if batch is None:
        each = kind.activations(model, inputs[:2]) * params.element_size()
        most, room = _LARGEST_CPU_BATCH, _CPU_BATCH_BYTES
        if params.is_cuda:  # few large batches: a launch costs more than what a small one computes
            most = _LARGEST_GPU_BATCH
            room = int(torch.cuda.mem_get_info(params.device)[0] * _GPU_BATCH_SHARE)
        batch = max(16, min(most, room // each))
    batch = min(batch, len(inputs))
    models = 1 if cpu else min(len(stacked), stack_limit(kind, model, stacked, inputs, batch))
    starts = range(0, len(inputs), batch)
    hits = torch.zeros((len(stacked), len(starts), classes), dtype=torch.float64, device=params.device)
    losses = torch.zeros((len(stacked), len(starts)), dtype=torch.float64, device=params.device)

    def worker() -> Callable[[tuple[int, int]], None]:
        kernel: Kernel = kind(model, shape, models, batch, stacked)
        loaded = -1

        def score(item: tuple[int, int]) -> None:
            nonlocal loaded
            first, part = item
            if loaded != first:
                kernel.load(stacked[first : first + models])
                loaded = first
            rows = slice(first, min(first + models, len(stacked)))
            here = slice(starts[part], starts[part] + batch)
            x, y = inputs[here], labels[here].expand(rows.stop - first, -1)
            scores = kernel.scores(0, x.expand(rows.stop - first, *x.shape))
            right = (scores.argmax(-1) == y).to(hits.dtype)
            hits[rows, part] = torch.zeros_like(hits[rows, part]).scatter_add_(1, y, right)
            each = -scores.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
            losses[rows, part] = each.sum(1, dtype=torch.float64)

        return score

    items = [(first, part) for first in range(0, len(stacked), models) for part in range(len(starts))]
    in_parallel(items, worker, (threads or torch.get_num_threads()) if cpu else None)
    counts = labels.bincount(minlength=classes)
    found = Evaluation(
        accuracy=hits.sum((1, 2)) / len(inputs),
        loss=losses.sum(1) / len(inputs),
        per_class=hits.sum(1) / counts,
        finite=stacked.isfinite().all(dim=1),
    )
    return Evaluation(*(each[0] for each in found)) if single else found
