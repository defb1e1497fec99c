"""Where a training is written down as it goes, so that it can go on after a crash: one writer, whole files."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np

from fedlaw.flower.federation import Federation, log
from fedlaw.results import RoundRecord, RunWriter, Store
from fedlaw.server import Server
from fedlaw.server.state import loads

_BLOB_LIMIT = 900_000_000  # bytes; SQLite takes 1e9 in one value


@dataclass(frozen=True)
class Training:
    """What the store knows a training by: its name, rule and settings. The roster is no part of the id, so that a
    resume with another one is refused and not taken for another training.
    """

    name: str
    rule: Any
    settings: dict[str, Any]
    clients: int = 0

    @property
    def rounds(self) -> int:
        """How many there are."""
        return int(self.settings["rounds"])

    @property
    def id(self) -> str:
        """Digest of everything but the number of clients."""
        text = json.dumps([self.name, self.rule, self.settings], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def canonical(self) -> dict[str, Any]:
        """Plain data, as the laboratory's experiments have it."""
        return {
            "version": 1,
            "transport": "flower",
            "name": self.name,
            "clients": self.clients,
            "rule": self.rule,
            **self.settings,
        }


class Journal:
    """Checkpoints after every round, in a store or a file, or nowhere. A context manager: it holds the lock.

    Args:
        federation: says where.
        training: what is trained, without its clients.

    Raises:
        ValueError: another process is writing, the training is finished, or it was interrupted and is not to be
            resumed.
    """

    def __init__(self, federation: Federation, training: Training) -> None:
        self._federation = federation
        self._training = training
        self._store: Store | None = None
        self._writer: RunWriter | None = None
        self._lock: IO[bytes] | None = None
        self._found: bytes | None = None

    def __enter__(self) -> Self:
        try:
            if self._federation.store is not None:
                self._store = Store(self._federation.store)
                self._check_store(self._store)
            elif self._federation.checkpoint is not None:
                self._open_file(Path(self._federation.checkpoint))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the lock. A training that is not over is marked interrupted: it can be resumed."""
        if self._store is not None:
            self._store.close()
        if self._lock is not None:
            self._lock.close()

    # -------------------------------------------------------------------------------------- going on
    def roster(self) -> tuple[int, ...] | None:
        """The roster of the training that is to go on; None: a new one."""
        if not self._federation.resume:
            return None
        if self._store is not None:
            known = self._store.setup(self._training.id).get("roster")
            return None if known is None else tuple(int(node) for node in known)
        if self._found is None:
            return None
        roster = loads(self._found)[1].get("roster")
        if not isinstance(roster, list) or not all(isinstance(node, int) for node in roster):
            raise ValueError(f"{self._federation.checkpoint}: the checkpoint has no roster of node ids")
        return tuple(roster)

    def begin(self, server: Server) -> None:
        """Bring the server to where the checkpoint stands, if there is one to go on from."""
        if self._store is not None:
            training = Training(self._training.name, self._training.rule, self._training.settings, server.n)
            self._writer = self._store.begin(training, resume=self._federation.resume)
            self._found = self._writer.checkpoint
            if self._found is None:
                self._writer.setup(roster=np.array(server.roster, dtype=np.uint64))
        if self._found is not None:
            server.load(self._found)
            self._found = None
            log.info("goes on after round %d", server.round - 1)
        elif self._federation.resume:
            log.info("there is no checkpoint to resume from: training starts at round 1")

    def note(self, server: Server, record: RoundRecord) -> None:
        """Round and state are on disk, whole, when this returns."""
        if self._writer is not None:
            self._writer.append(record)
            self._writer.save(record.round, server.dump())
        elif self._federation.checkpoint is not None:
            server.save(self._federation.checkpoint)

    def finish(self, summary: dict[str, Any]) -> None:
        """The training is over."""
        if self._writer is not None:
            self._writer.finish(summary)

    # -------------------------------------------------------------------------------------- what is there
    def check_size(self, size: int) -> None:
        """A model of `size` bytes must fit where its checkpoints go."""
        if self._store is not None and size > _BLOB_LIMIT:
            raise ValueError(
                f"store: a model of {size:,} bytes is over the {_BLOB_LIMIT:,} that one value of a database may "
                "have; use checkpoint= (a file) in its place"
            )

    def _check_store(self, store: Store) -> None:
        known = store.find(self._training.id)
        if known is None or known.status == "running":  # what is running is refused when the run is begun
            return
        if known.status == "finished":
            raise ValueError(
                f"training {self._training.name!r} with these settings is finished in {self._federation.store} "
                f"(run {known.id[:12]}): give Federation another name or store"
            )
        if known.done and not self._federation.resume:
            raise ValueError(
                f"training {self._training.name!r} was interrupted after round {known.done} "
                f"({self._federation.store}): resume=True goes on, another name starts anew"
            )

    def _open_file(self, path: Path) -> None:
        if not path.parent.is_dir():
            raise ValueError(f"checkpoint {path}: there is no folder {path.parent}")
        self._lock = _locked(path)
        if not path.exists():
            return
        if not self._federation.resume:
            raise ValueError(f"checkpoint {path} is there already: resume=True goes on, or name another file")
        self._found = path.read_bytes()


def _locked(path: Path) -> IO[bytes]:
    """An open lock file beside `path`. The system lets go of it when the process ends, however it ends."""
    lock = path.with_name(path.name + ".lock").open("ab")
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(lock.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ValueError(
            f"checkpoint {path} is being written by another process: stop it or name another file"
        ) from None
    os.set_inheritable(lock.fileno(), False)
    return lock
