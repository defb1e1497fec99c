"""The peer's side of the pipe: read the work, warm up, then one timed round for every line that comes in.

Needs Python and NumPy alone: it runs inside each peer's environment. A peer's script calls `serve(make)`, where
`make(work)` returns two functions: `run()` does one round and returns whatever it makes, and is what is timed;
`results(made)` turns that into models (n, d) or their mean (d,), in the order of torch's parameters, and losses.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Make = Callable[["Work"], tuple[Callable[[], Any], Callable[[Any], tuple[Array, Array]]]]


@dataclass(frozen=True)
class Work:
    """One round of local training.

    Attributes:
        folder: where inputs.npy (n, m, ...), labels.npy (n, m) and params.npy (d,) lie; examples of each client
            in the order in which they are visited, the same in every epoch.
        hidden: widths of the hidden layers of the MLP.
        cores: how many this process may use.
        variant: of the peer, where it has several ways.
    """

    folder: Path
    model: str
    hidden: tuple[int, ...]
    classes: int
    batch: int
    epochs: int
    lr: float
    cores: int
    device: str
    variant: str

    @property
    def inputs(self) -> Array:
        """(n, m, ...) float32."""
        return np.asarray(np.load(self.folder / "inputs.npy"))

    @property
    def flat_inputs(self) -> Array:
        """(n, m, features) float32."""
        inputs = self.inputs
        return inputs.reshape(*inputs.shape[:2], -1)

    @property
    def labels(self) -> Array:
        """(n, m) int64."""
        return np.asarray(np.load(self.folder / "labels.npy"))

    @property
    def params(self) -> Array:
        """(d,) the model everybody starts from, weights (out, in) and biases layer by layer."""
        return np.asarray(np.load(self.folder / "params.npy"))

    def layers(self) -> list[tuple[Array, Array]]:
        """The same as (weight (out, in), bias (out,)) of each linear layer of the MLP."""
        vector, at, made = self.params, 0, []
        features = int(np.prod(np.load(self.folder / "inputs.npy", mmap_mode="r").shape[2:]))
        for out in (*self.hidden, self.classes):
            weight = vector[at : at + out * features].reshape(out, features)
            at += out * features
            made.append((weight, vector[at : at + out]))
            at, features = at + out, out
        return made


def serve(make: Make, packages: tuple[str, ...]) -> None:
    """Answer the benchmark: argv is the work's folder, a JSON of settings, and where results go."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print goes to the log, not into the pipe
    work = read(sys.argv[1], sys.argv[2])
    run, results = make(work)
    made = run()
    models, losses = results(made)
    del made
    np.savez(sys.argv[3], models=models, losses=losses)
    answer(channel, packages, run, sys.stdin)


def read(folder: str, settings: str) -> Work:
    """The work that the benchmark describes."""
    given = json.loads(settings)
    return Work(folder=Path(folder), **given | {"hidden": tuple(given["hidden"])})


def answer(channel: TextIO, packages: tuple[str, ...], run: Callable[[], Any], lines: Iterator[str]) -> None:
    """Say that the warm-up is over, then time one round for every line."""
    print(json.dumps({"versions": versions(packages)}), file=channel, flush=True)
    for _ in lines:
        start = time.perf_counter()
        made = run()
        seconds = time.perf_counter() - start
        del made
        print(json.dumps({"seconds": seconds}), file=channel, flush=True)


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Installed versions by package; those that are missing are left out."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
