"""`fedlaw demo`: a live board, a final table, a picture, and what was seen in words."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from fedlaw import cli_show
from fedlaw.experiments import demo
from fedlaw.experiments.description import Experiment
from fedlaw.results import RoundRecord, attacker_weight

_SPARK_WIDTH = 24
_PLAIN_LINES = 5  # of each rule, where stdout is not a terminal


def show(*, seed: int, rounds: int, clients: int, attack: str, output: Path) -> None:
    """Run the demonstration and print it."""
    console = Console()
    described = demo.experiments(seed=seed, rounds=rounds, clients=clients, attack=attack)
    one = next(iter(described.values()))
    output.mkdir(parents=True, exist_ok=True)  # what cannot be written to is said before the training
    print(
        f"digits, {clients} clients, {one.malicious_count} of them attack: {attack} (seed {seed})", flush=True
    )
    began = time.perf_counter()
    board = Board(described, console)
    if console.is_terminal:
        with Live(board.table(), console=console, refresh_per_second=8) as board.live:
            results = demo.side_by_side(described, board.watch)
    else:
        results = demo.side_by_side(described, board.watch)
    seconds = time.perf_counter() - began
    cli_show.table(
        ("rule", "test accuracy", "attackers found", "honest excluded", "communication rounds"),
        [
            (
                name,
                _percent(result.summary["test_accuracy"]),
                _percent(result.summary.get("recall")),
                _percent(result.summary.get("honest_excluded")),
                str(result.summary["communication_rounds"]),
            )
            for name, result in results.items()
        ],
    )
    for name, result in results.items():
        for note in dict.fromkeys(result.summary["notes"]):
            print(f"note: {name}: {note}")
    picture = demo.picture(results, output)
    print(demo.verdict(results))
    print(f"{seconds:.0f} s of training and judging; the picture is {picture}")


class Board:
    """One row a rule: how far it is, its accuracy so far, the share of weight on attackers."""

    def __init__(self, described: Mapping[str, Experiment], console: Console) -> None:
        self.console = console
        self.rounds = {label: experiment.rounds for label, experiment in described.items()}
        self.accuracy: dict[str, list[float]] = {label: [] for label in described}
        self.done = dict.fromkeys(described, 0)
        self.weight: dict[str, float | None] = dict.fromkeys(described)
        self.live: Live | None = None

    def watch(self, label: str, record: RoundRecord, setup: dict[str, Any]) -> None:
        """Take in a round; show it."""
        self.done[label] = record.round
        if record.test_accuracy is not None:
            self.accuracy[label].append(record.test_accuracy)
        self.weight[label] = attacker_weight(record.weights, setup["malicious"])
        if self.live is not None:
            self.live.update(self.table())
        elif record.round % max(1, self.rounds[label] // _PLAIN_LINES) == 0:
            latest = self.accuracy[label][-1:]
            print(
                f"{label:<8} round {record.round}/{self.rounds[label]}  accuracy {_percent(*latest)}  "
                f"weight on attackers {_percent(self.weight[label])}",
                flush=True,
            )

    def table(self) -> Table:
        """The board as it stands."""
        shown = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for head in ("rule", "", "round", "accuracy so far", "now", "weight on attackers"):
            shown.add_column(
                head, justify="right" if head in ("round", "now", "weight on attackers") else "left"
            )
        for label, values in self.accuracy.items():
            shown.add_row(
                label,
                ProgressBar(total=self.rounds[label], completed=self.done[label], width=18),
                f"{self.done[label]}/{self.rounds[label]}",
                sparkline(values, _SPARK_WIDTH, ascii_only="utf" not in self.console.encoding.lower()),
                _percent(*values[-1:]),
                _percent(self.weight[label]),
            )
        return shown


def sparkline(values: list[float], width: int, *, ascii_only: bool = False) -> str:
    """Shares from 0 to 1 as a row of blocks, at most `width` of them.

    >>> sparkline([0.0, 0.5, 1.0], 8)
    '▁▅█'
    """
    marks = " .:-=+*#" if ascii_only else "▁▂▃▄▅▆▇█"
    step = max(1, -(-len(values) // width))
    kept = values[::-1][::step][::-1]  # so that the latest is among them
    return "".join(marks[min(7, int(max(0.0, value) * 8))] for value in kept)


def _percent(share: float | None = None) -> str:
    return "-" if share is None else f"{share:.1%}"
