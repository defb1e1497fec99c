"""What an engine is, and the work they all hand out: a stack of experiments that looks after itself."""

from __future__ import annotations

import re
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from fedlaw.experiments.description import Execution, Experiment
from fedlaw.experiments.runner import Callback, run_together
from fedlaw.results import AlreadyFinished, AlreadyRunning, RoundRecord, Store, StoreError

Rounds = Callable[[int], None]
_TELL_SECONDS = 0.2


@dataclass(frozen=True)
class Outcome:
    """What became of one run.

    Attributes:
        run: its id.
        status: "finished", "diverged", "failed", or "elsewhere" (another process is writing it).
        message: of a failure.
        notes: warnings that were given on the way, each once.
    """

    run: str
    status: str
    message: str | None = None
    notes: tuple[str, ...] = ()


class Engine(Protocol):
    """Carries out stacks of experiments and writes their runs into one store."""

    def run(
        self,
        stacks: Sequence[Sequence[Experiment]],
        *,
        store: Path,
        execution: Execution,
        on_rounds: Rounds,
        on_done: Callable[[list[Outcome]], None],
    ) -> None:
        """Run them all. `on_rounds` hears of rounds as they pass, `on_done` of each stack's outcomes.

        Raises:
            KeyboardInterrupt: after what was under way has been saved, ready to be resumed.
        """


def create(name: str, *, processes: int | None = None, address: str | None = None) -> Engine:
    """The engine of this name: "local" (processes on this machine) or "ray" (a Ray cluster)."""
    if name == "local":
        from fedlaw.experiments.engines.local import Local

        return Local(processes)
    if name == "ray":
        from fedlaw.experiments.engines.ray import Ray

        return Ray(address)
    raise ValueError(f"engine must be local or ray, got {name!r}")


def run_stack(
    experiments: Sequence[Experiment], *, store: Path, execution: Execution, on_rounds: Rounds | None = None
) -> list[Outcome]:
    """Run experiments of one shape together; one that fails does not take the others down.

    After a failure the stack is halved, and each half goes on from its checkpoints: what fails in the end
    fails alone, and is recorded with its reason. Too little memory for the whole stack mends itself that way.
    On a CPU everything is done with one torch thread, so that the bits depend on nothing else.
    """
    experiments = list(experiments)
    try:
        with _one_thread(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            watch = [_Counter(on_rounds)] if on_rounds else []
            results = run_together(
                experiments, store=store, execution=execution, resume=True, callbacks=watch
            )
        notes = tuple(distinct(str(each.message) for each in caught))
        return [Outcome(result.id, result.status, notes=notes) for result in results]
    except (AlreadyFinished, AlreadyRunning) as there:  # another process was faster
        status = "finished" if isinstance(there, AlreadyFinished) else "elsewhere"
        rest = [each for each in experiments if each.id != there.run_id]
        others = run_stack(rest, store=store, execution=execution, on_rounds=on_rounds) if rest else []
        return [Outcome(there.run_id, status), *others]
    except (StoreError, sqlite3.Error):
        raise  # nothing could be recorded: the sweep cannot go on
    except Exception as error:
        if len(experiments) == 1:
            return [_failed(experiments[0], store, f"{type(error).__name__}: {error}")]
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    middle = len(experiments) // 2
    halves = (experiments[:middle], experiments[middle:])
    return [
        each
        for half in halves
        for each in run_stack(half, store=store, execution=execution, on_rounds=on_rounds)
    ]


def record_failure(experiment: Experiment, store: Path, message: str) -> None:
    """Write a run down as failed, so that it is found again, unless it is there in a better state."""
    with Store(store) as opened:
        info = opened.find(experiment.id)
        if info is None or info.status == "interrupted":
            opened.begin(experiment, resume=True).fail(message)


def distinct(messages: Iterator[str]) -> list[str]:
    """Messages that differ in more than their numbers."""
    return list({re.sub(r"[\d.]+", "#", " ".join(each.split())): each for each in messages}.values())


def _failed(experiment: Experiment, store: Path, message: str) -> Outcome:
    message = " ".join(message.split())
    record_failure(experiment, store, message)
    return Outcome(experiment.id, "failed", message)


class _Counter(Callback):
    """Counts the rounds of a stack and tells of them now and then."""

    def __init__(self, tell: Rounds) -> None:
        self._tell, self._count, self._told = tell, 0, 0.0

    def on_round(self, record: RoundRecord) -> None:
        self._count += 1
        if time.monotonic() - self._told > _TELL_SECONDS:
            self._flush()

    def on_end(self, result: Any) -> None:
        self._flush()

    def _flush(self) -> None:
        count, self._count = self._count, 0
        self._told = time.monotonic()
        self._tell(count)


@contextmanager
def _one_thread() -> Iterator[None]:
    """One torch thread: products over many depend on how many there are, and a GPU's processes share the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
