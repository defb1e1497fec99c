"""Rules for the end of judging, and what recorded cosines would have made of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pandas as pd
import torch

from fedlaw.server import preset
from fedlaw.server.core_math import lowest_mean, two_groups
from fedlaw.server.core_verdict import WORST_SHARE


@dataclass(frozen=True, eq=False)
class Recording:
    """One run: cosines (rounds, n), NaN where a client was excluded, who attacked, and J."""

    group: str
    attack: str
    cosines: Any
    malicious: Any
    judged: int


JUDGE: Any = preset("hardened")
FIRST, RECENT = JUDGE.too_good_to + JUDGE.fade_rounds, JUDGE.fade_rounds


def seats(n: int) -> int:
    return n - int(JUDGE.attackers_below * n + 1e-9)


def recent(cosines: Any, k: int) -> Any:
    return np.where(np.isnan(cosines[k - 1]), np.nan, np.nanmean(cosines[max(0, k - RECENT) : k], axis=0))


@lru_cache(4096)  # rules ask the same of a recording
def apart(recording: Recording, end: int) -> Any:
    """Who belongs to a group of its own that is against the core, as the preset sees it."""
    cosines = recording.cosines
    window = max(JUDGE.too_good_to, int(np.ceil(JUDGE.two_groups_share * end - 1e-9)))
    by_worst, alive = lowest(cosines, end, window), ~np.isnan(cosines[end - 1])
    below = lower(cosines, end, by_worst)
    if below.any():
        clear = by_worst[alive & ~below].min() - by_worst[below].max() > JUDGE.fade * peak(
            cosines, end, alive
        )
        below &= (by_worst < 0) & clear
    return below | lower(cosines, end, windowed(cosines, end, window))


def peak(cosines: Any, end: int, alive: Any) -> float:
    """The median of the clients' largest recent mean cosines."""
    means = np.lib.stride_tricks.sliding_window_view(cosines[:end, alive], RECENT, axis=0).mean(-1)
    peaks = np.nanmax(means, axis=0)
    return float(np.median(peaks[peaks > 0])) if (peaks > 0).any() else 0.0


def windowed(cosines: Any, end: int, window: int) -> Any:
    return np.nanmean(cosines[max(0, end - window) : end], axis=0)


def lowest(cosines: Any, end: int, window: int) -> Any:
    return lowest_mean(torch.tensor(cosines[:end]), window, WORST_SHARE).numpy()


def lower(cosines: Any, end: int, mean: Any) -> Any:
    """Who is in the lower of two groups, and it below zero, by these mean cosines."""
    n, alive = len(cosines[0]), ~np.isnan(cosines[end - 1])
    room = torch.tensor([JUDGE.most_out(n) - int((~alive).sum())])
    gap, low, below = two_groups(torch.tensor(mean), torch.tensor(alive), JUDGE.group(n), room)
    return below.numpy() & (float(gap) >= JUDGE.two_groups) & (float(low) < 0)


@lru_cache(4096)
def sides(recording: Recording, end: int, groups: bool = True) -> tuple[Any, Any, Any]:
    """Who would be in and who out (the excluded in neither) after round `end`, and the windowed means."""
    cosines, window = recording.cosines, 3 * recording.judged // 8
    mean, alive = np.nanmean(cosines[max(0, end - window) : end], axis=0), ~np.isnan(cosines[end - 1])
    best = np.argsort(-np.where(alive, mean, -np.inf), kind="stable")[: seats(len(mean))]
    joins = mean > JUDGE.threshold
    if groups:
        joins = joins & ~apart(recording, end)
    inside = (np.isin(np.arange(len(mean)), best) | joins) & alive
    return inside, alive & ~inside, mean


def verdict(recording: Recording, end: int, groups: bool) -> tuple[float, float]:
    """Shares of attackers and of honest clients that are shut out by a freeze after round `end`."""
    inside, bad = sides(recording, end, groups)[0], recording.malicious
    return (float((~inside)[bad].mean()) if bad.any() else np.nan), float((~inside)[~bad].mean())


def fixed(_: Recording) -> Callable[[int], bool]:
    return lambda k: False


def unanimous(recording: Recording) -> Callable[[int], bool]:
    """Nobody below zero in the last third of a window, asked once, half-way."""
    cosines, judged = recording.cosines, recording.judged
    third = max(1, 3 * judged // 8 // 3)

    def over(k: int) -> bool:
        mean = np.nanmean(cosines[k - third : k], axis=0)
        return k == judged // 2 and bool((mean[~np.isnan(cosines[k - 1])] > 0).all())

    return over


def divided(recording: Recording, width: float = 0.15) -> Callable[[int], bool]:
    """A gap across zero, with no more clients below it than may attack, for five rounds in a row."""
    cosines, lasting = recording.cosines, 0

    def over(k: int) -> bool:
        nonlocal lasting
        mean = np.sort(recent(cosines, k)[~np.isnan(cosines[k - 1])])
        gaps = np.diff(mean)
        room = len(cosines[0]) - seats(len(cosines[0]))
        ok = (mean[:-1] < 0) & (mean[1:] > 0) & (np.arange(1, len(mean)) <= room) & (gaps > width)
        lasting = lasting + 1 if ok.any() else 0
        return k >= FIRST and lasting >= RECENT

    return over


def faded(
    recording: Recording,
    share: float,
    *,
    clear: bool = True,
    settled: bool = True,
    groups: bool = True,
) -> Callable[[int], bool]:
    """What clients have left of their peaks, in the median of the best 55 %, under a share for five rounds.

    `clear`: and whoever would be out stands apart by that share of the median peak, or (`groups`) as a group.
    `settled`: and nobody has joined them for five rounds, by which alone nobody else is in a group below.
    """
    cosines, judged = recording.cosines, recording.judged
    peaks, lasting = np.full(len(cosines[0]), -np.inf), 0
    before, same = np.zeros(len(cosines[0]), bool), 0

    def over(k: int) -> bool:
        nonlocal peaks, lasting, before, same
        mean = recent(cosines, k)
        peaks = np.fmax(peaks, mean)
        there = ~np.isnan(mean)
        usual = np.median(peaks[there & (peaks > 0)])
        left = np.sort((mean / np.maximum(peaks, usual))[there])[::-1]
        lasting = lasting + 1 if np.median(left[: seats(len(mean))]) < share else 0
        inside, outside, mean = sides(recording, k, groups)
        known = before & (lasting > 1)  # each client unsettles the verdict once
        same = 1 if (outside & ~known).any() else same + 1
        before = outside | known
        if k < FIRST or lasting < RECENT:
            return False
        unsettled = same < RECENT or (lower(cosines, k, recent(cosines, k)) & inside).any()
        if settled and unsettled and lasting < 3 * judged // 8:
            return False
        if not clear or not outside.any() or (groups and apart(recording, k).any()):
            return True
        return bool(mean[inside].min() - mean[outside].max() >= share * usual)

    return over


ALONE = "faded to 20%, threshold alone"
RULES: dict[str, Callable[[Recording], Callable[[int], bool]]] = {
    "all rounds": fixed,
    "nobody below zero, half-way": unanimous,
    "a gap across zero": divided,
    **{f"faded to {share:.0%}": partial(faded, share=share) for share in (0.1, 0.2, 0.3, 0.5)},
    "faded to 20%, settled or not": partial(faded, share=0.2, settled=False),
    "faded to 20%, clear or not": partial(faded, share=0.2, clear=False, settled=False),
    ALONE: partial(faded, share=0.2, settled=False, groups=False),
}


def tried(recordings: list[Recording]) -> pd.DataFrame:
    """A line for every group of runs and rule."""
    rows = []
    for recording in recordings:
        for name, rule in RULES.items():
            over = rule(recording)
            rounds = range(RECENT, len(recording.cosines) + 1)
            end = next((k for k in rounds if over(k)), len(recording.cosines))
            found, lost = verdict(recording, end, groups=name != ALONE)
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
