"""States that save and load without pickle: one .npz file of plain arrays and a JSON description."""

from __future__ import annotations

import io
import json
import os
import tempfile
import zipfile
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

FORMAT = 1
_MAX_BYTES = 1 << 36  # of one checkpoint, unpacked: a header that claims more is not believed
S = TypeVar("S")


def dumps(arrays: dict[str, Tensor], description: dict[str, Any]) -> bytes:
    """Arrays and a JSON-able description as the bytes of one .npz file."""
    text = json.dumps({"format": FORMAT, **description}, sort_keys=True)
    plain = {name: tensor.detach().cpu().numpy() for name, tensor in arrays.items()}
    file = io.BytesIO()
    np.savez(file, description=np.frombuffer(text.encode(), dtype=np.uint8), **plain)  # type: ignore[arg-type]
    return file.getvalue()


def loads(data: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Arrays and description that `dumps` made bytes of; a ValueError if they are anything else."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > _MAX_BYTES:
                raise ValueError("it claims to be larger than any checkpoint")
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        description = json.loads(arrays.pop("description").tobytes().decode())
        if not isinstance(description, dict) or description.get("format") != FORMAT:
            raise ValueError(f"format {FORMAT} expected")
        tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    except (ValueError, TypeError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"not a fedlaw checkpoint: {error}") from error
    return tensors, description


def replace_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to `path` in one step: there is the old file or the new one, never half of either."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def pack(state: object, prefix: str) -> dict[str, Tensor]:
    """The tensors of a dataclass by name, each name behind `prefix`."""
    return {f"{prefix}{field.name}": getattr(state, field.name) for field in fields(state)}  # type: ignore[arg-type]


def unpack(like: S, arrays: dict[str, Tensor], prefix: str) -> S:
    """A state like `like` from what `pack` made of one: every name, shape and dtype must agree."""
    values: dict[str, Tensor] = {}
    for field in fields(like):  # type: ignore[arg-type]
        name, expected = f"{prefix}{field.name}", getattr(like, field.name)
        if name not in arrays:
            raise ValueError(f"the checkpoint lacks {name!r}")
        given = arrays[name]
        if given.shape != expected.shape or given.dtype != expected.dtype:
            raise ValueError(
                f"{name!r} of the checkpoint is {given.dtype} {tuple(given.shape)}, "
                f"expected {expected.dtype} {tuple(expected.shape)}"
            )
        values[field.name] = given.to(expected.device)
    return type(like)(**values)
