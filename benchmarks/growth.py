"""How cost grows: with the number of clients, with the size of the model, and with experiments stacked together.

    python benchmarks/growth.py                        # clients, then parameters, then experiments
    python benchmarks/growth.py clients --most 1e8     # one of them, as far as n*d = 1e8
    python benchmarks/growth.py --device cuda

Clients and parameters: one phase of local training (64 examples a client, one batch) and one judged round of the
server, which is two phases told and ended: `paper` takes the published weight step, `hardened` core judging. Next
to the server's seconds stands how many times G, the (n, d) matrix of updates, could have been read in them.
Experiments: one judged round of whole federations of 50 clients each, trained in one program. `growth` is the time
per client (per parameter, per experiment) over that of the row above: 1.00 is straight proportion, less is better.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import machine
from torch import nn

from fedlaw import attacks
from fedlaw.data import Examples, Partition
from fedlaw.models import count_parameters, flatten, mlp
from fedlaw.server import Core, FedLAW, Replies, Settings, preset
from fedlaw.simulation import Jobs, LocalWork, Trained, train
from fedlaw.simulation.federation import Federation, Stack, populate

EXAMPLES, POOL, CLASSES = 64, 8192, 10
CLIENTS = (50, 100, 200, 500, 1000, 2000, 5000)
WIDTHS = (12, 126, 1258, 12578)  # of one hidden layer: d = 795 width + 10, from 10^4 to 10^7
STACKED = (1, 2, 4, 8, 16, 32, 64)
SERVERS = ("paper", "hardened")
_LONG, _TOO_LONG = 5.0, 60.0  # seconds: what takes longer is not repeated, or not done
WORK = LocalWork(epochs=1, batch_size=64)


def best(call: Callable[[], object], repeats: int) -> float:
    """Least seconds of one call."""
    found = []
    for _ in range(repeats):
        _wait()
        start = time.perf_counter()
        call()
        _wait()
        found.append(time.perf_counter() - start)
    return min(found)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def pool(seed: int = 0) -> Examples:
    """Random examples, which all clients share."""
    stream = torch.Generator().manual_seed(seed)
    inputs = torch.randn(POOL, 1, 28, 28, generator=stream)
    return Examples(inputs, torch.randint(0, CLASSES, (POOL,), generator=stream))


def sizes(cases: Iterable[tuple[int, nn.Module]], device: str, repeats: int) -> Iterator[dict[str, float]]:
    """One row after the other. A server that would take too long, growing with n^2, is left out: NaN."""
    took: dict[str, tuple[float, float]] = {}  # by server: n^2 d and seconds of the row before
    for n, model in cases:
        cost = float(n) ** 2 * count_parameters(model)
        long = {name for name, (before, seconds) in took.items() if seconds * cost / before > _TOO_LONG}
        row = one_size(n, model.to(device), device, repeats, [s for s in SERVERS if s not in long])
        took |= {name: (cost, row[name]) for name in SERVERS if not math.isnan(row[name])}
        yield row


def one_size(n: int, model: nn.Module, device: str, repeats: int, servers: Sequence[str]) -> dict[str, float]:
    """Seconds of a phase of training and of a judged round of each server, and of reading G once."""
    theta = flatten(model).to(device)
    inputs, labels = (part.to(device) for part in pool())
    order = torch.randint(0, POOL, (n, 1, EXAMPLES), generator=torch.Generator().manual_seed(1)).to(device)
    counts = torch.full((n,), EXAMPLES, device=device)
    jobs = Jobs(torch.zeros_like(counts), order, counts)
    made: list[Trained] = []

    def training() -> None:
        made.clear()
        made.append(train(model, theta.unsqueeze(0), inputs, labels, jobs, WORK))

    row: dict[str, float] = {"n": n, "d": len(theta), "training": best(training, repeats)}
    replies = Replies(range(n), *made[0], counts.double())
    row["pass"] = best(lambda: torch.mv(replies.updates, theta), repeats + 1)
    row |= dict.fromkeys(SERVERS, math.nan)
    for name in servers:
        judge = preset(name) if name == "paper" else Core(judged_rounds=repeats + 1, equal_losses="once")
        server = FedLAW(theta, range(n), judge, Settings(rounds=repeats + 1, alpha=WORK.lr))

        def judged(server: FedLAW = server) -> None:
            for _ in range(2):
                server.tell(replies)
                report = server.end_phase()
            assert report is not None
            assert report.skipped is None
            assert report.phases == 2

        first = best(judged, 1)  # makes room for G, which matters little where it takes long
        row[name] = first if first > _LONG else best(judged, repeats)
        del server
    return row


def stack_of(count: int, device: str) -> Stack:
    """Federations of 50 clients, alike but for their data."""
    federations, data, nobody = [], pool(), attacks.create("none")
    for seed in range(count):
        torch.manual_seed(seed)
        model = mlp((1, 28, 28), CLASSES).to(device)
        server = FedLAW(flatten(model), range(50), Core(judged_rounds=20), Settings(rounds=20, alpha=WORK.lr))
        shares = np.random.default_rng(seed).permutation(POOL)[: 50 * EXAMPLES].reshape(50, EXAMPLES)
        people = populate(
            data,
            Partition(tuple(np.sort(own) for own in shares)),
            torch.zeros(50, dtype=torch.bool),
            nobody,
            classes=CLASSES,
            black=0.0,
            seed=seed,
        )
        federations.append(Federation(server, people, model, nobody, WORK, seed=seed))
    return Stack(federations)


def one_stack(count: int, device: str, repeats: int) -> dict[str, float]:
    """Seconds of one judged round of all experiments."""
    stack = stack_of(count, device)

    def both_phases() -> None:
        stack.step()
        stack.step()

    both_phases()
    d = count_parameters(stack.federations[0].model)
    return {"experiments": count, "d": d, "round": best(both_phases, repeats)}


def rate(row: dict[str, float], before: dict[str, float] | None, part: str, unit: str) -> str:
    """Time per `unit` over that of the row before, as a cell."""
    if before is None:
        return " " * 8
    return _cell((row[part] / row[unit]) / (before[part] / before[unit]), 8, 2)


def _cell(value: float, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if math.isnan(value) else f"{value:{width}.{digits}f}"


def by_size(rows: Iterable[dict[str, float]], unit: str) -> list[dict[str, float]]:
    """Show the table of clients (`unit` n) or of parameters (`unit` d), row by row, and return it."""
    shown = []
    print(
        f"{'n':>6}{'d':>12}{'n*d':>10}{'training s':>12}{'us/' + ('client' if unit == 'n' else '1000 d'):>11}"
        f"{'growth':>8}{'paper s':>12}{'passes':>8}{'growth':>8}{'hardened s':>12}{'passes':>8}{'growth':>8}"
    )
    before: dict[str, float] | None = None
    for row in rows:
        share = row["n"] if unit == "n" else row["n"] * row["d"] / 1e3
        print(
            f"{row['n']:6,.0f}{row['d']:12,.0f}{row['n'] * row['d']:10.1e}{row['training']:12.3f}"
            f"{1e6 * row['training'] / share:11.2f}{rate(row, before, 'training', unit)}"
            + "".join(
                f"{_cell(row[name], 12, 3)}{_cell(row[name] / row['pass'], 8, 1)}{rate(row, before, name, unit)}"
                for name in SERVERS
            ),
            flush=True,
        )
        before = row
        shown.append(row)
    return shown


def by_stack(rows: Iterable[dict[str, float]]) -> list[dict[str, float]]:
    """Show the table of stacked experiments, row by row, and return it."""
    shown = []
    print(f"{'experiments':>12}{'round s':>10}{'ms/experiment':>15}{'growth':>8}")
    before: dict[str, float] | None = None
    for row in rows:
        each = row["round"] / row["experiments"]
        growth = "" if before is None else f"{each / (before['round'] / before['experiments']):.2f}"
        print(f"{row['experiments']:12.0f}{row['round']:10.3f}{1e3 * each:15.2f}{growth:>8}", flush=True)
        before = row
        shown.append(row)
    return shown


def hidden_layer(width: int) -> nn.Module:
    """784 - width - 10."""
    torch.manual_seed(0)
    return mlp((1, 28, 28), CLASSES, (width,))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("axes", nargs="*", default=["clients", "parameters", "experiments"])
    parser.add_argument(
        "--most", type=float, default=1e9, help="largest n*d (memory: about 10 bytes times this)"
    )
    parser.add_argument("--clients", type=int, default=100, help="of the federations whose model grows")
    parser.add_argument("--experiments", type=int, default=64, help="most that are stacked")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    args = parser.parse_args()
    if unknown := set(args.axes) - {"clients", "parameters", "experiments"}:
        parser.error(f"no axis {', '.join(sorted(unknown))}; there are: clients, parameters, experiments")
    print(machine())
    print(f"{args.device}; {EXAMPLES} examples a client, one batch; best of {args.repeats}")
    report: dict[str, Any] = {"machine": machine(), "device": args.device}
    torch.manual_seed(0)
    standard = mlp((1, 28, 28), CLASSES)
    if "clients" in args.axes:
        d = count_parameters(standard)
        print(f"\nClients, MLP 784-128-64-10, {d:,} parameters")
        cases: list[tuple[int, nn.Module]] = [(n, standard) for n in CLIENTS if n * d <= args.most]
        report["clients"] = by_size(sizes(cases, args.device, args.repeats), "n")
    if "parameters" in args.axes:
        print(f"\nParameters, one hidden layer, {args.clients} clients")
        n = args.clients
        cases = [(n, hidden_layer(w)) for w in WIDTHS if n * (795 * w + 10) <= args.most]
        report["parameters"] = by_size(sizes(cases, args.device, args.repeats), "d")
    if "experiments" in args.axes:
        print("\nStacked experiments, 50 clients each, MLP 784-128-64-10, hardened, one judged round")
        counts = [c for c in STACKED if c <= args.experiments]
        stacks = (one_stack(count, args.device, args.repeats) for count in counts)
        report["experiments"] = by_stack(stacks)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
