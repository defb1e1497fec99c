"""Figures show what the records say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedlaw.experiments.description import Experiment
from fedlaw.report._panels import HONEST, MALICIOUS
from fedlaw.report.run import Series, comparison, figure, label, plot, save
from fedlaw.results import RoundRecord, Store, StoreError

MASK = np.array([True, False, False, True, False])


def records(rounds: int = 8, freeze: int = 4, **values: Any) -> list[RoundRecord]:
    out = []
    for k in range(1, rounds + 1):
        weights = np.where(MASK, 0.2 * max(0, freeze - k) / freeze, 0.2 + 0.02 * k).astype(np.float32)
        common: dict[str, Any] = {
            "phases": 2 if k <= freeze else 1,
            "test_accuracy": 0.1 * k,
            "validation_accuracy": 0.1 * k - 0.05,
            "weights": weights,
            "true_positives": 2,
            "false_positives": 1,
            "true_negatives": 2,
            "false_negatives": 0,
        }
        out.append(RoundRecord(round=k, **{**common, **values}))
    return out


def words(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_accuracy_is_drawn_by_round_and_by_exchange() -> None:
    by_round, by_exchange, _, _ = figure(Series("x", records(), MASK)).axes
    assert by_round.lines[0].get_xdata().tolist() == list(range(1, 9))
    assert by_exchange.lines[0].get_xdata().tolist() == [2, 4, 6, 8, 9, 10, 11, 12]
    assert np.allclose(by_exchange.lines[0].get_ydata(), 0.1 * np.arange(1, 9))


def test_every_client_has_a_line_of_its_role() -> None:
    _, _, weights, _ = figure(Series("x", records(), MASK)).axes
    thin = [line for line in weights.lines if line.get_linewidth() < 1]
    assert sum(line.get_color() == HONEST for line in thin) == 3
    assert sum(line.get_color() == MALICIOUS for line in thin) == 2
    legend = [text.get_text() for text in weights.get_legend().get_texts()]
    assert legend[0].startswith("honest (3)")
    assert legend[1].startswith("malicious (2)")
    assert legend[2] == "weights frozen"


def test_the_confusion_counts_are_those_of_the_last_round() -> None:
    _, _, _, confusion = figure(Series("x", records(), MASK)).axes
    assert words(confusion)[::2] == ["2", "1", "0", "2"]  # honest kept, excluded; malicious kept, excluded
    assert words(confusion)[1::2] == ["67%", "33%", "0%", "100%"]


def test_what_is_not_there_is_said() -> None:
    plain = [RoundRecord(round=1, phases=1)]
    by_round, _, weights, confusion = figure(Series("median", plain)).axes
    assert words(by_round) == ["nothing was evaluated yet"]
    assert "no client has one weight" in words(weights)[0]
    assert words(confusion) == ["nobody was judged"]


def test_rounds_without_evaluation_are_left_out() -> None:
    some = [RoundRecord(round=k, phases=1, test_accuracy=0.5 if k % 3 == 0 else None) for k in range(1, 8)]
    by_round, by_exchange, _, _ = figure(Series("mean", some)).axes
    assert by_round.lines[0].get_xdata().tolist() == [3, 6]
    assert by_exchange.lines[0].get_xdata().tolist() == [3, 6]


def test_a_comparison_names_every_run_and_shows_one_runs_weights() -> None:
    other = records(weights=None, test_accuracy=0.2)
    left, right = comparison([Series("A", other), Series("B", records(), MASK)], chance=0.1).axes
    legend = [text.get_text() for text in left.get_legend().get_texts()]
    assert legend == ["B, at the end 80.0%", "A, at the end 20.0%", "guessing"]
    assert right.get_title(loc="left").endswith("B")
    assert len(right.lines) > 5


@pytest.mark.parametrize("ending", ["png", "pdf", "svg"])
def test_a_run_of_the_store_is_drawn_into_a_file(tmp_path: Path, ending: str) -> None:
    store = tmp_path / "a.sqlite"
    with Store(store) as opened:
        one = Experiment(clients=5, malicious=[0, 3], attack="lie", rule={"name": "krum", "f": 1}, rounds=8)
        run = opened.begin(one, resume=False)
        run.setup(malicious=MASK)
        for record in records():
            run.append(record)
    path = plot("last", store=store, output=tmp_path / "new" / f"a.{ending}")
    begins = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}[ending]
    assert path.read_bytes().startswith(begins)
    with pytest.raises(StoreError, match="no run 'zz'"):
        plot("zz", store=store)


def test_a_run_without_rounds_cannot_be_drawn(tmp_path: Path) -> None:
    with Store(tmp_path / "a.sqlite") as opened:
        opened.begin(Experiment(), resume=False)
    with pytest.raises(ValueError, match="no rounds yet"):
        plot("last", store=tmp_path / "a.sqlite", output=tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    made = figure(Series("x", records(), MASK))
    with pytest.raises(ValueError, match=r"must end in \.png"):
        save(made, tmp_path / "a.txt")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--output .* cannot be written"):
        save(made, tmp_path / "file" / "a.png")


def test_the_style_of_others_is_left_alone() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    figure(Series("x", records(), MASK))
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"rule": "fedlaw"}, "fedlaw (hardened)"),
        ({"rule": "bsum"}, "bsum"),
        ({"rule": {"name": "krum", "f": 2}}, "krum(f=2)"),
        ({"rule": ["clip", "median"]}, "clip + median"),
        ({"attack": {"name": "lie", "start": 3}}, "schedule(lie, start=3)"),
        ({"attack": {"name": "lie", "z": 1.5}}, "lie(z=1.5)"),
        ({"attack": "double"}, "split(schedule(inverse_gradient, start=2, stop=2), schedule("),
    ],
)
def test_labels_are_short(spec: dict[str, Any], words: str) -> None:
    described = Experiment(**spec).canonical()["rule" if "rule" in spec else "attack"]
    assert label(described).startswith(words)
