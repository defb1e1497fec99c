"""Reading a convolutional network for a GPU: its blocks, and how the kernels tile them."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass

import torch
from torch import nn

from fedlaw.simulation.reading import Part, UnknownLayer, pair, read

Tile = dict[str, int]

_NUMBERS = 32_768  # float32 sums that one program can hold in registers
_WIDEST = 128  # channels of a tile
_INNER = 127  # most products that a first convolution may sum for one of its outputs


@dataclass(frozen=True)
class Block:
    """One convolution, group norm, ReLU and 2x2 max-pooling, for examples of `shape` (channels, height, width).

    The images that enter the first block of a model have few channels and come with a border of zeros.
    """

    conv: nn.Conv2d
    norm: nn.GroupNorm
    shape: tuple[int, int, int]
    first: bool

    @property
    def kernel(self) -> tuple[int, int, int]:
        """(height, width, channels) of the weights of one output."""
        return *pair(self.conv.kernel_size), self.shape[0]

    @property
    def padding(self) -> int:
        """Zeros on each side of the input."""
        return pair(self.conv.padding)[0]

    @property
    def entering(self) -> tuple[int, int, int]:
        """(height, width, channels) of the input, with its border if it has one."""
        channels, height, width = self.shape
        border = 2 * self.padding if self.first else 0
        return height + border, width + border, channels

    @property
    def out(self) -> tuple[int, int, int]:
        """(channels, height, width) of the convolution's output."""
        _, height, width = self.shape
        (kh, kw), (pad, _) = pair(self.conv.kernel_size), pair(self.conv.padding)
        return self.conv.out_channels, height + 2 * pad - kh + 1, width + 2 * pad - kw + 1

    @property
    def pooled(self) -> tuple[int, int, int]:
        """(channels, height, width) of the block's output."""
        channels, height, width = self.out
        return channels, height // 2, width // 2

    @property
    def inner(self) -> int:
        """Products that are summed for one output of the convolution."""
        return math.prod(self.kernel)

    @property
    def numbers(self) -> int:
        """Parameters, with a bias whether or not the convolution has one."""
        return self.conv.out_channels * (self.inner + 3)

    @property
    def size(self) -> int:
        """Channels of a group, padded to a power of two."""
        return power_of_two(self.norm.num_channels // self.norm.num_groups)

    @property
    def cells(self) -> int:
        """Pooling windows of an example, incomplete ones included, padded to a power of two of at least 16."""
        _, height, width = self.out
        return max(16, power_of_two(-(-height // 2) * -(-width // 2)))

    def geometry(self) -> dict[str, int]:
        """What the kernels need to know of the convolution."""
        (height, width, channels), (kh, kw, _) = self.entering, self.kernel
        pad = 0 if self.first else self.padding
        sizes = {"OH": self.out[1], "OW": self.out[2]}
        return {"H": height, "W": width, "CIN": channels, "KH": kh, "KW": kw, "PAD": pad, **sizes}

    def columns(self) -> dict[str, int]:
        """What the kernels need to know of the normalization."""
        groups = self.norm.num_groups
        size = self.norm.num_channels // groups
        return {"GROUPS": groups, "SIZE": size, "BS": self.size, "CELLS": self.cells}

    def groups(self, channels: int, numbers: int) -> int:
        """Groups of a tile of four corners: at most so many channels, and numbers, as far as one group allows."""
        groups = power_of_two(max(self.norm.num_groups, -(-16 // self.size)))
        while groups > 1 and (groups * self.size > channels or 4 * self.cells * groups * self.size > numbers):
            groups //= 2
        return groups


def tiles(block: Block) -> dict[str, Tile]:
    """Tile sizes and launch settings of each kernel that works on this block, as measured best on an H200."""
    groups = block.groups(_WIDEST, _NUMBERS)
    full = 4 * block.cells * groups * block.size == _NUMBERS
    outs = max(16, min(128, power_of_two(block.out[0])))
    window = max(32, power_of_two(block.inner + 1))  # and the one behind it
    return {
        "forward": {
            "BG": groups,
            "BK": window if block.first else _divisor(block.shape[0]),
            "num_warps": 8 if full else 4,
            "num_stages": 3,
        },
        "first": {
            "BG": block.groups(16, _NUMBERS),
            "BK": window,
            "SPLIT": min(8, block.cells // 16),
            "num_warps": 8,
        },
        "norm": {"BG": block.groups(_WIDEST, _NUMBERS // 4), "num_warps": 4},
        "input": {
            "BM": 128,
            "BN": max(16, min(64, power_of_two(block.shape[0]))),
            "BK": _divisor(block.out[0]),
            "num_warps": 4,
            "num_stages": 3,
        },
        "weight": {"BM": 32, "BN": outs, "BK": 32, "num_warps": max(1, outs // 32), "num_stages": 3},
    }


def supports(
    model: nn.Module, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32
) -> bool:
    """Whether ConvKernel can train this model here: the layers of `models.cnn`, float32, a CUDA device, Triton.

    >>> from fedlaw.models import cnn
    >>> supports(cnn((3, 32, 32), 10), (3, 32, 32), torch.device("cpu"))
    False
    """
    if device.type != "cuda" or dtype != torch.float32 or importlib.util.find_spec("triton") is None:
        return False
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        plan(model, shape)
    except ValueError:
        return False
    return True


def plan(model: nn.Module, shape: tuple[int, ...]) -> tuple[list[Block], list[nn.Linear]]:
    """The model as blocks, then linear layers with ReLU between them.

    Raises:
        UnknownLayer: it is built differently, or one example's group of channels is too large for a tile.
    """
    parts = read(model, shape)
    kinds = [type(part.module) for part in parts]
    count = kinds.index(nn.Flatten) // 4 if nn.Flatten in kinds else 0
    tail = kinds[4 * count + 1 :]
    layers = [nn.Conv2d, nn.GroupNorm, nn.ReLU, nn.MaxPool2d] * count + [nn.Flatten]
    if not count or kinds[: 4 * count + 1] != layers:
        raise UnknownLayer("the model does not begin with blocks of Conv2d, GroupNorm, ReLU and MaxPool2d")
    if len(tail) % 2 == 0 or set(tail[::2]) != {nn.Linear} or not set(tail[1::2]) <= {nn.ReLU}:
        raise UnknownLayer("the model does not end in Linear layers with ReLU between them")
    blocks = [_block(*parts[4 * i : 4 * i + 4], entry=i == 0) for i in range(count)]
    if blocks[0].inner > _INNER:
        raise UnknownLayer(f"the first convolution sums more than {_INNER} products")
    return blocks, [part.module for part in parts if isinstance(part.module, nn.Linear)]


def _block(first: Part, second: Part, relu: Part, last: Part, *, entry: bool) -> Block:
    conv, norm, pool = first.module, second.module, last.module
    assert isinstance(conv, nn.Conv2d)
    assert isinstance(norm, nn.GroupNorm)
    assert isinstance(pool, nn.MaxPool2d)
    window = (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    if [pair(each) for each in window] != [(2, 2), (2, 2), (0, 0), (1, 1)] or pool.ceil_mode:
        raise UnknownLayer(f"layer {last.name!r} is not a plain 2x2 max-pooling")
    (kh, kw), (above, left) = pair(conv.kernel_size), pair(conv.padding)
    if pair(conv.stride) != (1, 1) or pair(conv.dilation) != (1, 1) or above != left or above >= min(kh, kw):
        raise UnknownLayer(f"layer {first.name!r} has strides, dilation or unusual padding")
    channels, height, width = first.shape
    block = Block(conv, norm, (channels, height, width), entry)
    tile = block.groups(_WIDEST, _NUMBERS) * block.size
    if not 16 <= tile <= _WIDEST or 4 * block.cells * tile > _NUMBERS:
        raise UnknownLayer(f"a group of layer {second.name!r} is too large to be held by one program")
    return block


def power_of_two(number: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << (number - 1).bit_length()


def _divisor(channels: int) -> int:
    """32 or 16, whichever divides the channels; 32 where none does."""
    return 16 if channels % 32 and channels % 16 == 0 else 32
