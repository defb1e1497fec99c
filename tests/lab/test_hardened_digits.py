"""Preset `hardened`, untouched, on real digits: how often does it find the attackers? Every cell is printed."""

import pytest

from fedlaw.experiments.description import Experiment
from fedlaw.experiments.runner import run_together

ATTACKS = {
    "flip": "label_flip",
    "random labels": "random_labels",
    "inverse": "inverse_gradient",
    "mimic 0.3": {"name": "mimic_misaligned", "rho": 0.3},
    "LIE": "lie",
    "noisy LIE": {"name": "lie", "noise": 0.3},
}
SEEDS = range(5)


def digits(seed, **changes):
    return Experiment(
        dataset="digits",
        split=(1500, 0, 297),
        clients=30,
        q=0.6,
        model_settings={"hidden": [32]},
        lr=0.02,
        batch_size=16,
        epochs=3,
        rounds=100,
        rule="fedlaw",
        evaluate_every=100,
        seed=seed,
        **changes,
    )


@pytest.mark.slow
def test_attackers_are_found_in_nine_runs_of_ten():
    good, total = 0, 0
    for share in (0.2, 0.4):
        for name, attack in ATTACKS.items():
            results = run_together([digits(seed, malicious=share, attack=attack) for seed in SEEDS])
            figures = [(r.summary["recall"], r.summary["honest_excluded"]) for r in results]
            cells = "  ".join(f"{recall:.2f}/{lost:.2f}" for recall, lost in figures)
            print(f"\n{name:14} {share:.0%}  recall/honest lost, seeds 0 to 4:  {cells}", end="")
            good += sum(recall >= 0.9 and lost <= 0.1 for recall, lost in figures)
            total += len(figures)
    print(f"\n{good} of {total} runs with recall 0.9 or more and at most a tenth of the honest clients lost")
    assert good >= 0.9 * total


@pytest.mark.slow
def test_nobody_attacking_loses_at_most_one():
    results = run_together([digits(seed) for seed in SEEDS])
    lost = [round(r.summary["honest_excluded"] * 30) for r in results]
    print(f"\nnobody attacks: honest clients lost {lost}")
    assert max(lost) <= 1
