"""The first layer of an MLP through the Gram matrix of a client's inputs: fewer products for several epochs."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fedlaw.simulation import layers
from fedlaw.simulation.batched import CACHE_LINE, BatchedKernel
from fedlaw.simulation.jobs import LocalWork, schedule, shares, visited
from fedlaw.simulation.layers import Layer
from fedlaw.simulation.reading import Part, read

_BLOCK = 64  # rows of the Gram matrix that are formed together, from the diagonal on
_WORTH = 0.85  # of the direct form's arithmetic: what the Gram form must stay under to be chosen


class PoolMemory:
    """What is worked out once of a pool of examples on which one model trains round after round.

    On a CPU Gram matrices of the clients' examples, on a GPU the pool in half precision.

    Args:
        limit: bytes of Gram matrices that are kept; beyond that they are formed anew each time.
    """

    def __init__(self, limit: int = 1 << 30) -> None:
        self._left = limit
        self._kept: dict[bytes, Tensor] = {}
        self._halved: Tensor | None = None

    def halved(self, inputs: Tensor) -> Tensor:
        """The pool in half precision, what is beyond its range at the end of it."""
        if self._halved is None:
            largest = torch.finfo(torch.float16).max
            self._halved = inputs.clamp(-largest, largest).half().contiguous()
        return self._halved

    def recall(self, index: Tensor, out: Tensor) -> bool:
        """Fill `out` (k, n, n) with the matrices of the examples `index` (k, n), if all of them are known."""
        known = [self._kept.get(_name(row)) for row in index]
        if any(each is None for each in known):
            return False
        for place, each in zip(out, known, strict=True):
            place.copy_(each)
        return True

    def keep(self, index: Tensor, gram: Tensor) -> None:
        """Remember what `recall` did not know."""
        for row, each in zip(index, gram, strict=True):
            if self._left >= each.nbytes and (name := _name(row)) not in self._kept:
                self._left -= each.nbytes
                self._kept[name] = each.clone(memory_format=torch.contiguous_format)


def _name(row: Tensor) -> bytes:
    name: bytes = row.numpy().tobytes()
    return name


class GramKernel(BatchedKernel):
    """BatchedKernel for jobs with one schedule, that follows the first layer by its outputs, not by its weights.

    SGD moves the first layer, z = x W^T + b, within the span of a job's own inputs X (n, f). After steps on
    inputs x_s with gradients g_s with respect to z_s,

        W = W_0 - lr sum_s g_s^T x_s,   b = b_0 - lr sum_s g_s^T 1,
        so that   Z = X W^T + b = Z_0 - lr sum_s (X x_s^T + 1) g_s.

    X x_s^T are columns of the Gram matrix X X^T, which does not change. So Z, for all n inputs, is kept up to date
    by Z -= lr (X X^T + 1)[:, batch] g, the g of every example are summed, and W is formed once, at the end. Over
    several epochs, with n not much larger than f, that is less arithmetic than two products with W at every step,
    and the losses over all examples need no product with X again. Up to rounding the result is BatchedKernel's.

    Use: `load`, `train`, `updates`.

    Args:
        model, shape, jobs, like: as for BatchedKernel.
        length: most inputs of a job.
    """

    def __init__(
        self, model: nn.Module, shape: tuple[int, ...], jobs: int, length: int, like: Tensor
    ) -> None:
        super().__init__(model, shape, jobs, length, like)
        first = self.parts[self._first].module
        assert isinstance(first, nn.Linear)
        self._linear, self._shape = first, shape
        self._clips = any(isinstance(part.module, nn.ReLU) for part in self.parts[: self._first])
        f, out = first.in_features, first.out_features
        self._room = [self._buffer((length, columns)) for columns in (f, length, out, out)]
        self._picked = self._buffer((length, length))
        self._held = (0, 0)

    @staticmethod
    def numbers(model: nn.Module, shape: tuple[int, ...], rows: int) -> int:
        """Numbers that are held for one job."""
        first = next(part for part in read(model, shape) if part.trained).module
        assert isinstance(first, nn.Linear)
        own = rows * (first.in_features + 2 * rows + 3 * first.out_features)
        return own + sum(p.numel() for p in model.parameters())

    def train(
        self,
        pool: Tensor,
        labels: Tensor,
        index: Tensor,
        place: Tensor,
        sizes: Tensor,
        work: LocalWork,
        multiple: int,
        memory: PoolMemory | None = None,
    ) -> Tensor:
        """Train the jobs that were loaded; return their losses (k,).

        Args:
            pool, labels: all examples and their classes.
            index, place: what each job's rows are and when they are visited; see `places`.
            sizes: (k,) how many of the rows are examples; what is beyond is padding.
            work: epochs, batch size, learning rate, where the loss is taken.
            multiple: that the last batch is padded to; see `schedule`.
            memory: where Gram matrices of earlier calls are found.
        """
        k, n = index.shape
        weight, share = shares(sizes, n, work.batch_size, self._like.dtype)
        y = labels[index]
        order_y = y.unsqueeze(1).expand(place.shape).gather(-1, place)
        row = torch.arange(k * n).view(k, n)
        order = place + row[:, None, :1]

        def mean_losses() -> Tensor:
            return (self.losses(0, row, y) * share).sum(1)

        self._begin(pool, index, memory)
        losses = mean_losses() if work.loss_point == "before" else None
        for epoch in range(work.epochs):
            for _, _, at, width in schedule([int(sizes[0])], work.batch_size, multiple, together=True):
                here = slice(at, at + width)
                self.step(0, order[:, epoch, here], order_y[:, epoch, here], weight[:, here], work.lr)
        if losses is None:
            losses = mean_losses()
        return losses

    def _begin(self, pool: Tensor, index: Tensor, memory: PoolMemory | None) -> None:
        """Take in the examples of the jobs that were loaded: `pool[index]`, index (k, n)."""
        k, n = index.shape
        f, out = self._linear.in_features, self._linear.out_features
        if self._held != (k, n):
            self._programs.clear()  # their views are of other lengths
            self._held = (k, n)
        self._x, self._gram, self._outputs, self._slopes = (
            self._rows(room, k, (n, columns))
            for room, columns in zip(self._room, (f, n, out, out), strict=True)
        )
        torch.index_select(pool, 0, index.flatten(), out=self._x.view(k * n, *self._shape))
        if self._clips:
            self._x.relu_()
        weight, bias = self._parameters(k)
        if memory is None or not memory.recall(index, self._gram):
            self._form_gram(0.0 if bias is None else 1.0)
            if memory is not None:
                memory.keep(index, self._gram)
        if bias is None:
            torch.bmm(self._x, weight.mT, out=self._outputs)
        else:
            torch.baddbmm(bias.unsqueeze(1), self._x, weight.mT, out=self._outputs)
        self._slopes.zero_()

    def _form_gram(self, bias: float) -> None:
        """X X^T, plus `bias` in every entry."""
        n = self._x.shape[1]
        constant = self._x.new_full((1, 1, 1), bias)
        for at in range(0, n, _BLOCK):
            here, after = slice(at, at + _BLOCK), slice(at + _BLOCK, n)
            gram = self._gram[:, here, at:]
            torch.baddbmm(constant, self._x[:, here], self._x[:, at:].mT, out=gram)
            self._gram[:, after, here] = gram[..., _BLOCK:].mT

    def updates(self, theta: Tensor, lr: float, out: Tensor) -> Tensor:
        """The pseudo-gradients (theta - psi) / lr of the jobs, written into `out` (k, d).

        That of the first layer is the sum of its gradients, which nothing need be subtracted from.
        """
        k, at = len(theta), 0
        weight, bias = self._parameters(k)
        formed = [self._views[id(p)] for p in self._linear.parameters()]
        torch.bmm(self._slopes.mT, self._x, out=weight)
        if bias is not None:
            torch.sum(self._slopes, 1, out=bias)
        for param in self._params.values():
            piece = slice(at, at + param[0].numel())
            target = out[:, piece].view(k, *param.shape[1:])
            if any(param is each for each in formed):
                target.copy_(param[:k])
            else:
                torch.sub(theta[:, piece].view(target.shape), param[:k], out=target).div_(lr)
            at = piece.stop
        return out

    def _parameters(self, k: int) -> tuple[Tensor, Tensor | None]:
        weight, bias = self._linear.weight, self._linear.bias
        return self._views[id(weight)][:k], None if bias is None else self._views[id(bias)][:k]

    def _forward(self, program: list[Layer], x: Tensor) -> Tensor:
        for layer in program[self._first :]:
            x = layer.forward(x)
        return x

    def _bind(self, i: int, part: Part, lo: int, hi: int, width: int) -> Layer:
        if i != self._first:
            return super()._bind(i, part, lo, hi, width)
        chosen = self._rows(self._buffers[i][0], hi - lo, (width, self._linear.out_features))
        n = self._gram.shape[1]
        return layers.Spanned(
            self._outputs, self._gram, self._slopes, chosen, self._rows(self._picked, hi - lo, (width, n))
        )


def gram_rows(
    model: nn.Module, shape: tuple[int, ...], size: int, work: LocalWork, multiple: int, like: Tensor
) -> int:
    """Rows that GramKernel holds for a job of `size` examples; 0 where BatchedKernel should train it.

    The job's own size decides, never its neighbours: they must not change its result. Rows are as many as the
    steps of an epoch visit (`schedule`), and more only where the next job would not begin on a cache line.
    """
    parts = read(model, shape)
    first = next((i for i, part in enumerate(parts) if part.trained), len(parts))
    module = parts[first].module if first < len(parts) - 1 else None
    if not isinstance(module, nn.Linear) or not like.is_floating_point():
        return 0
    f, out = module.in_features, module.out_features
    steps = visited(size, work.batch_size, multiple)
    unit = CACHE_LINE // like.element_size()
    step = max(4, unit // math.gcd(unit, f, out))
    rows = -(-steps // step) * step
    direct = (4 * work.epochs + 2) * steps * f * out
    gram = rows * (rows + _BLOCK) * f + 4 * rows * f * out + 2 * work.epochs * steps * rows * out
    return rows if gram < _WORTH * direct else 0


def places(order: Tensor, sizes: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """A set for every job, and where in it its orders find their examples.

    Args:
        order: (k, epochs, L) as in Jobs.
        sizes: (k,) as in Jobs.
        rows: length of every set.

    Returns:
        index (k, rows) of the job's examples, in the end padded with its first;
        place (k, epochs, rows), so that index[place[epoch]] is the epoch's order, padding at its own place;
        whether (k,) every epoch visits the same examples, without which the places mean nothing.

    >>> index, place, same = places(torch.tensor([[[7, 4, -1], [4, 7, -1]]]), torch.tensor([2]), 4)
    >>> index.tolist(), place.tolist(), same.tolist()
    ([[4, 7, 4, 4]], [[[1, 0, 2, 3], [0, 1, 2, 3]]], [True])
    """
    position = torch.arange(rows, device=order.device)
    order = nn.functional.pad(order, (0, max(0, rows - order.shape[-1])))[..., :rows]
    filled = position < sizes[:, None, None]
    found, visit = order.masked_fill(~filled, torch.iinfo(order.dtype).max).sort(dim=-1, stable=True)
    place = torch.empty_like(visit).scatter_(-1, visit, position.expand_as(visit))
    index = torch.where(filled[:, 0], found[:, 0], found[:, 0, :1])
    return index, place, (found == found[:, :1]).flatten(1).all(1)
