"""The local engine: stacks on this machine, in several processes where that pays."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from fedlaw.experiments.description import Execution, Experiment
from fedlaw.experiments.engines.base import Outcome, Rounds, record_failure, run_stack
from fedlaw.experiments.engines.mps import can_share, shared_card

_ON_A_GPU = 6  # beyond that the card is full: see benchmarks/README.md
_DEATHS = 3  # how often a process may die over a stack before its runs count as failed

Done = Callable[[list[Outcome]], None]


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def side_by_side(device: str) -> int:
    """Processes that fill this machine: one a core; on a GPU a few, if it lets them in at the same time."""
    if on_gpu(device):
        return min(_ON_A_GPU, cores()) if can_share() else 1
    return cores()


def on_gpu(device: str) -> bool:
    """Whether runs with this `Execution.device` compute on a GPU."""
    return device != "cpu" and torch.cuda.is_available()


class Local:
    """Stacks on this machine: one after the other here, or in several processes with one thread each.

    Args:
        processes: how many; None: as many as fill the machine (`side_by_side`).
    """

    def __init__(self, processes: int | None = None) -> None:
        if processes is not None and processes < 1:
            raise ValueError(f"processes must be at least 1, got {processes}")
        self.processes = processes

    def run(
        self,
        stacks: Sequence[Sequence[Experiment]],
        *,
        store: Path,
        execution: Execution,
        on_rounds: Rounds,
        on_done: Done,
    ) -> None:
        """See `Engine`."""
        wanted = self.processes or side_by_side(execution.device)
        if min(wanted, len(stacks)) <= 1:
            for stack in stacks:
                on_done(run_stack(stack, store=store, execution=execution, on_rounds=on_rounds))
            return
        alone = execution.model_copy(update={"threads": 1})
        with shared_card() if on_gpu(execution.device) else nullcontext():
            left, deaths = [list(stack) for stack in stacks], 0
            while left:
                left = _in_processes(left, min(wanted, len(left)), store, alone, on_rounds, on_done)
                deaths += bool(left)
                if deaths == _DEATHS:
                    for stack in left:
                        on_done([_died(each, store) for each in stack])
                    return


def _in_processes(
    stacks: list[list[Experiment]],
    processes: int,
    store: Path,
    execution: Execution,
    on_rounds: Rounds,
    on_done: Done,
) -> list[list[Experiment]]:
    """Run the stacks in a pool; those that were not done when one of its processes died are handed back."""
    context = multiprocessing.get_context("spawn")
    passed, stop = context.SimpleQueue(), context.Event()
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(passed, stop))
    left: list[list[Experiment]] = []
    stopping = False
    try:
        running: dict[Future[list[Outcome]], list[Experiment]] = {
            pool.submit(_work, stack, store, execution): stack for stack in stacks
        }
        while running:
            try:
                done, _ = wait(running, timeout=0.1, return_when=FIRST_COMPLETED)
                while not passed.empty():
                    on_rounds(passed.get())
                for future in done:
                    stack = running.pop(future)
                    if future.cancelled():
                        continue
                    try:
                        on_done(future.result())
                    except BrokenProcessPool:
                        left.append(stack)
                    except KeyboardInterrupt:  # the process heard that it should stop, and saved its runs
                        stopping = True
            except KeyboardInterrupt:
                if stopping:  # asked twice: leave the processes, which end with this one
                    raise
                stopping = True
                stop.set()
                for future in running:
                    future.cancel()
    finally:
        pool.shutdown(wait=not stopping or not left, cancel_futures=True)
    if stopping:
        raise KeyboardInterrupt
    return left


def _died(experiment: Experiment, store: Path) -> Outcome:
    message = "its process died several times, perhaps for want of memory: try a smaller --stack or --memory"
    record_failure(experiment, store, message)
    return Outcome(experiment.id, "failed", message)


# ------------------------------------------------------------------------------------------ in the processes
_line: dict[str, Any] = {}  # of a worker process to its parent, laid when the process begins


def _begin(passed: Any, stop: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which asks us to stop
    _line.update(passed=passed, stop=stop)
    parent = multiprocessing.parent_process()

    def end_with_parent() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)  # nobody is there to hear anything; the runs can be resumed

    threading.Thread(target=end_with_parent, daemon=True).start()


def _work(stack: list[Experiment], store: Path, execution: Execution) -> list[Outcome]:
    def on_rounds(count: int) -> None:
        with suppress(OSError):
            _line["passed"].put(count)
        if _line["stop"].is_set():
            raise KeyboardInterrupt

    return run_stack(stack, store=store, execution=execution, on_rounds=on_rounds)
