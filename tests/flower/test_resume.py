"""A training that was cut off goes on with the same bits, alone, and with the same nodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, MetricRecord

from fedlaw.flower import FedLAW, LocalGrid, RobustStrategy, Settings
from fedlaw.flower.layout import Fault
from fedlaw.results import Store, load, load_weights
from fedlaw.server import Published
from tests.flower.test_faults import BROKEN
from tests.flower.world import ALPHA, CLIENTS, FAULTY, FaultyGrid, accuracy, federation, model, plain_app

ROUNDS = 6


class Crash(Exception):
    pass


def _strategy(**where: Any) -> FedLAW:
    judge = Published(attackers=0.3, clip="median", weight_rounds=4)
    return FedLAW(judge, Settings(alpha=ALPHA), federation(**where))


def _train(strategy: Any, crash_in: int | None = None, grid: LocalGrid | None = None) -> Any:
    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        if round == crash_in:
            raise Crash
        return MetricRecord({"accuracy": accuracy(arrays), "loss": 0.5})

    return strategy.start(
        grid or FaultyGrid(), model(), num_rounds=ROUNDS, timeout=0.005, evaluate_fn=evaluate
    )


def _same(a: ArrayRecord, b: ArrayRecord) -> bool:
    return all(np.array_equal(a[name].numpy(), b[name].numpy()) for name in a)


@pytest.mark.parametrize("kind", ["store", "checkpoint"])
@pytest.mark.parametrize("crash_in", [1, 3, 5, 6])
def test_it_ends_with_the_same_bits(kind: str, crash_in: int, tmp_path: Path) -> None:
    where = {kind: tmp_path / "kept"}
    whole = _strategy()
    expected = _train(whole).arrays
    with pytest.raises(Crash):
        _train(_strategy(**where), crash_in)
    resumed = _strategy(**where, resume=True)
    result = _train(resumed)
    assert _same(result.arrays, expected)
    assert resumed.weights == whole.weights
    assert min(result.train_metrics_clientapp) == crash_in  # the round that was cut off is done again


def test_rules_resume_too(tmp_path: Path) -> None:
    def make(**where: Any) -> RobustStrategy:
        return RobustStrategy(
            {"name": "centered_clipping", "tau": 1.0}, Settings(alpha=ALPHA), federation(**where)
        )

    expected = _train(make()).arrays
    with pytest.raises(Crash):
        _train(make(checkpoint=tmp_path / "kept"), 4)
    assert _same(_train(make(checkpoint=tmp_path / "kept", resume=True)).arrays, expected)


class _OtherNodes(LocalGrid):
    def get_node_ids(self) -> list[int]:
        return [*range(101, 100 + CLIENTS), 777]


class _OneAway(FaultyGrid):
    def get_node_ids(self) -> list[int]:
        return [node for node in super().get_node_ids() if node != FAULTY]


@pytest.mark.parametrize("kind", ["store", "checkpoint"])
def test_another_roster_is_refused(kind: str, tmp_path: Path) -> None:
    where = {kind: tmp_path / "kept"}
    with pytest.raises(Crash):
        _train(_strategy(**where), 3)
    again = {**where, "resume": True}
    with pytest.raises(ValueError, match="1 of its 10 nodes are missing and 1 others are there"):
        _train(_strategy(**again), grid=_OtherNodes(plain_app(), CLIENTS))
    with pytest.raises(ValueError, match="1 of its 10 nodes are missing and 0 others are there"):
        _train(_strategy(**again), grid=_OneAway())
    with pytest.raises(ValueError, match="the checkpoint's roster is another one"):
        _train(_strategy(**again, roster=(100, 101)))
    # Named, the same roster goes on while one of it is away: it is absent, and nothing else.
    silent, _ = BROKEN["no reply"]
    named = _strategy(**again, roster=tuple(range(100, 100 + CLIENTS)))
    grid = _OneAway(silent)
    result = _train(named, grid=grid)
    assert result.train_metrics_clientapp[3]["answered"] == CLIENTS - 1
    assert {r.reason for r in named.server.refusals if r.client == FAULTY} == {Fault.NO_REPLY}  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["store", "checkpoint"])
def test_what_was_interrupted_is_not_overwritten(kind: str, tmp_path: Path) -> None:
    where = {kind: tmp_path / "kept"}
    with pytest.raises(Crash):
        _train(_strategy(**where), 3)
    with pytest.raises(ValueError, match="resume=True goes on"):
        _train(_strategy(**where))


def test_another_setting_is_another_training(tmp_path: Path) -> None:
    where = {"checkpoint": tmp_path / "kept"}
    with pytest.raises(Crash):
        _train(_strategy(**where), 3)
    other = FedLAW(
        Published(attackers=0.2, weight_rounds=4), Settings(alpha=ALPHA), federation(**where, resume=True)
    )
    with pytest.raises(ValueError, match="the checkpoint belongs to another run: its judge is"):
        _train(other)


def test_a_finished_training_is_not_run_twice(tmp_path: Path) -> None:
    where = {"store": tmp_path / "kept.sqlite"}
    _train(_strategy(**where))
    with pytest.raises(ValueError, match=r"is finished in .*: give Federation another name or store"):
        _train(_strategy(**where, resume=True))
    _train(_strategy(**where, name="second"))
    assert len(load(where["store"]).run.unique()) == 2


def test_a_finished_checkpoint_gives_its_model_back(tmp_path: Path) -> None:
    where = {"checkpoint": tmp_path / "kept"}
    first = _train(_strategy(**where))
    grid = FaultyGrid()
    again = _train(_strategy(**where, resume=True), grid=grid)
    assert _same(first.arrays, again.arrays)
    assert grid.asked == []


@pytest.mark.parametrize("kind", ["store", "checkpoint"])
def test_one_writer_at_a_time(kind: str, tmp_path: Path) -> None:
    where = {kind: tmp_path / "kept"}
    refused = []

    class Meddling(FaultyGrid):
        def handle(self, message: Any) -> Any:
            if not refused:
                with pytest.raises(ValueError, match="is being written by") as error:
                    _train(_strategy(**where, resume=True))
                refused.append(error)
            return super().handle(message)

    _train(_strategy(**where), grid=Meddling())
    assert refused


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from fedlaw.flower.journal import _locked\n"
        "lock = _locked(Path(sys.argv[1]))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(kept)], check=False, timeout=120)
    assert killed.returncode == -9
    _train(_strategy(checkpoint=kept))
    assert kept.is_file()


def test_rounds_are_in_the_store(tmp_path: Path) -> None:
    path = tmp_path / "kept.sqlite"
    strategy = _strategy(store=path)
    result = _train(strategy, grid=FaultyGrid(BROKEN["nan"][0]))
    frame = load(path)
    assert frame["round"].tolist() == list(range(1, ROUNDS + 1))
    assert frame["phases"].tolist() == [2] * 4 + [1] * 2
    assert frame["rule"].unique().tolist() == ["fedlaw"]
    assert frame["test_accuracy"].iloc[-1] == pytest.approx(accuracy(result.arrays))
    assert frame["answered"].tolist() == [CLIENTS - 1] * 4 + [7] * 2
    weights = load_weights(path, "last")
    assert weights.shape == (ROUNDS, CLIENTS)
    np.testing.assert_allclose(weights.iloc[-1], list(strategy.weights.values()), rtol=1e-6)
    with Store(path, read_only=True) as store:
        (info,) = store.runs()
        assert store.setup(info.id)["roster"].tolist() == list(range(100, 100 + CLIENTS))
        records = store.records(info.id)
    assert records[0].refusals == [[FAULTY, 1, "update is not finite or overflows its own norm"]]
    assert records[0].bytes_down == 2 * 15 * 4 * CLIENTS - 15 * 4  # the broken client is not asked in phase 2
    assert info.summary == {"test_accuracy": pytest.approx(accuracy(result.arrays)), "test_loss": 0.5}


def test_a_model_too_large_for_a_database_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedlaw.flower.journal._BLOB_LIMIT", 10)
    with pytest.raises(ValueError, match=r"use checkpoint= \(a file\)"):
        _train(_strategy(store=tmp_path / "kept.sqlite"))
