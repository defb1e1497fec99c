"""Milliseconds of every rule against its own lower bound and against ByzFL's, and its memory.

    python benchmarks/aggregators.py                          # d = 109,386, one thread and two
    python benchmarks/aggregators.py --d 109386 1000000 --json out.json
    python benchmarks/aggregators.py --device cuda --d 1000000
    python benchmarks/aggregators.py --growth                 # n from 50 to 5,000, d from 10^4 to 10^7

A rule's floor is made of what was measured in the same run: P, one pass of reading the input; W, writing as much
into fresh memory; Gram, n (n + 1) d operations at the rate of float32 matrix products; Mix, 2 n^2 d; sort(m),
columns of m values transposed into cache-sized blocks and sorted by NumPy (CUDA: torch's sort); eig, an
eigendecomposition of n x n. On CUDA also launch: one operation on n values, in a row of a hundred, which is what
any operation takes however little it does. A rule is charged those that its formula names beside the passes,
counted by hand (`LAUNCHES`); with a hundred thousand parameters they are most of it. The ratio without them stands
at the end of the line.

`memory` is the peak beyond the input, in units of the input. Rows are standard normal. ByzFL is installed into an
environment of its own on first use (`--no-peer`: not at all); clip and arc write into their input, so they are
given a copy, as ours make one.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from _common import machine
from peers import environment
from torch import Tensor

from fedlaw import aggregators as agg
from fedlaw._threads import each
from fedlaw.screening import clip_to_median, copy_clusters
from fedlaw.server import FedLAW, Replies, Settings

Floor = dict[str, float]  # how many of each unit


@dataclass(frozen=True)
class Case:
    """A rule, and what it cannot do without, in units of what is measured."""

    rule: agg.Rule
    floor: Floor
    peer: str | None = None


def formula(floor: Floor) -> str:
    """A floor in words."""
    return " + ".join(f"{count:g} {unit}" if count != 1 else unit for unit, count in floor.items() if count)


def lower_bound(floor: Floor, measured: Floor) -> dict[str, Any]:
    """A floor in milliseconds and in words; where launches are part of it, what it is without them."""
    least = sum(count * measured[unit] for unit, count in floor.items())
    found = {"floor": least, "formula": formula(floor)}
    if "launch" in floor:
        found["without_launches"] = least - floor["launch"] * measured["launch"]
    return found


def cases(n: int, f: int) -> dict[str, Case]:
    """Every registered rule (MDA with f = 1, Bulyan with the largest f it takes)."""
    bulyan = (n - 3) // 4
    return {
        "mean": Case(agg.Mean(), {"P": 1}, "mean"),
        "median": Case(agg.Median(), {f"sort({n})": 1}, "median"),
        "trimmed_mean": Case(agg.TrimmedMean(f), {f"sort({n})": 1}, "trimmed_mean"),
        "meamed": Case(agg.Meamed(f), {f"sort({n})": 1}, "meamed"),
        "krum": Case(agg.Krum(f), {"Gram": 1}, "krum"),
        "multi_krum": Case(agg.MultiKrum(f), {"Gram": 1, "P": 1}, "multi_krum"),
        f"bulyan, f={bulyan}": Case(agg.Bulyan(bulyan), {"Gram": 1, f"sort({n - 2 * bulyan})": 1}),
        "geometric_median": Case(agg.GeometricMedian(), {"P": 7}, "geometric_median"),
        "huber, 3 steps": Case(agg.Huber(tolerance=0, iterations=3), {f"sort({n})": 1, "P": 6}),
        "centered_clipping": Case(agg.CenteredClipping(), {"P": 2}, "centered_clipping"),
        "monna": Case(agg.MoNNA(f), {"P": 2}, "monna"),
        "caf": Case(agg.CAF(f), {"Gram": 1, "P": 1, "eig": 0}, "caf"),
        "dnc": Case(agg.DnC(f), {"Gram(10000)": 5, "P": 2, "eig": 5}),
        "foolsgold": Case(agg.FoolsGold(), {"Gram": 1, "P": 2, "W": 1}),
        "signguard": Case(agg.SignGuard(), {"P": 3}),
        "signguard, 0.9": Case(agg.SignGuard(coordinates=0.9), {"P": 3}),
        "fltrust": Case(agg.FLTrust(), {"P": 2}),
        "mda, f=1": Case(agg.MDA(1), {"Gram": 1, "P": 1}, "mda"),
        "bucketing": Case(agg.Bucketing(2), {"P": 1, "W": 0.5}, "bucketing"),
        "clip": Case(agg.Clip(), {"P": 2, "W": 1}, "clip"),
        "arc": Case(agg.ARC(f), {"P": 2, "W": 1}, "arc"),
        "nnm": Case(agg.NearestNeighborMixing(f), {"Gram": 1, "Mix": 1, "W": 1}, "nearest_neighbor_mixing"),
    }


# Operations on one number a client, or on n x n of them, that the rule takes when written with torch's. Krum:
# lengths, twice their sum less products, sort, sum of the nearest, least, and the row itself. Those of an iteration
# count every time. (One kernel for a whole rule would need none: hence the ratio without them is printed too.)
LAUNCHES = {
    "mean": 0, "median": 2, "trimmed_mean": 2, "meamed": 6, "krum": 7, "multi_krum": 8, "bulyan": 6,
    "geometric_median": 21, "huber": 27, "centered_clipping": 4, "monna": 5, "caf": 3, "dnc": 15, "foolsgold": 14,
    "signguard": 8, "fltrust": 6, "mda": 5, "bucketing": 3, "clip": 4, "arc": 3, "nnm": 7,
    # Screening, clipping, alignment, losses and the projection: a sort of n, one of 2n, four sums along them.
    "published step": 24,
    # The same without the projection, and copies, strikes, scores, ranks, too-good check and verdict.
    "copies check": 6, "core judging": 60,
}  # fmt: skip


def launches(name: str, x: Tensor) -> Floor:
    """What the row `name` is charged beside its passes, where launching costs anything to speak of."""
    return {} if x.device.type == "cpu" else {"launch": LAUNCHES[name.split(",")[0]]}


def best_of(run: Callable[[], object], repeats: int, patience: float = 4.0) -> float:
    """Least milliseconds of several calls after a warm-up; fewer calls where they are long."""
    run()
    least, spent = float("inf"), 0.0
    for _ in range(repeats):
        _wait()
        start = time.perf_counter()
        run()
        _wait()
        took = time.perf_counter() - start
        least, spent = min(least, took), spent + took
        if spent > patience:
            break
    return 1e3 * least


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def units(x: Tensor, repeats: int, sorted_rows: set[int]) -> Floor:
    """What was measured, in milliseconds: see the top of this file."""
    n, d = x.shape
    size = 1024 if x.device.type == "cpu" else 8192
    a = torch.randn(size, size, device=x.device)
    per_flop = best_of(lambda: a @ a, repeats) / (2 * size**3)
    reading = min(
        best_of(lambda: torch.linalg.vector_norm(x, dim=-1), repeats), best_of(lambda: x.sum(-1), repeats)
    )
    symmetric = torch.randn(n, n, dtype=torch.float64)
    symmetric = symmetric + symmetric.T
    found = {
        "P": reading,
        "W": max(0.0, best_of(x.clone, repeats) - reading),
        "Gram": n * (n + 1) * d * per_flop,
        "Gram(10000)": n * (n + 1) * min(d, 10_000) * per_flop,
        "Mix": 2 * n * n * d * per_flop,
        "eig": best_of(lambda: torch.linalg.eigh(symmetric), repeats),
        "GFLOP/s": 1e-6 / per_flop,
        "GB/s": 4e-6 * n * d / reading,
    }
    few = x[:, 0].clone()
    found["launch"] = best_of(lambda: [few.mul_(1) for _ in range(100)], repeats) / 100
    for m in sorted_rows:
        found[f"sort({m})"] = best_of(partial(_sort, x, m), repeats)
    return found


def _sort(x: Tensor, m: int) -> None:
    if x.device.type != "cpu":
        width = (1 << 26) // m
        block = x.new_empty((min(width, x.shape[-1]), m)).normal_()
        for start in range(0, x.shape[-1], width):
            block[: x.shape[-1] - start].sort(dim=-1)
        return
    array, d = x.numpy(), x.shape[-1]

    def make() -> Callable[[int], None]:
        block = np.empty((1024, m), dtype=np.float32)

        def sort(start: int) -> None:
            columns = block[: d - start]
            np.copyto(columns, array[:m, start : start + 1024].T)
            columns.sort(axis=-1)

        return sort

    for _ in each(range(0, d, 1024), make):
        pass


def extra_memory(run: Callable[[], object], x: Tensor) -> float | None:
    """Peak beyond what is held before, in units of x; None where the system does not tell."""
    if x.device.type != "cpu":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - held) / (x.numel() * x.element_size())
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at what is resident now
        before = _resident("VmRSS")
        run()
        return max(0, _resident("VmHWM") - before) * 1024 / (x.numel() * x.element_size())
    except OSError:
        return None


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def byzfl(n: int, f: int, d: int, threads: int, repeats: int, name: str) -> float | str:
    """Milliseconds of ByzFL's rule `name`, in a process of its own; or why there are none."""
    try:
        interpreter = environment.python("byzfl")
    except environment.NotInstalled as error:
        return f"cannot be installed: {error}"
    script = Path(__file__).parent / "peers" / "byzfl_aggregators.py"
    command = [str(interpreter), str(script), *(str(value) for value in (n, f, d, threads, repeats)), name]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, preexec_fn=partial(_at_most, 16)
        )
    except subprocess.TimeoutExpired:
        return "over a minute"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["it ended without a word"])[-1][:60]
    return float(json.loads(done.stdout)["ms"])


def _at_most(gigabytes: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (gigabytes << 30, gigabytes << 30))


# ---------------------------------------------------------------------------------------------- FedLAW's own steps


def fedlaw_steps(x: Tensor, judge: str, repeats: int) -> dict[str, float]:
    """Milliseconds of a judged round's parts, driven through the server with blocks of replies."""
    n, d = x.shape
    server = FedLAW(torch.zeros(d, device=x.device), range(n), judge, Settings(rounds=200, alpha=0.01))
    losses = torch.rand(n, dtype=torch.float64) + 1
    second = x.flip(0)
    parts: dict[str, list[float]] = {"first": [], "examine": [], "second": [], "weigh": []}
    for _ in range(repeats + 1):
        for one, other, replies in (("first", "examine", x), ("second", "weigh", second)):
            clients = server.ask().clients
            chosen = replies if len(clients) == n else replies[list(clients)]
            _wait()
            start = time.perf_counter()
            server.tell(Replies(clients, chosen, losses[list(clients)]))
            _wait()
            told = time.perf_counter()
            server.end_phase()
            _wait()
            parts[one].append(1e3 * (told - start))
            parts[other].append(1e3 * (time.perf_counter() - told))
    return {name: min(times[1:]) for name, times in parts.items()}


def own_rows(x: Tensor, floor: Floor, repeats: int) -> list[dict[str, Any]]:
    """The published step and core judging, against passes over the updates."""
    n = x.shape[0]
    paper, core = fedlaw_steps(x, "paper", repeats), fedlaw_steps(x, "hardened", repeats)
    norms = torch.linalg.vector_norm(x, dim=-1).double()
    everybody = torch.ones(n, dtype=torch.bool, device=x.device)
    radius, factors = clip_to_median(norms, everybody)
    copies = best_of(lambda: copy_clusters(x, factors, 0.05 * radius, everybody), repeats)
    published = paper["second"] + paper["weigh"]
    judged = core["examine"] + core["second"] + core["weigh"]
    parts = {
        "published step": (published, {"P": 3.0}),
        "copies check": (copies, {"P": 1.0, "Gram": 1 / 32}),
        "core judging": (judged, {"P": 5.0, "copies check": 1.0}),
    }
    floor = floor | {"copies check": copies}
    rows = []
    for name, (took, units_of) in parts.items():
        charged = units_of | launches(name, x)
        rows.append({"name": name, "ms": took, **lower_bound(charged, floor)})
    return rows


# ---------------------------------------------------------------------------------------------- tables


def table(args: argparse.Namespace, d: int, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    n, f = args.n, args.f
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(0)).to(args.device)
    reference = x.mean(0)
    chosen = {
        name: replace(case, floor=case.floor | launches(name, x))
        for name, case in cases(n, f).items()
        if not args.rules or name in args.rules
    }
    wanted = {int(u[5:-1]) for case in chosen.values() for u in case.floor if u.startswith("sort(")}
    floor = units(x, args.repeats, wanted)
    if "caf" in chosen:
        steps = _eigendecompositions(partial(_call, chosen["caf"].rule, x, reference))
        chosen["caf"] = replace(chosen["caf"], floor=chosen["caf"].floor | {"eig": steps})
    print(
        f"\nn={n}, f={f}, d={d:,}, {args.device}, {threads} threads; P = {floor['P']:.2f} ms "
        f"({floor['GB/s']:.0f} GB/s), float32 products {floor['GFLOP/s']:.0f} GFLOP/s; best of {args.repeats}"
    )
    print(f"{'':20}{'ms':>9}{'floor':>9}{'ratio':>7}{'memory':>8}{'ByzFL ms':>10}{'ratio':>7}  floor is")
    rows: list[dict[str, Any]] = []
    for name, case in chosen.items():
        run = partial(_call, case.rule, x, reference)
        taken, bound = best_of(run, args.repeats), lower_bound(case.floor, floor)
        rows.append({"name": name, "ms": taken, **bound, "memory": extra_memory(run, x)})
        if case.peer and args.device == "cpu" and not args.no_peer:
            rows[-1]["byzfl"] = byzfl(n, f, d, threads, args.repeats, case.peer)
        _print(rows[-1])
    if not args.rules:
        for row in own_rows(x, floor, args.repeats):
            rows.append(row)
            _print(row)
    return {"n": n, "f": f, "d": d, "threads": threads, "device": args.device, "units": floor, "rows": rows}


def _eigendecompositions(run: Callable[[], object]) -> int:
    """How many a call makes: CAF's number of steps depends on the rows."""
    with patch.object(torch.linalg, "eigh", wraps=torch.linalg.eigh) as counted:
        run()
    return counted.call_count


def _call(rule: agg.Rule, x: Tensor, reference: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rule(x, generator=torch.Generator().manual_seed(0), reference=reference)


def _print(row: dict[str, Any]) -> None:
    memory, peer, bare = row.get("memory"), row.get("byzfl"), row.get("without_launches")
    shown = "" if memory is None else f"{memory:.2f}"
    beside = f"{peer:10.1f}{peer / row['ms']:7.1f}" if isinstance(peer, float) else f"{'-':>10}{'-':>7}"
    without = f"; {row['ms'] / bare:.2f} without launches" if bare else ""
    print(
        f"{row['name']:20}{row['ms']:9.2f}{row['floor']:9.2f}{row['ms'] / row['floor']:7.2f}{shown:>8}{beside}  "
        f"{row['formula']}{f'; ByzFL not measured: {peer}' if isinstance(peer, str) else ''}{without}",
        flush=True,
    )


def growth(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Nanoseconds an entry of a few rules, n * d up to `--elements`."""
    rules = {"mean": agg.Mean(), "median": agg.Median(), "krum": None, "core judging": None}
    print(f"{'n':>6}{'d':>12}" + "".join(f"{name + ', ms':>18}{'ns/entry':>10}" for name in rules))
    found = []
    for n in (50, 200, 1000, 5000):
        for d in (10_000, 100_000, 1_000_000, 10_000_000):
            if n * d > args.elements:
                continue
            x = torch.randn(n, d, device=args.device)
            row: dict[str, Any] = {"n": n, "d": d}
            for name, rule in rules.items():
                if name == "core judging":
                    parts = fedlaw_steps(x, "hardened", 1)
                    row[name] = parts["examine"] + parts["second"] + parts["weigh"]
                else:
                    used = agg.Krum(int(0.4 * n)) if rule is None else rule
                    row[name] = best_of(partial(_call, used, x, x[0]), 2, patience=2.0)
            found.append(row)
            cells = "".join(f"{row[name]:18.1f}{1e6 * row[name] / (n * d):10.2f}" for name in rules)
            print(f"{n:6}{d:12,}{cells}", flush=True)
            del x
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--f", type=int, default=80)
    parser.add_argument("--d", type=int, nargs="+", default=[109_386])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, min(2, os.cpu_count() or 1)}))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rules", nargs="*", default=[], help="as the table names them; default: all")
    parser.add_argument("--no-peer", action="store_true", help="leave ByzFL out")
    parser.add_argument("--growth", action="store_true", help="a few rules over n and d instead")
    parser.add_argument("--elements", type=int, default=10**9, help="largest n * d of --growth")
    parser.add_argument("--json", help="write the numbers here")
    args = parser.parse_args()
    print(machine())
    if args.growth:
        torch.set_num_threads(max(args.threads))
        result: Any = growth(args)
    else:
        threads = args.threads if args.device == "cpu" else args.threads[:1]
        result = [table(args, d, t) for d in args.d for t in threads]
    if args.json:
        Path(args.json).write_text(json.dumps({"machine": machine(), "results": result}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
