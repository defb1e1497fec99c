"""What is committed under results/: found again where it is computed again, and whole where it is only read."""

from pathlib import Path

from fedlaw.experiments.description import Experiment
from fedlaw.experiments.runner import run_together
from fedlaw.report.cells import collect
from fedlaw.results import Store

RESULTS = Path(__file__).parents[2] / "results"


def test_three_cells_at_small_scale_are_found_again():
    """A label flip on digits under Krum, FedAvg and `hardened`: the same runs, up to another CPU's rounding."""
    with Store(RESULTS / "small.sqlite", read_only=True) as store:
        recorded = store.runs()
    assert len(recorded) == 6
    again = run_together([Experiment(**info.description) for info in recorded])
    for info, result in zip(recorded, again, strict=True):
        assert abs(result.summary["test_accuracy"] - info.summary["test_accuracy"]) < 0.02
        assert result.summary.get("recall") == info.summary.get("recall")
        assert result.summary.get("honest_excluded") == info.summary.get("honest_excluded")


def test_the_mnist_recording_has_what_the_reproduction_says():
    """FedLAW twice and FedAvg in full; nobody honest lost and everybody found who goes on attacking."""
    found = next(each for each in collect(RESULTS / "mnist.sqlite") if each.sweep.name == "mnist-accuracy")
    done = [place for place in found.places if place.finished]
    for method in ("FedLAW", "FedLAW hardened", "FedAVG"):
        assert len({place.run for place in done if place.labels["method"] == method}) == 210
    hardened = [place for place in done if place.labels["method"] == "FedLAW hardened"]
    assert {place.info.summary["honest_excluded"] for place in hardened} == {0.0}
    going_on = [p for p in hardened if p.labels["malicious"] and p.labels["attack"] != "Double Attack"]
    assert len(going_on) == 160
    assert {place.info.summary["recall"] for place in going_on} == {1.0}
