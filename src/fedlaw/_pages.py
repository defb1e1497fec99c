"""Room for large results on huge pages, where the system has them."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

_LARGE = 2 << 20  # bytes: one huge page


def large_empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """An uninitialised tensor of this shape, of the dtype and on the device of `like`.

    Writing a fresh tensor for the first time costs a page fault every 4 KiB: several times what the writing does.
    A large one on a CPU therefore asks for huge pages (Linux, where they are given on request).

    >>> large_empty((2, 3), torch.zeros(1)).shape
    torch.Size([2, 3])
    """
    count = math.prod(shape)
    size = count * like.element_size()
    if like.device.type != "cpu" or size < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    try:
        room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        room.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # no such pages, or no address space: an ordinary tensor says so better
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    return torch.frombuffer(room, dtype=like.dtype, count=count).view(shape)
