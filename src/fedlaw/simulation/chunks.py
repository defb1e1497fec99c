"""One worker's part of local training: chunk after chunk of jobs, in buffers of its own."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedlaw.simulation.conv_gpu import ConvKernel
from fedlaw.simulation.gram import GramKernel, places
from fedlaw.simulation.jobs import schedule, shares

if TYPE_CHECKING:
    from fedlaw.simulation.training import Kernel, Plan


class Worker:
    """Trains the jobs that it is called with and writes their updates and losses; buffers are made when needed.

    Args:
        plan: the call of `train` that it belongs to.
        most: jobs in a chunk.
    """

    def __init__(self, plan: Plan, most: int) -> None:
        self._plan, self._most = plan, most

    def __call__(self, rows: Tensor) -> None:
        """Train the jobs `rows`, in the order of their sizes."""
        plan, left = self._plan, rows
        if plan.gram_rows:
            length = plan.gram_rows[int(plan.jobs.sizes[rows[0]])]
            left = self._train_by_gram(rows, length) if length else rows
        if len(left):
            self._train(left)

    @cached_property
    def _kernel(self) -> Kernel:
        plan = self._plan
        of = (plan.model, plan.shape, self._most, plan.width, plan.params)
        return ConvKernel(*of, half=True) if plan.half else plan.kind(*of)

    @cached_property
    def _gram(self) -> GramKernel:
        plan = self._plan
        return GramKernel(plan.model, plan.shape, self._most, max(plan.gram_rows.values()), plan.params)

    @cached_property
    def _examples(self) -> Tensor:
        together = self._most if self._plan.together else 1
        return self._plan.inputs.new_empty((together * self._plan.width, *self._plan.shape))

    @cached_property
    def _theta(self) -> Tensor:
        return self._plan.params.new_empty((self._most, self._plan.params.shape[1]))

    def _start(self, rows: Tensor) -> Tensor:
        """Where the jobs start, (k, d); valid until the next call."""
        plan = self._plan
        return torch.index_select(plan.params, 0, plan.jobs.start[rows], out=self._theta[: len(rows)])

    def _train_by_gram(self, rows: Tensor, length: int) -> Tensor:
        """Train the jobs that GramKernel can; return the others."""
        plan = self._plan
        sizes = plan.jobs.sizes[rows]
        index, place, same = places(plan.jobs.order[rows], sizes, length)
        left, rows = rows[~same], rows[same]
        if len(rows):
            theta = self._start(rows)
            self._gram.load(theta)
            examples = (plan.inputs, plan.labels, index[same], place[same], sizes[same])
            plan.losses[rows] = self._gram.train(*examples, plan.work, plan.multiple, plan.memory)
            self._write(rows, theta, self._gram)
        return left

    def _train(self, rows: Tensor) -> None:
        """Train the jobs with the plan's kernel."""
        plan, kernel = self._plan, self._kernel
        jobs, work, batch = plan.jobs, plan.work, plan.work.batch_size
        sizes = jobs.sizes[rows]
        runs = schedule(sizes.tolist(), batch, plan.multiple, plan.together)
        position = torch.arange(max(run.at + run.width for run in runs), device=rows.device)
        weight, share = shares(sizes, len(position), batch, plan.params.dtype)
        # Padding repeats the first example of its batch with weight 0: it can be non-finite only where a real
        # example is. Positions of batches that a job does not have are never used.
        source = torch.where(position < sizes[:, None], position, position // batch * batch)
        source = source.clamp(max=jobs.order.shape[-1] - 1).unsqueeze(1).expand(-1, work.epochs, -1)
        order = jobs.order[rows].gather(-1, source).clamp_(min=0)
        labels = plan.labels[order]

        def gather(index: Tensor) -> Tensor:
            room = self._examples[: index.numel()]
            examples = torch.index_select(plan.inputs, 0, index.reshape(-1), out=room)
            return examples.view(*index.shape, *plan.shape)

        def mean_losses() -> Tensor:
            total = torch.zeros_like(share[:, 0])
            for lo, hi, at, width in runs:
                here = slice(at, at + width)
                x = gather(order[lo:hi, 0, here])
                each = kernel.losses(lo, x, labels[lo:hi, 0, here])
                total[lo:hi] += (each * share[lo:hi, here]).sum(1)
            return total

        theta = self._start(rows)
        kernel.load(theta)
        if work.loss_point == "before":
            plan.losses[rows] = mean_losses()
        for epoch in range(work.epochs):
            for lo, hi, at, width in runs:
                here = slice(at, at + width)
                x = gather(order[lo:hi, epoch, here])
                kernel.step(lo, x, labels[lo:hi, epoch, here], weight[lo:hi, here], work.lr)
        if work.loss_point == "after":
            plan.losses[rows] = mean_losses()
        self._write(rows, theta, kernel)

    def _write(self, rows: Tensor, theta: Tensor, kernel: Kernel | GramKernel) -> None:
        """The updates (theta - psi) / lr of the jobs, whose psi the kernel holds."""
        plan, lr = self._plan, self._plan.work.lr
        first, k = int(rows[0]), len(rows)
        # Neighbours, as clients of one size are: psi is written where the update belongs, and made one there.
        near = theta.device.type == "cpu" and torch.equal(rows, torch.arange(first, first + k))
        target = plan.updates[first : first + k] if near else torch.empty_like(theta)
        if isinstance(kernel, GramKernel):
            kernel.updates(theta, lr, out=target)
        else:
            torch.sub(theta, kernel.flat(k, out=target), out=target).div_(lr)
        if not near:
            plan.updates.index_copy_(0, rows, target)
