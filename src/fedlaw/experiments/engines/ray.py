"""The Ray engine: each stack a task on a cluster; Ray schedules, retries and brings results back."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedlaw.experiments.description import Execution, Experiment
from fedlaw.experiments.engines.base import Outcome, Rounds, record_failure, run_stack
from fedlaw.results.merge import merge

_RETRIES = 5  # of a stack whose worker died
_PATIENCE = 0.5


class Ray:
    """Stacks as tasks of a Ray cluster; fedlaw (and the data, under the same path) must be on its machines.

    Args:
        address: of the cluster ("auto": the one this machine belongs to); None: RAY_ADDRESS if that is set,
            else workers are started on this machine.
        cpus: workers to start on this machine where there is no cluster; None: one a core.
        gpus: share of a GPU that a stack gets, where the device is one.

    A task writes its runs into a file of its own, which comes back whole and is merged into the store: a worker
    that dies leaves nothing half-done, and its stack is tried again elsewhere. Needs the extra `ray`.
    """

    def __init__(self, address: str | None = None, *, cpus: int | None = None, gpus: float = 1.0) -> None:
        self.address, self.cpus, self.gpus = address, cpus, gpus

    def run(
        self,
        stacks: Sequence[Sequence[Experiment]],
        *,
        store: Path,
        execution: Execution,
        on_rounds: Rounds,
        on_done: Callable[[list[Outcome]], None],
    ) -> None:
        """See `Engine`. Rounds are heard of when their stack has come home."""
        if not stacks:
            return
        ray = _imported()
        mine = not ray.is_initialized()
        if mine:
            known = self.address or os.environ.get("RAY_ADDRESS")
            # A cluster of our own serves this machine only: it listens on loopback.
            own = {"num_cpus": self.cpus, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
            started = {} if known else own
            ray.init(address=known, log_to_driver=False, configure_logging=False, **started)
        alone = execution.model_copy(update={"threads": 1}) if execution.device == "cpu" else execution
        task = ray.remote(_work).options(
            num_cpus=1, num_gpus=0 if execution.device == "cpu" else self.gpus, max_retries=_RETRIES
        )
        waiting: dict[Any, Sequence[Experiment]] = {}
        try:
            waiting = {task.remote(list(stack), alone): stack for stack in stacks}
            while waiting:
                done, _ = ray.wait(list(waiting), num_returns=1, timeout=_PATIENCE)
                for reference in done:
                    stack = waiting.pop(reference)
                    on_done(_home(ray, reference, stack, store))
                    on_rounds(sum(each.rounds for each in stack))
        finally:
            for reference in waiting:
                ray.cancel(reference, force=True)
            if mine:
                ray.shutdown()


def _imported() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ModuleNotFoundError:
        raise ImportError("--engine ray needs Ray: pip install 'fedlaw[ray]'") from None
    return ray


def _work(stack: list[Experiment], execution: Execution) -> tuple[list[Outcome], bytes]:
    """On a worker: run the stack into a file of its own; the outcomes, and the file."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "runs.sqlite"
        outcomes = run_stack(stack, store=store, execution=execution)
        return outcomes, store.read_bytes()


def _home(ray: Any, reference: Any, stack: Sequence[Experiment], store: Path) -> list[Outcome]:
    """Merge what a task brought; if it brought nothing, write its runs down as failed."""
    try:
        outcomes, data = ray.get(reference)
    except ray.exceptions.RayError as error:
        message = f"its Ray task was lost {_RETRIES + 1} times: {type(error).__name__}"
        for each in stack:
            record_failure(each, store, message)
        return [Outcome(each.id, "failed", message) for each in stack]
    with tempfile.TemporaryDirectory() as folder:
        brought = Path(folder) / "runs.sqlite"
        brought.write_bytes(data)
        merge([brought], store)
    found: list[Outcome] = outcomes
    return found
