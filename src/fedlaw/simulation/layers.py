"""Layers of k models at once, each with its own parameters: forward, and backward fused with the SGD step.

Two layouts of what flows between them, for k models with w examples each:
    flat     (k, w, f): linear layers are batched matrix products;
    spatial  (w, k*C, H, W): convolutions have k groups, group norm k times the groups. For k = 1 that is the
             ordinary layout, so one model is never slower than without this module.

Scores alone, the last linear layer's, are (k, classes, w).

`backward(gradient, lr)` takes the gradient with respect to the layer's output, moves the layer's parameters by
-lr times theirs in place, and returns the gradient with respect to the layer's input, formed before they move.
Outputs may be overwritten by a following ReLU: no layer reads its own output again.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedlaw.simulation.reading import pair

_aten: Any = torch.ops.aten


class Layer(Protocol):
    """One layer of k models."""

    def forward(self, x: Tensor) -> Tensor: ...

    def backward(self, gradient: Tensor, lr: float) -> Tensor | None: ...


class Linear:
    """y = x W^T + b: weight (k, out, in), bias (k, out); writes into `out` (k, w, out), `grad` (k, w, in)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, out: Tensor, grad: Tensor | None) -> None:
        self.weight, self.transposed, self.bias = weight, weight.mT, bias
        self.row = None if bias is None else bias.unsqueeze(1)
        self.out, self.grad = out, grad

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        if self.row is None:
            return torch.bmm(x, self.transposed, out=self.out)
        return torch.baddbmm(self.row, x, self.transposed, out=self.out)

    def backward(self, gradient: Tensor, lr: float) -> Tensor | None:
        if self.grad is not None:
            torch.bmm(gradient, self.weight, out=self.grad)
        self.weight.baddbmm_(gradient.mT, self.x, alpha=-lr)
        if self.bias is not None:
            self.bias.sub_(gradient.sum(1), alpha=lr)
        return self.grad


class Spanned:
    """The first linear layer as the outputs for all of a job's n inputs (k, n, out); see GramKernel.

    It takes places (k, w) of examples, counted through the rows of all k jobs, and collects what each example's
    gradients sum to in `slopes` (k, n, out). Buffers: `out` (k, w, out), `columns` (k, w, n) of the Gram matrix.
    """

    def __init__(self, outputs: Tensor, gram: Tensor, slopes: Tensor, out: Tensor, columns: Tensor) -> None:
        self.outputs, self.out, self.columns = outputs, out, columns
        self.output_rows, self.gram_rows, self.slope_rows = (
            tensor.flatten(0, 1) for tensor in (outputs, gram, slopes)
        )

    def forward(self, x: Tensor) -> Tensor:
        self.places = x.flatten()
        return _pick(self.output_rows, self.places, self.out)

    def backward(self, gradient: Tensor, lr: float) -> None:
        self.slope_rows.index_add_(0, self.places, gradient.flatten(0, 1))
        _pick(self.gram_rows, self.places, self.columns)  # rows for columns: the matrix is symmetric
        self.outputs.baddbmm_(self.columns.mT, gradient, alpha=-lr)


def _pick(source: Tensor, index: Tensor, room: Tensor) -> Tensor:
    """Rows of `source` (N, f) into `room` (k, w, f), which may have gaps between its k parts."""
    if not room.is_contiguous():
        return room.copy_(source.index_select(0, index).view(room.shape))
    torch.index_select(source, 0, index, out=room.flatten(0, 1))
    return room


class Scores:
    """The last linear layer, y^T = W x^T + b: `out` is (k, out, w), and so is the gradient that it takes.

    A softmax over a few classes is fast across long rows of examples, and slow along short rows of classes.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, out: Tensor, grad: Tensor | None) -> None:
        self.weight, self.bias, self.out, self.grad = weight, bias, out, grad
        self.column = None if bias is None else bias.unsqueeze(2)

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        if self.column is None:
            return torch.bmm(self.weight, x.mT, out=self.out)
        return torch.baddbmm(self.column, self.weight, x.mT, out=self.out)

    def backward(self, gradient: Tensor, lr: float) -> Tensor | None:
        if self.grad is not None:
            torch.bmm(gradient.mT, self.weight, out=self.grad)
        self.weight.baddbmm_(gradient, self.x, alpha=-lr)
        if self.bias is not None:
            self.bias.sub_(gradient.sum(2), alpha=lr)
        return self.grad


class Transposed:
    """(k, w, classes) to the layout of scores, where no linear layer is the last."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mT

    def backward(self, gradient: Tensor, lr: float) -> Tensor:
        return gradient.mT.contiguous()


class ReLU:
    """y = max(x, 0), in place except where x may be the caller's; backward always in place."""

    def __init__(self, in_place: bool) -> None:
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        self.y = x.relu_() if self.in_place else x.relu()
        return self.y

    def backward(self, gradient: Tensor, lr: float) -> Tensor:
        result: Tensor = _aten.threshold_backward.grad_input(gradient, self.y, 0, grad_input=gradient)
        return result


class Flatten:
    """(k, w, ...) or, where `spatial`, (w, k*C, H, W) to (k, w, f)."""

    def __init__(self, k: int, width: int, spatial: bool) -> None:
        self.k, self.width, self.spatial = k, width, spatial

    def forward(self, x: Tensor) -> Tensor:
        if not self.spatial:
            return x.reshape(self.k, self.width, -1)
        self.shape = x.shape
        return x.reshape(self.width, self.k, -1).transpose(0, 1)

    def backward(self, gradient: Tensor, lr: float) -> Tensor:
        return gradient.transpose(0, 1).reshape(self.shape) if self.spatial else gradient


class Conv2d:
    """2-D convolution with zero padding: weight (k, out, in, height, width), bias (k, out)."""

    def __init__(
        self,
        module: nn.Conv2d,
        weight: Tensor,
        bias: Tensor | None,
        needs_grad: bool,
        format: torch.memory_format,
    ) -> None:
        self.weight, self.bias, self.needs_grad, self.format = weight, bias, needs_grad, format
        self.k, self.channels = weight.shape[0], weight.shape[0] * weight.shape[1]
        self.geometry = (list(module.stride), list(pair(module.padding)), list(module.dilation))

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        self.kernel = self.weight.flatten(0, 1).contiguous(memory_format=self.format)
        bias = None if self.bias is None else self.bias.flatten()
        stride, padding, dilation = self.geometry
        return torch.conv2d(x, self.kernel, bias, stride, padding, dilation, self.k)

    def backward(self, gradient: Tensor, lr: float) -> Tensor | None:
        grad, weight, bias = _aten.convolution_backward(
            gradient.contiguous(memory_format=self.format),
            self.x,
            self.kernel,
            [self.channels],
            *self.geometry,
            False,
            [0, 0],
            self.k,
            [self.needs_grad, True, self.bias is not None],
        )
        self.weight.sub_(weight.reshape(self.weight.shape), alpha=lr)
        if self.bias is not None:
            self.bias.sub_(bias.reshape(self.bias.shape), alpha=lr)
        return grad if self.needs_grad else None


class GroupNorm:
    """Group normalisation with weight and bias (k, C)."""

    def __init__(
        self,
        module: nn.GroupNorm,
        weight: Tensor,
        bias: Tensor,
        needs_grad: bool,
        format: torch.memory_format,
    ) -> None:
        self.weight, self.bias, self.needs_grad, self.format = weight, bias, needs_grad, format
        self.groups, self.eps = module.num_groups * weight.shape[0], module.eps

    def forward(self, x: Tensor) -> Tensor:
        self.x = x.contiguous(memory_format=self.format)
        self.sizes = (x.shape[0], x.shape[1], x[0, 0].numel(), self.groups)
        self.scale = self.weight.flatten()
        y, self.mean, self.rstd = torch.native_group_norm(
            self.x, self.scale, self.bias.flatten(), *self.sizes, self.eps
        )
        return y

    def backward(self, gradient: Tensor, lr: float) -> Tensor | None:
        grad, weight, bias = _aten.native_group_norm_backward(
            gradient.contiguous(memory_format=self.format),
            self.x,
            self.mean,
            self.rstd,
            self.scale,
            *self.sizes,
            [self.needs_grad, True, True],
        )
        self.weight.sub_(weight.reshape(self.weight.shape), alpha=lr)
        self.bias.sub_(bias.reshape(self.bias.shape), alpha=lr)
        return grad if self.needs_grad else None


class MaxPool2d:
    """Maximum over windows."""

    def __init__(self, module: nn.MaxPool2d) -> None:
        window = (module.kernel_size, module.stride, module.padding, module.dilation)
        self.window = (*(list(pair(each)) for each in window), module.ceil_mode)

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        y, self.indices = _aten.max_pool2d_with_indices(x, *self.window)
        return y  # type: ignore[no-any-return]

    def backward(self, gradient: Tensor, lr: float) -> Tensor:
        grad: Tensor = _aten.max_pool2d_with_indices_backward(gradient, self.x, *self.window, self.indices)
        return grad
