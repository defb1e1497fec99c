"""When should judging end? Rules tried on recorded cosines, on data sets where they fade at very different speeds.

    python benchmarks/timing.py results/timing-*.csv results/mnist.sqlite results/mnist-hardened.csv
    python benchmarks/timing.py --record cifar10-mlp --data-dir DATA --store timing.sqlite
    python benchmarks/timing.py --record cifar10-mlp --store timing.sqlite --report results/timing

The first command reads recordings (a results file, or a CSV, one line a run, and the .npz of the same name) and
prints, for every timing rule and every group of runs, in which round judging would have ended, which share of the
attackers and which of the honest clients would have been shut out, and in how many runs something went wrong. The
second makes recordings: runs of preset `hardened` that are judged to their last round, whatever the signal.
CIFAR-10 is halved there to 16 x 16 pixels, to fit a CPU. The third writes what the first one reads.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
from recall import ATTACKS, SETTINGS, Progress, report

from fedlaw import data
from fedlaw.experiments.description import Execution, Experiment
from fedlaw.experiments.runner import run_together
from fedlaw.results import Store
from fedlaw.server import Core, preset


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
    "cifar10-mlp": (CIFAR | {"model": "mlp"}, 60, 0.9, "none flip inverse mimic", [0]),
    "cifar10-cnn": (
        CIFAR | {"model": "cnn", "model_settings": {"channels": [16, 32], "hidden": [64]}},
        40, 0.9, "flip none", [0],
    ),
}  # fmt: skip


def plan(name: str) -> dict[str, Experiment]:
    """The runs of a setting by name, judged to the last round."""
    setting, rounds, q, attacks, seeds = RECORDED[name]
    judge = {"judged_rounds": rounds, "acquittal": 0.0, "turnover": 1.0, "fade": 0.0}
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


@dataclass(frozen=True)
class Recording:
    """One run: cosines (J, n), NaN where a client was excluded, and who attacked."""

    group: str
    attack: str
    cosines: Any
    malicious: Any


def read(file: Path) -> Iterator[Recording]:
    """The runs of a results file, or of a CSV and of the .npz beside it; those that ended early are left aside."""
    if file.suffix == ".sqlite":
        yield from _read_store(file)
        return
    table, arrays = pd.read_csv(file), np.load(file.with_suffix(".npz"))
    table = table[table.rule == "hardened"]
    rounds = {run: len(arrays[f"{run}.cosines"]) for run in table.run}
    for row in table.itertuples():
        cosines = arrays[f"{row.run}.cosines"].astype(float)
        if len(cosines) == max(rounds.values()):
            group = f"{file.stem.removeprefix('timing-')} q={row.q}"
            yield Recording(group, str(row.attack), cosines, arrays[f"{row.run}.malicious"].astype(bool))


def _read_store(file: Path) -> Iterator[Recording]:
    with Store(file, read_only=True) as store:
        for info in store.runs():
            what = info.description
            if what["rule"].get("name") != "fedlaw" or not what["rule"].get("appeal_gap"):
                continue
            cosines = np.asarray(
                [r.alignment for r in store.records(info.id) if r.alignment is not None], np.float64
            )
            judge = Core().bind(what["clients"], what["rounds"])
            if info.status == "finished" and len(cosines) >= (judge.judged_rounds or 0):
                attack = "flip" if what["attack"]["name"] == "label_flip" else what["attack"]["name"]
                malicious = np.asarray(store.setup(info.id)["malicious"], bool)
                q = what["partition_settings"]["q"]
                yield Recording(f"{file.stem} q={q}", attack, cosines, malicious)


# ------------------------------------------------------------------------------------------ the rules
JUDGE: Any = preset("hardened")
FIRST, RECENT = JUDGE.too_good_to + JUDGE.fade_rounds, JUDGE.fade_rounds


def seats(n: int) -> int:
    return n - int(JUDGE.attackers_below * n + 1e-9)


def recent(cosines: Any, k: int) -> Any:
    return np.where(np.isnan(cosines[k - 1]), np.nan, np.nanmean(cosines[max(0, k - RECENT) : k], axis=0))


def sides(cosines: Any, end: int) -> tuple[Any, Any, Any]:
    """Who would be in and who out (the excluded in neither) after round `end`, and the windowed means."""
    window = 3 * len(cosines) // 8
    mean, alive = np.nanmean(cosines[max(0, end - window) : end], axis=0), ~np.isnan(cosines[end - 1])
    best = np.argsort(-np.where(alive, mean, -np.inf), kind="stable")[: seats(len(mean))]
    inside = (np.isin(np.arange(len(mean)), best) | (mean > JUDGE.threshold)) & alive
    return inside, alive & ~inside, mean


def verdict(recording: Recording, end: int) -> tuple[float, float]:
    """Shares of attackers and of honest clients that are shut out by a freeze after round `end`."""
    out, bad = ~sides(recording.cosines, end)[0], recording.malicious
    return (float(out[bad].mean()) if bad.any() else np.nan), float(out[~bad].mean())


def fixed(_: Any) -> Callable[[int], bool]:
    return lambda k: False


def unanimous(cosines: Any) -> Callable[[int], bool]:
    """Nobody below zero in the last third of a window, asked once, half-way."""
    third = max(1, 3 * len(cosines) // 8 // 3)

    def over(k: int) -> bool:
        mean = np.nanmean(cosines[k - third : k], axis=0)
        return k == len(cosines) // 2 and bool((mean[~np.isnan(cosines[k - 1])] > 0).all())

    return over


def divided(cosines: Any, width: float = 0.15) -> Callable[[int], bool]:
    """A gap across zero, with no more clients below it than may attack, for five rounds in a row."""
    lasting = 0

    def over(k: int) -> bool:
        nonlocal lasting
        mean = np.sort(recent(cosines, k)[~np.isnan(cosines[k - 1])])
        gaps = np.diff(mean)
        room = len(cosines[0]) - seats(len(cosines[0]))
        ok = (mean[:-1] < 0) & (mean[1:] > 0) & (np.arange(1, len(mean)) <= room) & (gaps > width)
        lasting = lasting + 1 if ok.any() else 0
        return k >= FIRST and lasting >= RECENT

    return over


def faded(cosines: Any, share: float, *, clear: bool = True) -> Callable[[int], bool]:
    """What clients have left of their peaks, in the median of the best 55 %, under a share for five rounds.

    `clear`: and whoever would be out stands apart by that share of the median peak.
    """
    peaks, lasting = np.full(len(cosines[0]), -np.inf), 0

    def over(k: int) -> bool:
        nonlocal peaks, lasting
        mean = recent(cosines, k)
        peaks = np.fmax(peaks, mean)
        there = ~np.isnan(mean)
        usual = np.median(peaks[there & (peaks > 0)])
        left = np.sort((mean / np.maximum(peaks, usual))[there])[::-1]
        lasting = lasting + 1 if np.median(left[: seats(len(mean))]) < share else 0
        if k < FIRST or lasting < RECENT:
            return False
        inside, outside, mean = sides(cosines, k)
        return not clear or not outside.any() or mean[inside].min() - mean[outside].max() >= share * usual

    return over


RULES: dict[str, Callable[[Any], Callable[[int], bool]]] = {
    "all rounds": fixed,
    "nobody below zero, half-way": unanimous,
    "a gap across zero": divided,
    **{f"faded to {share:.0%}": (lambda c, share=share: faded(c, share)) for share in (0.1, 0.2, 0.3, 0.5)},
    "faded to 20%, clear or not": lambda cosines: faded(cosines, 0.2, clear=False),
}


def tried(recordings: list[Recording]) -> pd.DataFrame:
    """A line for every group of runs and rule."""
    rows = []
    for recording in recordings:
        for name, rule in RULES.items():
            over = rule(recording.cosines)
            rounds = range(RECENT, len(recording.cosines) + 1)
            end = next((k for k in rounds if over(k)), len(recording.cosines))
            found, lost = verdict(recording, end)
            rows.append((recording.group, recording.attack, name, end, found, lost))
    table = pd.DataFrame(rows, columns=["runs", "attack", "rule", "end", "found", "lost"])
    groups: dict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
    for (group, rule), part in table.groupby(["runs", "rule"], sort=False):
        attacked = part[part.found.notna()]
        flips = attacked.attack == "flip"
        groups[group, rule] = {
            "runs": len(part),
            "ends": f"{part.end.min()} to {part.end.max()}",
            "found": attacked.found[~flips].mean(),
            "flippers": attacked.found[flips].mean(),
            "lost": part.lost.mean(),
            "lost at most": part.lost.max(),
        }
    return pd.DataFrame(groups).T


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
