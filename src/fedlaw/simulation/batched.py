"""The batched backend: k copies of a Sequential stepped at once by batched matrix products."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fedlaw._pages import large_empty
from fedlaw.simulation import layers
from fedlaw.simulation.layers import Layer
from fedlaw.simulation.reading import Part, convolves, read

CACHE_LINE = 64  # bytes


class BatchedKernel:
    """k copies of a Sequential, each with parameters of its own, and their SGD steps.

    Parameters and the intermediates of linear layers lie in buffers that are made once. On a CPU each job's share
    of a buffer begins on a cache line, so that its arithmetic cannot depend on its place among its neighbours.

    Args:
        model: a Sequential of known layers.
        shape: of one example.
        jobs: most jobs at once.
        width: most examples of a job at once.
        like: a tensor of the dtype and on the device to work in.
    """

    def __init__(self, model: nn.Module, shape: tuple[int, ...], jobs: int, width: int, like: Tensor) -> None:
        self.parts = read(model, shape)
        cpu = like.device.type == "cpu"
        self._jobs, self._width, self._like = jobs, width, like
        self._unit = CACHE_LINE // like.element_size() if cpu else 1
        self._format = torch.channels_last if cpu else torch.contiguous_format
        self._images = convolves(self.parts)
        self._first = next((i for i, part in enumerate(self.parts) if part.trained), len(self.parts))
        self._params = {
            name: self._rows(self._buffer(tuple(p.shape)), jobs, tuple(p.shape))
            for name, p in model.named_parameters()
        }
        self._views = {id(p): self._params[name] for name, p in model.named_parameters()}
        self._buffers = {
            i: (
                self._buffer((width, part.module.out_features)),
                self._buffer((width, part.module.in_features)),
            )
            for i, part in enumerate(self.parts)
            if isinstance(part.module, nn.Linear)
        }
        self._entry = self._buffer((width, *shape)) if cpu and not self._images else None
        self._programs: dict[tuple[int, int, int], list[Layer]] = {}

    @staticmethod
    def activations(model: nn.Module, examples: Tensor) -> int:
        """Numbers that all layers together take in and put out, for one example."""
        return sum(math.prod(part.shape) for part in read(model, tuple(examples.shape[1:])))

    @staticmethod
    def stacks(model: nn.Module, device: torch.device) -> bool:
        """Whether jobs should step together: always, except convolutions on a CPU, which lose by it."""
        return device.type != "cpu" or not any(isinstance(module, nn.Conv2d) for module in model.modules())

    def load(self, theta: Tensor) -> None:
        """Let jobs 0..k-1 start from the rows of `theta` (k, d)."""
        at = 0
        for param in self._params.values():
            size = param[0].numel()
            param[: len(theta)].copy_(theta[:, at : at + size].view(len(theta), *param.shape[1:]))
            at += size

    def flat(self, k: int, out: Tensor | None = None) -> Tensor:
        """The parameters (k, d) of jobs 0..k-1, written into `out` if given."""
        return torch.cat([param[:k].flatten(1) for param in self._params.values()], dim=1, out=out)

    def step(self, lo: int, x: Tensor, y: Tensor, weight: Tensor, lr: float) -> None:
        """One SGD step of jobs lo, lo+1, ... on x (k, w, ...), y (k, w), examples weighted by `weight` (k, w)."""
        program = self._program(lo, lo + x.shape[0], x.shape[1])
        weight = weight.unsqueeze(1)
        # d loss / d scores = weight * (softmax - one-hot)
        slope = self._forward(program, x).softmax(1).mul_(weight)
        gradient: Tensor | None = slope.scatter_add_(1, y.unsqueeze(1), -weight)
        for layer in reversed(program[self._first :]):
            assert gradient is not None  # the first trained layer alone returns none
            gradient = layer.backward(gradient, lr)

    def losses(self, lo: int, x: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy (k, w) of every example under jobs lo, lo+1, ..."""
        scores = self._forward(self._program(lo, lo + x.shape[0], x.shape[1]), x)
        return -scores.log_softmax(1).gather(1, y.unsqueeze(1)).squeeze(1)

    def scores(self, lo: int, x: Tensor) -> Tensor:
        """Class scores (k, w, classes); valid until the next call."""
        return self._forward(self._program(lo, lo + x.shape[0], x.shape[1]), x).mT

    def _forward(self, program: list[Layer], x: Tensor) -> Tensor:
        """Class scores (k, classes, w)."""
        k, width = x.shape[:2]
        if self._images:
            x = x.transpose(0, 1).flatten(1, 2).contiguous(memory_format=self._format)
        elif self._entry is not None and x[0].numel() % self._unit:
            x = self._rows(self._entry, k, (width, *x.shape[2:])).copy_(x)
        for layer in program:
            x = layer.forward(x)
        return x

    def _program(self, lo: int, hi: int, width: int) -> list[Layer]:
        """The layers of jobs lo..hi-1 for batches of `width`, bound to their parameters and buffers."""
        key = (lo, hi, width)
        if key not in self._programs:
            program = [self._bind(i, part, *key) for i, part in enumerate(self.parts)]
            last = program[-1] if program else None
            self._programs[key] = (
                program if isinstance(last, layers.Scores) else [*program, layers.Transposed()]
            )
        return self._programs[key]

    def _bind(self, i: int, part: Part, lo: int, hi: int, width: int) -> Layer:
        module, k, further = part.module, hi - lo, i > self._first
        weight, bias = (
            self._views[id(p)][lo:hi] if isinstance(p := getattr(module, name, None), nn.Parameter) else None
            for name in ("weight", "bias")
        )
        if isinstance(module, nn.Linear):
            assert weight is not None
            out, given = self._buffers[i]
            grad = self._rows(given, k, (width, module.in_features)) if further else None
            if i == len(self.parts) - 1:
                scores = self._rows(out, k, (module.out_features, width))
                return layers.Scores(weight, bias, scores, grad)
            return layers.Linear(weight, bias, self._rows(out, k, (width, module.out_features)), grad)
        if isinstance(module, nn.Conv2d):
            assert weight is not None
            return layers.Conv2d(module, weight, bias, further, self._format)
        if isinstance(module, nn.GroupNorm):
            assert weight is not None
            assert bias is not None
            return layers.GroupNorm(module, weight, bias, further, self._format)
        if isinstance(module, nn.MaxPool2d):
            return layers.MaxPool2d(module)
        if isinstance(module, nn.ReLU):
            return layers.ReLU(in_place=further)
        return layers.Flatten(k, width, spatial=self._images and len(part.shape) == 3)

    def _buffer(self, shape: tuple[int, ...]) -> Tensor:
        """Room for all jobs' tensors of `shape`."""
        share = -(-math.prod(shape) // self._unit) * self._unit
        return large_empty((self._jobs * share,), self._like)

    def _rows(self, buffer: Tensor, k: int, shape: tuple[int, ...]) -> Tensor:
        """A view (k, *shape) of the buffer's beginning, each of the k from a cache line on."""
        size = math.prod(shape)
        share = -(-size // self._unit) * self._unit
        return buffer[: k * share].view(k, share)[:, :size].view(k, *shape)
