"""Would the judge as it is today decide recorded runs as they were decided?

    python benchmarks/replay.py results/mnist.sqlite results/cifar10.sqlite

Every run of core judging by groups in a results file that keeps cosines is judged again, round by round, by the
functions that judge a run. Printed is how many runs there are of each attack, in how many of them judging ends in
the round in which it ended, and in how many the same clients are left out. Exclusions are taken from the record.
Not on record are losses, which count a thirtieth, so that the core's seats may differ by some, and cosines with
everybody's direction: appeals by it are not heard, and where nobody is left out judging does not end early.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from fedlaw.results import Store
from fedlaw.server import Core, Status, preset
from fedlaw.server.core_appeal import ends, fade, settle
from fedlaw.server.core_math import row_of
from fedlaw.server.core_verdict import decided, is_quiet

_MEMBER = tuple(Status).index(Status.MEMBER)


@dataclass(frozen=True)
class Judged:
    """A recorded run: what it was, its judge, cosines (rounds, n), NaN where there was none, and who was let in."""

    file: str
    attack: str
    judge: Core
    cosines: Any
    members: Any


def recorded(file: Path, every: int = 1) -> Iterator[Judged]:
    """The finished runs of core judging by groups, or every so many of them."""
    known, hardened = {field.name for field in fields(Core)}, preset("hardened")
    assert isinstance(hardened, Core)
    with Store(file, read_only=True) as store:
        judged = [info for info in store.runs() if info.description["rule"].get("two_groups")]
        for info in judged[::every]:
            what = info.description
            records = store.records(info.id)
            cosines = np.asarray([r.alignment for r in records if r.alignment is not None], np.float64)
            if info.status != "finished" or not len(cosines) or records[-1].statuses is None:
                continue
            settings = {name: value for name, value in what["rule"].items() if name in known}
            judge = replace(hardened, **settings).bind(what["clients"], what["rounds"])
            members = np.asarray(records[-1].statuses) == _MEMBER
            yield Judged(file.stem, what["attack"]["name"], judge, cosines, members)


def replay(run: Judged) -> tuple[int, Any]:
    """In which round judging ends, and who is a member then."""
    judge, cosines = run.judge, torch.tensor(run.cosines)
    state = judge.start(cosines.shape[-1], torch.zeros(1))
    gone = cosines.isnan().flip(0).cumprod(0).flip(0).bool()  # not heard from this round on
    for k, row in enumerate(cosines):
        scored = ~row.isnan()
        decay = judge.decay if k >= 2 else 0.0
        here = row_of(state.cosines, state.judged)
        state = replace(
            state,
            judged=state.judged + 1,
            asked=state.asked + scored,
            scored=state.scored + scored,
            excluded=gone[k].to(torch.int64),
            total=torch.where(scored, decay * state.total + row, state.total),
            decay=torch.where(scored, decay * state.decay + 1, state.decay),
            cosines=torch.where(here, row, state.cosines),
        )
        state = judge._seat(replace(state, quiet=state.quiet | (here & is_quiet(judge, state))))
        state = settle(judge, fade(judge, state))
        if bool(ends(judge, state)):
            break
    return int(state.judged), decided(judge, state)[0].numpy()


def replayed(file: Path, every: int = 1) -> pd.DataFrame:
    """A line a run: the attack, when judging ended and would end, and how many clients are judged otherwise."""
    rows = []
    for run in recorded(file, every):
        end, members = replay(run)
        differ = int((members != run.members).sum())
        rows.append((run.file, run.attack, len(run.cosines), end, differ))
    return pd.DataFrame(rows, columns=["file", "attack", "ended", "ends", "judged otherwise"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="results files that keep cosines")
    table = pd.concat([replayed(file) for file in parser.parse_args().files])
    table["same round"] = table.ended == table.ends
    table["same verdict"] = table["judged otherwise"] == 0
    how = {"ends": "count", "same round": "sum", "same verdict": "sum", "judged otherwise": "max"}
    grouped = table.groupby(["file", "attack"], sort=False).agg(how).rename(columns={"ends": "runs"})
    print(grouped.to_string())
    print(table[["same round", "same verdict"]].agg(["sum", "count"]).to_string())


if __name__ == "__main__":
    main()
