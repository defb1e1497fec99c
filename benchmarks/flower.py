"""What a round over Flower costs the server: taking replies apart against judging them, and peak memory.

    python benchmarks/flower.py                          # 200 clients, 1,000,000 parameters
    python benchmarks/flower.py --clients 50 --threads 1

The in-memory Grid hands over one serialized reply at a time, as a SuperLink does; clients send trained parameters
made of one direction and their own noise. "Apart" is: open and check the arrays, make a pseudo-gradient of them,
screen it, store it. "Judging" is everything else: ending both phases, and what phase 2 forms as its replies arrive.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import resource
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from _common import machine
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedlaw.flower import Federation, FedLAW, LocalGrid, Settings
from fedlaw.server import Core, preset

ALPHA = 0.1


def app_of(size: int) -> ClientApp:
    """Clients that agree on a direction and differ by noise twice as long."""
    app = ClientApp()
    direction = np.random.default_rng(0).standard_normal(size, np.float32) * np.float32(1e-3)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        config, part = message.content["config"], context.node_config["partition-id"]
        stream = np.random.default_rng([int(config["server-round"]), int(config["phase"]), int(part)])
        noise = stream.standard_normal(size, np.float32) * np.float32(2e-3)
        trained = message.content["arrays"]["x"].numpy() - direction - noise
        metrics = MetricRecord({"train_loss": 1 + 0.1 * float(stream.random()), "num-examples": 100})
        content: dict[str, Any] = {"arrays": ArrayRecord({"x": Array(trained)}), "metrics": metrics}
        return Message(RecordDict(content), reply_to=message)

    return app


class Timed(FedLAW):
    """FedLAW that notes how long its parts take, by round."""

    def __init__(self, judge: Any, clock: Callable[[], float]) -> None:
        super().__init__(judge, Settings(alpha=ALPHA), Federation(min_nodes=2, poll=0.0))
        self.clock = clock
        self.seconds: dict[tuple[int, str], float] = defaultdict(float)

    def _clocked(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            assert self.server is not None
            at = (self.server.round, name.format(phase=self.server.phase))
            start = self.clock()
            try:
                return call(*args)
            finally:
                self.seconds[at] += self.clock() - start

        return timed

    def _make(self, *given: Any) -> Any:
        server: Any = super()._make(*given)
        server.tell = self._clocked(server.tell, "tell {phase}")
        server.end_phase = self._clocked(server.end_phase, "end {phase}")
        return server

    def _read(self, *given: Any) -> Any:
        return self._clocked(super()._read, "read")(*given)


def measure(
    name: str, clients: int, size: int, rounds: int, threads: int | None, cpu: bool
) -> tuple[float, ...]:
    """Seconds of each part in the median round, and peak memory in MB over that of an idle process."""
    if threads:
        torch.set_num_threads(threads)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    judge = preset("paper") if name == "paper" else Core(judged_rounds=rounds + 1)
    strategy = Timed(judge, time.process_time if cpu else time.perf_counter)
    grid, model = LocalGrid(app_of(size), clients), ArrayRecord({"x": Array(np.zeros(size, np.float32))})
    before = peak()
    strategy.start(grid, model, num_rounds=rounds + 1, timeout=3600)

    def median(part: str) -> float:
        return float(np.median([strategy.seconds[k, part] for k in range(2, rounds + 2)]))

    read, store, first, last = median("read"), median("tell 1"), median("end 1"), median("end 2")
    forming = max(0.0, median("tell 2") - store)  # screening costs what it costs in phase 1
    apart, judging = read + 2 * store, first + forming + last
    return read, store, first, forming, last, apart, judging, judging / apart, peak() - before


def peak() -> float:
    """Most memory this process ever had, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=4, help="measured; one more warms up")
    parser.add_argument("--threads", type=int, help="default: torch's own number")
    parser.add_argument("--cpu-time", action="store_true", help="of all threads, where the machine is busy")
    args = parser.parse_args()
    n, d = args.clients, args.parameters
    print(machine())
    unit = "CPU seconds" if args.cpu_time else "seconds"
    print(
        f"{n} clients, {d:,} parameters: n*d*4 = {n * d * 4 / 2**20:,.0f} MB; {args.threads or 'all'} threads"
    )
    print(f"{unit}, median of {args.rounds} rounds; peak memory over that of an idle process")
    columns = "read", "store", "end 1", "phase 2", "end 2", "apart", "judging", "ratio", "peak MB"
    print(" " * 10 + "".join(f"{name:>9}" for name in columns))
    for name in ("paper", "hardened"):  # each in a process of its own, for the sake of its peak memory
        with multiprocessing.get_context("spawn").Pool(1) as process:
            row = process.apply(measure, (name, n, d, args.rounds, args.threads, args.cpu_time))
        print(f"{name:10}" + "".join(f"{value:9.2f}" for value in row[:-1]) + f"{row[-1]:9,.0f}", flush=True)


if __name__ == "__main__":
    main()
