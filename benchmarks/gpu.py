"""Seconds per experiment of the paper's settings on a GPU, and how far that is from what the card could do.

    python benchmarks/gpu.py --data-dir DATA                    # MNIST: FedAvg, FedLAW as published, hardened
    python benchmarks/gpu.py --data-dir DATA --dataset cifar10  # one CIFAR-10 experiment, a part of its rounds

MNIST: the runs of `fedlaw reproduce mnist-accuracy` (200 clients, MLP 784-128-64-10, batch 64, 3 local epochs,
200 rounds, of which 20 have two phases as published and 80 with `hardened`; five attacks and none, 10 to 40 %
attackers), whole: reading the data, building, evaluating and recording in a store included, in `--processes`
processes that train `--stack` experiments together. CIFAR-10: the first run of each method of `cifar10-accuracy`;
after four phases `--rounds` of them are timed, and the whole is reckoned from these, building and evaluating.

Printed are seconds a run of the whole, and from the first round on (starting processes and compiling kernels take
ten seconds or so, however many runs follow). Two floors are printed beside them: the arithmetic of local training
(forward, backward, the pass for the loss) at the measured rate of large TF32 products, and the bytes it must move
(each step reads and writes a client's parameters, and reads its examples) at the measured rate of a copy. Both
count all clients in every phase, and all rounds that `hardened` may judge: where attackers are not asked after the
freeze, or judging ends early, that is more than is done, and the share is too high by as much.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from _common import machine
from torch import Tensor, nn

from fedlaw import models
from fedlaw.experiments import reproduce
from fedlaw.experiments.description import Execution, Experiment
from fedlaw.experiments.engines.local import Local, side_by_side

METHODS = ("FedAVG", "FedLAW", "FedLAW hardened")


def rate(work: float, run: Callable[[], object], repeats: int = 20) -> float:
    """`work` per second of the best of three batches of repeats."""
    run()
    best = float("inf")
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - began) / repeats)
    return work / best


def card() -> tuple[float, float]:
    """Measured TF32 flops per second of a large product, and bytes per second of a copy."""
    torch.set_float32_matmul_precision("high")
    a = torch.randn(8192, 8192, device="cuda")
    b = torch.empty_like(a)
    found = rate(2 * 8192.0**3, lambda: torch.mm(a, a, out=b)), rate(2.0 * a.nbytes, lambda: b.copy_(a))
    torch.set_float32_matmul_precision("highest")
    return found


def work_of_a_phase(
    experiment: Experiment, examples: int, network: list[tuple[int, int]]
) -> tuple[float, float]:
    """Flops and bytes of one phase's local training of a `network` of layers (multiplications, parameters)."""
    ends = experiment.epochs
    forward = sum(times for times, _ in network)
    flops = (
        2.0 * examples * (ends * (3 * forward - network[0][0]) + forward)
    )  # nobody needs the input's gradient
    steps = experiment.clients * ends * -(-examples // (experiment.clients * experiment.batch_size))
    numbers = sum(count for _, count in network)
    return flops, 4.0 * (steps * 2 * numbers + experiment.clients * numbers)


def layers(model: nn.Module, shape: Sequence[int]) -> list[tuple[int, int]]:
    """(multiplications an example, parameters) of every layer with a matrix or a convolution, from the input on."""
    found: list[tuple[int, int]] = []

    def note(layer: nn.Module, _: object, out: Tensor) -> None:
        weight = layer.get_parameter("weight")
        places = out[0].numel() // len(weight)
        found.append((places * weight.numel(), sum(each.numel() for each in layer.parameters())))

    kept = [each for each in model.modules() if isinstance(each, nn.Linear | nn.Conv2d)]
    hooks = [each.register_forward_hook(note) for each in kept]
    model(next(model.parameters()).new_zeros(1, *shape))
    for hook in hooks:
        hook.remove()
    return found


class Clock:
    """Seconds since it was made, and since the first round that it was told of."""

    def __init__(self) -> None:
        self.began, self.first = time.perf_counter(), float("inf")

    def tick(self, rounds: int) -> None:
        self.first = min(self.first, time.perf_counter())

    def read(self) -> tuple[float, float]:
        now = time.perf_counter()
        return now - self.began, now - min(now, self.first)


def mnist(given: argparse.Namespace, flops: float, bytes_: float) -> list[dict[str, Any]]:
    """Every method's runs, timed whole."""
    planned = reproduce.load("mnist-accuracy").planned()
    rows = []
    for method in given.methods:
        runs = [each.experiment for each in planned if each.labels["method"] == method]
        runs = runs[:: max(1, len(runs) // given.experiments)][: given.experiments]
        stacks = [runs[at : at + given.stack] for at in range(0, len(runs), given.stack)]
        execution = Execution(data_dir=given.data_dir, device="cuda", precision=given.precision)
        phases = sum(_phases(each) for each in runs) / len(runs)
        with tempfile.TemporaryDirectory() as folder:
            outcomes: list[Any] = []
            clock = Clock()
            Local(given.processes).run(
                stacks,
                store=Path(folder) / "gpu.sqlite",
                execution=execution,
                on_rounds=clock.tick,
                on_done=outcomes.extend,
            )
            seconds, working = (each / len(runs) for each in clock.read())
        failed = [each.message for each in outcomes if each.status == "failed"]
        if failed:
            raise SystemExit(f"{len(failed)} runs failed: {failed[0]}")
        model = models.create(runs[0].model, (1, 28, 28), 10, seed=0)
        arithmetic, traffic = work_of_a_phase(runs[0], 56_000, layers(model, (1, 28, 28)))
        floors = phases * arithmetic / flops, phases * (traffic + 4.0 * 56_000 * 3 * 784) / bytes_
        rows.append(_row(method, len(runs), seconds, working, phases, floors))
        print(_line(rows[-1]), flush=True)
    return rows


def _phases(experiment: Experiment) -> int:
    """How many phases its rounds have, all told."""
    server = experiment.server(torch.zeros(4), [])
    judge = getattr(server, "judge", None)
    two = 0 if judge is None else getattr(judge, "judged_rounds", None) or judge.weight_rounds
    return experiment.rounds + int(two)


def cifar10(given: argparse.Namespace, flops: float, bytes_: float) -> list[dict[str, Any]]:
    """One experiment, some of its rounds; phases beyond the first few, which compile, are timed."""
    from fedlaw.experiments.lab import Lab, stacked
    from fedlaw.experiments.runner import _matmul_precision

    planned = reproduce.load("cifar10-accuracy").planned()
    rows = []
    for method in given.methods:
        run = next(each.experiment for each in planned if each.labels["method"] == method)
        execution = Execution(data_dir=given.data_dir, device="cuda", precision=given.precision)
        began = time.perf_counter()
        lab = Lab(run, execution)
        building = time.perf_counter() - began
        with _matmul_precision(given.precision):
            stack = stacked([lab], execution)
            for _ in range(4):
                stack.step()
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(given.rounds):
                stack.step()
            torch.cuda.synchronize()
            phase = (time.perf_counter() - began) / given.rounds
            began = time.perf_counter()
            lab._evaluate()
            torch.cuda.synchronize()
            evaluation = time.perf_counter() - began
        phases = _phases(run)
        seconds = building + phases * phase + evaluation * run.rounds / run.evaluate_every
        arithmetic, traffic = work_of_a_phase(run, len(lab.population.labels), layers(lab.model, (3, 32, 32)))
        floors = phases * arithmetic / flops, phases * traffic / bytes_
        rows.append(_row(method, 1, seconds, phases * phase, phases, floors))
        print(f"{_line(rows[-1])}   (build {building:.1f} s, evaluation {evaluation:.2f} s)", flush=True)
    return rows


def _row(
    method: str, runs: int, seconds: float, working: float, phases: float, floors: tuple[float, float]
) -> dict[str, Any]:
    return {
        "method": method, "runs": runs, "phases": phases, "seconds": seconds, "working": working,
        "ms_a_phase": 1e3 * working / phases, "arithmetic": floors[0], "traffic": floors[1],
        "share": max(floors) / working,
    }  # fmt: skip


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['method']:20}{row['runs']:6}{row['phases']:8.0f}{row['seconds']:10.3f}{row['working']:10.3f}"
        f"{row['ms_a_phase']:12.2f}{row['arithmetic']:14.3f}{row['traffic']:11.3f}{row['share']:8.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--dataset", choices=("mnist", "cifar10"), default="mnist")
    parser.add_argument("--methods", nargs="+", default=[*METHODS], help="of the paper's tables")
    parser.add_argument("--experiments", type=int, default=96, help="runs of each method (mnist)")
    parser.add_argument(
        "--stack", type=int, default=16, help="experiments trained together by a process (mnist)"
    )
    parser.add_argument("--processes", type=int, help=f"default {side_by_side('cuda')} (mnist)")
    parser.add_argument("--rounds", type=int, default=40, help="timed (cifar10)")
    parser.add_argument("--precision", choices=("half", "tf32", "float32"), default="tf32")
    parser.add_argument("--json", type=Path, help="write the figures here")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU that torch can use: benchmarks/simulation.py measures CPUs")
    flops, bytes_ = card()
    print(machine())
    print(f"measured: {flops / 1e12:.0f} TFLOP/s (TF32), {bytes_ / 1e12:.2f} TB/s; {given.precision}")
    print(
        f"{'':20}{'runs':>6}{'phases':>8}{'s whole':>10}{'s rounds':>10}{'ms a phase':>12}"
        f"{'arithmetic s':>14}{'traffic s':>11}{'share':>8}"
    )
    rows = (mnist if given.dataset == "mnist" else cifar10)(given, flops, bytes_)
    if given.json:
        about = {"machine": machine(), "tflops": flops / 1e12, "tbytes": bytes_ / 1e12}
        settings = {key: str(value) for key, value in vars(given).items() if key not in ("data_dir", "json")}
        given.json.write_text(json.dumps({**about, "settings": settings, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
