"""Pickles of numpy arrays and plain containers, read without running anything they name.

CIFAR's files are pickles (of Python 2; copies written later are of Python 3). A pickle is a program, so this
reader trusts none of it:

1. The opcodes are walked first, by `pickletools`, which allocates only what is there. Those that could only
   serve mischief are refused, and so are memo indices larger than the file.
2. Names are never imported. The few that numpy writes for an array stand for small objects here that collect
   the pieces; every other name is refused. The array is then built from its bytes, with the size checked.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlaw.data.base import DataError

MAX_BYTES = 1 << 28
_REFUSED = frozenset(
    [
        "INST",
        "OBJ",
        "NEWOBJ",
        "NEWOBJ_EX",
        "PERSID",
        "BINPERSID",
        "EXT1",
        "EXT2",
        "EXT4",
        "NEXT_BUFFER",
        "READONLY_BUFFER",
    ]
)
_DTYPES = frozenset(["b1", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"])


def read_arrays(path: Path) -> dict[str, Any]:
    """The dict in a pickle file, with str keys, values of plain types and numpy arrays (read-only)."""
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise DataError(f"{path}: {size} bytes; at most {MAX_BYTES} are admitted")
    content = path.read_bytes()
    try:
        _walk(content)
        found = _Reader(io.BytesIO(content), encoding="bytes").load()
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    except Exception as error:  # a damaged pickle can raise nearly anything; none of it is our bug
        detail = str(error).split("\n")[0]
        raise DataError(f"{path}: damaged pickle ({detail}); remove it and get it again") from None
    if not isinstance(found, dict):
        raise DataError(f"{path}: holds a {type(found).__name__}, a dict is expected; get it again")
    # keys are bytes when Python 2 wrote them
    return {_text(key): _finished(value) for key, value in found.items()}


def _walk(content: bytes) -> None:
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in _REFUSED:
            raise DataError(f"pickle with the opcode {opcode.name}: refused, data needs none of it")
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and not 0 <= int(argument or 0) <= len(content):
            raise DataError(f"pickle with the memo index {argument}: refused")


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("latin1")
    if not isinstance(value, str):
        raise DataError(f"a pickle with the key {value!r}: refused, keys must be text")
    return value


def _finished(value: Any) -> Any:
    return value.finish() if isinstance(value, _Array) else value


class _Reader(pickle.Unpickler):
    """An unpickler for which only numpy's names for arrays exist."""

    def find_class(self, module: str, name: str) -> Any:
        # numpy 2 moved numpy.core to numpy._core; both spellings are in circulation
        known = _NAMES.get((module.replace("numpy._core", "numpy.core", 1), name))
        if known is None:
            raise DataError(
                f"pickle names {module}.{name}: refused, only arrays and plain containers are admitted"
            )
        return _Name(known)


class _Name:
    """Stands for an admitted name: it can be called, and nothing else can be done with it."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise DataError("pickle changes a name: refused")


class _DType:
    """What `numpy.dtype('u1', False, True)` and its state (version, byte order, ...) say."""

    __slots__ = ("code", "order")

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = _text(code)
        self.order = "="
        if self.code not in _DTYPES:
            raise DataError(
                f"pickle with an array of dtype {self.code!r}: refused, only numbers are admitted"
            )

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) < 5 or any(part is not None for part in state[2:5]):
            raise DataError("pickle with a structured dtype: refused, only numbers are admitted")
        order = _text(state[1])
        if order not in ("<", ">", "=", "|"):
            raise DataError(f"pickle with the byte order {order!r}: refused")
        self.order = "=" if order == "|" else order

    def finish(self) -> np.dtype[Any]:
        return np.dtype(self.order + self.code)


class _Array:
    """Collects the shape, dtype and bytes of one array."""

    __slots__ = ("_dtype", "_fortran", "_shape", "_values")

    def __init__(self) -> None:
        self._set((), _DType("u1"), False, b"\0")

    def _set(self, shape: Any, dtype: Any, fortran: Any, values: Any) -> None:
        plain = isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape)
        if not plain or not isinstance(dtype, _DType) or not isinstance(values, bytes | bytearray):
            raise DataError("pickle with an array of unknown form: refused")
        self._shape, self._dtype, self._fortran, self._values = shape, dtype, bool(fortran), values

    def __setstate__(self, state: Any) -> None:
        _version, shape, dtype, fortran, values = state
        self._set(shape, dtype, fortran, values)

    def finish(self) -> NDArray[Any]:
        dtype = self._dtype.finish()
        needed = math.prod(self._shape) * dtype.itemsize
        if needed != len(self._values):
            raise DataError(
                f"array of shape {self._shape} needs {needed} bytes, the pickle has {len(self._values)}"
            )
        flat = np.frombuffer(bytes(self._values), dtype)
        return flat.reshape(self._shape, order="F" if self._fortran else "C")


def _from_buffer(values: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    array = _Array()
    array._set(shape, dtype, order == "F", values)
    return array


def _encode(text: Any, encoding: Any) -> bytes:
    """`codecs.encode` as Python 3 uses it to write bytes in an old protocol: latin1 of a str, nothing else."""
    if not isinstance(text, str) or _text(encoding) not in ("latin1", "latin-1"):
        raise DataError("pickle with an encoding other than latin1: refused")
    return text.encode("latin1")


_NAMES: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): lambda *_: _Array(),
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("numpy", "ndarray"): lambda *_: _Array(),
    ("numpy", "dtype"): _DType,
    ("_codecs", "encode"): _encode,
    ("__builtin__", "bytes"): lambda: b"",  # how protocols up to 2 write an array without elements
}
