"""A Flower ArrayRecord as one flat vector and back, and how an untrusted one is opened."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from torch import Tensor

from fedlaw.screening import check_buffers

_FLOATS = {"float16": 2, "float32": 4, "float64": 8}
_NUMPY = "numpy.ndarray"  # the one serialization Flower has: the bytes of an .npy file
_HEADER = 4096  # bytes of an .npy header at most; numpy writes 128


class Fault(StrEnum):
    """Why a message is no answer at all. These words, and no text of a client, are what logs and metrics show."""

    UNREADABLE = "message cannot be read"
    NO_CONTENT = "message has no content"
    TOO_MANY_RECORDS = "message has more records than any answer"
    NO_ARRAYS = "array record is missing"
    TWO_ARRAYS = "more than one array record"
    TWO_METRICS = "more than one metric record"
    WRONG_KEYS = "arrays are not those of the model"
    WRONG_STYPE = "arrays are not serialized as numpy arrays"
    WRONG_DTYPE = "array is not floating point"
    WRONG_SHAPE = "array has the wrong shape"
    WRONG_SIZE = "array holds another number of elements than it claims"
    FORGED = "message names another sender"
    DUPLICATE = "second reply in the same phase"
    LATE = "answers another round or phase"
    NO_REPLY = "no reply in time"
    NOT_SENT = "request could not be delivered"


class _Slot(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """Where each array of a model lies in its vector (d,): in the order of the ArrayRecord it was made of.

    >>> layout = Layout.of(ArrayRecord({"w": Array(np.ones((2, 3), np.float32)), "b": Array(np.zeros(3))}))
    >>> layout.size, layout.dtype
    (9, torch.float64)
    """

    slots: tuple[_Slot, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, arrays: ArrayRecord) -> Self:
        """The layout of our own model; a ValueError that names every array which cannot be averaged."""
        if not len(arrays):
            raise ValueError("initial_arrays must hold the model to start from, got none")
        named = {name: array.numpy() for name, array in arrays.items()}
        odd = [
            f"{name} ({values.dtype})" for name, values in named.items() if values.dtype.kind not in "biufc"
        ]
        if odd:
            raise ValueError(f"initial_arrays must be numbers, got {', '.join(odd)}")
        check_buffers((name, torch.from_numpy(np.array(values))) for name, values in named.items())
        slots, start = [], 0
        for name, values in named.items():
            stop = start + values.size
            slots.append(_Slot(name, tuple(values.shape), values.dtype.name, start, stop))
            start = stop
        wide = any(slot.dtype == "float64" for slot in slots)
        return cls(tuple(slots), torch.float64 if wide else torch.float32)

    @property
    def size(self) -> int:
        """d, the number of elements."""
        return self.slots[-1].stop

    @property
    def bytes(self) -> int:
        """How many bytes the arrays take, without headers."""
        return sum((slot.stop - slot.start) * np.dtype(slot.dtype).itemsize for slot in self.slots)

    def to_arrays(self, vector: Tensor) -> ArrayRecord:
        """The vector (d,) as an ArrayRecord of the model's names, shapes and dtypes."""
        flat = vector.detach().cpu().numpy()
        return ArrayRecord(
            {
                slot.name: Array(flat[slot.start : slot.stop].reshape(slot.shape).astype(slot.dtype))
                for slot in self.slots
            }
        )

    def to_vector(self, arrays: ArrayRecord) -> Tensor:
        """Our own arrays as a vector (d,); a ValueError if they are not laid out so."""
        found = self.read(arrays)
        if isinstance(found, Fault):
            raise ValueError(f"arrays do not fit the model: {found}")
        return found

    def read(self, arrays: ArrayRecord) -> Tensor | Fault:
        """Untrusted arrays as a new vector (d,), or what is wrong with them.

        Nothing is allocated before every name, dtype, shape and number of bytes is the model's.
        """
        if len(arrays) != len(self.slots):
            return Fault.WRONG_KEYS
        opened = []
        for slot in self.slots:
            array = arrays.get(slot.name)
            if array is None:
                return Fault.WRONG_KEYS
            values = _open(array, slot.shape)
            if isinstance(values, Fault):
                return values
            opened.append(values)
        vector = torch.empty(self.size, dtype=self.dtype)
        flat = vector.numpy()
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is infinite, and refused as that
            for slot, values in zip(self.slots, opened, strict=True):
                flat[slot.start : slot.stop].reshape(slot.shape)[...] = values
        return vector


def _open(array: Any, shape: tuple[int, ...]) -> NDArray[Any] | Fault:
    """A view of the bytes of an untrusted Array, if it is floating point and of this very shape.

    `np.load` would allocate whatever the header inside claims; here the header is held to the shape first.
    """
    data = array.data
    if array.stype != _NUMPY or not isinstance(data, bytes):
        return Fault.WRONG_STYPE
    if array.dtype not in _FLOATS:
        return Fault.WRONG_DTYPE
    if tuple(array.shape) != shape:
        return Fault.WRONG_SHAPE
    payload = math.prod(shape) * _FLOATS[array.dtype]
    if not payload < len(data) <= payload + _HEADER:
        return Fault.WRONG_SIZE
    head = io.BytesIO(data[:_HEADER])
    try:
        version = np.lib.format.read_magic(head)
        if version == (1, 0):
            inner, by_columns, dtype = np.lib.format.read_array_header_1_0(head)
        elif version == (2, 0):
            inner, by_columns, dtype = np.lib.format.read_array_header_2_0(head)
        else:
            return Fault.UNREADABLE
        offset = head.tell()
    except Exception:  # the parser's errors are many, and all mean the same: these bytes are no array
        return Fault.UNREADABLE
    if dtype.kind != "f" or dtype.itemsize != _FLOATS[array.dtype]:
        return Fault.WRONG_DTYPE
    if inner != shape:
        return Fault.WRONG_SHAPE
    if len(data) - offset != payload:
        return Fault.WRONG_SIZE
    flat = np.frombuffer(data, dtype=dtype, offset=offset)
    return flat.reshape(shape[::-1]).T if by_columns else flat.reshape(shape)
