"""FedLAW: the server that learns whom to trust, in two exchanges a round; and BSUM, its baseline."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from fedlaw._linalg import clip_factors, paired_products, weighted_sum, weighted_sums
from fedlaw.server import state as checkpoint
from fedlaw.server.base import ROWS_AT_ONCE, Server, finite
from fedlaw.server.core import Core
from fedlaw.server.judge import Arrived, Evidence, Examined, Exclusion, Judge, Status
from fedlaw.server.protocol import ClientId, RoundReport, Settings
from fedlaw.server.published import LinearProgram, Published

_FEW_CLIENTS = 20  # fewer than core judging was ever measured on
_REASONS = ("alignment", "loss", "score")


class FedLAW(Server):
    r"""FedLAW: weights learned together with the model.

    While weights are learned a round has two phases. Phase 1 collects g_i at theta; phase 2 collects g~_i and
    f~_i at the look-ahead model theta~ = theta - alpha sum_i w_i g_i; the judge makes new weights of them, and
    theta <- theta - alpha sum_i w_i g_i with the new ones. After the freeze a round has one phase. Of phase 2
    only z = sum_i w_i g~_i and the products g_i . g~_i are kept, formed as replies arrive: n*d numbers in all.

    Weights are normalised over those asked and lose the mass of the absent without renormalising.

    Args:
        initial_params: (d,) the model to start from.
        clients: the roster, frozen.
        judge: `Published(...)`, `Core(...)`, or the name of a preset: "paper" or "hardened".
        settings: rounds, step size and the like.

    >>> server = FedLAW(torch.zeros(3), clients=range(50), judge="hardened", settings=Settings(rounds=100))
    >>> server.judge.judged_rounds, server.ask().phase
    (60, 1)

    Reference: Byzantine-Robust Federated Learning with Learnable Aggregation Weights, ICLR 2026.
    """

    kind = "fedlaw"

    def __init__(
        self,
        initial_params: Tensor,
        clients: Iterable[ClientId],
        judge: Judge | str = "hardened",
        settings: Settings | None = None,
    ) -> None:
        roster = tuple(clients)
        settings = settings or Settings()
        chosen: Judge = preset(judge) if isinstance(judge, str) else judge
        self.judge: Any = chosen.bind(len(roster), settings.rounds)
        if isinstance(self.judge, Core) and len(roster) < _FEW_CLIENTS:
            warnings.warn(
                f"core judging was measured with {_FEW_CLIENTS} clients or more and there are {len(roster)}: "
                "treat its verdict with care, or use Published(attackers=...) with an assumed share",
                stacklevel=2,
            )
        self._judge_state: Any = self.judge.start(len(roster), like=torch.empty(0))
        self._norms = torch.zeros(len(roster), dtype=torch.float64)
        self._history: dict[str, list[Tensor]] = {"round": [], **{name: [] for name in _REASONS}}
        super().__init__(initial_params, roster, settings)

    # -------------------------------------------------------------------------------------- the protocol's hooks
    def _eligible(self) -> Tensor:
        return self.judge.eligible(self._judge_state)  # type: ignore[no-any-return]

    def _needs_loss(self) -> bool:
        return self.phase == 2

    def _sent(self) -> Tensor:
        return self.params if self.phase == 1 else self._lookahead

    def _receive(self, rows: Tensor, updates: Tensor, norms: Tensor) -> None:
        if self.phase == 1:
            self._store(rows, updates)
            self._norms[rows] = norms
            return
        examined, device = self._examined, updates.device
        factors = clip_factors(norms, examined.radius)
        self._second_factors[rows] = factors
        self._z += weighted_sums((self._sums[:, rows] * factors).to(device), updates)
        if not isinstance(self.judge, Published | LinearProgram):  # they do not look at a client's own share
            self._products[rows.to(device)] = _row_products(self._gathered, rows, updates)

    def _close(self) -> RoundReport | None:
        return self._close_first() if self.phase == 1 else self._close_second()

    def _close_first(self) -> RoundReport | None:
        self._gathered = self._collected()
        norms = torch.where(self._answered, self._norms, 0.0)
        arrived = Arrived(self._gathered, norms, self._asked, self._answered, self._examples())
        phases = self.judge.phases(self._judge_state)
        self._examined: Examined = self.judge.examine(self._judge_state, arrived)
        self._clipped_norms = norms * self._examined.factors
        if short := self._too_few(bool(self._examined.enough)):
            return self._report(weights=None, skipped=short)
        if phases == 1:
            skipped = self._step(self._examined.weights, self._answered)
            if skipped is None:
                self._judge_state = self.judge.settle(self._judge_state, self._examined)
            return self._report(weights=self._examined.weights, skipped=skipped)
        self._lookahead = self.params - self.settings.alpha * self._weighted(
            self._examined.weights, self._answered
        )
        if not finite(self._lookahead):
            return self._report(weights=None, skipped="the look-ahead model would not have been finite")
        wanted = [each for each in (self._examined.weights, self._examined.assembly) if each is not None]
        self._sums = torch.stack(wanted)
        self._z = self.params.new_zeros(len(wanted), len(self.params))
        self._products = torch.zeros(self.n, dtype=torch.float64, device=self.params.device)
        self._second_factors = torch.ones(self.n, dtype=torch.float64)
        self.phase = 2
        self._open_phase(self._examined.usable)
        return None

    def _close_second(self) -> RoundReport:
        examined = self._examined
        along, length = self._z @ self._gathered.mT, torch.linalg.vector_norm(self._z, dim=1)
        found = torch.cat(
            [along.flatten().double(), self._products, length.double()]
        ).cpu()  # one way home for all
        along, own, length = torch.split(found, [along.numel(), self.n, len(length)])
        alone = examined.assembly is None
        evidence = Evidence(
            along=(along if alone else along.view(-1, self.n)) * examined.factors,
            own=own * examined.factors * self._second_factors,
            norms=self._clipped_norms,
            length=length[0] if alone else length,
            losses=self._losses,
            asked=self._asked,
            scored=self._answered,
            counts=self._examples(),
            alpha=self.settings.alpha,
        )
        if short := self._too_few():
            return self._report(weights=None, skipped=short)
        verdict = self.judge.weigh(examined.state, examined, evidence)
        if short := self._too_few(bool(verdict.enough)):
            return self._report(weights=None, skipped=short)
        self._judge_state = verdict.state  # judged is judged, whether or not the model can be moved
        self._history["round"].append(torch.tensor(self.round))
        for name in _REASONS:
            self._history[name].append(verdict.reasons[name])
        # Who was not judged in this round does not move the model in it.
        skipped = self._step(verdict.weights, self._answered)
        notes = self.judge.notes(verdict.state)
        return self._report(weights=verdict.weights, reasons=verdict.reasons, skipped=skipped, notes=notes)

    # -------------------------------------------------------------------------------------- arithmetic
    def _too_few(self, enough: bool = True) -> str | None:
        """Why the round must be skipped for lack of replies, or None."""
        there, least = int(self._answered.sum()), self.settings.minimum_replies
        if there < least:
            return f"{there} usable replies in phase {self.phase}, at least {least} are needed"
        if not enough:
            return (
                f"too few of those with weight answered in phase {self.phase}: {there} usable replies in all"
            )
        return None

    def _weighted(self, weights: Tensor, answered: Tensor) -> Tensor:
        """sum_i w_i g_i over those who answered, w normalised over those asked."""
        asked = (weights * self._asked).sum().clamp(min=1e-300)
        shares = weights / asked * answered * self._examined.factors
        return weighted_sum(shares.to(self._gathered.device), self._gathered)

    def _step(self, weights: Tensor, answered: Tensor) -> str | None:
        if not float((weights * self._asked * answered).sum()) > 0:
            return "nobody with weight answered"
        return self._apply(self._weighted(weights, answered))

    # -------------------------------------------------------------------------------------- what it knows
    @property
    def frozen(self) -> bool:
        """Whether weights are final (until a refresh)."""
        return bool(self.judge.frozen(self._judge_state))

    @property
    def weights(self) -> Tensor:
        """(n,) current weights, roster order."""
        return self._judge_state.weights.clone()  # type: ignore[no-any-return]

    @property
    def state(self) -> Any:
        """The judge's state, a frozen dataclass of tensors."""
        return self._judge_state

    def statuses(self) -> dict[ClientId, tuple[Status, Exclusion]]:
        """Core, on trial, member, left out or excluded (with reason), by client."""
        return dict(zip(self.roster, self.judge.statuses(self._judge_state), strict=True))

    def explain(self, client: ClientId) -> list[dict[str, float]]:
        """Why a client has the weight it has: for every weight round its alignment, loss part and score.

        The score is what the judge ranks by; `alignment` and `loss` are the two parts it was made of. NaN in
        rounds in which the client was not scored.
        """
        row = self._row(client)
        if row is None:
            raise ValueError(f"no client {client!r} on the roster")
        return [
            {"round": int(k), **{name: float(self._history[name][i][row]) for name in _REASONS}}
            for i, k in enumerate(self._history["round"])
        ]

    def _pack(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        arrays = checkpoint.pack(self._judge_state, "judge.")
        for name, rows in self._history.items():
            if rows:
                arrays[f"history.{name}"] = torch.stack(rows)
        return arrays, {"judge": {"name": type(self.judge).__name__, **asdict(self.judge)}}

    def _unpack(self, arrays: dict[str, Tensor], description: dict[str, Any]) -> None:
        self._judge_state = checkpoint.unpack(self._judge_state, arrays, "judge.")
        lengths = set()
        for name in self._history:
            stacked = arrays.get(f"history.{name}")
            self._history[name] = [] if stacked is None else list(stacked.unbind())
            lengths.add(len(self._history[name]))
        if len(lengths) != 1 or any(len(row) != self.n for row in self._history["score"]):
            raise ValueError("the checkpoint's history does not fit its roster")


class BSUM(FedLAW):
    """FedLAW-BSUM, the paper's baseline: the weights solve a linear program in the losses alone.

    >>> BSUM(torch.zeros(3), clients=range(10), judge=LinearProgram(attackers=0.4)).judge.sparsity
    6

    Reference: the paper's supplement, after Razaviyayn, Hong and Luo, A unified convergence analysis of block
    successive minimization methods for nonsmooth optimization, 2013.
    """

    kind = "bsum"

    def __init__(
        self,
        initial_params: Tensor,
        clients: Iterable[ClientId],
        judge: LinearProgram | None = None,
        settings: Settings | None = None,
    ) -> None:
        super().__init__(initial_params, clients, judge or LinearProgram(), settings)


def _row_products(matrix: Tensor, rows: Tensor, updates: Tensor) -> Tensor:
    """(m,) float64: products of the given rows of matrix (n, d) with those of updates (m, d); no (m, d) temporary.

    Consecutive rows are a view; others are copied, a few at a time.
    """
    first, m = int(rows[0]), len(rows)
    together = torch.equal(rows, torch.arange(first, first + m))
    step, where = m if together else ROWS_AT_ONCE, rows.to(matrix.device)
    products = []
    for at in range(0, m, step):
        own = matrix[first : first + m] if together else matrix[where[at : at + step]]
        products.append(paired_products(own, updates[at : at + step]))
    return torch.cat(products)


PRESETS: dict[str, Published | Core] = {
    # As published. The paper names server-side clipping as part of the method and no radius: the median norm.
    "paper": Published(attackers=0.4, beta=0.01, clip="median"),
    "hardened": Core(
        judged_share=0.6,
        equal_losses="once",
        too_good_level=0.55,
        too_good_wide=0.25,
        majority=0.15,
        turnover=0.4,
        fade=0.2,
        quiet=0.0,
        two_groups=2.2,
        catch_up=4.0,
    ),
}


def preset(name: str) -> Published | Core:
    """The judge of a preset by name.

    `paper`: the published step, sparsity n - b_f fixed from round 1, beta 0.01, weights learned in 20 rounds,
    updates clipped to the median norm. It has to be told the share of attackers.
    `hardened`: core judging with a block of equal losses counted once, only the very well aligned too good to be
    true, a new core where a minority holds it, no freeze by a core that has just changed, an end as soon as
    nothing is left to judge by, a verdict by groups where there are two, without the last rounds where the core had
    nothing to judge by in them, and afterwards more weight, for a while, for those who had none. Told nothing.

    >>> type(preset("hardened")).__name__
    'Core'
    """
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; there are: {', '.join(PRESETS)}")
    return PRESETS[name]
