"""Convolutional networks of k clients on a GPU: a block of convolution, norm, ReLU and pooling is one kernel."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fedlaw.simulation.conv_plan import Block, plan, tiles
from fedlaw.simulation.reading import pair

_RAISED = 1024.0  # what gradients in half precision are multiplied by


class ConvKernel:
    """k copies of a convolutional network, each with parameters of its own, and their SGD steps, on a GPU.

    The arguments and the methods are those of BatchedKernel. Padding, examples of weight 0 at the end of a job's
    batch, costs next to nothing. Matrix products are as `torch.set_float32_matmul_precision` says: "highest" takes
    the three leading products of operands split into two TF32 numbers each, which is as exact as float32; any other
    setting takes one product of TF32 numbers. Sums are in float32, in an order that does not vary from run to run.

    Args:
        half: keep examples, activations and their gradients in half precision, and a copy of the convolutions'
            weights in it, so that products are of numbers with 11 significant bits, as TF32 has. Parameters stay in
            float32. Gradients are kept multiplied by `_RAISED`, lest they be too small for its range.
    """

    def __init__(
        self,
        model: nn.Module,
        shape: tuple[int, ...],
        jobs: int,
        width: int,
        like: Tensor,
        *,
        half: bool = False,
    ) -> None:
        from fedlaw.simulation import conv_gradients, conv_kernels  # they need Triton

        self._blockwise: Any = conv_kernels
        self._products: Any = conv_gradients
        self._blocks, self._linear = plan(model, shape)
        exact = torch.get_float32_matmul_precision() == "highest"
        self._precision = "tf32x3" if exact else "tf32"
        self.tiles = [tiles(block, exact and not half, half) for block in self._blocks]
        self._like, self._half = like, half
        self._raised = _RAISED if half else 1.0
        self._examples = jobs * width
        beyond = math.prod(self._blocks[0].kernel[1:])  # the last row of taps ends beyond the last image
        self._entry = self._kept_room(self._examples * math.prod(self._blocks[0].entering) + beyond)
        self._param = [self._room(jobs, block.numbers) for block in self._blocks]
        # The first block's weights are few: its kernels round them as they read them.
        self._copy = [
            self._kept_room(jobs, block.inner * block.out[0]) if half and not block.first else None
            for block in self._blocks
        ]
        self._back = [self._kept_room(jobs, block.inner * block.out[0]) for block in self._blocks]
        self._pooled = [self._kept_room(self._examples * math.prod(block.pooled)) for block in self._blocks]
        self._weight = [self._room(jobs, *layer.weight.shape) for layer in self._linear]
        self._bias = [
            None if layer.bias is None else self._room(jobs, layer.out_features) for layer in self._linear
        ]
        self._full = torch.full((jobs,), width, dtype=torch.int32, device=like.device)
        self._place = torch.arange(1, width + 1, dtype=torch.int32, device=like.device)
        self._kept: list[_Kept] = []
        views = {id(p): view for p, view in self._views()}
        self._rows = [views[id(p)] for p in model.parameters()]

    @staticmethod
    def activations(model: nn.Module, examples: Tensor) -> int:
        """Numbers that are kept for one example."""
        blocks, linear = plan(model, tuple(examples.shape[1:]))
        kept = sum(math.prod(block.pooled) for block in blocks)
        kept += sum(math.prod(block.out) + math.prod(block.shape) for block in blocks[1:])
        entry = math.prod(blocks[0].entering) + blocks[0].numbers
        return entry + kept + sum(layer.out_features for layer in linear)

    @staticmethod
    def stacks(model: nn.Module, device: torch.device) -> bool:
        """Whether jobs should step together: yes."""
        return True

    def load(self, theta: Tensor) -> None:
        """Let jobs 0..k-1 start from the rows of `theta` (k, d)."""
        at, k = 0, len(theta)
        for view in self._rows:
            size = view[0].numel()
            view[:k].copy_(theta[:, at : at + size].view(k, *view.shape[1:]))
            at += size
        for block, param, copy, back in zip(self._blocks, self._param, self._copy, self._back, strict=True):
            weight = param[:k, : back.shape[1]].view(k, block.out[0], block.inner)
            back[:k].view(k, block.inner, block.out[0]).copy_(weight.mT)
            if copy is not None:
                copy[:k].copy_(weight.flatten(1))

    def flat(self, k: int, out: Tensor | None = None) -> Tensor:
        """The parameters (k, d) of jobs 0..k-1, written into `out` if given."""
        return torch.cat([view[:k].flatten(1) for view in self._rows], dim=1, out=out)

    def step(self, lo: int, x: Tensor, y: Tensor, weight: Tensor, lr: float) -> None:
        """One SGD step of jobs lo, lo+1, ... on x (k, w, ...), y (k, w), examples weighted by `weight` (k, w).

        A job's examples of weight 0 are left out from the last one back to one of another weight.
        """
        if not self._kept:  # scores need none of this
            self._kept = [_Kept(block, self._examples, self._like, self._pooled[0]) for block in self._blocks]
        k, w = weight.shape
        with self._device():
            count = ((weight != 0) * self._place[:w]).amax(1).to(torch.int32)
            x = self._enter(x)
            hidden = self._tail(lo, self._trunk(lo, k, w, x, count, keep=True))
            weight = weight.unsqueeze(-1)
            # d loss / d scores = weight * (softmax - one-hot)
            slope = hidden.pop().softmax(-1).mul_(weight)
            slope.scatter_add_(-1, y.unsqueeze(-1), -weight)
            gradient = self._tail_step(lo, hidden, slope, lr)
            if self._half:
                gradient = gradient.mul_(self._raised).half()
            lr = lr / self._raised
            for i in range(len(self._blocks) - 1, 0, -1):
                self._norm_backward(i, lo, k, w, gradient, count)
                self._input_gradient(i, lo, k, w, count)
                self._weight_step(i, lo, k, w, count, lr)
                self._sum_step(i, lo, k, w, lr)
                gradient = self._kept[i].gradient
            self._first_backward(lo, k, w, x, gradient, count)
            self._sum_step(0, lo, k, w, lr)

    def losses(self, lo: int, x: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy (k, w) of every example under jobs lo, lo+1, ..."""
        return -self.scores(lo, x).log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)

    def scores(self, lo: int, x: Tensor) -> Tensor:
        """Class scores (k, w, classes)."""
        k, w = x.shape[:2]
        with self._device():
            return self._tail(lo, self._trunk(lo, k, w, self._enter(x), self._full, keep=False))[-1]

    def _enter(self, x: Tensor) -> Tensor:
        """The images x (k, w, channels, height, width) with their border, by height, width and channel."""
        block, (k, w, channels) = self._blocks[0], x.shape[:3]
        room = self._entry[: k * w * math.prod(block.entering)].view(k, w, *block.entering)
        (_, height, width), edge = block.shape, block.padding
        room[:, :, edge : edge + height, edge : edge + width, :channels] = x.permute(0, 1, 3, 4, 2)
        return room

    def _trunk(self, lo: int, k: int, w: int, x: Tensor, count: Tensor, keep: bool) -> Tensor:
        """All blocks: (k, w, features), by height, width and channel."""
        for i, (block, pooled) in enumerate(zip(self._blocks, self._pooled, strict=True)):
            kept = self._kept[i] if keep and i else None
            tile = self.tiles[i]["forward"]
            param, copy = self._param[i], self._copy[i]
            weight = param if copy is None else copy
            self._blockwise.block_forward[(k * w, -(-block.norm.num_groups // tile["BG"]))](
                x, weight[lo:], param[lo:], count, pooled, pooled if kept is None else kept.normal,
                pooled if kept is None else kept.rstd, w, block.norm.eps, weight.shape[1],
                **block.geometry(), **block.columns(),
                KEEP=kept is not None, PRECISION=self._precision, **tile,
            )  # fmt: skip
            x = pooled
        features = math.prod(self._blocks[-1].pooled)
        return x[: k * w * features].view(k, w, features).to(self._like.dtype)

    def _norm_backward(self, i: int, lo: int, k: int, w: int, gradient: Tensor, count: Tensor) -> None:
        block, kept, tile = self._blocks[i], self._kept[i], self.tiles[i]["norm"]
        self._blockwise.norm_backward[(k * w, -(-block.norm.num_groups // tile["BG"]))](
            kept.normal, kept.rstd, gradient, self._scale(i, lo), kept.partial, count, w, STEP=block.numbers,
            OH=block.out[1], OW=block.out[2], **block.columns(), BIAS=block.conv.bias is not None, **tile,
        )  # fmt: skip

    def _input_gradient(self, i: int, lo: int, k: int, w: int, count: Tensor) -> None:
        block, kept, tile = self._blocks[i], self._kept[i], self.tiles[i]["input"]
        channels, height, width = block.shape
        self._products.input_gradient[(k * -(-w * height * width // tile["BM"]), -(-channels // tile["BN"]))](
            kept.normal, self._back[i][lo:], kept.gradient, count, w, **block.geometry(), COUT=block.out[0],
            PRECISION=self._precision, **tile,
        )  # fmt: skip

    def _weight_step(self, i: int, lo: int, k: int, w: int, count: Tensor, lr: float) -> None:
        block, kept, tile = self._blocks[i], self._kept[i], self.tiles[i]["weight"]
        back, copy = self._back[i][lo:], self._copy[i]
        self._products.weight_step[(k * -(-block.inner // tile["BM"]), -(-block.out[0] // tile["BN"]))](
            self._pooled[i - 1], kept.normal, self._param[i][lo:], back if copy is None else copy[lo:], back,
            count, lr, w, **block.geometry(), COUT=block.out[0], COPY=copy is not None,
            PRECISION=self._precision, **tile,
        )  # fmt: skip

    def _first_backward(self, lo: int, k: int, w: int, x: Tensor, gradient: Tensor, count: Tensor) -> None:
        block, tile = self._blocks[0], self.tiles[0]["first"]
        span = pair(block.conv.kernel_size)[1] * block.depth
        self._blockwise.first_backward[(k * w, -(-block.norm.num_groups // tile["BG"]))](
            x, self._param[0][lo:], gradient, self._kept[0].partial, count, w, block.norm.eps,
            **block.geometry(), **block.columns(), SPAN=span, BIAS=block.conv.bias is not None,
            PRECISION=self._precision, **tile,
        )  # fmt: skip

    def _sum_step(self, i: int, lo: int, k: int, w: int, lr: float) -> None:
        """Block i moved where its gradients lie in parts: all of the first block, else its last three rows."""
        block = self._blocks[i]
        param, size = (
            (self._param[i][lo:], block.numbers) if block.first else (self._scale(i, lo), 3 * block.out[0])
        )
        self._products.sum_step[(k, -(-size // 256))](
            param, self._kept[i].partial, lr, w, STEP=block.numbers, SIZE=size, BLOCK=256, num_warps=2
        )

    def _scale(self, i: int, lo: int) -> Tensor:
        """Bias, gamma and beta of job lo's block i, and what lies behind them."""
        block = self._blocks[i]
        return self._param[i].view(-1)[lo * block.numbers + block.out[0] * block.inner :]

    def _tail(self, lo: int, x: Tensor) -> list[Tensor]:
        """The linear layers' inputs, each (k, w, features), then the scores."""
        jobs = slice(lo, lo + len(x))
        hidden = [x]
        for weight, bias in zip(self._weight, self._bias, strict=True):
            if len(hidden) > 1:
                hidden[-1].relu_()
            rows = weight[jobs].mT
            hidden.append(
                torch.bmm(hidden[-1], rows)
                if bias is None
                else torch.baddbmm(bias[jobs].unsqueeze(1), hidden[-1], rows)
            )
        return hidden

    def _tail_step(self, lo: int, hidden: list[Tensor], slope: Tensor, lr: float) -> Tensor:
        """The linear layers moved against the gradient (k, w, classes) of the scores; returns their input's."""
        jobs = slice(lo, lo + len(slope))
        for i in range(len(self._weight) - 1, -1, -1):
            weight, bias = self._weight[i], self._bias[i]
            before = torch.bmm(slope, weight[jobs])
            weight[jobs].baddbmm_(slope.mT, hidden[i], alpha=-lr)
            if bias is not None:
                bias[jobs].sub_(slope.sum(1), alpha=lr)
            slope = before.mul_(hidden[i] > 0) if i else before
        return slope

    def _views(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every parameter of the model with its values for all jobs, a view in the order of the model's own."""
        for block, param in zip(self._blocks, self._param, strict=True):
            outs, inner = block.out[0], block.inner
            height, width = pair(block.conv.kernel_size)
            weight = param[:, : outs * inner].view(-1, outs, *block.kernel)
            weight = weight[:, :, :height, :width, : block.shape[0]]
            yield block.conv.weight, weight.permute(0, 1, 4, 2, 3)
            rest = (block.conv.bias, block.norm.weight, block.norm.bias)
            for i, parameter in enumerate(rest):
                if parameter is not None:
                    yield parameter, param[:, outs * (inner + i) : outs * (inner + i + 1)]
        channels, height, width = self._blocks[-1].pooled
        for i, (layer, weight, bias) in enumerate(zip(self._linear, self._weight, self._bias, strict=True)):
            if i == 0:  # the model flattens by channel, height, width
                weight = weight.view(-1, layer.out_features, height, width, channels).permute(0, 1, 4, 2, 3)
            yield layer.weight, weight
            if bias is not None:
                yield layer.bias, bias

    def _device(self) -> AbstractContextManager[Any]:
        """Kernels are launched on the current device: it must be that of the tensors."""
        return torch.cuda.device(self._like.device) if self._like.is_cuda else nullcontext()

    def _room(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self._like.dtype, device=self._like.device)

    def _kept_room(self, *shape: int) -> Tensor:
        dtype = torch.float16 if self._half else self._like.dtype
        return torch.zeros(shape, dtype=dtype, device=self._like.device)


class _Kept:
    """What a block keeps between forward and backward for a number of examples; the first keeps no activations."""

    def __init__(self, block: Block, examples: int, like: Tensor, activations: Tensor) -> None:
        outs = block.out[0]
        self.partial = like.new_empty(examples * (block.numbers if block.first else 3 * outs))
        if not block.first:
            self.normal = activations.new_empty(examples * math.prod(block.out))
            self.rstd = like.new_empty(examples * outs)
            self.gradient = activations.new_empty(examples * math.prod(block.shape))
