"""Every fault of one client, in either phase, over the real client code: the run ends, and honestly."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from fedlaw.flower import FedLAW, RobustStrategy, Settings
from fedlaw.screening import Reason
from fedlaw.server import Published
from tests.flower.world import ALPHA, ATTACKERS, FAULTY, Fault, FaultyGrid, accuracy, federation, model

JUDGED, ROUNDS = 4, 6


def _edited(change: Callable[[dict[str, Any]], Any]) -> Fault:
    """A fault that changes the records of a reply: {"arrays": {name: array}, "metrics": {...}}."""

    def fault(request: Message, reply: Message) -> list[Message]:
        arrays = {name: array.numpy().copy() for name, array in reply.content["arrays"].items()}
        content: dict[str, Any] = {"arrays": arrays, "metrics": dict(reply.content["metrics"])}
        change(content)
        records: dict[str, Any] = {}
        for name, values in content.items():
            if isinstance(values, dict) and name.startswith("arrays"):
                records[name] = ArrayRecord({key: Array(np.asarray(x)) for key, x in values.items()})
            elif isinstance(values, dict):
                records[name] = MetricRecord(values)
            else:
                records[name] = values
        return [Message(RecordDict(records), reply_to=request)]

    return fault


def _nan(content: dict[str, Any]) -> None:
    content["arrays"]["bias"][1] = np.nan


def _infinite(content: dict[str, Any]) -> None:
    content["arrays"]["bias"] = content["arrays"]["bias"].astype(np.float64) + 1e300


def _wrong_shape(content: dict[str, Any]) -> None:
    content["arrays"]["weight"] = content["arrays"]["weight"].T.copy()


def _broadcastable(content: dict[str, Any]) -> None:
    content["arrays"]["weight"] = content["arrays"]["weight"][:1]


def _scalar(content: dict[str, Any]) -> None:
    content["arrays"]["bias"] = np.float32(0.5)


def _wrong_keys(content: dict[str, Any]) -> None:
    content["arrays"] = {name.upper(): x for name, x in content["arrays"].items()}


def _extra_key(content: dict[str, Any]) -> None:
    content["arrays"]["more"] = np.zeros(2, np.float32)


def _integers(content: dict[str, Any]) -> None:
    content["arrays"]["weight"] = content["arrays"]["weight"].astype(np.int64)


def _strings(content: dict[str, Any]) -> None:
    content["arrays"]["bias"] = np.array(["a", "b", "c"])


def _no_arrays(content: dict[str, Any]) -> None:
    del content["arrays"]


def _two_arrays(content: dict[str, Any]) -> None:
    content["arrays-2"] = content["arrays"]


def _two_metrics(content: dict[str, Any]) -> None:
    content["metrics-2"] = {"train_loss": 0.0}


def _nothing(content: dict[str, Any]) -> None:
    content.clear()


def _many_records(content: dict[str, Any]) -> None:
    content |= {f"config{i}": ConfigRecord({"x": "y"}) for i in range(50)}


def _counts(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["metrics"].__setitem__("num-examples", value)


def _silent(request: Message, reply: Message) -> list[Message]:
    return []


def _error(request: Message, reply: Message) -> list[Message]:
    return [Message(Error(2, "Traceback: PATIENT-4711 has no label"), reply_to=request)]


def _forged_sender(request: Message, reply: Message) -> list[Message]:
    reply.metadata.__dict__["_src_node_id"] = 107
    return [reply]


BROKEN: dict[str, tuple[Fault, str]] = {
    "nan": (_edited(_nan), Reason.NOT_FINITE.words),
    "infinite": (_edited(_infinite), Reason.NOT_FINITE.words),
    "wrong shape": (_edited(_wrong_shape), "array has the wrong shape"),
    "broadcastable shape": (_edited(_broadcastable), "array has the wrong shape"),
    "scalar": (_edited(_scalar), "array has the wrong shape"),
    "wrong keys": (_edited(_wrong_keys), "arrays are not those of the model"),
    "extra key": (_edited(_extra_key), "arrays are not those of the model"),
    "integers": (_edited(_integers), "array is not floating point"),
    "strings": (_edited(_strings), "array is not floating point"),
    "missing array record": (_edited(_no_arrays), "array record is missing"),
    "two array records": (_edited(_two_arrays), "more than one array record"),
    "two metric records": (_edited(_two_metrics), "more than one metric record"),
    "empty": (_edited(_nothing), "array record is missing"),
    "many records": (_edited(_many_records), "message has more records than any answer"),
    "count of 1e15": (_edited(_counts(10**15)), Reason.COUNT_ABSURD.words),
    "negative count": (_edited(_counts(-3)), Reason.COUNT_ABSURD.words),
    "count is a list": (_edited(_counts([1, 2])), Reason.COUNT_ABSURD.words),
    "exception": (_error, "client error: its app raised an exception"),
    "no reply": (_silent, "no reply in time"),
    "forged sender": (_forged_sender, "message names another sender"),
}


def _no_metric(content: dict[str, Any]) -> None:
    del content["metrics"]["train_loss"]


def _no_metrics(content: dict[str, Any]) -> None:
    del content["metrics"]


def _loss(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["metrics"].__setitem__("train_loss", value)


LOSSES: dict[str, tuple[Fault, str]] = {
    "missing metric": (_edited(_no_metric), Reason.LOSS_MISSING.words),
    "missing metric record": (_edited(_no_metrics), Reason.LOSS_MISSING.words),
    "loss is a list": (_edited(_loss([0.1])), Reason.LOSS_INVALID.words),
    "loss is NaN": (_edited(_loss(float("nan"))), Reason.LOSS_INVALID.words),
    "loss is negative": (_edited(_loss(-1.0)), Reason.LOSS_INVALID.words),
}


def fedlaw(**changes: Any) -> FedLAW:
    judge = Published(attackers=0.3, clip="median", weight_rounds=JUDGED)
    return FedLAW(judge, Settings(alpha=ALPHA), federation(**changes))


def _train(strategy: Any, grid: FaultyGrid) -> Any:
    return strategy.start(grid, model(), num_rounds=ROUNDS, timeout=0.005)


@pytest.fixture(scope="module")
def undisturbed() -> float:
    strategy = fedlaw()
    result = _train(strategy, FaultyGrid())
    assert all(strategy.weights[node] == 0 for node in ATTACKERS)
    assert strategy.weights[FAULTY] > 0  # so that weight zero in the tests below is the fault's doing
    return accuracy(result.arrays)


def test_the_undisturbed_federation_learns(undisturbed: float) -> None:
    assert undisturbed > 0.8


def _check(strategy: FedLAW, result: Any, words: str, phases: tuple[int, ...], undisturbed: float) -> None:
    assert accuracy(result.arrays) > undisturbed - 0.03
    assert all(strategy.weights[node] == 0 for node in (*ATTACKERS, FAULTY))
    assert strategy.server is not None
    refused = [r for r in strategy.server.refusals if r.client == FAULTY]
    assert {r.reason for r in refused} == {words}
    # A client whose phase 1 is unusable is not asked in phase 2.
    expected = 1 if 1 in phases else 2
    assert {r.phase for r in refused} == {expected}
    assert len(refused) == JUDGED
    assert set(strategy.server.refusals) == set(refused)
    for k in range(1, JUDGED + 1):
        assert result.train_metrics_clientapp[k][f"refused/{FAULTY}"] == 1
        assert result.train_metrics_clientapp[k]["skipped"] == 0


@pytest.mark.parametrize("phases", [(1,), (2,), (1, 2)], ids=["phase 1", "phase 2", "both"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_client_ends_with_weight_zero(
    name: str, phases: tuple[int, ...], undisturbed: float
) -> None:
    fault, words = BROKEN[name]
    strategy = fedlaw()
    result = _train(strategy, FaultyGrid(fault, phases))
    _check(strategy, result, words, phases, undisturbed)


@pytest.mark.parametrize("name", LOSSES)
def test_a_client_without_a_loss_ends_with_weight_zero(name: str, undisturbed: float) -> None:
    fault, words = LOSSES[name]
    strategy = fedlaw()
    result = _train(strategy, FaultyGrid(fault))
    _check(strategy, result, words, (2,), undisturbed)


@pytest.mark.parametrize("name", BROKEN)
def test_rules_survive_every_fault(name: str, undisturbed: float) -> None:
    fault, words = BROKEN[name]
    strategy = RobustStrategy("median", Settings(alpha=ALPHA), federation())
    result = _train(strategy, FaultyGrid(fault))
    assert accuracy(result.arrays) > undisturbed - 0.03
    assert strategy.server is not None
    assert [(r.client, r.phase, r.reason) for r in strategy.server.refusals] == [(FAULTY, 1, words)] * ROUNDS


def test_a_rule_needs_no_loss() -> None:
    strategy = RobustStrategy("median", Settings(alpha=ALPHA), federation())
    result = _train(strategy, FaultyGrid(LOSSES["missing metric record"][0]))
    assert strategy.server is not None
    assert strategy.server.refusals == []
    assert result.train_metrics_clientapp[1]["answered"] == 10


def test_a_second_reply_is_refused_and_changes_nothing() -> None:
    def twice(request: Message, reply: Message) -> list[Message]:
        (other,) = _edited(_nan)(request, reply)
        return [reply, other]

    clean, doubled = fedlaw(), fedlaw()
    expected = _train(clean, FaultyGrid()).arrays
    found = _train(doubled, FaultyGrid(twice)).arrays
    assert all(np.array_equal(expected[name].numpy(), found[name].numpy()) for name in expected)
    assert doubled.server is not None
    assert {r.reason for r in doubled.server.refusals} == {Reason.DUPLICATE.words}
    assert doubled.weights == clean.weights


def test_a_first_reply_that_was_refused_cannot_be_made_good() -> None:
    def corrected(request: Message, reply: Message) -> list[Message]:
        (bad,) = _edited(_nan)(request, reply)
        return [bad, reply]

    strategy = fedlaw()
    _train(strategy, FaultyGrid(corrected))
    assert strategy.weights[FAULTY] == 0


def test_a_late_reply_of_the_last_phase_is_refused() -> None:
    held: list[Message] = []

    def late(request: Message, reply: Message) -> list[Message]:
        """Answers each request with what the previous one should have got."""
        if held and held[0].metadata.reply_to_message_id == request.metadata.message_id:
            return []
        answer = [held.pop()] if held else []
        held.append(reply)
        return answer

    strategy = fedlaw()
    result = _train(strategy, FaultyGrid(late))
    assert strategy.server is not None
    reasons = {r.reason for r in strategy.server.refusals}
    assert Reason.LATE.words in reasons
    assert all(r.client == FAULTY for r in strategy.server.refusals)
    assert strategy.weights[FAULTY] == 0
    assert accuracy(result.arrays) > 0.8


def test_a_message_that_answers_nothing_is_dropped() -> None:
    def stray(request: Message, reply: Message) -> list[Message]:
        other = _edited(lambda content: None)(request, reply)[0]
        other.metadata.__dict__["_reply_to_message_id"] = "never-sent"
        return [other, reply]

    strategy = fedlaw()
    _train(strategy, FaultyGrid(stray))
    assert strategy.server is not None
    assert strategy.server.refusals == []


def test_a_reply_that_cannot_be_decoded_costs_its_sender_alone(undisturbed: float) -> None:
    def undecodable(request: Message, reply: Message) -> list[Message]:
        raise KeyError("children of PATIENT-4711")  # as inflating a forged object tree does

    strategy = fedlaw()
    result = _train(strategy, FaultyGrid(undecodable))
    _check(strategy, result, "message cannot be read", (1, 2), undisturbed)


def test_a_broken_link_is_no_fault_of_a_client() -> None:
    def unplugged(request: Message, reply: Message) -> list[Message]:
        raise ConnectionError("SuperLink is gone")

    with pytest.raises(ConnectionError):
        _train(fedlaw(), FaultyGrid(unplugged))


def test_texts_of_clients_reach_neither_logs_nor_metrics_nor_the_store(
    caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    store = tmp_path / "results.sqlite"
    strategy = fedlaw(store=store)
    caplog.set_level(logging.DEBUG, logger="flwr")
    logging.getLogger("flwr").propagate = True
    try:
        result = _train(strategy, FaultyGrid(_error))
    finally:
        logging.getLogger("flwr").propagate = False
    assert strategy.server is not None
    assert "its app raised an exception" in caplog.text
    for text in (
        caplog.text,
        repr(result),
        repr(strategy.server.refusals),
        store.read_bytes().decode("latin1"),
    ):
        assert "PATIENT" not in text
        assert "Traceback" not in text


def test_too_few_replies_skip_a_round_and_the_model_stays() -> None:
    strategy = FedLAW("paper", Settings(alpha=ALPHA, minimum_replies=10), federation())
    result = _train(strategy, FaultyGrid(_silent))
    assert [result.train_metrics_clientapp[k]["skipped"] for k in range(1, ROUNDS + 1)] == [1] * ROUNDS
    assert all(np.array_equal(x.numpy(), model()[name].numpy()) for name, x in result.arrays.items())


def test_requests_that_cannot_be_delivered_are_absences() -> None:
    class Lossy(FaultyGrid):
        def push_messages(self, messages: Any) -> Any:
            names = super().push_messages(messages)
            sent = {name: self._sent[name].metadata.dst_node_id for name in names}
            return [None if sent[name] == FAULTY else name for name in names]

    strategy = fedlaw()
    _train(strategy, Lossy())
    assert strategy.server is not None
    assert {(r.client, r.reason) for r in strategy.server.refusals} == {
        (FAULTY, "request could not be delivered")
    }
    assert strategy.weights[FAULTY] == 0


def test_a_grid_that_leaves_out_what_it_could_not_send() -> None:
    class Short(FaultyGrid):
        def push_messages(self, messages: Any) -> Any:
            names = super().push_messages(messages)
            return [name for name in names if self._sent[name].metadata.dst_node_id != FAULTY]

    strategy = fedlaw()
    _train(strategy, Short())
    assert strategy.weights[FAULTY] == 0
    assert sum(weight > 0 for weight in strategy.weights.values()) == 7
