"""The results store: what is written comes back the same, whoever reads, writes or is killed meanwhile."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedlaw.experiments.description import Experiment
from fedlaw.results import (
    AlreadyFinished,
    AlreadyRunning,
    RoundRecord,
    Store,
    StoreError,
    load,
    load_summary,
    load_weights,
)
from fedlaw.results.record import COLUMNS, from_row, to_row

MALICIOUS = np.array([True, False, False, True])


def experiment(**settings: Any) -> Experiment:
    return Experiment(**{"clients": 4, "rounds": 5, "rule": "mean", "malicious": [0, 3], **settings})


def record(k: int, **values: Any) -> RoundRecord:
    weights = np.array([0.0, 0.5, 0.25, 0.25], np.float32)
    common: dict[str, Any] = {
        "phases": 2 if k < 3 else 1,
        "test_accuracy": k / 10,
        "weights": weights,
        "losses": np.array([1.0, np.nan, 2.0, 3.0], np.float32),
        "statuses": np.zeros(4, np.int8),
        "true_positives": 1,
        "bytes_up": 1 << 40,
        "notes": ["a note"],
        "refusals": [[2, 1, "not finite"]],
    }
    return RoundRecord(round=k, **{**common, **values})


def same(a: RoundRecord, b: RoundRecord) -> bool:
    return to_row(a) == to_row(b)


# ---------------------------------------------------------------------------------------- rows
def numbers() -> st.SearchStrategy[float | None]:
    return st.none() | st.floats(allow_nan=True, allow_infinity=True)


@given(
    st.integers(1, 10**6),
    st.tuples(numbers(), numbers(), numbers()),
    hnp.arrays(np.float32, 4),
    st.text(),
)
def test_a_record_comes_back_the_same(
    k: int, floats: tuple[float | None, ...], weights: np.ndarray, text: str
) -> None:
    written = record(
        k, test_loss=floats[0], epsilon=floats[1], seconds=floats[2], weights=weights, notes=[text]
    )
    connection = sqlite3.connect(":memory:")
    marks = ", ".join("?" * len(COLUMNS))
    back = from_row(connection.execute(f"SELECT {marks}", to_row(written)).fetchone())
    for name in COLUMNS:
        a, b = getattr(written, name), getattr(back, name)
        if isinstance(a, np.ndarray):
            assert a.tobytes() == b.tobytes()
            assert a.dtype == b.dtype
        elif isinstance(a, float) and math.isnan(a):
            assert math.isnan(b)
        else:
            assert a == b


def test_bytes_on_disk_are_little_endian(tmp_path: Path) -> None:
    with Store(tmp_path / "a.sqlite") as store:
        run = store.begin(experiment(), resume=False)
        run.setup(sizes=np.array([1, 2], ">i4"))
        run.append(record(1, weights=np.array([1, 0, 0, 0], ">f4")))
        blob = store._connection.execute("SELECT weights FROM rounds").fetchone()[0]
        assert blob[:4] == b"\x00\x00\x80\x3f"
        assert store.setup(run.id)["sizes"].tolist() == [1, 2]
        declared = store._connection.execute(
            "SELECT sql FROM sqlite_master WHERE name = 'rounds'"
        ).fetchone()[0]
        assert "weights BLOB /* <f4 */" in declared


# ---------------------------------------------------------------------------------------- a run's life
def test_a_run_from_begin_to_finish(tmp_path: Path) -> None:
    path, one = tmp_path / "a.sqlite", experiment()
    with Store(path) as store:
        assert store.find(one.id) is None
        run = store.begin(one, resume=False)
        assert (run.id, run.checkpoint, run.done_rounds) == (one.id, None, 0)
        run.setup(malicious=MALICIOUS, parameters=7, groups=[1, 2])
        for k in range(1, 6):
            run.append(record(k))
        run.finish({"accuracy": 0.5, "recall": math.nan})
    with Store(path, read_only=True) as store:
        info = store.runs()[0]
        assert (info.status, info.done, info.total) == ("finished", 5, 5)
        assert info.description == one.canonical()
        assert Experiment(**info.description) == one
        assert info.summary == {"accuracy": 0.5, "recall": None}
        assert set(info.versions) == {"fedlaw", "torch", "numpy", "python"}
        assert info.machine["cores"] >= 1
        assert info.ended is not None
        assert info.ended >= info.started
        setup = store.setup(one.id)
        assert setup["malicious"].dtype == bool
        assert (setup["malicious"] == MALICIOUS).all()
        assert (setup["parameters"], setup["groups"]) == (7, [1, 2])
        assert all(same(a, record(k)) for k, a in enumerate(store.records(one.id), 1))


def test_a_finished_run_is_not_run_twice(tmp_path: Path) -> None:
    with Store(tmp_path / "a.sqlite") as store:
        run = store.begin(experiment(), resume=False)
        run.append(record(1))
        run.finish({})
        for resume in (False, True):
            with pytest.raises(AlreadyFinished, match=run.id):
                store.begin(experiment(), resume=resume)
        assert len(store.records(run.id)) == 1
        assert store.begin(experiment(seed=1), resume=False).done_rounds == 0


@pytest.mark.parametrize("end", ["interrupt", "fail", "close"])
def test_resuming_goes_on_from_the_checkpoint(tmp_path: Path, end: str) -> None:
    path = tmp_path / "a.sqlite"
    with Store(path) as store:
        run = store.begin(experiment(), resume=False)
        run.setup(malicious=MALICIOUS)
        run.append(record(1))
        run.append(record(2))
        run.save(2, b"state after 2")
        run.append(record(3))
        if end == "interrupt":
            run.interrupt()
        elif end == "fail":
            run.fail("it broke")
    with Store(path) as store:
        info = store.find(run.id)
        assert info is not None
        assert (info.status, info.done) == ("failed" if end == "fail" else "interrupted", 3)
        assert info.message == ("it broke" if end == "fail" else None)
        again = store.begin(experiment(), resume=True)
        assert (again.checkpoint, again.done_rounds) == (b"state after 2", 2)
        assert [r.round for r in store.records(run.id)] == [1, 2]
        again.append(record(3, test_accuracy=0.9))
        assert load(path)["attacker_weight"].tolist() == [0.25, 0.25, 0.25]  # the set-up is still known
        again.finish({})
        assert store.records(run.id)[2].test_accuracy == 0.9


def test_interrupting_with_a_checkpoint_keeps_every_round(tmp_path: Path) -> None:
    with Store(tmp_path / "a.sqlite") as store:
        run = store.begin(experiment(), resume=False)
        run.append(record(1))
        run.interrupt(1, b"here")
        again = store.begin(experiment(), resume=True)
        assert (again.checkpoint, again.done_rounds) == (b"here", 1)


def test_an_interruption_before_a_round_was_written_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    with Store(tmp_path / "a.sqlite") as store:
        run = store.begin(experiment(), resume=False)
        run.append(record(1))
        run.save(1, b"after 1")
        run.interrupt(2, b"after 2, whose record was never appended")
        again = store.begin(experiment(), resume=True)
        assert (again.checkpoint, again.done_rounds) == (b"after 1", 1)


def test_without_resume_an_interrupted_run_starts_anew(tmp_path: Path) -> None:
    with Store(tmp_path / "a.sqlite") as store:
        run = store.begin(experiment(), resume=False)
        run.setup(malicious=MALICIOUS)
        run.append(record(1))
        run.interrupt(1, b"here")
        other = store.begin(experiment(seed=9), resume=False)
        other.append(record(1))
        again = store.begin(experiment(), resume=False)
        assert (again.checkpoint, again.done_rounds) == (None, 0)
        assert store.records(run.id) == []
        assert store.setup(run.id) == {}
        assert len(store.records(other.id)) == 1


def test_a_checkpoint_needs_its_rounds(tmp_path: Path) -> None:
    with Store(tmp_path / "a.sqlite") as store:
        run = store.begin(experiment(), resume=False)
        run.append(record(1))
        with pytest.raises(ValueError, match="only 1 of its rounds"):
            run.save(2, b"")


def test_a_writer_that_lost_its_run_writes_nothing(tmp_path: Path) -> None:
    with Store(tmp_path / "a.sqlite") as store:
        run = store.begin(experiment(), resume=False)
        with pytest.raises(AlreadyRunning, match=str(os.getpid())):
            store.begin(experiment(), resume=True)
        run.interrupt()
        again = store.begin(experiment(), resume=False)
        for write in (lambda: run.append(record(1)), lambda: run.finish({}), lambda: run.save(0, b"")):
            with pytest.raises(StoreError, match="no longer"):
                write()
        assert store.records(run.id) == []
        again.finish({})
        with pytest.raises(StoreError, match="no longer"):
            again.append(record(1))


def test_readers_see_rounds_while_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    with Store(path) as store, Store(path, read_only=True) as reader, Store(path, read_only=True) as slow:
        run = store.begin(experiment(), resume=False)
        reading = slow._connection.execute("SELECT * FROM runs")  # a read that is still going on
        for k in (1, 2):
            run.append(record(k))
            assert [r.round for r in reader.records(run.id)] == list(range(1, k + 1))
        assert len(reading.fetchall()) == 1
        assert reader.runs()[0].status == "running"
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            reader.begin(experiment(), resume=False)


# ---------------------------------------------------------------------------------------- killed, and many at once
WRITER = textwrap.dedent(
    """
    import sys
    import numpy as np
    from fedlaw.results import RoundRecord, Store

    class One:  # stands for an Experiment, and is quicker to import
        def __init__(self, seed, rounds):
            self.id, self.rounds, self.seed = f"run{seed}", rounds, seed

        def canonical(self):
            return {"seed": self.seed, "clients": 4}

    path, seed, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with Store(path) as store:
        run = store.begin(One(seed, rounds), resume=True)
        print("begun", flush=True)
        for k in range(run.done_rounds + 1, rounds + 1):
            weights = np.full(4, k, np.float32)
            run.append(RoundRecord(round=k, phases=1, test_accuracy=k / 1e6, weights=weights))
            if k % 7 == 0:
                run.save(k, np.full(20000, k, "<i4").tobytes())
                print(k, flush=True)
        run.finish({"last": rounds})
    """
)


@dataclasses.dataclass(frozen=True)
class Stand:
    """The same run, begun from here."""

    rounds: int
    id: str = "run0"

    def canonical(self) -> dict[str, Any]:
        return {"seed": 0, "clients": 4}


def start_writer(path: Path, seed: int, rounds: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(seed), str(rounds)], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.skipif(os.name != "posix", reason="kill -9 is what is tested")
def test_kill_9_in_the_middle_of_writing_leaves_a_run_that_resumes(tmp_path: Path) -> None:
    path, rounds = tmp_path / "a.sqlite", 10**6
    run_id, one = "run0", Stand(rounds)
    reached = 0
    for _ in range(2):  # the second one resumes what the first left
        process = start_writer(path, 0, rounds)
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        for _ in range(5):
            reached = int(process.stdout.readline())
        with Store(path) as store:
            alive = store.find(run_id)
            assert alive is not None
            assert alive.status == "running"
            with pytest.raises(AlreadyRunning):
                store.begin(one, resume=True)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        with Store(path) as store:
            info = store.find(run_id)
            assert info is not None
            assert info.status == "interrupted"
            assert info.done >= reached
            rows = store.records(run_id)
            assert [r.round for r in rows] == list(range(1, info.done + 1))  # none missing, none twice
            for r in rows:
                assert r.test_accuracy == r.round / 1e6
                assert r.weights is not None
                assert (r.weights == r.round).all()
            assert store._connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    with Store(path) as store:
        run = store.begin(one, resume=True)
        assert run.done_rounds >= reached
        assert run.checkpoint == np.full(20000, run.done_rounds, "<i4").tobytes()
        assert len(store.records(run_id)) == run.done_rounds


def test_several_processes_write_different_runs_into_one_new_file(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    processes = [start_writer(path, seed, 60) for seed in range(3)]
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    frame = load(path)
    assert frame.groupby("seed")["round"].count().tolist() == [60, 60, 60]
    assert set(load_summary(path)["status"]) == {"finished"}
    assert not list(tmp_path.glob("*-wal"))


# ---------------------------------------------------------------------------------------- files that cannot be used
def test_files_that_are_not_ours_are_left_as_they_are(tmp_path: Path) -> None:
    text, foreign = tmp_path / "notes.txt", tmp_path / "other.sqlite"
    text.write_text("my notes")
    connection = sqlite3.connect(foreign)
    connection.execute("CREATE TABLE mine (x)")
    connection.commit()
    connection.close()
    for path in (text, foreign):
        before = path.read_bytes()
        for read_only in (False, True):
            with pytest.raises(StoreError, match="not a fedlaw results file") as caught:
                Store(path, read_only=read_only)
            assert "\n" not in str(caught.value)
        assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "other.sqlite"]


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    Store(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StoreError, match="format 99"):
        Store(path)


def test_places_where_no_file_can_be(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no folder"):
        Store(tmp_path / "nowhere" / "a.sqlite")
    with pytest.raises(StoreError, match="is a folder"):
        Store(tmp_path)
    with pytest.raises(StoreError, match="there are no results"):
        Store(tmp_path / "a.sqlite", read_only=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    Store(tmp_path / "a.sqlite").close()
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StoreError, match="no permission"):
            Store(tmp_path / "b.sqlite")
        with Store(tmp_path / "a.sqlite", read_only=True) as store:
            assert store.runs() == []
    finally:
        tmp_path.chmod(0o700)


def test_no_permission_is_said_whoever_runs_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(StoreError, match="no permission to write"):
        Store(tmp_path / "b.sqlite")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------- frames
def test_frames_have_settings_beside_measurements(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    with Store(path) as store:
        for seed, rule in ((0, "mean"), (1, {"name": "trimmed_mean", "f": 1})):
            run = store.begin(experiment(seed=seed, rule=rule), resume=False)
            run.setup(malicious=MALICIOUS)
            for k in range(1, 4):
                run.append(
                    record(
                        k, test_loss=math.nan if k == 2 else 0.5, weights=None if seed else record(k).weights
                    )
                )
            run.finish({"accuracy": 0.3})
        ids = [info.id for info in store.runs()]
    frame = load(path)
    assert len(frame) == 6
    assert frame["rule"].tolist() == ["mean"] * 3 + ["trimmed_mean"] * 3
    assert frame["rule.f"].dropna().tolist() == [1.0] * 3
    assert frame["communication_rounds"].tolist() == [2, 4, 5] * 2
    assert frame["test_loss"].isna().tolist() == [False, True, False] * 2
    assert pd.api.types.is_float_dtype(frame["test_loss"])
    assert frame["attacker_weight"].iloc[0] == 0.25
    assert frame["attacker_weight"].iloc[3:].isna().all()
    assert set(load(path, runs=ids[1][:10])["run"]) == {ids[1]}
    assert set(load(path, runs="last")["run"]) == {ids[1]}
    weights = load_weights(path, ids[0])
    assert weights.shape == (3, 4)
    assert weights.loc[2].tolist() == [0.0, 0.5, 0.25, 0.25]
    assert load_weights(path, ids[1]).isna().all(axis=None)
    summary = load_summary(path)
    assert summary["accuracy"].tolist() == [0.3, 0.3]
    assert summary["partition.q"].tolist() == [0.6, 0.6]


def test_frames_of_runs_without_rounds(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    with Store(path) as store:
        assert load(path).empty
        assert load_summary(path).empty
        store.begin(experiment(), resume=False)
        assert len(load(path)) == 0
        assert load_summary(path)["status"].tolist() == ["running"]


def test_runs_are_found_by_the_beginning_of_their_id(tmp_path: Path) -> None:
    with Store(tmp_path / "a.sqlite") as store:
        with pytest.raises(StoreError, match="no runs in it yet"):
            store.resolve("last")
        ids = [store.begin(experiment(seed=seed), resume=False).id for seed in range(20)]
        assert store.resolve("last").id == ids[-1]
        assert store.resolve(ids[3][:12].upper()).id == ids[3]
        with pytest.raises(StoreError, match="no run 'zz'"):
            store.resolve("zz")
        shared = next(d for d in "0123456789abcdef" if sum(i.startswith(d) for i in ids) > 1)
        with pytest.raises(StoreError, match="ambiguous"):
            store.resolve(shared)


def test_every_field_of_a_record_is_a_column(tmp_path: Path) -> None:
    with Store(tmp_path / "a.sqlite") as store:
        columns = {row[1] for row in store._connection.execute("PRAGMA table_info(rounds)")}
    assert columns == {"run", "attacker_weight", *(f.name for f in dataclasses.fields(RoundRecord))}


def test_many_processes_may_make_the_same_store_at_once(tmp_path: Path) -> None:
    """Each opens the new file at the same moment; one that found it locked used to give up."""
    script = (
        "import sys, time\n"
        "from fedlaw.results import Store\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "for i in range(12):\n"
        "    Store(f'{sys.argv[1]}/{i}.sqlite').close()\n"
    )
    crowd = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(5)
    ]
    for process in crowd:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in crowd:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate()[1] for process in crowd]
    assert [process.returncode for process in crowd] == [0] * 5, said
