"""Local training of all clients at once."""

from __future__ import annotations

from itertools import groupby
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from fedlaw._pages import large_empty
from fedlaw.models.vector import count_parameters
from fedlaw.simulation import fused
from fedlaw.simulation.batched import BatchedKernel
from fedlaw.simulation.chunks import Worker
from fedlaw.simulation.conv_gpu import ConvKernel
from fedlaw.simulation.conv_plan import supports
from fedlaw.simulation.functional import VmapKernel, train_sequential
from fedlaw.simulation.gram import GramKernel, PoolMemory, gram_rows
from fedlaw.simulation.jobs import Jobs, LocalWork, Trained, visited
from fedlaw.simulation.parallel import in_parallel
from fedlaw.simulation.reading import UnknownLayer, read

Backend = Literal["auto", "batched", "vmap", "sequential"]
BACKENDS: tuple[Backend, ...] = ("auto", "batched", "vmap", "sequential")

_CPU_CHUNK_BYTES = 4 << 20  # a chunk's parameters and intermediates should stay in a core's caches
_GRAM_CHUNK_BYTES = 16 << 20  # with GramKernel, whose large operands are read a few times only
_LEAST_STEP = 2_000_000  # parameters x examples: a smaller step is all overhead, which threads only add to
_GPU_MEMORY_SHARE = 0.4  # of the free memory, for one chunk's parameters and intermediates
_TAIL_MULTIPLE = 8  # the last batch of an epoch is padded to a multiple of this many examples

KernelKind = type[BatchedKernel] | type[VmapKernel] | type[ConvKernel]


class Kernel(Protocol):
    """k jobs' parameters and how they step: see BatchedKernel, VmapKernel, ConvKernel."""

    def load(self, theta: Tensor) -> None: ...
    def flat(self, k: int, out: Tensor | None = None) -> Tensor: ...
    def step(self, lo: int, x: Tensor, y: Tensor, weight: Tensor, lr: float) -> None: ...
    def losses(self, lo: int, x: Tensor, y: Tensor) -> Tensor: ...
    def scores(self, lo: int, x: Tensor) -> Tensor: ...


def train(
    model: nn.Module,
    params: Tensor,
    inputs: Tensor,
    labels: Tensor,
    jobs: Jobs,
    work: LocalWork,
    *,
    backend: Backend = "auto",
    threads: int | None = None,
    chunk: int | None = None,
    memory: PoolMemory | None = None,
    half: bool = False,
) -> Trained:
    """Train C clients' models locally and return their updates and losses.

    Every job starts at theta, its row of `params`, takes `work.epochs` passes of mini-batch SGD over its examples
    and ends at psi; its update is the pseudo-gradient (theta - psi) / lr. Backends, equal up to rounding:

    - ``batched``: forward and backward written out as batched matrix products for a Sequential of Linear, ReLU,
      Flatten, Conv2d, GroupNorm, MaxPool2d; the fast one. On a CPU jobs go in chunks that fit the cache, one
      Python thread per core; convolutions go job by job, and an MLP's first layer through the Gram matrix of a
      client's inputs where that is less arithmetic (`fedlaw.simulation.gram`). On a GPU all jobs go together, as
      far as memory lasts; on a Hopper GPU blocks of convolution, norm, ReLU and pooling have kernels of their own
      (`fedlaw.simulation.conv_gpu`).
    - ``vmap``: any module. On a GPU all jobs together by torch.func, which needs control flow that does not
      depend on the data; on a CPU job by job, one Python thread per core, by autograd.
    - ``sequential``: the reference, an autograd loop.
    - ``auto``: on a GPU that may use TF32, an MLP's whole training in one kernel (`fedlaw.simulation.fused`);
      otherwise batched where it knows all layers, else vmap.

    On a CPU a job's result is the same to the last bit whatever it is trained beside, in chunks of
    whatever size, on however many threads.

    Args:
        model: the network; its own parameter values are not used and it is not changed. A network that draws
            random numbers (dropout) is refused: its draws could not be repeated.
        params: (R, d) parameter vectors, in the order of the model's named parameters, then floating buffers.
        inputs: (N, ...) pool of examples, on the device of `params`.
        labels: (N,) their classes, int64.
        jobs: who trains on what, starting where.
        work: epochs, batch size, learning rate, where the loss is taken.
        threads: Python threads on a CPU; None: as many as torch would use (`torch.get_num_threads`).
        chunk: jobs that are held in memory together by one thread; None: chosen by size.
        memory: for calls with one model and one pool, what of an earlier call can be used again; the result is
            the same to the last bit.
        half: let the kernels of a GPU round the operands of their products to half precision.

    Returns:
        Trained(updates (C, d), losses (C,)). Where training diverges they hold infinities or NaN.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2))
    >>> jobs = Jobs(torch.tensor([0]), torch.tensor([[[0, 1]]]), torch.tensor([2]))
    >>> train(model, torch.zeros(1, 6), torch.eye(2), torch.tensor([0, 1]), jobs, LocalWork(epochs=1)).updates
    tensor([[-0.2500,  0.2500,  0.2500, -0.2500,  0.0000,  0.0000]])
    """
    _check(model, params, inputs, labels, jobs, work, threads, chunk)
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; there are: {', '.join(BACKENDS)}")
    shape = tuple(inputs.shape[1:])
    if backend == "sequential" or len(jobs) == 0:
        return train_sequential(model, params, inputs, labels, jobs, work)
    if backend == "auto" and fused.supports(model, params, inputs, work):
        return fused.train_fused(model, params, inputs, labels, jobs, work, half=half, memory=memory)
    kind = kernel_for(model, shape, backend, params)
    plan = Plan(model, kind, params, inputs, labels, jobs, work, memory, half)
    cpu = params.device.type == "cpu"
    threads = (threads or torch.get_num_threads()) if cpu else 1
    chunks = plan.chunks(threads, chunk)
    most = max(len(rows) for rows in chunks)
    in_parallel(chunks, lambda: Worker(plan, most), threads if cpu else None)
    return Trained(plan.updates, plan.losses)


def kernel_for(model: nn.Module, shape: tuple[int, ...], backend: Backend, like: Tensor) -> KernelKind:
    """The kernel that `backend` means for this model, to work as `like`; UnknownLayer where batched cannot."""
    if backend == "vmap":
        return VmapKernel
    try:
        read(model, shape)
    except UnknownLayer:
        if backend == "auto":
            return VmapKernel
        raise
    return ConvKernel if supports(model, shape, like.device, like.dtype) else BatchedKernel


class Plan:
    """One call of `train`: everything that its workers share."""

    def __init__(
        self,
        model: nn.Module,
        kind: KernelKind,
        params: Tensor,
        inputs: Tensor,
        labels: Tensor,
        jobs: Jobs,
        work: LocalWork,
        memory: PoolMemory | None = None,
        half: bool = False,
    ) -> None:
        self.memory, self.half = memory, half and kind is ConvKernel
        if self.half:
            inputs = (memory or PoolMemory()).halved(inputs)
        self.model, self.kind, self.params = model, kind, params
        self.inputs, self.labels, self.jobs, self.work = inputs, labels, jobs, work
        self.updates = large_empty((len(jobs), params.shape[1]), params)
        self.losses = torch.empty(len(jobs), dtype=params.dtype, device=params.device)
        self.shape = tuple(inputs.shape[1:])
        self.together = kind.stacks(model, params.device)
        if _looks_across_examples(model):
            self.multiple = 1  # such a layer would see the padding
        elif params.device.type == "cpu":
            self.multiple = _TAIL_MULTIPLE
        else:
            self.multiple = work.batch_size  # one launch for all tails is worth more than the arithmetic
        largest = int(jobs.sizes.max())
        self.width = min(work.batch_size, -(-largest // self.multiple) * self.multiple)
        found = {size: self._gram_rows(size) for size in set(jobs.sizes.tolist())}
        self.gram_rows = found if any(found.values()) else {}  # by size; 0: to be trained directly

    def chunks(self, threads: int, chunk: int | None) -> list[Tensor]:
        """The jobs in parts that a worker should hold together, at most `chunk` of them; None: chosen by size."""
        # Neighbours in a chunk should be of one size; the stable sort leaves equal ones in roster order.
        by_size = self.jobs.sizes.argsort(descending=True, stable=True)
        if not self.gram_rows:
            return list(torch.split(by_size, chunk or self._limit(threads)))
        sizes, batch = self.jobs.sizes[by_size].tolist(), self.work.batch_size
        parts: list[Tensor] = []
        at = 0
        # GramKernel takes jobs of one schedule.
        for end, alike in groupby(
            visited(n, batch, self.multiple) if self.gram_rows[n] else 0 for n in sizes
        ):
            count = len(list(alike))
            rows, first, at = by_size[at : at + count], sizes[at], at + count
            limit = chunk or self._limit(threads, self.gram_rows[first] if end else 0)
            pieces = -(-count // limit)
            if pieces > threads and chunk is None:
                pieces = -(-pieces // threads) * threads  # all threads end at about the same time
            parts += rows.tensor_split(min(pieces, count))
        return parts

    def _limit(self, threads: int, gram: int = 0) -> int:
        """Jobs that a worker should hold together, with `gram` rows each in GramKernel."""
        if not self.together:
            return 1
        share = -(-len(self.jobs) // threads)
        if gram:
            each = GramKernel.numbers(self.model, self.shape, gram) * self.params.element_size()
            return max(1, min(share, _GRAM_CHUNK_BYTES // each))
        least = -(-_LEAST_STEP // (self.params.shape[1] * self.width))
        limit = stack_limit(self.kind, self.model, self.params, self.inputs, self.width)
        return min(max(share, least), limit)

    def _gram_rows(self, size: int) -> int:
        """Rows of a job of that size in GramKernel; 0 where the job is to be trained directly."""
        work = self.work
        large = self.params.shape[1] * min(work.batch_size, size) >= _LEAST_STEP
        if self.kind is not BatchedKernel or self.params.device.type != "cpu" or not large:
            return 0
        return gram_rows(self.model, self.shape, size, work, self.multiple, self.params)


def stack_limit(kind: KernelKind, model: nn.Module, params: Tensor, inputs: Tensor, width: int) -> int:
    """How many models (rows of `params`), with `width` examples each, should be held together: at least 1."""
    numbers = params.shape[1] + width * kind.activations(model, inputs[:2])
    each = numbers * params.element_size()
    if params.device.type == "cpu":
        return max(1, _CPU_CHUNK_BYTES // each)
    free = torch.cuda.mem_get_info(params.device)[0] if params.is_cuda else 4 << 30
    return max(1, int(free * _GPU_MEMORY_SHARE) // (2 * each))  # twice: every number has a gradient


def _looks_across_examples(model: nn.Module) -> bool:
    """Whether some layer may mix the examples of a batch: batch norm, or anything that keeps statistics."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()) or any(
        buffer.is_floating_point() for buffer in model.buffers()
    )


def check_pool(model: nn.Module, params: Tensor, inputs: Tensor, labels: Tensor) -> None:
    """Refuse parameters and examples that do not fit the model or each other, in one line."""
    d = count_parameters(model)
    if params.ndim != 2 or params.shape[1] != d or not params.is_floating_point():
        raise ValueError(
            f"params must be floating-point (R, {d}) for this model, got {params.dtype} of {tuple(params.shape)}"
        )
    if labels.shape != inputs.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(
            f"labels must be int64, one for each of the {len(inputs)} inputs, got {labels.dtype} of "
            f"{tuple(labels.shape)}"
        )
    if inputs.is_floating_point() and inputs.dtype != params.dtype:
        raise ValueError(f"inputs are {inputs.dtype} and params {params.dtype}; convert one of them")


def _check(
    model: nn.Module,
    params: Tensor,
    inputs: Tensor,
    labels: Tensor,
    jobs: Jobs,
    work: LocalWork,
    threads: int | None,
    chunk: int | None,
) -> None:
    """Refuse what does not fit together, in one line."""
    for name, value in (("threads", threads), ("chunk", chunk)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, or None for a choice by size, got {value}")
    check_pool(model, params, inputs, labels)
    places = {tensor.device for tensor in (params, inputs, labels, jobs.start, jobs.order, jobs.sizes)}
    if len(places) > 1:
        raise ValueError(
            f"params, inputs, labels and jobs must be on one device, got {sorted(map(str, places))}"
        )
    if jobs.order.shape[1] != work.epochs:
        raise ValueError(f"jobs.order has {jobs.order.shape[1]} epochs and work.epochs is {work.epochs}")
    if len(jobs) and not 0 <= int(jobs.start.min()) <= int(jobs.start.max()) < len(params):
        raise ValueError(f"jobs.start must be rows 0 to {len(params) - 1} of params")
    if jobs.order.numel() and int(jobs.order.max()) >= len(inputs):
        raise ValueError(f"jobs.order must index the {len(inputs)} inputs, got {int(jobs.order.max())}")
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise ValueError(
                f"the model has {module}, whose random draws could not be repeated; set its p to 0"
            )
