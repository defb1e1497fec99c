"""Seconds per round of local training: fedlaw's backends, a plain PyTorch loop and other simulators, same work.

    python benchmarks/simulation.py                       # 200 clients x 280 examples, MLP 784-128-64-10
    python benchmarks/simulation.py --no-peers            # ours and the plain loop alone
    python benchmarks/simulation.py --peers jax flower    # these peers only
    python benchmarks/simulation.py --model cnn           # 20 clients x 80 examples, CNN on 3x32x32, batch 16

Everybody starts from the same model and trains every client for all epochs on the same batches in the same order
(one order for all epochs, so that those who do not shuffle do the same arithmetic), then takes the mean loss of the
trained model over all of the client's examples, by one forward pass without gradients. Data are random numbers.
*Later rounds* is every round of an experiment but its first: the Gram matrices of the clients' inputs are there.
Each contestant is a process of its own, warmed up; they take turns, and the best repeat of each counts. Peers live
in environments of their own under .local/peers, made on first use; they take part on a CPU with the MLP.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import machine
from peers.driver import Contestant, NotMeasured, Running
from peers.environment import ENVIRONMENTS

from fedlaw.models import cnn, flatten, mlp

FLOOR = Contestant("gemm", "products alone", "gemm.py")
OURS = [
    Contestant("batched", "fedlaw batched", "ours.py", variant="batched"),
    Contestant("reshuffled", "fedlaw, anew each epoch", "ours.py", variant="reshuffled", comparable=False),
    Contestant("later", "fedlaw, later rounds", "ours.py", variant="later"),
    Contestant("vmap", "fedlaw vmap", "ours.py", variant="vmap"),
    Contestant("sequential", "fedlaw sequential", "ours.py", variant="sequential"),
    Contestant("plain", "plain PyTorch loop", "ours.py", variant="plain"),
]
PEERS = [
    Contestant("jax-map", "JAX lax.map(scan)", "jax_clients.py", "jax", "map"),
    Contestant("jax-loop", "JAX jit per client", "jax_clients.py", "jax", "loop"),
    Contestant("fedjax", "FedJAX", "fedjax_clients.py", "fedjax"),
    Contestant("pfl", "pfl", "pfl_clients.py", "pfl"),
    Contestant("byzfl", "ByzFL", "byzfl_clients.py", "byzfl", "loader"),
    Contestant("byzfl-ready", "ByzFL, ready batches", "byzfl_clients.py", "byzfl", "ready"),
    Contestant("blazefl-threads", "BlazeFL threads", "blazefl_clients.py", "blazefl", "threads"),
    Contestant("blazefl-processes", "BlazeFL processes", "blazefl_clients.py", "blazefl", "processes"),
    Contestant("flower", "Flower simulation", "flower_clients.py", "flower", alone=True),
]
_PAUSE = 0.3  # seconds between turns: threads of the last one still spin for a moment


def write_work(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Write the examples and the first model; the settings that contestants are given."""
    shape = (1, 28, 28) if args.model == "mlp" else (3, 32, 32)
    stream = np.random.default_rng(0)
    inputs = stream.standard_normal((args.clients, args.samples, *shape), np.float32)
    np.save(folder / "inputs.npy", inputs)
    np.save(folder / "labels.npy", stream.integers(0, 10, (args.clients, args.samples)))
    torch.manual_seed(0)
    model = mlp(shape, 10, args.hidden) if args.model == "mlp" else cnn(shape, 10, (32, 64), (128,))
    np.save(folder / "params.npy", flatten(model).numpy())
    return {
        "model": args.model,
        "hidden": args.hidden,
        "classes": 10,
        "batch": args.batch_size,
        "epochs": args.epochs,
        "lr": 0.01,
        "device": args.device,
    }


def measure(
    out: dict[str, dict[str, Any]],
    contestants: list[Contestant],
    folder: Path,
    settings: dict[str, Any],
    cores: list[int],
    repeats: int,
) -> None:
    """Fill `out`, by key: seconds of every repeat, versions, the difference from the first contestant's result."""
    reference: Running | None = None
    groups = [[c for c in contestants if not c.alone], *([c] for c in contestants if c.alone)]
    for group in groups:
        running: list[Running] = []
        try:
            for contestant in group:
                try:
                    started = Running(contestant, folder, settings, cores)
                except NotMeasured as error:
                    out[contestant.key] = {"not measured": str(error)}
                    continue
                running.append(started)
                row = out[contestant.key] = {"versions": started.versions, "seconds": []}
                if contestant is FLOOR:
                    row["flops"] = float(started.losses[0])
                    continue
                reference = reference or started
                row["difference"] = difference(started, reference) if contestant.comparable else None
            for turn in range(repeats):
                print(f"  repeat {turn + 1} of {repeats}", file=sys.stderr, flush=True)
                # In another order each time: nobody always comes after the one that leaves the machine warm.
                for each in random.Random(turn).sample(running, len(running)):
                    time.sleep(_PAUSE)
                    try:
                        out[each.contestant.key]["seconds"].append(each.round())
                    except NotMeasured as error:
                        out[each.contestant.key] = {"not measured": str(error)}
                        running.remove(each)
        finally:
            for each in running:
                each.close()


def difference(found: Running, reference: Running) -> float:
    """|models - reference| / |how far the reference moved|; of the means over clients where that is all there is.

    A loss that is off by more counts as well: whoever did not train on the same batches is found out.
    """
    a, b = found.models, reference.models
    if a.ndim == 1:
        a, b = a[None], b.mean(0, keepdims=True)
    moved = np.linalg.norm(b - reference_start(reference))
    losses = abs(float(found.losses.mean()) / float(reference.losses.mean()) - 1)
    return max(float(np.linalg.norm(a - b) / moved), losses)


def reference_start(reference: Running) -> Any:
    """(d,) the model everybody starts from."""
    return np.load(reference.folder / "params.npy")


def show(title: str, rows: dict[str, dict[str, Any]], examples: int) -> None:
    """One table: ratios against the first contestant, the floor last."""
    names = {c.key: c.name for c in (*OURS, *PEERS, FLOOR)}
    print(f"\n{title}")
    first = next((key for key, row in rows.items() if key != FLOOR.key and row.get("seconds")), None)
    if first is None:
        print("nothing could be measured")
        return
    ours = min(rows[first]["seconds"])
    later = min(rows.get("later", {}).get("seconds") or rows[first]["seconds"])
    head = f"{'best s':>9}{'median':>9}{'us/example':>12}{'times ' + names[first]:>22}{'times later':>13}"
    print(f"{'':24}{head}{'difference':>12}  versions")
    for key, row in rows.items():
        if key == FLOOR.key:
            continue
        if not row.get("seconds"):
            print(f"{names[key]:24}  not measured ({row.get('not measured', 'its turn did not come')})")
            continue
        best, median = min(row["seconds"]), float(np.median(row["seconds"]))
        about = ", ".join(f"{name} {number}" for name, number in row["versions"].items())
        figures = (
            f"{best:9.3f}{median:9.3f}{1e6 * best / examples:12.2f}{best / ours:22.2f}{best / later:13.2f}"
        )
        off = "other order" if row["difference"] is None else f"{row['difference']:.1e}"
        print(f"{names[key]:24}{figures}{off:>12}  {about}")
    floor = rows.get(FLOOR.key, {})
    if floor.get("seconds"):
        best, giga = min(floor["seconds"]), floor["flops"] / 1e9
        print(
            f"{names[FLOOR.key]:24}{best:9.3f}: {giga:.1f} GFLOP of ordinary training at {giga / best:.0f} "
            f"GFLOP/s; {names[first]} reaches {100 * best / ours:.0f} % of that floor"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=("mlp", "cnn"), default="mlp")
    parser.add_argument("--clients", type=int, help="default 200 (cnn: 20)")
    parser.add_argument("--samples", type=int, help="of each client; default 280 (cnn: 80)")
    parser.add_argument("--batch-size", type=int, help="default 64 (cnn: 16)")
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 64], help="widths of the MLP")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cores", nargs="+", choices=("all", "one"), default=["all", "one"], help="tables")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--peers", nargs="*", choices=[*ENVIRONMENTS], default=[*ENVIRONMENTS])
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument(
        "--skip", nargs="*", default=[], help="contestants to leave out, such as vmap, jax-loop"
    )
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    args = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # so that contestants and temporary files go as well
    usual = (200, 280, 64) if args.model == "mlp" else (20, 80, 16)
    for name, value in zip(("clients", "samples", "batch_size"), usual, strict=True):
        setattr(args, name, getattr(args, name) or value)
    simple = args.model == "mlp" and args.device == "cpu"
    peers = [] if args.no_peers or not simple else [c for c in PEERS if c.environment in args.peers]
    contestants = [c for c in [*OURS, *([FLOOR] if simple else []), *peers] if c.key not in args.skip]
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    tables = {"all": available, "one": available[:1]} if args.device == "cpu" else {"all": available}

    print(machine())
    work = (
        f"{args.model}, {args.clients} clients x {args.samples} examples, batch {args.batch_size}, {args.epochs} "
        f"epochs and the loss over all examples afterwards, {args.device}; best of {args.repeats}"
    )
    print(work)
    if (busy := os.getloadavg()[0]) > 0.5:
        print(f"this machine is busy with something else (load {busy:.1f}): take ratios with care")
    report: dict[str, Any] = {"machine": machine(), "work": work, "tables": {}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        settings = write_work(folder, args)
        for name in dict.fromkeys(args.cores):
            if name not in tables or (name == "one" and "all" in args.cores and len(available) == 1):
                continue
            cores = tables[name]
            print(f"{name} cores ({len(cores)})" if name == "all" else "one core", file=sys.stderr)
            rows: dict[str, dict[str, Any]] = {}
            report["tables"][name] = rows
            try:
                measure(rows, contestants, folder, settings, cores, args.repeats)
            finally:  # what was measured is shown, even if the rest was not waited for
                title = f"All {len(cores)} cores" if name == "all" else "One core"
                show(title, rows, args.clients * args.samples * args.epochs)
    if peers:
        print(
            "\nOn several cores fedlaw by itself trains chunks of clients on a thread each; BlazeFL and Flower\n"
            "spread clients over as many threads, processes or actors as they are told, here one a core; all\n"
            "others train client after client, and further cores help only within a matrix product."
        )
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
