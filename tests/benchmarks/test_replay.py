"""What is committed under results/ was decided by the judge as it is: recorded cosines are judged again."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("benchmarks are not part of this installation", allow_module_level=True)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("file", "every"), [("mnist", 8), ("cifar10", 1)])
def test_recorded_runs_are_decided_as_they_were(monkeypatch, file, every):
    """In the same round; losses are not on record, so single clients at the edge of the core may differ."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import replay

    table = replay.replayed(ROOT / "results" / f"{file}.sqlite", every)
    assert len(table) >= 6
    assert (table.ended == table.ends).all()
    assert table["judged otherwise"].max() <= 1
    assert (table["judged otherwise"] == 0).mean() > 0.8
