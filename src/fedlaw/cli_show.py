"""What the command prints: progress while something goes on, tables when it is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from fedlaw.results import RoundRecord, RunInfo

_PLAIN_LINES = 20  # log lines of a whole run where stdout is not a terminal


def names(summaries: Mapping[str, str]) -> None:
    """Names and what they are, one line each."""
    width = max(map(len, summaries), default=0)
    for name, words in summaries.items():
        print(f"{name:<{width}}  {words}")


# ------------------------------------------------------------------------------------------ progress
def progress() -> Lines:
    """A live bar on a terminal, log lines elsewhere."""
    return Bar() if Console().is_terminal else Lines()


class Lines:
    """Shows a run in a few plain lines, for logs: a callback of the runner, within a `with` block."""

    def __init__(self) -> None:
        self.done, self.total = 0, 0
        self._accuracy: float | None = None
        self._malicious: Any = None
        self._first = 0
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing was opened."""

    def on_start(self, experiment: Any, done_rounds: int, total_rounds: int, setup: dict[str, Any]) -> None:
        """Say what begins."""
        self.done, self.total, self._first = done_rounds, total_rounds, done_rounds
        self._malicious = setup.get("malicious")
        self._began = time.monotonic()
        self._begin(
            f"run {experiment.id[:8]}" + (f", from round {done_rounds + 1} on" if done_rounds else "")
        )

    def on_round(self, record: RoundRecord) -> None:
        """Show the round."""
        from fedlaw.results import attacker_weight

        self.done = record.round
        if record.test_accuracy is not None:
            self._accuracy = record.test_accuracy
        share = attacker_weight(record.weights, self._malicious)
        accuracy = "-" if self._accuracy is None else f"{self._accuracy:.1%}"
        attackers = "-" if share is None or not self._malicious.any() else f"{share:.1%}"
        self._show(accuracy, attackers)
        if record.skipped:
            self._say(f"round {record.round} was skipped: {record.skipped}")

    def on_end(self, result: Any) -> None:
        """The summary follows."""

    def _begin(self, words: str) -> None:
        self._say(words)

    def _say(self, words: str) -> None:
        print(words, flush=True)

    def _show(self, accuracy: str, attackers: str) -> None:
        every = max(1, self.total // _PLAIN_LINES)
        if self.done % every == 0 or self.done == self.total:
            rate = (time.monotonic() - self._began) / max(1, self.done - self._first)
            left = _duration(rate * (self.total - self.done))
            self._say(
                f"round {self.done}/{self.total}  accuracy {accuracy}  weight on attackers {attackers}  {left} left"
            )


class Bar(Lines):
    """A live bar with accuracy, weight on attackers and time left."""

    def __enter__(self) -> Self:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("round {task.completed:.0f}/{task.total:.0f}"),
            TextColumn("accuracy [bold]{task.fields[accuracy]}"),
            TextColumn("on attackers [bold]{task.fields[attackers]}"),
            TimeRemainingColumn(),
            expand=True,
        )
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def _begin(self, words: str) -> None:
        self._task = self._bar.add_task(
            words, total=self.total, completed=self.done, accuracy="-", attackers="-"
        )

    def _say(self, words: str) -> None:
        self._bar.console.print(words, style="yellow")

    def _show(self, accuracy: str, attackers: str) -> None:
        self._bar.update(self._task, completed=self.done, accuracy=accuracy, attackers=attackers)


@contextmanager
def download_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar per file on a terminal, a line per file elsewhere."""
    if not Console().is_terminal:
        told: set[str] = set()

        def line(file: str, done: int, total: int) -> None:
            if file not in told:
                told.add(file)
                print(f"{file}: {size(total)}", flush=True)

        yield line
        return
    with Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    ) as bar:
        tasks: dict[str, Any] = {}

        def show(file: str, done: int, total: int) -> None:
            if file not in tasks:
                tasks[file] = bar.add_task(file, total=total)
            bar.update(tasks[file], completed=done)

        yield show


# ------------------------------------------------------------------------------------------ tables
_PERCENT = {
    "test_accuracy": "test accuracy",
    "validation_accuracy": "validation accuracy",
    "attack_success": "attack success",
    "recall": "attackers found (recall)",
    "precision": "of those excluded, attackers (precision)",
    "honest_excluded": "honest clients excluded",
}


def summary(values: Mapping[str, Any]) -> None:
    """The figures of a finished run."""
    rows = [(words, f"{values[key]:.1%}") for key, words in _PERCENT.items() if values.get(key) is not None]
    if values.get("minority_excluded"):
        rows.append(("of them, in minority groups", str(values["minority_excluded"])))
    if values.get("diverged"):
        rows.append(("training", "diverged: accuracy is scored as chance"))
    if values.get("communication_rounds") is not None:
        rows.append(("communication rounds", str(values["communication_rounds"])))
    for key, words in (("bytes_up", "sent by clients"), ("bytes_down", "sent to clients")):
        if values.get(key) is not None:
            rows.append((words, size(values[key])))
    for key, words in (("skipped_rounds", "rounds skipped"), ("refusals", "replies refused")):
        if values.get(key):
            rows.append((words, str(values[key])))
    if values.get("skipped_why"):
        rows.append(("the last of them", str(values["skipped_why"])))
    if values.get("seconds") is not None:
        rows.append(("time", _duration(values["seconds"])))
    table(("", ""), rows)
    for note in dict.fromkeys(values.get("notes") or []):
        print(f"note: {note}")


def runs(infos: Sequence[RunInfo]) -> None:
    """The runs of a store, one line each."""
    from fedlaw.report.run import label

    rows = []
    for info in infos:
        what = info.description
        who = what["malicious"]
        many = len(who) if isinstance(who, list) else who
        accuracy = info.summary.get("test_accuracy")
        rows.append(
            (
                info.id[:8],
                info.status,
                f"{info.done}/{info.total}",
                what["dataset"],
                label(what["rule"]),
                f"{many}/{what['clients']} {label(what['attack'])}",
                str(what["seed"]),
                "-" if accuracy is None else f"{accuracy:.1%}",
                info.started[:16].replace("T", " "),
            )
        )
    table(("run", "status", "rounds", "dataset", "rule", "attack", "seed", "accuracy", "begun (UTC)"), rows)


def run(info: RunInfo) -> None:
    """One run: settings, origin, figures."""
    from fedlaw.results.frames import flatten

    rows = [("run", info.id), ("status", f"{info.status}, {info.done} of {info.total} rounds")]
    rows += [("begun", info.started), ("ended", info.ended or "-")]
    rows += [(key, str(value)) for key, value in info.versions.items()]
    rows += [(key, str(value)) for key, value in info.machine.items() if value is not None]
    if info.message:
        rows.append(("failure", info.message))
    rows += [(key, str(value)) for key, value in flatten(info.description).items() if value is not None]
    table(("", ""), rows)
    if info.summary:
        summary(info.summary)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on a terminal; elsewhere the same cells in columns, never cut or wrapped."""
    console = Console()
    if console.is_terminal:
        shown = Table(show_header=any(heads), box=None, padding=(0, 2, 0, 0), header_style="bold")
        for head in heads:
            shown.add_column(head, overflow="fold")
        for row in rows:
            shown.add_row(*row)
        console.print(shown, markup=False)
        return
    every = [heads, *rows] if any(heads) else list(rows)
    widths = [max(len(row[i]) for row in every) for i in range(len(heads))] if every else []
    for row in every:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def size(count: float) -> str:
    """Bytes as people read them.

    >>> size(512), size(2_500_000)
    ('512 B', '2.5 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{seconds:.1f} s" if seconds < 10 else f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
