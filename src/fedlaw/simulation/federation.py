"""A federation in one process: the server asks, all clients train at once, attackers forge, the server is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from fedlaw import attacks
from fedlaw._random import generator
from fedlaw.attacks import Attack, View
from fedlaw.data import Examples, Partition
from fedlaw.models import layout
from fedlaw.server import FedLAW, OnePhase, Oracle, Replies, Request, RoundReport, Server
from fedlaw.simulation.jobs import Jobs, LocalWork, Trained, shuffled
from fedlaw.simulation.training import Backend, train

_NUMBER_BYTES = 8  # a loss or an example count on the wire


@dataclass(frozen=True, eq=False)
class Population:
    """The clients and their data, fixed before round 1.

    Attributes:
        inputs, labels: the pool: every training example, then the poisoned copies.
        clean, poisoned: (n, L) each client's examples as indices into the pool, padded with -1; the two differ
            for malicious clients whose attack poisons data.
        sizes: (n,) number of examples of each client.
        malicious: (n,) bool.
        groups: (n,) label group of each client, or None.
    """

    inputs: Tensor
    labels: Tensor
    clean: Tensor
    poisoned: Tensor
    sizes: Tensor
    malicious: Tensor
    groups: np.ndarray[tuple[int], np.dtype[np.int64]] | None

    @property
    def n(self) -> int:
        """Number of clients."""
        return len(self.sizes)

    def to(self, device: torch.device) -> Population:
        """The same with its data on `device`; who is malicious stays on the CPU, where it is looked up."""
        moved = {
            name: getattr(self, name).to(device)
            for name in ("inputs", "labels", "clean", "poisoned", "sizes")
        }
        return replace(self, **moved)

    @property
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
    extra_inputs, extra_labels, at = [inputs], [labels], len(labels)
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
        torch.cat(extra_inputs),
        torch.cat(extra_labels),
        clean,
        poisoned,
        sizes,
        malicious.cpu(),
        partition.groups,
    )


class Federation:
    """One experiment: a server and the population it trains with, one phase at a time.

    Args:
        server: over clients 0 .. n-1.
        population: their data; moved to the device of the server's model.
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
        self.server, self.model = server, model
        self.population = population.to(server.params.device)
        self.attack, self.work, self.dropout, self.seed = attack, work, dropout, seed
        self.bytes_up = self.bytes_down = 0  # of the round under way
        self.honest_losses: Tensor | None = None  # (h,) of the last phase
        self.diverged = False  # whether most honest clients' updates of the last phase were of no use
        self._layers = tuple(slot.stop - slot.start for slot in layout(model))
        self._ranks = attacks.ranks(population.malicious)
        self._request: Request | None = None

    def jobs(self) -> tuple[Tensor, Jobs]:
        """What is to be trained in this phase: the model (d,) sent out, and a job per client that will answer."""
        server, people = self.server, self.population
        self._request = request = server.ask()
        if request.phase == 1:
            self.bytes_up = self.bytes_down = 0
        asked = torch.tensor([int(c) for c in request.clients], dtype=torch.int64)  # type: ignore[call-overload]
        if self.dropout > 0:
            drawn = torch.rand(
                people.n, generator=generator(self.seed, request.round, request.phase, "dropout")
            )
            asked = asked[drawn[asked] >= self.dropout]
        self._there = asked
        self._acting = self.attack.acting(request.round, people.malicious)
        device = people.sizes.device
        index = torch.where(self._acting.to(device).unsqueeze(-1), people.poisoned, people.clean)
        shuffle = generator(self.seed, request.round, request.phase, "shuffle")
        # Drawn for the whole roster, so that who answers does not change in which order the others train.
        order = shuffled(index, people.sizes, self.work.epochs, shuffle)[asked.to(device)]
        start = torch.zeros(len(asked), dtype=torch.int64, device=device)
        numbers = len(request.params) * request.params.element_size()
        self.bytes_down += len(request.clients) * numbers
        self.bytes_up += len(asked) * (numbers + 2 * _NUMBER_BYTES)
        return request.params, Jobs(start, order, people.sizes[asked.to(device)])

    def deliver(self, trained: Trained) -> RoundReport | None:
        """Forge what attackers forge, tell the server, end the phase."""
        request, there, people = self._request, self._there, self.population
        assert request is not None
        updates, losses = trained.updates, trained.losses
        acting = self._acting[there]
        honest = ~people.malicious[there]
        device = updates.device
        self.honest_losses = losses[honest.to(device)].double().cpu()
        if bool(acting.any()):
            view = View(
                updates=updates,
                losses=losses,
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
            rows = acting.nonzero().flatten().to(device)
            updates = updates.index_copy(0, rows, forged.updates.to(updates.dtype))
            losses = losses.index_copy(0, rows, forged.losses.to(losses.dtype))
        counts = people.sizes[there.to(device)].double()
        before = len(self.server.refusals)
        self.server.tell(Replies(there.tolist(), updates, losses, counts))
        refused = {refusal.client for refusal in self.server.refusals[before:]}
        broken = sum(client in refused for client in there[honest].tolist())
        self.diverged = 2 * broken > int(honest.sum())
        return self.server.end_phase()

    def _rule(self, there: Tensor) -> Callable[[Tensor], Tensor]:
        """What the server would make of updates (m, d) of those who answer, for attackers that search."""
        server, sizes = self.server, self.population.sizes
        counts = sizes[there.to(sizes.device)].double()

        def aggregate(updates: Tensor) -> Tensor:
            if isinstance(server, OnePhase):
                stream = generator(server.settings.seed, server.round, "rule", device=updates.device)
                return server.rule(updates, counts=counts.to(updates), generator=stream).vector
            if isinstance(server, FedLAW):
                weights = server.weights[there.to(server.weights.device)].to(updates)
            else:
                assert isinstance(server, Oracle)
                weights = counts.to(updates)
            return (weights / weights.sum().clamp(min=1e-30)) @ updates

        return aggregate


class Stack:
    """Experiments of one shape (model, local work), trained together: one program for all their clients.

    On a CPU the result of each is, to the last bit, what it is alone.
    """

    def __init__(
        self, federations: Sequence[Federation], *, backend: Backend = "auto", threads: int | None = None
    ) -> None:
        first = federations[0]
        if any(f.work != first.work or f._layers != first._layers for f in federations):
            raise ValueError("experiments that are stacked must have the same model and local training")
        self.federations = list(federations)
        self.backend, self.threads = backend, threads
        pools = [f.population for f in federations]
        self._offsets = np.cumsum([0, *(len(pool.labels) for pool in pools)])[:-1].tolist()
        self._inputs, self._labels = pools[0].inputs, pools[0].labels
        if len(pools) > 1:
            self._inputs, self._labels = (
                torch.cat([getattr(p, x) for p in pools]) for x in ("inputs", "labels")
            )

    def step(self) -> list[tuple[Federation, RoundReport | None]]:
        """One phase of every experiment that is not done; who took it, and the report where a round ended."""
        live = [(f, at) for f, at in zip(self.federations, self._offsets, strict=True) if not f.server.done]
        parts, params = [], []
        for federation, offset in live:
            theta, jobs = federation.jobs()
            params.append(theta)
            order = torch.where(jobs.order >= 0, jobs.order + offset, jobs.order) if offset else jobs.order
            parts.append(Jobs(jobs.start, order, jobs.sizes))
        if not live:
            return []
        stacked, first = Jobs.stack(parts, rows=[1] * len(parts)), self.federations[0]
        if len(stacked):
            trained = train(
                first.model,
                torch.stack(params),
                self._inputs,
                self._labels,
                stacked,
                first.work,
                backend=self.backend,
                threads=self.threads,
            )
        else:  # nobody answers anywhere
            trained = Trained(params[0].new_zeros(0, len(params[0])), params[0].new_zeros(0))
        out, at = [], 0
        for (federation, _), part in zip(live, parts, strict=True):
            mine = Trained(trained.updates[at : at + len(part)], trained.losses[at : at + len(part)])
            at += len(part)
            out.append((federation, federation.deliver(mine)))
        return out
