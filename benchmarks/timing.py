"""When should judging end? Rules tried on recorded cosines, on data sets where they fade at very different speeds.

    python benchmarks/timing.py results/timing-*.csv results/mnist.sqlite results/cifar10.sqlite
    python benchmarks/timing.py --record cifar10-mlp --data-dir DATA --store timing.sqlite
    python benchmarks/timing.py --record cifar10-mlp --store timing.sqlite --report results/timing

The first command reads recordings (a results file, or a CSV, one line a run, and the .npz of the same name) and
prints, for every timing rule and every group of runs, in which round judging would have ended, which share of the
attackers and which of the honest clients would have been shut out, and in how many runs something went wrong. The
second makes recordings: runs of preset `hardened` that are judged to their last round, whatever the signal. There
CIFAR-10 is halved to 16 x 16 pixels, to fit a CPU. The third writes what the first one reads.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
from recall import ATTACKS, SETTINGS, Progress, report
from timing_rules import Recording, tried

from fedlaw import data
from fedlaw.experiments.description import Execution, Experiment
from fedlaw.experiments.runner import run_together
from fedlaw.results import Store
from fedlaw.server import Core


def halved(name: str = "cifar10") -> data.Dataset:
    """A data set of images at half its width and height: means of 2 x 2 pixels."""
    full = data.load(name)
    n, c, h, w = full.inputs.shape
    small = full.inputs.reshape(n, c, h // 2, 2, w // 2, 2).astype(np.float32).mean((3, 5))
    return data.from_arrays(small.round().astype(np.uint8), full.labels, name=f"{name}-{h // 2}")


CIFAR = {
    "dataset": "timing:halved",
    "batch_size": 16,
    "lr": 0.01,
    "clients": 200,
    "split": (48000, 2000, 10000),
}
MNIST = {"dataset": "mnist", "model": "mlp", **SETTINGS["mnist"]}
# By name: the setting, how many rounds are judged, q, attacks, seeds.
RECORDED: dict[str, tuple[dict[str, Any], int, float, str, list[int]]] = {
    "digits": (
        {"dataset": "digits", "model": "mlp", **SETTINGS["digits"], "clients": 30},
        60, 0.6, "none flip inverse mimic double noisy-lie", [0, 1, 2, 3, 4, 40, 41, 42, 43, 44],
    ),
    "mnist-20": (MNIST | {"clients": 20}, 60, 0.9, "none flip inverse mimic", [0]),
    "mnist-50": (MNIST | {"clients": 50}, 60, 0.9, "none flip inverse mimic", [0]),
    "mnist-50-few": (
        MNIST | {"clients": 50, "examples": 14000},
        60, 0.9, "none flip inverse", [101, 102, 103, 104],
    ),
    "cifar10-mlp": (CIFAR | {"model": "mlp"}, 60, 0.9, "none flip inverse mimic", [0]),
    "cifar10-cnn": (
        CIFAR | {"model": "cnn", "model_settings": {"channels": [16, 32], "hidden": [64]}},
        40, 0.9, "flip none", [0],
    ),
}  # fmt: skip


def plan(name: str) -> dict[str, Experiment]:
    """The runs of a setting by name, judged to the last round."""
    setting, rounds, q, attacks, seeds = RECORDED[name]
    judge = {"judged_rounds": rounds, "turnover": 1.0, "fade": 0.0, "two_groups": 0.0, "majority": 0.0}
    rule = {"name": "fedlaw", "preset": "hardened", **judge}
    known = ATTACKS | {"none": "none"}
    return {
        f"hardened {attack} {q} {seed}": Experiment(
            **setting
            | {"seed": seed, "q": q, "epochs": 3, "rounds": rounds, "evaluate_every": 10, "rule": rule},
            attack=known[attack],
            malicious=0.0 if attack == "none" else 0.4,
        )
        for seed, attack in product(seeds, attacks.split())
    }


def found(store: Path, runs: dict[str, Experiment]) -> dict[str, Any]:
    """The runs under the ids they have in the store; what is void where `judged_rounds` is given may differ."""

    def essence(description: dict[str, Any]) -> dict[str, Any]:
        return description | {"rule": {k: v for k, v in description["rule"].items() if k != "judged_share"}}

    with Store(store, read_only=True) as opened:
        there = [(info.id, essence(info.description)) for info in opened.runs() if info.status == "finished"]
    named = {}
    for name, experiment in runs.items():
        wanted = essence(experiment.canonical())
        ids = [id for id, description in there if description == wanted]
        kept = {
            key: getattr(experiment, key)
            for key in ("partition_settings", "malicious_count", "clients", "seed")
        }
        named[name] = SimpleNamespace(id=ids[0] if ids else experiment.id, **kept)
    return named


def read(file: Path) -> Iterator[Recording]:
    """The runs of a results file, or of a CSV and of the .npz beside it.

    Those that ended early are left aside, unless all of a group did: they say less of rules that end later.
    """
    runs = list(_read_store(file) if file.suffix == ".sqlite" else _read_csv(file))
    for group in dict.fromkeys(each.group for each in runs):
        alike = [each for each in runs if each.group == group]
        judged = max(each.judged for each in alike)
        complete = [each for each in alike if len(each.cosines) >= judged]
        yield from complete or alike


def _read_csv(file: Path) -> Iterator[Recording]:
    table, arrays = pd.read_csv(file), np.load(file.with_suffix(".npz"))
    table = table[table.rule == "hardened"]
    most = max(len(arrays[f"{run}.cosines"]) for run in table.run)
    for row in table.itertuples():
        cosines = arrays[f"{row.run}.cosines"].astype(float)
        group = f"{file.stem.removeprefix('timing-')} q={row.q}"
        yield Recording(group, str(row.attack), cosines, arrays[f"{row.run}.malicious"].astype(bool), most)


def _read_store(file: Path) -> Iterator[Recording]:
    with Store(file, read_only=True) as store:
        for info in store.runs():
            what = info.description
            if what["rule"].get("name") != "fedlaw" or not what["rule"].get("two_groups"):
                continue
            cosines = np.asarray(
                [r.alignment for r in store.records(info.id) if r.alignment is not None], np.float64
            )
            judge = Core().bind(what["clients"], what["rounds"])
            # In a split attack some stop: half of the paper's double attackers do.
            if info.status == "finished" and what["attack"]["name"] != "split":
                attack = "flip" if what["attack"]["name"] == "label_flip" else what["attack"]["name"]
                malicious = np.asarray(store.setup(info.id)["malicious"], bool)
                q = what["partition_settings"]["q"]
                yield Recording(
                    f"{file.stem} q={q}", attack, cosines, malicious, judge.judged_rounds or len(cosines)
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="recordings to try the rules on")
    parser.add_argument("--record", choices=[*RECORDED], nargs="+", default=[])
    parser.add_argument("--data-dir", type=Path, help="files of MNIST and CIFAR-10")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--store", type=Path, default=Path("timing.sqlite"))
    parser.add_argument("--report", type=Path, help="write PATH-SETTING.csv and .npz from the store and stop")
    given = parser.parse_args()
    if given.data_dir:
        os.environ["FEDLAW_DATA"] = str(given.data_dir)
    for name in given.record:
        runs = plan(name)
        if given.report:
            report(
                given.store, found(given.store, runs), given.report.with_name(f"{given.report.name}-{name}")
            )
            continue
        progress = Progress(sum(experiment.rounds for experiment in runs.values()))
        execution = Execution(device="cpu", threads=given.threads, checkpoint_seconds=60)
        for experiment in runs.values():
            run_together(
                [experiment], store=given.store, execution=execution, resume=True, callbacks=[progress]
            )
    if given.files:
        table = tried([each for file in given.files for each in read(file)])
        print(table.to_string(float_format="{:.3f}".format))


if __name__ == "__main__":
    main()
