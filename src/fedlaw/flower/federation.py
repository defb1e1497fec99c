"""Who takes part, how long is waited, and where a training is written down."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

from flwr.serverapp import Grid

log = logging.getLogger("flwr")  # Flower's own: `flwr log` shows what is said here

RESERVED = ("phase", "loss-point", "alpha")  # keys of the config record that the strategies set


@dataclass(frozen=True)
class Federation:
    """What a strategy has to know about its federation.

    Attributes:
        min_nodes: nodes that must be connected before training starts; those connected then are the roster.
        roster: node ids, if the roster is to be these and no others; then nobody is waited for.
        wait: seconds to wait for the nodes at the start.
        timeouts: seconds that phase 1 and phase 2 may take; None: `start`'s timeout for each. Requests live as
            long as their phase.
        poll: seconds between two looks for replies.
        loss_metric, count_metric: names of the metrics in which clients tell their loss and example count.
        arrays_record, config_record: names of the records that are sent out.
        store: a results file (SQLite). Every round is written to it, and a checkpoint with it.
        checkpoint: a file for checkpoints alone, for models too large for a database; not together with `store`.
        name: tells this training from others with the same settings in the same store.
        resume: go on from the checkpoint there is. Without it, a training that was interrupted is not overwritten.

    >>> Federation(min_nodes=5, timeouts=(600, 300)).timeout(2, default=3600)
    300.0
    """

    min_nodes: int = 2
    roster: tuple[int, ...] | None = None
    wait: float = 600.0
    timeouts: tuple[float, float] | None = None
    poll: float = 1.0
    loss_metric: str = "train_loss"
    count_metric: str = "num-examples"
    arrays_record: str = "arrays"
    config_record: str = "config"
    store: str | os.PathLike[str] | None = None
    checkpoint: str | os.PathLike[str] | None = None
    name: str = "flower"
    resume: bool = False

    def __post_init__(self) -> None:
        if self.min_nodes < 1:
            raise ValueError(f"min_nodes must be at least 1, got {self.min_nodes}")
        if self.roster is not None and len(set(self.roster)) != len(self.roster):
            raise ValueError("roster must name each node once, got one twice")
        if self.roster is not None and not self.roster:
            raise ValueError(
                "roster must name at least one node, or be None for those connected at the start"
            )
        for name, value in (("wait", self.wait), ("poll", self.poll)):
            if not value >= 0:
                raise ValueError(f"{name} must be at least 0 seconds, got {value}")
        for seconds in self.timeouts or ():
            _check_timeout("timeouts", seconds)
        if self.timeouts is not None and len(self.timeouts) != 2:
            raise ValueError(f"timeouts must be seconds for phase 1 and phase 2, got {self.timeouts}")
        if self.store is not None and self.checkpoint is not None:
            raise ValueError("store and checkpoint: give one of them, a store holds its own checkpoint")
        if self.resume and self.store is None and self.checkpoint is None:
            raise ValueError("resume needs a store or a checkpoint to go on from")
        if self.arrays_record == self.config_record:
            raise ValueError(f"arrays_record and config_record must differ, got {self.arrays_record!r} twice")

    def timeout(self, phase: int, default: float) -> float:
        """Seconds that a phase may take."""
        seconds = default if self.timeouts is None else self.timeouts[phase - 1]
        _check_timeout("timeout", seconds)
        return float(seconds)

    def assemble(self, grid: Grid, expected: Iterable[int] | None = None) -> tuple[int, ...]:
        """The roster, sorted and from now on frozen.

        Args:
            grid: whose nodes are looked at.
            expected: the roster of the checkpoint to go on from; None: a new training.

        Raises:
            ValueError: too few nodes within `wait` seconds, or not those that are expected.
        """
        wanted = None if expected is None else set(expected)
        if self.roster is not None:
            if wanted is not None and wanted != set(self.roster):
                raise ValueError(_another(wanted, set(self.roster)))
            return tuple(sorted(self.roster))
        end = time.monotonic() + self.wait
        while True:
            here = set(grid.get_node_ids())
            if here == wanted or (wanted is None and len(here) >= self.min_nodes):
                return tuple(sorted(here))
            if wanted is not None and here - wanted:
                raise ValueError(_another(wanted, here))
            if time.monotonic() >= end:
                break
            needed = self.min_nodes if wanted is None else len(wanted)
            log.info("waiting for nodes: %d of %d are connected", len(here), needed)
            time.sleep(min(max(self.poll, 0.01), max(end - time.monotonic(), 0)))
        if wanted is not None:
            raise ValueError(_another(wanted, here))
        raise ValueError(
            f"{len(here)} nodes connected within wait = {self.wait:g} s, min_nodes = {self.min_nodes} are needed: "
            "start the missing SuperNodes or wait longer"
        )


def _check_timeout(name: str, seconds: float) -> None:
    if not 0 < seconds < math.inf:
        raise ValueError(f"{name} must be over 0 and finite, got {seconds}")


def _another(wanted: set[int], here: set[int]) -> str:
    return (
        f"the checkpoint's roster is another one: {len(wanted - here)} of its {len(wanted)} nodes are missing and "
        f"{len(here - wanted)} others are there; connect the same nodes, or name them with roster=(...) to go on "
        "while some are away"
    )
