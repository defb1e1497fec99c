"""The benchmark's side of the pipe: start a contestant, wait for its warm-up, ask for one timed round at a time."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import environment

HERE = Path(__file__).resolve().parent
_SECONDS = 240  # for a start with its warm-up, or for one round


@dataclass(frozen=True)
class Contestant:
    """Somebody who trains all clients for a round.

    Attributes:
        key: what it is called on the command line.
        name: what it is called in tables.
        script: of the folder peers.
        environment: one of `environment.ENVIRONMENTS`, or None for the benchmark's own.
        variant: handed to the script.
        comparable: whether it trains in the common order, so that its result should be everybody's.
        alone: whether it keeps the machine busy while it waits, and so must not take turns with others.
    """

    key: str
    name: str
    script: str
    environment: str | None = None
    variant: str = ""
    comparable: bool = True
    alone: bool = False


class NotMeasured(Exception):
    """Why a contestant has no figures, in one line."""


class Running:
    """A contestant in a process of its own, warmed up."""

    def __init__(
        self, contestant: Contestant, folder: Path, settings: dict[str, Any], cores: list[int]
    ) -> None:
        self.contestant, self.folder = contestant, folder
        try:
            own = contestant.environment
            interpreter = sys.executable if own is None else str(environment.python(own))
        except environment.NotInstalled as error:
            raise NotMeasured(f"cannot be installed: {error}") from None
        print(f"  {contestant.name}: warming up", file=sys.stderr, flush=True)
        name = f"{contestant.key}-{len(cores)}"
        self._log, result = folder / f"{name}.log", folder / f"{name}.npz"
        given = settings | {"cores": len(cores), "variant": contestant.variant}
        threads = dict.fromkeys(
            ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(len(cores))
        )
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [interpreter, str(HERE / contestant.script), str(folder), json.dumps(given), str(result)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | threads | {"CUDA_VISIBLE_DEVICES": _devices(settings)},
                preexec_fn=lambda: _stay_on(cores),
            )
        self.versions: dict[str, str] = self._hear()["versions"]
        with np.load(result) as made:
            self.models, self.losses = made["models"], made["losses"]
        result.unlink()

    def round(self) -> float:
        """Seconds of one round."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return float(self._hear()["seconds"])

    def close(self) -> None:
        """Let it end; by force if it does not."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._process.stdout, selectors.EVENT_READ)
            line = self._process.stdout.readline() if waiting.select(_SECONDS) else None
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        self._process.kill()
        self._process.wait()
        said = [text for text in self._log.read_text(errors="replace").splitlines() if text.strip()]
        why = f"no answer within {_SECONDS} s" if line is None else (said or ["it ended without a word"])[-1]
        raise NotMeasured(f"does not run: {why.strip()}")


def _stay_on(cores: list[int]) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def _devices(settings: dict[str, Any]) -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0") if settings["device"] != "cpu" else ""
