"""Arrays from strangers: nothing is read, allocated or broadcast that is not the model's."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st

from fedlaw.flower.layout import Fault, Layout

MODEL = {
    "w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.zeros((), np.float32),
    "e": np.zeros((0, 4), np.float32),
}
LAYOUT = Layout.of(ArrayRecord({name: Array(x) for name, x in MODEL.items()}))


def _record(**changes: Any) -> ArrayRecord:
    arrays = {name: Array(x) for name, x in MODEL.items()} | changes
    return ArrayRecord(arrays)


def _npy(header: str, payload: bytes, version: tuple[int, int] = (1, 0)) -> bytes:
    text = header.encode() + b"\n"
    length = len(text).to_bytes(2 if version == (1, 0) else 4, "little")
    return b"\x93NUMPY" + bytes(version) + length + text + payload


def test_there_and_back() -> None:
    vector = torch.arange(7.0)
    found = LAYOUT.read(LAYOUT.to_arrays(vector))
    assert isinstance(found, torch.Tensor)
    assert found.tolist() == vector.tolist()


def test_the_order_of_a_reply_does_not_matter() -> None:
    shuffled = ArrayRecord({name: Array(MODEL[name]) for name in ("e", "b", "w")})
    assert LAYOUT.to_vector(shuffled).tolist() == LAYOUT.to_vector(_record()).tolist()


@pytest.mark.parametrize(
    "values",
    [
        np.asfortranarray(MODEL["w"]),
        MODEL["w"].astype(">f4"),
        MODEL["w"].astype(np.float64),
        MODEL["w"].astype(np.float16),
        MODEL["w"][:, ::-1][:, ::-1],
    ],
    ids=["by columns", "big endian", "float64", "float16", "a view"],
)
def test_other_ways_to_write_the_same_array(values: Any) -> None:
    array = Array(values)
    array.dtype = values.dtype.newbyteorder("=").name
    assert LAYOUT.to_vector(_record(w=array)).tolist() == LAYOUT.to_vector(_record()).tolist()


def test_what_overflows_is_infinite_and_no_warning() -> None:
    found = LAYOUT.read(_record(w=Array(np.full((2, 3), 1e200))))
    assert isinstance(found, torch.Tensor)
    assert torch.isinf(found[:6]).all()


HUGE = "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000, 1000000000), }"
GOOD = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }"


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (_npy(HUGE, b"\0" * 24), Fault.WRONG_SHAPE),
        (_npy(HUGE, b"\0" * 24, (2, 0)), Fault.WRONG_SHAPE),
        (_npy(GOOD.replace("<f4", "|O"), b"\0" * 24), Fault.WRONG_DTYPE),
        (_npy(GOOD.replace("<f4", "<i4"), b"\0" * 24), Fault.WRONG_DTYPE),
        (_npy(GOOD.replace("<f4", "<f8"), b"\0" * 24), Fault.WRONG_DTYPE),
        (_npy(GOOD.replace("(2, 3)", "(3, 2)"), b"\0" * 24), Fault.WRONG_SHAPE),
        (_npy(GOOD.replace("(2, 3)", "(-2, -3)"), b"\0" * 24), Fault.WRONG_SHAPE),
        (_npy(GOOD, b"\0" * 23), Fault.WRONG_SIZE),
        (_npy(GOOD, b"\0" * 25), Fault.WRONG_SIZE),
        (_npy(GOOD, b"\0" * 5000), Fault.WRONG_SIZE),
        (_npy("__import__('os').abort()", b"\0" * 24), Fault.UNREADABLE),
        (_npy("[" * 2000, b"\0" * 24), Fault.UNREADABLE),
        (_npy(GOOD, b"\0" * 24, (3, 0)), Fault.UNREADABLE),
        (b"PK\x03\x04" + b"\0" * 100, Fault.UNREADABLE),
        (b"\x80\x04pickle" + b"\0" * 100, Fault.UNREADABLE),
        (b"\0" * 25, Fault.UNREADABLE),
        (b"", Fault.WRONG_SIZE),
    ],
)
def test_a_header_that_lies_is_refused_before_anything_is_allocated(data: bytes, fault: Fault) -> None:
    array = Array("float32", (2, 3), "numpy.ndarray", data)
    assert LAYOUT.read(_record(w=array)) is fault


@pytest.mark.parametrize(
    ("array", "fault"),
    [
        (Array("float32", (2, 3), "pickle", b"\0" * 24), Fault.WRONG_STYPE),
        (Array("float128", (2, 3), "numpy.ndarray", b"\0" * 24), Fault.WRONG_DTYPE),
        (Array("object", (2, 3), "numpy.ndarray", b"\0" * 24), Fault.WRONG_DTYPE),
        (Array("float32", (10**12,), "numpy.ndarray", b"\0" * 24), Fault.WRONG_SHAPE),
        (Array(MODEL["w"][None]), Fault.WRONG_SHAPE),
        (Array(MODEL["w"][0]), Fault.WRONG_SHAPE),
    ],
)
def test_a_claim_that_is_not_the_models_is_refused(array: Array, fault: Fault) -> None:
    assert LAYOUT.read(_record(w=array)) is fault


@given(position=st.integers(0, 151), byte=st.integers(0, 255), cut=st.integers(0, 152))
def test_damaged_bytes_are_read_or_refused_and_never_raise(position: int, byte: int, cut: int) -> None:
    buffer = io.BytesIO()
    np.save(buffer, MODEL["w"])
    data = bytearray(buffer.getvalue())
    data[position] = byte
    array = Array("float32", (2, 3), "numpy.ndarray", bytes(data[:cut] if cut % 3 == 0 else data))
    found = LAYOUT.read(_record(w=array))
    assert isinstance(found, Fault) or found.shape == (7,)


def test_our_own_arrays_must_fit() -> None:
    with pytest.raises(ValueError, match="arrays do not fit the model"):
        LAYOUT.to_vector(ArrayRecord())
    with pytest.raises(ValueError, match=r"initial_arrays must be numbers, got a \(<U1\)"):
        Layout.of(ArrayRecord({"a": Array(np.array(["x"]))}))
