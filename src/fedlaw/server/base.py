"""The shell of every server: who is asked, what arrives, what is refused, and when a round is over."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedlaw import screening
from fedlaw._linalg import row_norms
from fedlaw._random import generator
from fedlaw.screening import Reason, masked_median
from fedlaw.server import state as checkpoint
from fedlaw.server.judge import Exclusion, Status
from fedlaw.server.protocol import ClientId, Refusal, Replies, Reply, Request, RoundReport, Settings

ROWS_AT_ONCE = 16  # of updates that have to be copied: memory for these, not for all


class Server(ABC):
    """One training, driven from outside: `ask`, `tell`, `end_phase` until `done`.

    What has d numbers (models, updates) lies where the model lies; what has one number a client, on the CPU.

    >>> from fedlaw.aggregators import Median
    >>> from fedlaw.server import OnePhase
    >>> server = OnePhase(torch.zeros(2), clients=["a", "b", "c"], rule=Median(), settings=Settings(rounds=1))
    >>> request = server.ask()
    >>> for client, value in zip(request.clients, [1.0, 2.0, 900.0]):
    ...     server.tell(Reply(client, torch.full((2,), value)))
    >>> report = server.end_phase()
    >>> server.params, server.done
    (tensor([-0.0200, -0.0200]), True)
    """

    kind: ClassVar[str]

    def __init__(
        self, initial_params: Tensor, clients: Iterable[ClientId], settings: Settings | None = None
    ) -> None:
        if initial_params.ndim != 1 or initial_params.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                "initial_params must be a flat tensor (d,) of floating-point numbers, float32 or float64, got "
                f"{initial_params.dtype} of shape {tuple(initial_params.shape)}"
            )
        if not len(initial_params) or not bool(torch.isfinite(initial_params).all()):
            raise ValueError("initial_params must be finite numbers, one at least")
        self.roster: tuple[ClientId, ...] = tuple(clients)
        self._index = {client: i for i, client in enumerate(self.roster)}
        if not self.roster:
            raise ValueError("clients must name at least one client, got none")
        if len(self._index) != len(self.roster):
            raise ValueError("clients must be distinct, got one twice")
        if not all(isinstance(client, str | int) and not isinstance(client, bool) for client in self.roster):
            raise ValueError("clients must be named by strings or integers")
        self.settings = settings or Settings()
        self.params = initial_params.detach().clone()
        self.round = 1
        self.phase = 1
        self.refusals: list[Refusal] = []
        self._updates: Tensor | None = None
        self._counts = torch.full((self.n,), torch.nan, dtype=torch.float64)
        self._counts_at_start = self._counts.clone()  # the last round boundary's, which a checkpoint holds
        self._refused_before = 0
        self._open_round()

    # -------------------------------------------------------------------------------------- what subclasses say
    @abstractmethod
    def _eligible(self) -> Tensor:
        """(n,) bool: who may be asked in the coming round."""

    @abstractmethod
    def _needs_loss(self) -> bool:
        """Whether a reply of the current phase is of no use without its loss."""

    @abstractmethod
    def _receive(self, rows: Tensor, updates: Tensor, norms: Tensor) -> None:
        """Take the usable updates (m, d), with their norms (m,) in float64, of the clients `rows` (m,); counts and
        losses are noted already."""

    @abstractmethod
    def _close(self) -> RoundReport | None:
        """The phase is over: the report if the round is, None if another phase follows."""

    @abstractmethod
    def statuses(self) -> dict[ClientId, tuple[Status, Exclusion]]:
        """Where every client stands, and why it was excluded where it was."""

    @abstractmethod
    def _pack(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What the subclass remembers from round to round: arrays, and a JSON-able description of its settings."""

    @abstractmethod
    def _unpack(self, arrays: dict[str, Tensor], description: dict[str, Any]) -> None:
        """Take back what `_pack` gave."""

    # -------------------------------------------------------------------------------------- the protocol
    @property
    def n(self) -> int:
        """Number of clients on the roster."""
        return len(self.roster)

    @property
    def done(self) -> bool:
        """Whether all rounds are over."""
        return self.round > self.settings.rounds

    def ask(self) -> Request:
        """What to send now, and to whom. Asking again gives the same answer until the phase ends."""
        self._check_not_done()
        # A copy: who is handed the model may train in it.
        return Request(self.round, self.phase, self._sent().clone(), self._clients, self.settings.loss_point)

    def tell(self, replies: Reply | Replies | Any) -> None:
        """Take one reply or a block. What cannot be used is refused and recorded, never raised."""
        self._check_not_done()
        if isinstance(replies, Replies):
            self._tell_block(replies)
        elif isinstance(replies, Reply):
            self._tell_one(replies)
        else:  # what a transport could make nothing of
            self._refuse(type(replies).__name__, Reason.WRONG_TYPE)

    def end_phase(self) -> RoundReport | None:
        """No more replies for this phase. Returns the round's report if the round is over."""
        self._check_not_done()
        report = self._close()
        if report is not None:
            self.round += 1
            self.phase = 1
            self._refused_before = len(self.refusals)
            self._counts_at_start = self._counts.clone()
            if not self.done:
                self._open_round()
        return report

    def _check_not_done(self) -> None:
        if self.done:
            raise RuntimeError(f"training is over: all {self.settings.rounds} rounds are done")

    # -------------------------------------------------------------------------------------- one phase
    def _sent(self) -> Tensor:
        """The model that the current phase sends out."""
        return self.params

    def _open_round(self) -> None:
        eligible = self._eligible()
        if self.settings.participation < 1:
            rows = eligible.nonzero().flatten()
            drawn = generator(self.settings.seed, self.round, "participation")
            some = max(1, round(self.settings.participation * len(rows)))
            chosen = rows[torch.randperm(len(rows), generator=drawn)[:some]]
            eligible = torch.zeros_like(eligible).index_fill(0, chosen, True)
        self._asked = eligible
        self._open_phase(eligible)

    def _open_phase(self, wanted: Tensor) -> None:
        self._wanted = wanted
        self._clients = tuple(self.roster[i] for i in wanted.nonzero().flatten().tolist())
        self._answered = torch.zeros_like(wanted)
        self._losses = torch.full((self.n,), torch.nan, dtype=torch.float64)

    def _store(self, rows: Tensor, updates: Tensor) -> None:
        """Keep updates (m, d) as rows of the (n, d) matrix of this round."""
        if self._updates is None:
            self._updates = self.params.new_zeros(self.n, len(self.params))
        if len(rows) == self.n and torch.equal(rows, torch.arange(self.n)):
            self._updates.copy_(updates)
        else:
            self._updates.index_copy_(0, rows.to(updates.device), updates)

    def _collected(self) -> Tensor:
        """(n, d) the updates stored in this round, zero rows for those who did not answer."""
        if self._updates is None:
            self._updates = self.params.new_zeros(self.n, len(self.params))
        if not bool(self._answered.all()):
            self._updates.masked_fill_(~self._answered.to(self._updates.device).unsqueeze(-1), 0)
        return self._updates

    def _refuse(self, client: ClientId, reason: Reason) -> None:
        shown = client if isinstance(client, str | int) else repr(client)[:80]
        self.refusals.append(Refusal(self.round, self.phase, shown, reason.words))

    def _row(self, client: Any) -> int | None:
        """Row of an untrusted client name; None if there is no such client."""
        try:
            named = isinstance(client, str | int) and not isinstance(client, bool)  # True would be client 1
            return self._index.get(client) if named else None
        except TypeError:
            return None

    def _standing(self, client: Any, wanted: Tensor | list[bool], answered: Tensor | list[bool]) -> Reason:
        """Whether a reply of `client` may count: it was asked and has not answered yet."""
        row = self._row(client)
        if row is None or not wanted[row]:
            return Reason.NOT_ASKED
        return Reason.DUPLICATE if answered[row] else Reason.USABLE

    def _tell_one(self, reply: Reply) -> None:
        reason = self._standing(reply.client, self._wanted, self._answered)
        now = ((reply.round, self.round), (reply.phase, self.phase))
        if reason is Reason.USABLE and not all(
            told is None or (type(told) is int and told == current) for told, current in now
        ):
            reason = Reason.LATE
        update = None
        if reason is Reason.USABLE:
            reason, update = screening.read_update(reply.update, len(self.params), like=self.params)
        if reason is not Reason.USABLE or update is None:
            return self._refuse(reply.client, reason)
        loss, count = screening.read_number(reply.loss), screening.read_number(reply.count)

        def told(value: float | None) -> Tensor | None:
            return None if value is None else torch.tensor([value], dtype=torch.float64)

        return self._take([reply.client], update.unsqueeze(0), told(loss), told(count))

    def _tell_block(self, replies: Replies) -> None:
        clients = list(replies.clients)
        updates, m = replies.updates, len(clients)
        if not isinstance(updates, Tensor) or updates.layout != torch.strided or updates.is_meta:
            reason = Reason.WRONG_TYPE
        elif not updates.is_floating_point():
            reason = Reason.WRONG_DTYPE
        elif tuple(updates.shape) != (m, len(self.params)):
            reason = Reason.WRONG_SHAPE
        elif not _fits(replies.losses, m):
            reason = Reason.LOSS_INVALID
        elif not _fits(replies.counts, m):
            reason = Reason.COUNT_ABSURD
        else:
            updates = updates.detach().to(dtype=self.params.dtype, device=self.params.device)
            return self._take(clients, updates, replies.losses, replies.counts)
        for client in clients:
            self._refuse(client, reason)
        return None

    def _take(
        self, clients: Sequence[ClientId], updates: Tensor, losses: Tensor | None, counts: Tensor | None
    ) -> None:
        """Screen a block whose shapes are right, refuse rows one by one, and receive the rest."""
        lengths = row_norms(updates)  # an accelerator goes on with it while the CPU does the rest
        at, where = self._usable(clients)
        losses = None if losses is None else losses.detach().to("cpu", torch.float64)
        counts = None if counts is None else counts.detach().to("cpu", torch.float64)
        norms = lengths.to("cpu", torch.float64)
        codes = screening.screen(updates, losses, counts, needs_loss=self._needs_loss(), norms=norms)[at]
        if bool(codes.any()):
            for place, code in zip(at.tolist(), codes.tolist(), strict=True):
                if code:
                    self._refuse(clients[place], Reason(code))
            at, where = at[codes == 0], where[codes == 0]
        if not len(at):
            return
        self._answered[where] = True
        if losses is not None:
            self._losses[where] = losses[at]
        if counts is not None:
            self._counts[where] = counts[at]
        if len(at) == len(updates):
            self._receive(where, updates, norms)
            return
        for some, whose in zip(torch.split(at, ROWS_AT_ONCE), torch.split(where, ROWS_AT_ONCE), strict=True):
            self._receive(whose, updates[some], norms[some])  # a few rows at once: no second copy of them all

    def _usable(self, clients: Sequence[ClientId]) -> tuple[Tensor, Tensor]:
        """Which of a block's replies may count (k,), and the rows (k,) of their senders; others are refused."""
        if (
            not bool(self._answered.any())
            and all(type(client) in (int, str) for client in clients)
            and tuple(clients) == self._clients
        ):  # everybody who was asked, in order: a simulator's block
            rows = self._wanted.nonzero().flatten()
            return torch.arange(len(rows)), rows
        wanted, answered = self._wanted.tolist(), self._answered.tolist()
        places, found = [], []
        for place, client in enumerate(clients):
            reason = self._standing(client, wanted, answered)
            if reason is not Reason.USABLE:
                self._refuse(client, reason)
                continue
            row = self._index[client]
            answered[row] = True
            places.append(place)
            found.append(row)
        return torch.tensor(places, dtype=torch.int64), torch.tensor(found, dtype=torch.int64)

    def _examples(self, bound: float | None = None) -> Tensor:
        """(n,) example counts as last told; the median where none was (1 without any); at most `bound` medians."""
        told = ~self._counts.isnan()
        median = torch.nan_to_num(masked_median(self._counts, told), nan=1.0)
        counts = torch.where(told, self._counts, median)
        return counts if bound is None else torch.minimum(counts, bound * median)

    def _apply(self, step: Tensor) -> str | None:
        """theta <- theta - alpha * step, unless that is not finite; then the reason in words."""
        params = self.params - self.settings.alpha * step
        if not finite(params):
            return "the step would have made the model non-finite"
        self.params = params
        return None

    def _report(
        self,
        *,
        weights: Tensor | None,
        reasons: dict[str, Tensor] | None = None,
        skipped: str | None = None,
        notes: tuple[str, ...] = (),
    ) -> RoundReport:
        return RoundReport(
            round=self.round,
            phases=self.phase,
            asked=self._asked.clone(),
            answered=self._answered.clone(),
            weights=weights,
            statuses=tuple(self.statuses().values()),
            reasons=reasons or {},
            losses=self._losses.clone(),
            skipped=skipped,
            notes=notes,
            refusals=tuple(self.refusals[self._refused_before :]),
        )

    # -------------------------------------------------------------------------------------- save and load
    def dump(self) -> bytes:
        """The state at the last round boundary as bytes (an .npz file; no pickle).

        Between the phases of a round, what was told in that round is not part of it: after `load` the round
        starts again at phase 1, and the run goes on with the same bits (CPU).
        """
        arrays, description = self._pack()
        arrays |= {"params": self.params, "counts": self._counts_at_start}
        return checkpoint.dumps(arrays, description | self._identity() | {"round": self.round})

    def load(self, data: bytes) -> None:
        """Go on where the server that made `data` stood. Kind, roster and settings must be the same."""
        arrays, description = checkpoint.loads(data)
        for name, value in (self._pack()[1] | self._identity()).items():
            if description.get(name) != value:
                raise ValueError(
                    f"the checkpoint belongs to another run: its {name} is {_short(description.get(name))}, "
                    f"this server's is {_short(value)}"
                )
        kept = {}
        for name, like in (("params", self.params), ("counts", self._counts)):
            kept[name] = arrays.pop(name, torch.empty(0))
            if kept[name].shape != like.shape or kept[name].dtype != like.dtype:
                raise ValueError(f"the checkpoint's {name} are not this server's")
        at = description.get("round")
        if not isinstance(at, int) or not 1 <= at <= self.settings.rounds + 1:
            raise ValueError(f"the checkpoint is at round {at!r}, outside 1 to {self.settings.rounds + 1}")
        self._unpack(arrays, description)
        self.params = kept["params"].to(self.params.device)
        self._counts = kept["counts"]
        self._counts_at_start = self._counts.clone()
        self.round, self.phase = at, 1
        self.refusals, self._refused_before = [], 0
        if not self.done:
            self._open_round()

    def _identity(self) -> dict[str, Any]:
        return {"server": self.kind, "roster": list(self.roster), "settings": asdict(self.settings)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `dump` to a file, replacing it in one step."""
        checkpoint.replace_file(path, self.dump())

    def restore(self, path: str | os.PathLike[str]) -> None:
        """`load` what `save` wrote to a file."""
        try:
            self.load(Path(path).read_bytes())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def finite(x: Tensor) -> bool:
    """Whether all entries of x are finite: one pass, and one number to wait for."""
    return math.isfinite(torch.linalg.vector_norm(x, ord=torch.inf))


def _fits(values: Any, m: int) -> bool:
    """Whether losses or counts of a block are missing, or one number a reply."""
    return values is None or (
        isinstance(values, Tensor) and not values.is_complex() and tuple(values.shape) == (m,)
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."
