"""Carrying out a sweep: what is to be done, how long it may take, in which stacks; then doing it."""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedlaw.experiments.description import Execution, Experiment
from fedlaw.experiments.engines.base import Engine, Outcome, distinct
from fedlaw.experiments.engines.local import Local, on_gpu, side_by_side
from fedlaw.experiments.lab import Lab, Shelf, stacked
from fedlaw.experiments.sweep import Planned, Sweep
from fedlaw.results import Store, notes

_CPU_STACK, _GPU_STACK = 16, 64  # runs in a stack at most, where memory does not say less
_SAMPLE, _SAMPLE_ROUNDS = 3, 2  # experiments and rounds that are measured
_PATIENCE = 30.0  # seconds that this may take; else a fraction of the examples is, and reckoned up
_SHAPE = (
    *("dataset", "dataset_settings", "examples", "split", "scaling", "model", "model_settings", "clients"),
    *("epochs", "batch_size", "lr", "loss_point", "rounds"),
)


@dataclass(frozen=True)
class Measured:
    """Of runs of one shape: seconds to build one, seconds a round of one, bytes that one needs."""

    build: float
    round: float
    bytes: float


@dataclass
class Plan:
    """What a sweep comes to, given what is in the store.

    Attributes:
        sweep: what was asked for.
        planned: all of its experiments.
        status: run id to its status in the store; "new" where it is not there.
        stacks: what is to be run, in stacks.
        seconds: how long that may take, all processes together; None: not estimated.
        counts: how many runs have which status. paces: what is known of the speed of each shape.
    """

    sweep: Sweep
    planned: list[Planned]
    status: dict[str, str]
    stacks: list[list[Experiment]]
    seconds: float | None = None
    counts: Counter[str] = field(default_factory=Counter)
    paces: dict[str, Measured] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        """Rounds that are to be run, those of interrupted runs from the beginning."""
        return sum(each.rounds for stack in self.stacks for each in stack)


@dataclass(frozen=True)
class Conducted:
    """What became of a sweep: outcomes by run id, and warnings given on the way."""

    outcomes: dict[str, Outcome]
    notes: list[str]

    @property
    def failures(self) -> list[Outcome]:
        """Runs that failed, with their messages."""
        return [each for each in self.outcomes.values() if each.status == "failed"]


def make_plan(
    sweep: Sweep,
    store: str | os.PathLike[str],
    *,
    planned: Sequence[Planned] | None = None,
    execution: Execution | None = None,
    processes: int | None = None,
    stack: int | None = None,
    memory: float | None = None,
    retry: bool = False,
    measure: bool = True,
) -> Plan:
    """What there is to do.

    Args:
        sweep: what is asked for. planned: its experiments, where they are known already.
        store: the results file; it need not be there yet.
        execution: how runs are carried out.
        processes: that will run side by side; None: what `Local` does.
        stack: runs in a stack at most. memory: bytes for all processes together; None: half of what is free.
        retry: runs that failed are tried again.
        measure: runs of shapes that the store knows nothing about are tried out for an estimate.
    """
    execution = execution or Execution()
    planned = sweep.planned() if planned is None else list(planned)
    status = _status(planned, Path(store))
    redo = {"new", "interrupted", *(["failed"] if retry else [])}
    different = {each.experiment.id: each.experiment for each in planned}
    todo = [each for each in different.values() if status[each.id] in redo]
    todo.sort(key=lambda each: status[each.id] != "interrupted")  # what was begun comes first
    on_cpu = not on_gpu(execution.device)
    beside = processes or side_by_side(execution.device)
    paces = _paces(Path(store))
    stacks: list[list[Experiment]] = []
    seconds: float | None = 0.0
    for shape, group in _by_shape(todo).items():
        key = f"{'cpu' if on_cpu else 'gpu'} {shape}"
        if key not in paces and measure:
            paces[key] = try_out(group, execution)
        known = paces.get(key)
        limit = stack or (_CPU_STACK if on_cpu else _GPU_STACK)
        if known is not None:
            room = (memory or _free(on_cpu) / 2) / beside
            limit = max(1, min(limit, int(room / known.bytes)))
        if stack is None:  # enough stacks that no process waits long for the last one
            limit = max(1, min(limit, math.ceil(len(group) / (2 * beside))))
        stacks += [group[at : at + limit] for at in range(0, len(group), limit)]
        if known is None or seconds is None:
            seconds = None
        else:
            seconds += sum(known.build + known.round * each.rounds for each in group)
    share = max(1, min(beside, len(stacks)))
    counts = Counter(status.values())
    return Plan(sweep, planned, status, stacks, None if seconds is None else seconds / share, counts, paces)


def conduct(
    plan: Plan,
    store: str | os.PathLike[str],
    *,
    engine: Engine | None = None,
    execution: Execution | None = None,
    on_rounds: Callable[[int], None] | None = None,
    on_done: Callable[[list[Outcome]], None] | None = None,
) -> Conducted:
    """Do what the plan says. The sweep is noted in the store first, so that the report knows what is missing.

    Raises:
        KeyboardInterrupt: after what was under way has been saved; the same sweep goes on from there.
    """
    store = Path(store)
    note_sweep(store, plan.sweep, plan.planned)
    with Store(store) as opened:
        notes.put(opened._connection, {(notes.PACE, key): vars(pace) for key, pace in plan.paces.items()})
    outcomes: dict[str, Outcome] = {}
    said: list[str] = []

    def done(finished: list[Outcome]) -> None:
        outcomes.update({each.run: each for each in finished})
        said.extend(note for each in finished for note in each.notes)
        if on_done:
            on_done(finished)

    (engine or Local()).run(
        plan.stacks,
        store=store,
        execution=execution or Execution(),
        on_rounds=on_rounds or (lambda count: None),
        on_done=done,
    )
    return Conducted(outcomes, distinct(iter(said)))


def run_sweep(
    sweep: Sweep, store: str | os.PathLike[str], *, execution: Execution | None = None, **settings: Any
) -> Conducted:
    """Plan and conduct a sweep in one call, on this machine.

    Args:
        sweep: what to run. store: the results file. execution: how.
        settings: of `make_plan`.

    >>> import tempfile
    >>> sweep = Sweep.parse({"axes": {"rule": ["mean", "median"]}, "base": {"rounds": 2, "examples": 200}})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     conducted = run_sweep(sweep, Path(folder) / "a.sqlite", processes=1, measure=False)
    >>> [each.status for each in conducted.outcomes.values()]
    ['finished', 'finished']
    """
    plan = make_plan(sweep, store, execution=execution, **settings)
    return conduct(plan, store, engine=Local(settings.get("processes")), execution=execution)


def note_sweep(store: Path, sweep: Sweep, planned: Sequence[Planned]) -> None:
    """Write down what the sweep is and which runs it consists of; parts of it that were noted before stay."""
    runs = {json.dumps(each.labels): each.experiment.id for each in planned}
    if store.is_file():
        before = notes.read(store, notes.SWEEP).get(sweep.name, {})
        if before.get("id") == sweep.id or _same_but_less(before.get("sweep"), sweep.plain()):
            runs = {**before.get("runs", {}), **runs}
            sweep = Sweep.parse(_joined(before["sweep"], sweep.plain()))
    notes.write(
        store,
        notes.SWEEP,
        sweep.name,
        {"id": sweep.id, "sweep": sweep.plain(), "runs": runs, "at": time.time()},
    )


def try_out(experiments: Sequence[Experiment], execution: Execution) -> Measured:
    """Build a few of the experiments, run two rounds of them stacked, write nothing.

    Where that would take long (convolutions on a CPU), a round with one batch a client is run instead.
    """
    step = max(1, len(experiments) // _SAMPLE)
    chosen, shelf = list(experiments[::step][:_SAMPLE]), Shelf()
    labs: list[Lab] = []
    for each in chosen:
        began = time.perf_counter()  # the last one: data sets are read once
        try:
            labs.append(Lab(each, execution, shelf))
        except Exception:  # it will fail in its turn, and be recorded
            continue
        build = time.perf_counter() - began
    if not labs:
        return Measured(1.0, 1.0, 1.0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are given when the runs are run
            took = _seconds_by_few(labs[0], execution, shelf)
            if took * len(labs) * _SAMPLE_ROUNDS <= _PATIENCE:
                took = _seconds_a_round(labs, execution, _SAMPLE_ROUNDS)
    except Exception:
        took = 1.0
    finally:
        torch.set_num_threads(before)
    return Measured(build, took, max(map(_bytes, labs)))


def _seconds_by_few(lab: Lab, execution: Execution, shelf: Shelf) -> float:
    """Seconds a round, reckoned from one with a batch a client; 0 where they have no more, or cannot have less."""
    experiment = lab.experiment
    few, there = experiment.clients * experiment.batch_size, int(lab.population.sizes.sum())
    if few >= there:
        return 0.0
    try:
        small = Lab(experiment.replace(examples=few), execution, shelf)
    except ValueError:  # a partition that needs more examples
        return 0.0
    if on_gpu(execution.device):
        _seconds_a_round(
            [small], execution, 1
        )  # starting the card and compiling kernels are no part of a round
    return _seconds_a_round([small], execution, 1) * there / few


def _seconds_a_round(labs: Sequence[Lab], execution: Execution, each: int) -> float:
    """Seconds a round of one, measured on `each` rounds of all of them."""
    stack = stacked(labs, execution)
    began, rounds = time.perf_counter(), 0
    while rounds < each * len(labs) and (stepped := stack.step()):
        rounds += sum(report is not None for _, report in stepped)
    return (time.perf_counter() - began) / max(1, rounds)


# ------------------------------------------------------------------------------------------ helpers
def _bytes(lab: Lab) -> float:
    """What a run in a stack needs, if it shares no data with others: pool, what it is tested on, a few (n, d)."""
    people, params = lab.population, lab.federation.server.params
    pool = sum(x.numel() * x.element_size() for x in (people.inputs, people.poisoned_inputs, people.clean))
    tests = sum(x.numel() * x.element_size() for part in (lab._test, lab._validation) for x in part)
    return pool + tests + 5.0 * people.n * params.numel() * params.element_size()


def _free(on_cpu: bool) -> float:
    """Bytes of memory that are free here."""
    if not on_cpu:
        return float(torch.cuda.mem_get_info()[0])
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024
    except OSError:
        pass
    return 4e9


def _by_shape(experiments: Sequence[Experiment]) -> dict[str, list[Experiment]]:
    groups: dict[str, list[Experiment]] = {}
    for each in experiments:
        described = each.canonical()
        key = json.dumps([described[name] for name in _SHAPE])
        groups.setdefault(key, []).append(each)
    return groups


def _status(planned: Sequence[Planned], store: Path) -> dict[str, str]:
    there: dict[str, str] = {}
    if store.is_file() and store.stat().st_size:
        with Store(store, read_only=True) as opened:
            there = {info.id: info.status for info in opened.runs()}
    return {each.experiment.id: there.get(each.experiment.id, "new") for each in planned}


def _paces(store: Path) -> dict[str, Measured]:
    if not store.is_file() or not store.stat().st_size:
        return {}
    return {name: Measured(**value) for name, value in notes.read(store, notes.PACE).items()}


def _same_but_less(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> bool:
    """Whether two notes are of one sweep: a part of it may have been asked for (`only`), or no search."""
    if before is None:
        return False
    searches = [each["search"] for each in (before, now) if each["search"]]
    fixed = all(before[key] == now[key] for key in ("base", "when"))
    return fixed and searches[1:] in ([], searches[:1]) and list(before["axes"]) == list(now["axes"])


def _joined(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The sweep that both are parts of; labels are in the order of the part that has more of them."""
    axes: dict[str, Any] = {}
    for axis, values in now["axes"].items():
        old = before["axes"][axis]
        labels = list(_unique([*values, *old] if len(values) >= len(old) else [*old, *values]))
        axes[axis] = (
            {label: {**old, **values}[label] for label in labels} if isinstance(values, Mapping) else labels
        )
    search = now["search"] or before["search"]
    return {**now, "axes": axes, "search": search, "seeds": sorted({*before["seeds"], *now["seeds"]})}


def _unique(values: Sequence[Any]) -> Iterator[Any]:
    seen: list[Any] = []
    for value in values:
        if value not in seen:
            seen.append(value)
            yield value
