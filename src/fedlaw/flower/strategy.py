"""Flower strategies: the server of `fedlaw.server` decides, Flower carries."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict, is_dataclass, replace
from typing import Any, NoReturn, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from fedlaw.aggregators import Rule, describe, parse
from fedlaw.flower.exchange import Exchange
from fedlaw.flower.federation import RESERVED, Federation, log
from fedlaw.flower.journal import Journal, Training
from fedlaw.flower.layout import Fault, Layout
from fedlaw.flower.records import Timings, round_metrics, round_record
from fedlaw.flower.replies import bytes_of, read_reply
from fedlaw.server import FedLAW as FedLAWServer
from fedlaw.server import OnePhase, Refusal, Reply, RoundReport, Server, Settings, preset
from fedlaw.server.judge import Judge
from fedlaw.server.one_phase import Unit

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class _ServerStrategy(Strategy):
    """Drives a `fedlaw.server` over a Grid: ask, send, tell what arrives, end the phase.

    After `start`, `server` is the server with all it knows, and `weights` what each node ended with.
    """

    def __init__(self, settings: Settings | None, federation: Federation | None) -> None:
        self.settings = settings or Settings()
        self.federation = federation or Federation()
        self.server: Server | None = None
        self._layout: Layout | None = None

    # -------------------------------------------------------------------------------------- what subclasses say
    @abstractmethod
    def _make(self, params: Tensor, roster: tuple[int, ...], settings: Settings) -> Server:
        """The server that decides."""

    @abstractmethod
    def _describe(self) -> Any:
        """The rule and its settings as plain data."""

    # -------------------------------------------------------------------------------------- the training
    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Train for `num_rounds` model updates and return Flower's result.

        Args:
            grid: Flower's.
            initial_arrays: the model to start from; floating point throughout.
            num_rounds: model updates. While weights are learned, each takes two exchanges.
            timeout: seconds that one exchange may take, unless the federation says otherwise.
            train_config: sent to the clients with every request, beside "server-round", "phase", "loss-point" and
                "alpha".
            evaluate_config: not used; what clients claim about their own accuracy is no evidence.
            evaluate_fn: given round and model, evaluates on the server's own data.

        Raises:
            ValueError: the model cannot be averaged, too few nodes came, or there is no going on from the
                checkpoint. Nothing that a client does raises.
        """
        config = dict(train_config or {})
        if taken := [key for key in RESERVED if key in config]:
            raise ValueError(f"train_config must not set {taken[0]!r}: the strategy does")
        federation = self.federation
        self._layout = layout = Layout.of(initial_arrays)
        settings = replace(self.settings, rounds=num_rounds)
        for phase in (1, 2):
            federation.timeout(phase, timeout)
        training = Training(federation.name, self._describe(), asdict(settings))
        result = Result()
        with Journal(federation, training) as journal:
            journal.check_size(layout.bytes)
            roster = federation.assemble(grid, journal.roster())
            self.server = server = self._make(layout.to_vector(initial_arrays), roster, settings)
            journal.begin(server)
            self.summary()
            self._evaluate(result, evaluate_fn, server.round - 1)
            exchange = Exchange(grid, federation.poll)
            while not server.done:
                began, timings = time.monotonic(), Timings()
                report = None
                while report is None:
                    report = self._phase(exchange, timeout, config, timings)
                result.train_metrics_clientapp[report.round] = round_metrics(report, roster, timings)
                evaluated = self._evaluate(result, evaluate_fn, report.round)
                record = round_record(report, timings, evaluated, time.monotonic() - began)
                journal.note(server, record)
                self._say(report, timings)
            last = result.evaluate_metrics_serverapp.get(num_rounds)
            journal.finish({} if last is None else {f"test_{k}": v for k, v in last.items() if k in _FIGURES})
        result.arrays = layout.to_arrays(server.params)
        return result

    def _phase(
        self, exchange: Exchange, timeout: float, config: dict[str, Any], timings: Timings
    ) -> RoundReport | None:
        """One exchange; the report if it was the round's last."""
        server, layout, federation = self._started()
        request = server.ask()
        begun = time.monotonic()
        patience = federation.timeout(request.phase, timeout)
        messages = self._messages(config, ttl=patience)
        timings.bytes_down += layout.bytes * len(request.clients)
        for arrival in exchange.run(messages, patience):
            node, reply = arrival.node, arrival.reply
            if isinstance(reply, Fault):
                answer: Any = reply
            else:
                timings.nodes[request.phase, node] = arrival.seconds
                timings.bytes_up += bytes_of(reply)
                answer = self._read(reply, layout, request.params)
            if isinstance(answer, str):
                server.refusals.append(Refusal(request.round, request.phase, node, str(answer)))
            else:
                server.tell(Reply(node, answer.update, answer.loss, answer.count))
        report = server.end_phase()
        timings.phases[request.phase] = time.monotonic() - begun
        return report

    def _read(self, reply: Message, layout: Layout, sent: Tensor) -> Any:
        federation = self.federation
        try:
            return read_reply(
                reply, layout, sent, self.settings.alpha, federation.loss_metric, federation.count_metric
            )
        except Exception as error:  # a message is what its sender made of it
            log.warning("a reply cannot be taken apart (%s)", type(error).__name__)
            return Fault.UNREADABLE

    def _messages(self, config: dict[str, Any], ttl: float) -> list[Message]:
        """The requests of the current phase: one content, shared by all."""
        server, layout, federation = self._started()
        request = server.ask()
        told = {
            **config,
            "server-round": request.round,
            "phase": request.phase,
            "loss-point": request.loss_point,
            "alpha": self.settings.alpha,
        }
        content = RecordDict(
            {
                federation.arrays_record: layout.to_arrays(request.params),
                federation.config_record: ConfigRecord(told),
            }
        )
        return [
            Message(content, cast(int, node), MessageType.TRAIN, ttl=ttl, group_id=str(request.round))
            for node in request.clients
        ]

    def _evaluate(self, result: Result, evaluate_fn: EvaluateFn | None, round: int) -> MetricRecord | None:
        if evaluate_fn is None:
            return None
        server, layout, _ = self._started()
        found = evaluate_fn(round, layout.to_arrays(server.params))
        if found is not None:
            result.evaluate_metrics_serverapp[round] = found
        return found

    def _started(self) -> tuple[Server, Layout, Federation]:
        if self.server is None or self._layout is None:
            raise RuntimeError("the strategy has not been started")
        return self.server, self._layout, self.federation

    def _say(self, report: RoundReport, timings: Timings) -> None:
        server, _, _ = self._started()
        shares = (timings.phases.get(1, 0.0), timings.phases.get(2, 0.0))
        log.info(
            "round %d of %d: %d of %d answered, %d refused or absent; phase 1 %.1f s, phase 2 %.1f s%s",
            report.round, server.settings.rounds, int(report.answered.sum()), int(report.asked.sum()),
            len(report.refusals), *shares, f"; skipped: {report.skipped}" if report.skipped else "",
        )  # fmt: skip
        for refusal in report.refusals:
            log.info("\tnode %s, phase %d: %s", refusal.client, refusal.phase, refusal.reason)
        for note in report.notes:
            log.warning("%s", note)

    # -------------------------------------------------------------------------------------- what it knows
    @property
    def weights(self) -> dict[int, float]:
        """The weight of each node, by its id; empty for a rule that has none."""
        found: Tensor | None = getattr(self.server, "weights", None)
        if self.server is None or found is None:
            return {}
        return {cast(int, node): float(w) for node, w in zip(self.server.roster, found, strict=True)}

    # -------------------------------------------------------------------------------------- Flower's interface
    def summary(self) -> None:
        """Log what is about to run."""
        server, layout, federation = self._started()
        log.info(
            "%s: %d nodes, %d parameters, rounds %d to %d, %s",
            type(self).__name__, server.n, layout.size, server.round, server.settings.rounds, self._describe(),
        )  # fmt: skip
        kept = federation.store or federation.checkpoint
        log.info("checkpoints: %s", "none, a crash starts over" if kept is None else kept)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Not part of how these strategies run: see `aggregate_train`."""
        self._refuse_to_be_driven()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Not part of how these strategies run: replies are taken as they arrive, twice a round where needed."""
        self._refuse_to_be_driven()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nobody is asked: use `evaluate_fn`."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """There is nothing to aggregate."""
        return None

    def _refuse_to_be_driven(self) -> NoReturn:
        raise RuntimeError(
            f"{type(self).__name__} is driven by its own start(): a wrapper that calls configure_train and "
            "aggregate_train cannot ask twice a round"
        )


_FIGURES = ("accuracy", "loss")


class FedLAW(_ServerStrategy):
    """FedLAW as a Flower strategy: two exchanges a round while it learns whom to trust, then one.

    Clients are plain Flower clients that return their trained parameters, their loss and their example count; or
    those that `fedlaw.flower.client` makes. They answer both exchanges in the same way: train from the model that
    came, say what the loss is.

    Args:
        judge: "hardened", "paper", `fedlaw.server.Core(...)`, `Published(...)` or `LinearProgram(...)`.
        settings: step size and the like; `alpha` is the clients' learning rate. The number of rounds is `start`'s.
        federation: nodes, timeouts, names of metrics, where checkpoints go.

    >>> from fedlaw.server import Published
    >>> strategy = FedLAW(Published(attackers=0.4), Settings(alpha=0.05), Federation(min_nodes=5))

    Reference: Byzantine-Robust Federated Learning with Learnable Aggregation Weights, ICLR 2026.
    """

    def __init__(
        self,
        judge: Judge | str = "hardened",
        settings: Settings | None = None,
        federation: Federation | None = None,
    ) -> None:
        super().__init__(settings, federation)
        self.judge: Judge = preset(judge) if isinstance(judge, str) else judge

    def _make(self, params: Tensor, roster: tuple[int, ...], settings: Settings) -> Server:
        return FedLAWServer(params, roster, self.judge, settings)

    def _describe(self) -> Any:
        given: dict[str, Any] = asdict(cast(Any, self.judge)) if is_dataclass(self.judge) else {}
        return {"name": "fedlaw", "judge": type(self.judge).__name__, **given}


class RobustStrategy(_ServerStrategy):
    """Any rule of `fedlaw.aggregators` as a Flower strategy: one exchange a round, replies screened first.

    Args:
        rule: a rule, or what `aggregators.parse` makes one of: a name, a mapping with name and settings, a list of
            those (a chain).
        settings: step size and the like; its effect cancels out except for rules with thresholds.
        federation: nodes, timeouts, names of metrics, where checkpoints go.
        unit: what the rule's thresholds are meant for, "gradient" or "parameter".
        reference: for rules that compare with an update the server trusts (FLTrust): given round and model, the
            arrays after training on the server's own data.

    >>> RobustStrategy({"name": "krum", "f": 2}, federation=Federation(min_nodes=7)).rule
    Krum(f=2, neighbors=None)
    """

    def __init__(
        self,
        rule: Any,
        settings: Settings | None = None,
        federation: Federation | None = None,
        *,
        unit: Unit = "gradient",
        reference: Callable[[int, ArrayRecord], ArrayRecord] | None = None,
    ) -> None:
        super().__init__(settings, federation)
        self.rule: Rule = parse(rule)
        self.unit: Unit = unit
        self.reference = reference

    def _make(self, params: Tensor, roster: tuple[int, ...], settings: Settings) -> Server:
        train = self.reference

        def trusted(round: int, params: Tensor) -> Tensor:
            _, layout, _ = self._started()
            assert train is not None
            trained = layout.to_vector(train(round, layout.to_arrays(params)))
            return (params - trained) / settings.alpha

        reference = None if train is None else trusted
        return OnePhase(params, roster, self.rule, settings, unit=self.unit, reference=reference)

    def _describe(self) -> Any:
        try:
            return describe(self.rule)
        except ValueError:  # a rule of one's own that is not registered
            return {"name": repr(self.rule)}
