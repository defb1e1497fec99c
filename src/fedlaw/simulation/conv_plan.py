"""Reading a convolutional network for a GPU: its blocks, and how the kernels tile them."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass

import torch
from torch import nn

from fedlaw.simulation.reading import Part, UnknownLayer, pair, read

Tile = dict[str, int]

_CAPABILITY = (9, 0)  # Hopper: tiles are as large as its registers and shared memory allow
_NUMBERS = 32_768  # float32 sums that one program can hold in registers
_WIDEST = 128  # channels of a tile
_DEEPEST = 64  # numbers in a row of a first convolution's kernel


@dataclass(frozen=True)
class Block:
    """One convolution, group norm, ReLU and 2x2 max-pooling, for examples of `shape` (channels, height, width).

    The images that enter the first block of a model have few channels, too few for a matrix product at each tap of
    the convolution: they are given a border of zeros and pixels of a power of two, and the kernels are told that
    one tap is a whole row of the convolution's kernel.
    """

    conv: nn.Conv2d
    norm: nn.GroupNorm
    shape: tuple[int, int, int]
    first: bool

    @property
    def depth(self) -> int:
        """Numbers of one pixel of the input."""
        return max(4, power_of_two(self.shape[0])) if self.first else self.shape[0]

    @property
    def kernel(self) -> tuple[int, int, int]:
        """(height, width, channels) of the weights of one output, as they are stored: those added are zero."""
        height, width = pair(self.conv.kernel_size)
        return height, max(power_of_two(width), 16 // self.depth) if self.first else width, self.depth

    @property
    def padding(self) -> int:
        """Zeros on each side of the input."""
        return pair(self.conv.padding)[0]

    @property
    def entering(self) -> tuple[int, int, int]:
        """(height, width, channels) of the input, as it is stored."""
        _, height, width = self.shape
        border = 2 * self.padding if self.first else 0
        return height + border, width + border, self.depth

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
        (height, width, depth), (kh, kw, channels) = self.entering, self.kernel
        if self.first:
            taps = {"CIN": kw * channels, "KH": kh, "KW": 1, "PAD": 0}
        else:
            taps = {"CIN": channels, "KH": kh, "KW": kw, "PAD": self.padding}
        return {"H": height, "W": width, "PIXEL": depth, "OH": self.out[1], "OW": self.out[2], **taps}

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


def tiles(block: Block, exact: bool, half: bool = False) -> dict[str, Tile]:
    """Tile sizes and launch settings of each kernel that works on this block, as measured best on an H200.

    `exact`: products are sums of several terms, which take more registers. `half`: operands are half as large, so
    that twice as many fit.
    """
    groups = block.groups(_WIDEST, _NUMBERS)
    full = 4 * block.cells * groups * block.size == _NUMBERS
    outs = max(16, min(128, power_of_two(block.out[0])))
    warps = 8 if exact else 4
    deep = 2 if half else 1
    return {
        "forward": {
            "BG": groups,
            "BK": math.prod(block.kernel[1:]) if block.first else _divisor(block.shape[0], 32 * deep),
            "num_warps": 8 if full else 4,
            "num_stages": 1 if block.first else 3,
        },
        "first": {
            "BG": block.groups(16, _NUMBERS),
            "SPLIT": min(warps, block.cells // 16),
            "num_warps": warps,
            "num_stages": 1,
        },
        "norm": {"BG": block.groups(_WIDEST, _NUMBERS // 4), "num_warps": 4},
        "input": {
            "BM": 128,
            "BN": max(16, min(64, power_of_two(block.shape[0]))),
            "BK": _divisor(block.out[0], 32 * deep),
            "num_warps": 4,
            "num_stages": 3,
        },
        "weight": {"BM": 32, "BN": outs, "BK": 32 * deep, "num_warps": max(1, outs // 32), "num_stages": 3},
    }


def supports(
    model: nn.Module, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32
) -> bool:
    """Whether ConvKernel can train this model here: the layers of `models.cnn`, float32, a Hopper GPU, Triton.

    >>> from fedlaw.models import cnn
    >>> supports(cnn((3, 32, 32), 10), (3, 32, 32), torch.device("cpu"))
    False
    """
    if device.type != "cuda" or dtype != torch.float32 or importlib.util.find_spec("triton") is None:
        return False
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) != _CAPABILITY:
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
    if math.prod(blocks[0].kernel[1:]) > _DEEPEST:
        raise UnknownLayer("the first convolution has too many channels for so wide a kernel")
    held = 4 * blocks[0].cells * blocks[0].groups(16, _NUMBERS) * blocks[0].size
    if blocks[0].size > 8 or held > _NUMBERS // 2:
        raise UnknownLayer("a group of the first block is too large to be held by one program")
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


def _divisor(channels: int, most: int) -> int:
    """The largest of 64, 32 and 16, but not above `most`, that divides the channels; 32 where none does."""
    return next((size for size in (64, 32, 16) if size <= most and channels % size == 0), 32)
