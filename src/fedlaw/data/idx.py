"""The IDX format of MNIST and its relatives, read as the untrusted bytes they are."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import IO, cast

import numpy as np
from numpy.typing import NDArray

from fedlaw.data.base import DataError

MAX_BYTES = 1 << 28  # of one file's contents: five times the largest of the known files
_CHUNK = 1 << 20
_UINT8 = 8  # the type code of unsigned bytes, the only one these data sets use


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """The array of bytes in an IDX file, plain or (suffix .gz) compressed, of so many `dimensions`.

    The format: two zero bytes, a type code, the number of dimensions, each dimension as a big-endian uint32,
    then the elements. What the header claims is checked against a limit before anything is read, and memory
    grows with what is really there.
    """
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            return _parse(cast("IO[bytes]", file), path, dimensions)
    except (gzip.BadGzipFile, zlib.error, EOFError):
        raise DataError(f"{path}: damaged gzip file; remove it and get it again") from None


def _parse(file: IO[bytes], path: Path, dimensions: int) -> NDArray[np.uint8]:
    head = file.read(4)
    if len(head) < 4 or head[:2] != b"\0\0":
        raise DataError(f"{path}: not an IDX file (it must begin with two zero bytes); get it again")
    if head[2] != _UINT8 or head[3] != dimensions:
        raise DataError(
            f"{path}: type code {head[2]} in {head[3]} dimensions; "
            f"unsigned bytes (code {_UINT8}) in {dimensions} are expected"
        )
    sizes = file.read(4 * dimensions)
    if len(sizes) < 4 * dimensions:
        raise DataError(f"{path}: ends within its header; remove it and get it again")
    shape = tuple(int.from_bytes(sizes[i : i + 4], "big") for i in range(0, len(sizes), 4))
    expected = math.prod(shape)
    if not 0 < expected <= MAX_BYTES:
        raise DataError(f"{path}: claims the shape {shape}, {expected} bytes; 1 to {MAX_BYTES} are admitted")
    content = bytearray()
    while len(content) <= expected:  # one byte more than expected tells a file that is too long
        chunk = file.read(min(_CHUNK, expected + 1 - len(content)))
        if not chunk:
            break
        content += chunk
    if len(content) != expected:
        has = "more" if len(content) > expected else f"only {len(content)}"
        raise DataError(f"{path}: the shape {shape} needs {expected} bytes, it has {has}; get it again")
    return np.frombuffer(content, np.uint8).reshape(shape)
