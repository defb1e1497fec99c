"""What the strategies do when nothing is wrong: the server's own arithmetic, every rule, both kinds of clients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy

from fedlaw import aggregators
from fedlaw.flower import Federation, FedLAW, LocalGrid, RobustStrategy, Settings, Task, Trained, client
from fedlaw.flower.layout import Layout
from fedlaw.flower.replies import UPDATE
from fedlaw.server import FedLAW as FedLAWServer
from fedlaw.server import OnePhase, Published, Reply, Server
from tests.flower.world import (
    ALPHA,
    ATTACKERS,
    CLIENTS,
    FaultyGrid,
    accuracy,
    federation,
    fit,
    model,
    plain_app,
    wrapped_app,
)

JUDGE = Published(attackers=0.3, clip="median", weight_rounds=3)
SETTINGS = Settings(alpha=ALPHA)


def _vector(arrays: ArrayRecord) -> torch.Tensor:
    return Layout.of(model()).to_vector(arrays)


def _drive(server: Server) -> torch.Tensor:
    """The same training without Flower."""
    layout = Layout.of(model())
    while not server.done:
        request = server.ask()
        state = layout.to_arrays(request.params).to_torch_state_dict()
        for node in request.clients:
            trained = fit(dict(state), int(str(node)) - 100)
            psi = torch.cat([trained.state[name].reshape(-1) for name in state])
            update = (request.params - psi) / ALPHA
            server.tell(Reply(node, update, trained.loss, trained.examples))
        server.end_phase()
    return server.params


def test_they_are_flower_strategies() -> None:
    assert issubclass(FedLAW, Strategy)
    assert issubclass(RobustStrategy, Strategy)


def test_fedlaw_over_flower_is_the_server_itself() -> None:
    roster = range(100, 100 + CLIENTS)
    server = FedLAWServer(_vector(model()), roster, JUDGE, Settings(rounds=5, alpha=ALPHA))
    expected = _drive(server)
    strategy = FedLAW(JUDGE, SETTINGS, federation())
    result = strategy.start(FaultyGrid(), model(), num_rounds=5)
    torch.testing.assert_close(_vector(result.arrays), expected, rtol=1e-6, atol=1e-7)
    assert list(strategy.weights.values()) == pytest.approx(server.weights.tolist())
    assert set(strategy.weights) == set(roster)
    assert all(strategy.weights[node] == 0 for node in ATTACKERS)


def test_two_exchanges_while_weights_are_learned_then_one_with_the_members() -> None:
    grid = FaultyGrid()
    strategy = FedLAW(JUDGE, SETTINGS, federation())
    result = strategy.start(grid, model(), num_rounds=5)
    phases = [result.train_metrics_clientapp[k]["phases"] for k in range(1, 6)]
    assert phases == [2, 2, 2, 1, 1]
    members = {node for node, weight in strategy.weights.items() if weight > 0}
    assert {node for k, _, node in grid.asked if k == 5} == members


def test_wrapped_and_plain_clients_come_to_the_same() -> None:
    found = []
    for app in (plain_app(), wrapped_app()):
        result = FedLAW(JUDGE, SETTINGS, federation()).start(FaultyGrid(app=app), model(), num_rounds=5)
        found.append(_vector(result.arrays))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


def _reference(round: int, arrays: ArrayRecord) -> ArrayRecord:
    return ArrayRecord(dict(fit(dict(arrays.to_torch_state_dict()), 0).state))


RULES = [
    name
    for name in aggregators.names()
    if name != "chain" and not issubclass(aggregators.registry.factory(name), aggregators.PreAggregator)
]


def _spec(name: str) -> dict[str, Any]:
    takes = aggregators.registry.settings(name)
    given: dict[str, Any] = {"f": 2} if "f" in takes else {}
    if "tau" in takes:
        given["tau"] = 1.0
    return {"name": name, **given}


@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_a_strategy(name: str) -> None:
    assert len(RULES) >= 14
    reference = _reference if name == "fltrust" else None
    strategy = RobustStrategy(_spec(name), SETTINGS, federation(), reference=reference)
    result = strategy.start(FaultyGrid(), model(), num_rounds=3)

    def trusted(round: int, params: torch.Tensor) -> torch.Tensor:
        layout = Layout.of(model())
        return (params - layout.to_vector(_reference(round, layout.to_arrays(params)))) / ALPHA

    server = OnePhase(
        _vector(model()),
        range(100, 100 + CLIENTS),
        aggregators.parse(_spec(name)),
        Settings(rounds=3, alpha=ALPHA),
        reference=trusted if reference else None,
    )
    expected = _drive(server)
    torch.testing.assert_close(_vector(result.arrays), expected, rtol=1e-4, atol=1e-5)
    assert strategy.weights == {}


def test_the_mean_is_flowers_fedavg() -> None:
    ours = RobustStrategy("mean", SETTINGS, federation()).start(FaultyGrid(), model(), num_rounds=3)
    theirs = FedAvg(fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS).start(
        LocalGrid(plain_app(), CLIENTS), model(), num_rounds=3
    )
    torch.testing.assert_close(_vector(ours.arrays), _vector(theirs.arrays), rtol=1e-4, atol=1e-5)


def test_metrics_of_every_client_and_round() -> None:
    told = []

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        told.append(round)
        return MetricRecord({"accuracy": accuracy(arrays)})

    strategy = FedLAW(JUDGE, SETTINGS, federation())
    result = strategy.start(FaultyGrid(), model(), num_rounds=4, evaluate_fn=evaluate)
    assert told == [0, 1, 2, 3, 4]
    first, last = result.train_metrics_clientapp[1], result.train_metrics_clientapp[4]
    for node in range(100, 100 + CLIENTS):
        assert {f"weight/{node}", f"loss/{node}", f"seconds/1/{node}", f"seconds/2/{node}"} <= set(first)
        assert last[f"weight/{node}"] == pytest.approx(strategy.weights[node])
    assert first["asked"] == first["answered"] == CLIENTS
    assert first["refused"] == 0
    assert first["seconds"] == pytest.approx(first["seconds/1"] + first["seconds/2"])
    assert result.evaluate_metrics_serverapp[4]["accuracy"] > 0.8


def test_what_clients_are_told() -> None:
    seen: list[ConfigRecord] = []
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        seen.append(message.content["config"])
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    FedLAW("paper", Settings(alpha=0.5, loss_point="before"), Federation(min_nodes=3, poll=0)).start(
        LocalGrid(app, 3), model(), num_rounds=1, train_config=ConfigRecord({"lr": 0.1}), timeout=7
    )
    assert dict(seen[0]) == {
        "lr": 0.1,
        "server-round": 1,
        "phase": 1,
        "loss-point": "before",
        "alpha": 0.5,
    }
    assert {config["phase"] for config in seen} == {1, 2}


def test_requests_live_as_long_as_their_phase() -> None:
    lives: dict[int, float] = {}

    class Watching(FaultyGrid):
        def push_messages(self, messages: Any) -> Any:
            kept = list(messages)
            lives.update({int(m.content["config"]["phase"]): m.metadata.ttl for m in kept})
            return super().push_messages(kept)

    FedLAW(JUDGE, SETTINGS, federation(timeouts=(7.0, 3.0))).start(Watching(), model(), num_rounds=1)
    assert lives == {1: 7.0, 2: 3.0}
    FedLAW(JUDGE, SETTINGS, federation()).start(Watching(), model(), num_rounds=1, timeout=11.0)
    assert lives == {1: 11.0, 2: 11.0}


def test_integer_buffers_are_refused_by_name() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match=r"1\.num_batches_tracked \(torch.int64\)"):
        FedLAW("paper").start(FaultyGrid(), ArrayRecord(network.state_dict()))


def test_float_buffers_are_averaged() -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        part = float(context.node_config["partition-id"])
        arrays = {
            name: Array(np.asarray(x.numpy() + part, x.dtype))
            for name, x in message.content["arrays"].items()
        }
        return Message(RecordDict({"arrays": ArrayRecord(arrays)}), reply_to=message)

    state = {
        "weight": torch.zeros(2),
        "running_mean": torch.ones(3, dtype=torch.float64),
        "scale": torch.tensor(2.0),
    }
    strategy = RobustStrategy("mean", SETTINGS, Federation(min_nodes=3, poll=0))
    found = strategy.start(LocalGrid(app, 3), ArrayRecord(state), num_rounds=1).arrays.to_torch_state_dict()
    assert {name: x.dtype for name, x in found.items()} == {name: x.dtype for name, x in state.items()}
    for name, before in state.items():
        torch.testing.assert_close(found[name], before + 1)


def test_settings_are_checked_and_explained() -> None:
    with pytest.raises(ValueError, match="min_nodes must be at least 1, got 0"):
        Federation(min_nodes=0)
    with pytest.raises(ValueError, match="give one of them"):
        Federation(store="a", checkpoint="b")
    with pytest.raises(ValueError, match="resume needs a store or a checkpoint"):
        Federation(resume=True)
    with pytest.raises(ValueError, match="timeouts must be over 0"):
        Federation(timeouts=(1.0, 0.0))
    with pytest.raises(ValueError, match="train_config must not set 'phase'"):
        FedLAW("paper").start(FaultyGrid(), model(), train_config=ConfigRecord({"phase": 3}))
    with pytest.raises(ValueError, match="timeout must be over 0"):
        FedLAW("paper").start(FaultyGrid(), model(), timeout=0)
    with pytest.raises(ValueError, match="min_nodes = 11 are needed"):
        FedLAW("paper", federation=federation(min_nodes=11)).start(FaultyGrid(), model())
    with pytest.raises(ValueError, match="initial_arrays must hold the model"):
        FedLAW("paper").start(FaultyGrid(), ArrayRecord())
    with pytest.raises(ValueError, match="unknown preset"):
        FedLAW("papers")


def test_few_nodes_and_the_hardened_preset_warn() -> None:
    with pytest.warns(UserWarning, match="20 clients or more and there are 10"):
        FedLAW("hardened", SETTINGS, federation()).start(FaultyGrid(), model(), num_rounds=1)


def test_a_wrapper_that_drives_it_itself_is_told_why_not() -> None:
    with pytest.raises(RuntimeError, match=r"driven by its own start\(\)"):
        FedLAW("paper").aggregate_train(1, [])


# ------------------------------------------------------------------------------------------ the client wrapper


def _ask(app: ClientApp, **config: Any) -> Message:
    told = {"server-round": 2, "phase": 1, "loss-point": "after", "alpha": 0.5} | config
    grid = LocalGrid(app, 1)
    content = RecordDict({"arrays": model(), "config": ConfigRecord(told)})
    (reply,) = grid.send_and_receive([Message(content, 100, "train")])
    return reply


def test_the_wrapper_answers_with_pseudo_gradient_loss_and_count() -> None:
    tasks = []

    def train(state: dict[str, torch.Tensor], task: Task) -> Trained:
        tasks.append(task)
        return Trained({name: x - 1 for name, x in state.items()}, loss=1.5, examples=7)

    reply = _ask(client(train), phase=2)
    assert {name: x.numpy().tolist() for name, x in reply.content[UPDATE].items()} == {
        "weight": [[2.0] * 4] * 3,
        "bias": [2.0] * 3,
    }
    assert dict(reply.content["metrics"]) == {"train_loss": 1.5, "num-examples": 7}
    assert (tasks[0].round, tasks[0].phase, tasks[0].loss_point, tasks[0].alpha) == (2, 2, "after", 0.5)


def test_the_wrapper_hands_out_copies() -> None:
    def train(state: dict[str, torch.Tensor], task: Task) -> Trained:
        for x in state.values():
            x.sub_(3.0)
        return Trained(state, loss=0.0, examples=1)

    assert _ask(client(train)).content[UPDATE]["bias"].numpy().tolist() == [6.0] * 3


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (ValueError("PATIENT-4711"), 101),
        (Trained({}, 0.0, 1), 103),
        (Trained({"weight": torch.zeros(1), "bias": torch.zeros(3)}, 0.0, 1), 103),
        (None, 103),
    ],
)
def test_the_wrapper_fails_with_a_code_and_no_text(answer: Any, code: int) -> None:
    def train(state: dict[str, torch.Tensor], task: Task) -> Trained:
        if isinstance(answer, Exception):
            raise answer
        return answer

    reply = _ask(client(train))
    assert reply.error.code == code
    assert "4711" not in str(reply.error.reason)


def test_the_wrapper_does_not_understand_a_request_of_another_strategy() -> None:
    def train(state: dict[str, torch.Tensor], task: Task) -> Trained:
        raise AssertionError("must not be reached")

    grid = LocalGrid(client(train), 1)
    (reply,) = grid.send_and_receive([Message(RecordDict({"arrays": model()}), 100, "train")])
    assert reply.error.code == 102
