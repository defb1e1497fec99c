"""Results that come home: merged without loss, exported small, and never over something better."""

import lzma
import sqlite3

import numpy as np
import pytest

from fedlaw.experiments.description import Experiment
from fedlaw.experiments.runner import Callback, run
from fedlaw.results import Store, StoreError, notes
from fedlaw.results.export import export
from fedlaw.results.merge import merge
from tests.lab.test_runner import same

TINY = {"clients": 20, "rounds": 4, "examples": 300, "malicious": 0.3, "attack": "lie"}


class Stop(Callback):
    """Ctrl-C after two rounds."""

    def on_round(self, record):
        if record.round == 2:
            raise KeyboardInterrupt


def interrupted(experiment, store):
    with pytest.raises(KeyboardInterrupt):
        run(experiment, store=store, callbacks=[Stop()])


def test_runs_of_several_files_come_together(tmp_path):
    a, b, home = (tmp_path / f"{name}.sqlite" for name in ("a", "b", "home"))
    one, two = Experiment(**TINY, rule="mean"), Experiment(**TINY, rule="fedlaw")
    run(one, store=a)
    run(two, store=b)
    notes.write(b, "sweep", "mine", {"id": "x", "runs": {"{}": two.id}})
    done = merge([a, b], home)
    assert (done.added, done.kept) == (2, 0)
    assert merge([a, b], home).kept == 2
    with Store(home, read_only=True) as here, Store(b, read_only=True) as there:
        assert same(here.records(two.id), there.records(two.id))
        assert here.find(two.id) == there.find(two.id)
        mine, theirs = here.setup(two.id), there.setup(two.id)
        assert all(np.array_equal(mine[key], theirs[key]) for key in theirs)
    assert notes.read(home, "sweep")["mine"]["runs"] == {"{}": two.id}


def test_what_got_further_wins_and_a_merged_run_goes_on(tmp_path):
    a, home = tmp_path / "a.sqlite", tmp_path / "home.sqlite"
    experiment = Experiment(**TINY, rule="fedlaw")
    interrupted(experiment, a)
    merge([a], home)
    with Store(home, read_only=True) as store:
        assert store.find(experiment.id).status == "interrupted"
    resumed = run(experiment, store=home, resume=True)
    assert same(resumed.records, run(experiment).records)
    assert merge([a], home).kept == 1  # the interrupted one does not undo the finished one
    assert merge([home], a).replaced == 1
    with Store(a, read_only=True) as store:
        assert store.find(experiment.id).status == "finished"


def test_different_results_of_one_run_are_named(tmp_path):
    a, b = tmp_path / "a.sqlite", tmp_path / "b.sqlite"
    experiment = Experiment(**TINY, rule="mean")
    run(experiment, store=a)
    run(experiment, store=b)
    with Store(b) as store:
        store._connection.execute("UPDATE runs SET summary = json_set(summary, '$.test_accuracy', 0.123)")
    assert merge([b], a).different == (experiment.id,)
    with Store(a, read_only=True) as store:
        assert store.find(experiment.id).summary["test_accuracy"] != 0.123


def test_a_file_cannot_be_merged_into_itself(tmp_path):
    run(**TINY, rule="mean", store=tmp_path / "a.sqlite")
    with pytest.raises(StoreError, match="cannot be merged into itself"):
        merge([tmp_path / "a.sqlite"], tmp_path / "a.sqlite")
    with pytest.raises(StoreError, match="there are no results"):
        merge([tmp_path / "none.sqlite"], tmp_path / "a.sqlite")


def test_compact_files_leave_out_what_was_interrupted(tmp_path):
    full, small = tmp_path / "a.sqlite", tmp_path / "small.sqlite"
    whole = run(**TINY, rule="mean", store=full)
    half = run(**TINY, rule="median", store=full)
    with Store(full) as store:
        store._connection.execute("UPDATE runs SET status = 'interrupted' WHERE id = ?", (half.id,))
    export(full, small, compact=True)
    with Store(small, read_only=True) as store:
        assert [info.id for info in store.runs()] == [whole.id]
        left = "SELECT count(*) FROM (SELECT run FROM rounds UNION ALL SELECT run FROM arrays) WHERE run = ?"
        assert store._connection.execute(left, (half.id,)).fetchone() == (0,)


@pytest.mark.parametrize("weights", [False, True])
def test_compact_files_keep_what_tables_need(tmp_path, weights):
    full, small = tmp_path / "a.sqlite", tmp_path / "small.sqlite"
    result = run(**TINY, rule="fedlaw", store=full)
    export(full, small, compact=True, weights=weights)
    with Store(small, read_only=True) as store:
        records = store.records(result.id)
        assert store.find(result.id).summary == result.summary
    assert [r.test_accuracy for r in records] == [np.float32(r.test_accuracy) for r in result.records]
    for name in ("epsilon", "test_loss"):
        expected = [getattr(r, name) for r in result.records]
        np.testing.assert_allclose([getattr(r, name) for r in records], expected, rtol=2**-11)
    last, whole = records[-1], result.records[-1]
    np.testing.assert_allclose(last.losses, whole.losses, rtol=2**-11)
    for name in ("weights", "statuses", "exclusions"):
        assert np.array_equal(getattr(last, name), getattr(whole, name))
    assert [r.weights is not None for r in records[:-1]] == [weights] * 3
    assert all(r.statuses is None for r in records[:-1])
    assert small.stat().st_size <= full.stat().st_size
    assert not list(tmp_path.glob("small.sqlite-*"))
    # At home the compact record does not replace the full one, and the full one replaces it.
    assert merge([small], full).kept == 1
    assert merge([full], small).replaced == 1
    with pytest.raises(StoreError, match="is there already"):
        export(full, small)


def test_an_archive_is_read_like_the_file_it_was_made_of(tmp_path):
    full, small = tmp_path / "a.sqlite", tmp_path / "small.sqlite"
    result = run(**TINY, rule="fedlaw", store=full)
    with Store(full) as store:  # the published step's alignment has no bound
        huge = np.full(TINY["clients"], 123456.789, np.float32).tobytes()
        store._connection.execute("UPDATE rounds SET alignment = ? WHERE round = 1", (huge,))
    export(full, small, compact=True, cosines=True, archive=True)
    assert list(tmp_path.glob("small.sqlite*")) == [small]
    with Store(small, read_only=True) as store:
        assert store.find(result.id).summary == result.summary
        records = store.records(result.id)
    judged = [
        (mine, his) for mine, his in zip(records, result.records, strict=True) if his.alignment is not None
    ]
    assert judged
    np.testing.assert_allclose(judged[0][0].alignment, 123456.789, rtol=2**-11)
    for mine, his in judged[1:]:
        np.testing.assert_allclose(mine.alignment, his.alignment, rtol=2**-11)
    before = small.read_bytes()
    with pytest.raises(StoreError, match="archive, which is only read: `fedlaw results merge"):
        run(**TINY, rule="mean", store=small)
    assert small.read_bytes() == before
    again = tmp_path / "again.sqlite"
    assert merge([small], again).added == 1
    run(**TINY, rule="mean", store=again)


@pytest.mark.parametrize("harm", ["cut", "other", "empty", "no blob"])
def test_a_damaged_archive_is_refused_in_one_line(tmp_path, harm):
    full, small = tmp_path / "a.sqlite", tmp_path / "small.sqlite"
    run(**TINY, rule="mean", store=full)
    export(full, small, compact=True, archive=True)
    with sqlite3.connect(small) as connection:
        data = connection.execute("SELECT data FROM archive").fetchone()[0]
        worse = {"cut": data[: len(data) // 2], "other": lzma.compress(b"text"), "empty": b"", "no blob": 3}[
            harm
        ]
        connection.execute("UPDATE archive SET data = ?", (worse,))
    connection.close()
    with pytest.raises(StoreError, match=r"the archive is .*fetch it again"):
        Store(small, read_only=True)


def test_an_archive_of_another_program_is_not_taken_for_ours(tmp_path):
    full, small = tmp_path / "a.sqlite", tmp_path / "small.sqlite"
    run(**TINY, rule="mean", store=full)
    export(full, small, compact=True, archive=True)
    stranger = sqlite3.connect(":memory:")
    stranger.execute("CREATE TABLE runs (id TEXT)")
    stranger.commit()
    with sqlite3.connect(small) as connection:
        connection.execute("UPDATE archive SET data = ?", (lzma.compress(stranger.serialize()),))
    connection.close()
    with pytest.raises(StoreError, match="not a fedlaw results file"):
        Store(small, read_only=True)
