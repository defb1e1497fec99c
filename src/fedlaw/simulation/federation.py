"""A federation in one process: the server asks, all clients train at once, attackers forge, the server is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedlaw import attacks
from fedlaw._random import client_keys, generator
from fedlaw.attacks import Attack, View
from fedlaw.data import Examples, Partition
from fedlaw.models import layout
from fedlaw.server import FedLAW, OnePhase, Oracle, Replies, Request, RoundReport, Server
from fedlaw.simulation.gram import PoolMemory
from fedlaw.simulation.jobs import Jobs, LocalWork, Trained, shuffled
from fedlaw.simulation.training import Backend, train

_NUMBER_BYTES = 8  # a loss or an example count on the wire


@dataclass(frozen=True, eq=False)
class Population:
    """The clients and their data, fixed before round 1.

    Attributes:
        inputs, labels: the training examples, which experiments of one seed share.
        poisoned_inputs, poisoned_labels: the poisoned copies of what malicious clients hold; often none.
        clean, poisoned: (n, L) each client's examples as indices into the two, one behind the other, padded with
            -1; the rows differ for malicious clients whose attack poisons data.
        sizes: (n,) number of examples of each client.
        malicious: (n,) bool.
        groups: (n,) label group of each client, or None.
    """

    inputs: Tensor
    labels: Tensor
    poisoned_inputs: Tensor
    poisoned_labels: Tensor
    clean: Tensor
    poisoned: Tensor
    sizes: Tensor
    malicious: Tensor
    groups: np.ndarray[tuple[int], np.dtype[np.int64]] | None

    @property
    def n(self) -> int:
        """Number of clients."""
        return len(self.sizes)

    @cached_property
    def minority(self) -> Tensor:
        """(n,) bool: honest clients whose label group is mostly malicious, the first to be taken for attackers."""
        if self.groups is None:
            return torch.zeros_like(self.malicious)
        groups = torch.from_numpy(self.groups).to(self.malicious.device)
        share = torch.stack([self.malicious[groups == g].double().mean() for g in groups])
        return ~self.malicious & (share >= 0.5)


def populate(
    train_data: Examples,
    partition: Partition,
    malicious: Tensor,
    attack: Attack,
    *,
    classes: int,
    black: float | Tensor,
    seed: int,
) -> Population:
    """Hand the training data out, poison what attackers poison, and lay everything out for training.

    Args:
        train_data: scaled training examples.
        partition: who holds which of them.
        malicious: (n,) bool.
        attack: what the malicious clients do; its data poisoning is drawn once, client by client.
        classes: number of labels. black: value of a black pixel after scaling.
        seed: of the poisoning.
    """
    inputs, labels = train_data
    n, crew = len(partition), int(malicious.sum())
    sizes = torch.from_numpy(partition.counts.copy())
    clean = torch.full((n, int(sizes.max())), -1, dtype=torch.int64)
    for i, own in enumerate(partition.indices):
        clean[i, : len(own)] = torch.from_numpy(own)
    poisoned = clean.clone()
    extra_inputs, extra_labels, at = [inputs[:0]], [labels[:0]], len(labels)
    if attack.poisons_data:
        for rank, i in enumerate(malicious.nonzero().flatten().tolist()):
            mine = clean[i, : int(sizes[i])]
            x, y = attack.member(rank, crew).poison(
                inputs[mine],
                labels[mine],
                classes=classes,
                black=black,
                generator=generator(seed, i, "poison"),
            )
            if len(x) != len(mine) or len(y) != len(mine):
                raise ValueError(f"attack {attack!r} changed the number of examples of a client")
            extra_inputs.append(x)
            extra_labels.append(y)
            poisoned[i, : len(mine)] = torch.arange(at, at + len(mine))
            at += len(mine)
    return Population(
        inputs,
        labels,
        torch.cat(extra_inputs),
        torch.cat(extra_labels),
        clean,
        poisoned,
        sizes,
        malicious.cpu(),
        partition.groups,
    )


class Asked(NamedTuple):
    """What one experiment has to be trained in a phase.

    Attributes:
        params: (d,) the model that is sent out.
        clients: (k,) who will answer, int64. acting: (k,) bool, whose data are poisoned now.
        keys: (k,) what the orders of their examples are drawn from.
    """

    params: Tensor
    clients: Tensor
    acting: Tensor
    keys: Tensor


class Federation:
    """One experiment: a server and the population it trains with, one phase at a time.

    Who is malicious, who answers and how much data everybody has are looked up on the CPU; models, data and
    updates are where the server's model is.

    Args:
        server: over clients 0 .. n-1.
        population: their data.
        model: the network.
        attack: what the malicious clients do.
        work: a client's local training; its learning rate is the server's alpha.
        dropout: share of those asked who do not answer, drawn anew in each phase.
        seed: of shuffles, dropouts and attacks.
    """

    def __init__(
        self,
        server: Server,
        population: Population,
        model: nn.Module,
        attack: Attack,
        work: LocalWork,
        *,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> None:
        if work.lr != server.settings.alpha or work.loss_point != server.settings.loss_point:
            raise ValueError("the clients' learning rate and loss point must be the server's")
        self.server, self.model, self.population = server, model, population
        self.attack, self.work, self.dropout, self.seed = attack, work, dropout, seed
        self.bytes_up = self.bytes_down = 0  # of the round under way
        self.honest_losses: Tensor | None = None  # (h,) of the last phase
        self.diverged = False  # whether most honest clients' updates of the last phase were of no use
        self._layers = tuple(slot.stop - slot.start for slot in layout(model))
        self._ranks = attacks.ranks(population.malicious)
        self._request: Request | None = None

    def begin(self) -> Asked:
        """Ask the server, and see who will answer."""
        people = self.population
        self._request = request = self.server.ask()
        if request.phase == 1:
            self.bytes_up = self.bytes_down = 0
        asked = torch.tensor(request.clients, dtype=torch.int64)  # the roster's names are 0 .. n-1
        if self.dropout > 0:
            drawn = torch.rand(
                people.n, generator=generator(self.seed, request.round, request.phase, "dropout")
            )
            asked = asked[drawn[asked] >= self.dropout]
        self._there = asked
        self._acting = self.attack.acting(request.round, people.malicious)[asked]
        # Drawn for the whole roster, so that who answers does not change in which order the others train.
        keys = client_keys(people.n, self.seed, request.round, request.phase, "shuffle")[asked]
        numbers = len(request.params) * request.params.element_size()
        self.bytes_down += len(request.clients) * numbers
        self.bytes_up += len(asked) * (numbers + 2 * _NUMBER_BYTES)
        return Asked(request.params, asked, self._acting, keys)

    def deliver(self, trained: Trained, losses: Tensor) -> RoundReport | None:
        """Forge what attackers forge, tell the server, end the phase. `losses` are those trained, on the CPU."""
        request, there, people = self._request, self._there, self.population
        assert request is not None
        updates, acting = trained.updates, self._acting
        honest = ~people.malicious[there]
        self.honest_losses = losses[honest].double()
        if bool(acting.any()):
            device = updates.device
            view = View(
                updates=updates,
                losses=trained.losses,
                malicious=acting.to(device),
                params=request.params,
                round=request.round,
                phase=request.phase,
                alpha=self.work.lr,
                generator=generator(self.seed, request.round, request.phase, "attack", device=device),
                rule=self._rule(there) if self.attack.needs_rule else None,
                ranks=self._ranks[there].to(device),
                crew=int(people.malicious.sum()),
                layers=self._layers,
            )
            forged = self.attack.forge(view)
            rows = acting.nonzero().flatten()
            updates = updates.index_copy(0, rows.to(device), forged.updates.to(updates.dtype))
            losses = losses.index_copy(0, rows, forged.losses.to(losses))
        before = len(self.server.refusals)
        self.server.tell(Replies(there.tolist(), updates, losses, people.sizes[there].double()))
        refused = {refusal.client for refusal in self.server.refusals[before:]}
        broken = sum(client in refused for client in there[honest].tolist()) if refused else 0
        self.diverged = 2 * broken > int(honest.sum())
        return self.server.end_phase()

    def _rule(self, there: Tensor) -> Callable[[Tensor], Tensor]:
        """What the server would make of updates (m, d) of those who answer, for attackers that search."""
        server, counts = self.server, self.population.sizes[there].double()

        def aggregate(updates: Tensor) -> Tensor:
            if isinstance(server, OnePhase):
                stream = generator(server.settings.seed, server.round, "rule", device=updates.device)
                return server.rule(updates, counts=counts.to(updates), generator=stream).vector
            if isinstance(server, FedLAW):
                weights = server.weights[there].to(updates)
            else:
                assert isinstance(server, Oracle)
                weights = counts.to(updates)
            return (weights / weights.sum().clamp(min=1e-30)) @ updates

        return aggregate


class Stack:
    """Experiments of one shape (model, local work), trained together: one program for all their clients.

    On a CPU the result of each is, to the last bit, what it is alone. The data of all experiments are one pool,
    in which what several of them share lies once.
    """

    def __init__(
        self,
        federations: Sequence[Federation],
        *,
        backend: Backend = "auto",
        threads: int | None = None,
        half: bool = False,
    ) -> None:
        first = federations[0]
        if any(f.work != first.work or f._layers != first._layers for f in federations):
            raise ValueError("experiments that are stacked must have the same model and local training")
        self.federations = list(federations)
        self.backend, self.threads, self.half = backend, threads, half
        self._memory = PoolMemory()
        people, device = [f.population for f in federations], first.server.params.device
        self._rows = np.cumsum([0, *(p.n for p in people)])[:-1].tolist()  # of each experiment's first client
        parts, begins = _pooled(people)
        self._inputs, self._labels = (_joined([part[k] for part in parts], device) for k in (0, 1))
        longest = max(p.clean.shape[1] for p in people)
        tables = [
            torch.cat([_placed(getattr(p, name), p, begins, longest) for p in people])
            for name in ("clean", "poisoned")
        ]
        self._table = torch.stack(tables).to(device)  # (2, clients of all, L) into the pool: clean, poisoned
        self._sizes = torch.cat([p.sizes for p in people]).to(device)

    def step(self) -> list[tuple[Federation, RoundReport | None]]:
        """One phase of every experiment that is not done; who took it, and the report where a round ended."""
        live = [(f, row) for f, row in zip(self.federations, self._rows, strict=True) if not f.server.done]
        if not live:
            return []
        asked = [federation.begin() for federation, _ in live]
        params = torch.stack([each.params for each in asked])
        counts = [len(each.clients) for each in asked]
        trained = self._train(params, asked, [row for _, row in live])
        losses = trained.losses.cpu()  # of all experiments at once: the one time that training is waited for
        parts = (torch.split(each, counts) for each in (*trained, losses))
        return [
            (federation, federation.deliver(Trained(updates, own), on_cpu))
            for (federation, _), updates, own, on_cpu in zip(live, *parts, strict=True)
        ]

    def _train(self, params: Tensor, asked: Sequence[Asked], rows: Sequence[int]) -> Trained:
        first = self.federations[0]
        told = torch.stack(
            [
                torch.cat([each.clients + row for each, row in zip(asked, rows, strict=True)]),
                torch.cat([each.acting.long() for each in asked]),
                torch.cat([each.keys for each in asked]),
                torch.cat([torch.full_like(each.clients, k) for k, each in enumerate(asked)]),
            ]
        ).to(params.device)
        client, acting, keys, start = told
        if not len(client):  # nobody answers anywhere
            return Trained(params.new_zeros(0, params.shape[1]), params.new_zeros(0))
        sizes = self._sizes[client]
        order = shuffled(self._table[acting, client], sizes, first.work.epochs, keys)
        return train(
            first.model,
            params,
            self._inputs,
            self._labels,
            Jobs(start, order, sizes),
            first.work,
            backend=self.backend,
            threads=self.threads,
            memory=self._memory,
            half=self.half,
        )


def _pooled(people: Sequence[Population]) -> tuple[list[tuple[Tensor, Tensor]], dict[int, int]]:
    """The different tensors of examples, and at which place of the pool each (by the id of its labels) begins."""
    parts: list[tuple[Tensor, Tensor]] = []
    begins: dict[int, int] = {}
    end = 0
    for p in people:
        for inputs, labels in ((p.inputs, p.labels), (p.poisoned_inputs, p.poisoned_labels)):
            if id(labels) not in begins:
                begins[id(labels)] = end
                end += len(labels)
                parts.append((inputs, labels))
    return parts, begins


def _joined(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    filled = [part.to(device) for part in parts if len(part)]
    return filled[0] if len(filled) == 1 else torch.cat(filled)


def _placed(index: Tensor, people: Population, begins: dict[int, int], length: int) -> Tensor:
    """Indices (n, L) into a population's own examples as indices into the pool, padded to `length`."""
    base, extra, own = begins[id(people.labels)], begins[id(people.poisoned_labels)], len(people.labels)
    moved = torch.where(index < own, index + base, index - own + extra)
    return nn.functional.pad(torch.where(index < 0, -1, moved), (0, length - index.shape[1]), value=-1)
