"""How many attackers does `hardened` find, and what does it cost? Real data, many experiments stacked.

    python benchmarks/recall.py --data-dir DATA --device cuda --store recall.sqlite
    python benchmarks/recall.py --store recall.sqlite --report results/mnist-hardened
    python benchmarks/recall.py --dataset digits --q 0.6 --rounds 100 --clients 30 --set verdict_rounds=0

The first command runs the paper's MNIST setting (200 clients, MLP 784-128-64-10, batch 64, 3 local epochs, learning
rate 0.01, 200 rounds) with 40 % attackers that fill whole label groups, the oracle of the same seeds, and FedAvg
without attack. What is in the store already is not run again; several processes may share a store, one a seed, if
one does not fill the GPU. The second command writes a CSV, one line a run, and an .npz with who attacked and the
cosines of every client and judged round in half precision, and prints a table. The third takes the handwritten
digits that come with scikit-learn (a small network, seconds a run on a CPU) and another setting of the judge.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedlaw.experiments.description import Execution, Experiment
from fedlaw.experiments.runner import Callback, run_together
from fedlaw.results import Store, load_summary

ATTACKS: dict[str, Any] = {
    "inverse": "inverse_gradient",
    "backdoor": "backdoor",
    "flip": "label_flip",
    "mimic": {"name": "mimic_misaligned", "rho": 0.3},
    "lie": "lie",
    "noisy-lie": {"name": "lie", "noise": 0.3},
    "double": {"name": "double", "persistent": True},
    "turns": "turns",  # five rounds of good behaviour, five of inverted gradients
}


MNIST = {"model_settings": {"hidden": [128, 64]}, "batch_size": 64, "lr": 0.01, "clients": 200, "rounds": 200}
SETTINGS: dict[str, dict[str, Any]] = {
    "mnist": MNIST,
    "fashion_mnist": MNIST,
    "digits": {"model_settings": {"hidden": [32]}, "batch_size": 16, "lr": 0.02, "split": (1500, 0, 297)},
}  # fmt: skip


def setting(seed: int, q: float, dataset: str = "mnist", **changes: Any) -> Experiment:
    """The paper's MNIST setting, or the one for digits."""
    base: dict[str, Any] = {"dataset": dataset, "model": "mlp", "epochs": 3, "evaluate_every": 10}
    return Experiment(**base | SETTINGS[dataset] | {"seed": seed, "q": q} | changes)


def plan(
    seeds: list[int],
    attacks: list[str],
    qs: list[float],
    *,
    malicious: float = 0.4,
    judge: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Experiment]:
    """Every experiment by a readable name; `judge`: settings in place of those of preset `hardened`."""
    runs = {}
    learned = {"name": "fedlaw", "preset": "hardened", **(judge or {})}
    for seed, q in product(seeds, qs):
        attacked = {"malicious": malicious, **changes}
        for name in attacks:
            runs[f"hardened {name} {q} {seed}"] = setting(
                seed, q, attack=ATTACKS[name], rule=learned, **attacked
            )
        runs[f"oracle any {q} {seed}"] = setting(seed, q, rule="oracle", **attacked)
        runs[f"hardened none {q} {seed}"] = setting(seed, q, rule=learned, **changes)
        runs[f"fedavg none {q} {seed}"] = setting(seed, q, rule="mean", **changes)
    return runs


class Progress(Callback):
    """A line every few seconds."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.began, self.said = total, 0, time.monotonic(), 0.0

    def on_round(self, record: Any) -> None:
        self.done += 1
        now = time.monotonic()
        if now - self.said > 15:
            left = (now - self.began) / self.done * (self.total - self.done)
            print(f"{self.done}/{self.total} rounds, about {left:.0f} s left", flush=True)
            self.said = now


def report(store: Path, runs: Mapping[str, Any], output: Path) -> None:
    """One line a run as CSV, with what it ran on, and the table."""
    frame = load_summary(store).set_index("run")
    rows = []
    for name, experiment in runs.items():
        if experiment.id not in frame.index or frame.loc[experiment.id, "status"] != "finished":
            print(f"missing: {name}")
            continue
        row, (rule, attack) = frame.loc[experiment.id], name.split()[:2]
        rows.append(
            {
                "rule": rule,
                "attack": attack,
                "q": experiment.partition_settings["q"],
                "malicious": experiment.malicious_count / experiment.clients,
                "seed": experiment.seed,
                **{
                    key: row.get(key)
                    for key in (
                        "test_accuracy",
                        "recall",
                        "precision",
                        "honest_excluded",
                        "communication_rounds",
                    )
                },
                "run": experiment.id,
            }
        )
    table = pd.DataFrame(rows)
    output.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(output.with_suffix(".csv"), index=False, float_format="%.5f")
    arrays = {}
    with Store(store, read_only=True) as opened:
        for run in table.run[table.rule == "hardened"]:
            judged = [r.alignment for r in opened.records(run) if r.alignment is not None]
            arrays[f"{run}.cosines"] = np.array(judged, np.float16)
            arrays[f"{run}.malicious"] = opened.setup(run)["malicious"]
    np.savez_compressed(output.with_suffix(".npz"), **arrays)
    grouped = table.groupby(["rule", "attack", "q"], sort=False)
    for (rule, attack, q), group in grouped:
        accuracy = " ".join(f"{100 * x:.1f}" for x in group.test_accuracy)
        recall = " ".join(f"{x:.2f}" for x in group.recall.fillna(-1))
        lost = " ".join(f"{x:.2f}" for x in group.honest_excluded.fillna(-1))
        print(f"{rule:9} {attack:9} q={q}  accuracy {accuracy}  recall {recall}  honest lost {lost}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--store", type=Path, default=Path("recall.sqlite"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument(
        "--attacks", nargs="+", default=[name for name in ATTACKS if name != "turns"], choices=[*ATTACKS]
    )
    parser.add_argument("--q", type=float, nargs="+", default=[0.9, 0.6])
    parser.add_argument("--only", default="", help="only runs whose name begins so: hardened, oracle, fedavg")
    parser.add_argument("--stack", type=int, default=16, help="experiments trained together")
    parser.add_argument("--precision", default="float32", choices=["float32", "tf32", "half"])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument(
        "--examples", type=int, help="training examples of all clients together; all there are"
    )
    parser.add_argument("--dataset", default="mnist", choices=[*SETTINGS])
    parser.add_argument("--malicious", type=float, default=0.4)
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="settings of the judge other than the preset's",
    )
    parser.add_argument("--report", type=Path, help="write PATH.csv and PATH.npz from the store and stop")
    given = parser.parse_args()
    runs = plan(
        given.seeds,
        given.attacks,
        given.q,
        malicious=given.malicious,
        judge={name: json.loads(value) for name, value in (pair.split("=", 1) for pair in given.set)},
        dataset=given.dataset,
        rounds=given.rounds,
        clients=given.clients,
        examples=given.examples,
    )
    runs = {name: experiment for name, experiment in runs.items() if name.startswith(given.only)}
    if given.report:
        return report(given.store, runs, given.report)
    with Store(given.store) as store:
        waiting = [
            e for e in runs.values() if (info := store.find(e.id)) is None or info.status != "finished"
        ]
    print(f"{len(runs)} runs, {len(waiting)} to do, {given.stack} at a time", flush=True)
    execution = Execution(
        data_dir=given.data_dir, device=given.device, precision=given.precision, checkpoint_seconds=60
    )
    progress = Progress(sum(e.rounds for e in waiting))
    for at in range(0, len(waiting), given.stack):
        run_together(
            waiting[at : at + given.stack],
            store=given.store,
            execution=execution,
            resume=True,
            callbacks=[progress],
        )
    return None


if __name__ == "__main__":
    main()
