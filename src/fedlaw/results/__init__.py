"""Results: a SQLite file that is written as runs go, and data frames of what is in it."""

from fedlaw.results.database import StoreError
from fedlaw.results.frames import load, load_summary, load_weights
from fedlaw.results.record import RoundRecord
from fedlaw.results.store import DEFAULT, AlreadyFinished, AlreadyRunning, RunInfo, Store
from fedlaw.results.writer import RunWriter, attacker_weight

__all__ = [
    "DEFAULT",
    "AlreadyFinished",
    "AlreadyRunning",
    "RoundRecord",
    "RunInfo",
    "RunWriter",
    "Store",
    "StoreError",
    "attacker_weight",
    "load",
    "load_summary",
    "load_weights",
]
