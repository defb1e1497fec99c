"""What recorded cosines say: how far honest clients and attackers are apart, when to decide, and a picture of it.

    python benchmarks/recordings.py results/mnist.sqlite
    python benchmarks/recordings.py results/mnist.sqlite --figure docs/images/cosines.png

For every attack, share of attackers and q of the runs of `hardened` in a results file with cosines (exported with
`--cosines`): the lowest mean cosine of any honest client and the highest of any attacker that was not excluded,
over the last third of a window at round J / 2 and over a whole window at the freeze (where `Core.threshold`
decides). The figure shows the cosines of every client in every judged round, one run an attack: 40 % attackers,
q = 0.9, the first seed there is.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from fedlaw.results import Store
from fedlaw.server import Core

Figures = dict[str, list[float]]


def sides(cosines: Any, malicious: Any, end: int, window: int) -> tuple[float, float]:
    """Lowest mean of an honest client and highest of an attacker, over `window` rounds up to `end`."""
    there = ~np.isnan(cosines[end - 1])
    mean = np.nanmean(cosines[end - window : end], axis=0)
    honest, attackers = mean[there & ~malicious], mean[there & malicious]
    return honest.min(), attackers.max() if attackers.size else np.nan


def table(store: Path) -> dict[tuple[str, float, float], Figures]:
    """Figures by attack, q and share of attackers."""
    found: dict[tuple[str, float, float], Figures] = defaultdict(lambda: defaultdict(list))
    with Store(store, read_only=True) as opened:
        for info in opened.runs():
            what = info.description
            if what["rule"].get("name") != "fedlaw" or not what["rule"].get("two_groups"):
                continue
            rows = [r.alignment for r in opened.records(info.id) if r.alignment is not None]
            if info.status != "finished" or len(rows) < 2:
                continue
            malicious = np.asarray(opened.setup(info.id)["malicious"], dtype=bool)
            cosines = np.asarray(rows, dtype=np.float64)
            judge = Core().bind(what["clients"], what["rounds"])
            judged, window = judge.judged_rounds or 0, judge.window or 0
            share = malicious.sum() / what["clients"]
            figures = found[what["attack"]["name"], what["partition_settings"]["q"], share]
            if len(rows) >= judged // 2:
                low, high = sides(cosines, malicious, judged // 2, window // 3)
                figures["half honest"].append(low)
                figures["half attackers"].append(high)
            low, high = sides(cosines, malicious, len(rows), min(window, len(rows)))
            figures["end honest"].append(low)
            figures["end attackers"].append(high)
    return found


PICTURED = ("label_flip", "inverse_gradient", "backdoor", "none")


def picture(store: Path, file: Path) -> None:
    """A panel for each of `PICTURED`: a line a client, mean of five rounds."""
    from matplotlib.figure import Figure

    with Store(store, read_only=True) as opened:
        chosen: dict[str, Any] = {}
        for info in sorted(opened.runs(), key=lambda info: int(info.description["seed"])):
            what = info.description
            right = what["partition_settings"]["q"] == 0.9 and what["malicious"] in (0, 0.4 * what["clients"])
            if info.status == "finished" and what["rule"].get("two_groups") and right:
                chosen.setdefault(what["attack"]["name"], info)
        figure = Figure(figsize=(10, 5.6), layout="constrained")
        panels = figure.subplots(2, 2, sharex=True, sharey=True).flat
        for panel, name in zip(panels, PICTURED, strict=True):
            info = chosen[name]
            malicious = np.asarray(opened.setup(info.id)["malicious"], dtype=bool)
            rows = [r.alignment for r in opened.records(info.id) if r.alignment is not None]
            smooth = np.lib.stride_tricks.sliding_window_view(np.asarray(rows, float), 5, axis=0).mean(-1)
            x = np.arange(5, len(smooth) + 5)
            panel.plot(x, smooth[:, ~malicious], color="#2166ac", linewidth=0.4, alpha=0.5)
            panel.plot(x, smooth[:, malicious], color="#b2182b", linewidth=0.4, alpha=0.6)
            panel.axhline(Core().threshold, color="black", linewidth=0.8, linestyle="--")
            panel.set_title(f"{name.replace('_', ' ')}, seed {info.description['seed']}", fontsize=10)
    figure.supxlabel("judged round")
    figure.supylabel("cosine with the core's next gradient (mean of five rounds)")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("--figure", type=Path, help="draw the cosines into this file instead")
    given = parser.parse_args()
    if given.figure:
        picture(given.store, given.figure)
        return
    print(
        f"{'attack':18}{'q':>5}{'share':>7}{'runs':>6}   {'J/2: honest from':>17}{'attackers to':>14}"
        f"   {'freeze: honest from':>20}{'attackers to':>14}"
    )
    for (attack, q, share), f in sorted(table(given.store).items()):
        cells = [np.nanmin(f["half honest"]), np.nanmax(np.append(f["half attackers"], -np.inf))]
        ends = [np.nanmin(f["end honest"]), np.nanmax(np.append(f["end attackers"], -np.inf))]
        shown = ["-" if np.isinf(x) else f"{x:.2f}" for x in (*cells, *ends)]
        print(
            f"{attack:18}{q:5}{share:7.0%}{len(f['end honest']):6}   {shown[0]:>17}{shown[1]:>14}"
            f"   {shown[2]:>20}{shown[3]:>14}"
        )


if __name__ == "__main__":
    main()
