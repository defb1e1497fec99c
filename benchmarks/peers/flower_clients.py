"""Flower's simulation engine: a Ray actor of one processor on each core, a message to every client and back.

The model travels as one array, the cheapest form there is. The clock runs around `grid.send_and_receive`; Ray, the
actors and their data are there before it starts.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Any, cast

import numpy as np
from worker import Array as Numbers
from worker import answer, read

os.environ |= {
    "BENCHMARK_FOLDER": sys.argv[1],
    "BENCHMARK_SETTINGS": sys.argv[2],
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def main() -> None:
    """One round per line of standard input, inside a simulation that goes on until it ends."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from flower_app import app as client_app
    from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.WARNING)
    work = read(sys.argv[1], sys.argv[2])
    clients = len(np.load(work.folder / "labels.npy", mmap_mode="r"))
    server_app = ServerApp()

    @server_app.main()
    def rounds(grid: Grid, context: Context) -> None:
        while len(nodes := list(grid.get_node_ids())) < clients:
            time.sleep(0.1)
        theta = work.params

        def run() -> list[Message]:
            content: Any = {"arrays": ArrayRecord({"theta": Array(theta)})}
            asked = [Message(RecordDict(content), dst_node_id=node, message_type="train") for node in nodes]
            return list(grid.send_and_receive(asked))

        models, losses = taken_apart(run())
        np.savez(sys.argv[3], models=models, losses=losses)
        answer(channel, ("flwr", "ray", "torch"), run, cast(Any, sys.stdin))

    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": work.cores, "_node_ip_address": "127.0.0.1", "log_to_driver": False},
        },
    )


def taken_apart(replies: list[Any]) -> tuple[Numbers, Numbers]:
    """Models (n, d) and losses (n,) in the order of clients; an error of a client ends the benchmark."""
    for reply in replies:
        if reply.has_error():
            raise RuntimeError(f"a client failed: {reply.error.reason}")
    made = sorted(
        (
            int(r.content["metrics"]["client"]),
            r.content["arrays"]["theta"].numpy(),
            r.content["metrics"]["loss"],
        )
        for r in replies
    )
    return np.stack([model for _, model, _ in made]), np.array([loss for _, _, loss in made])


if __name__ == "__main__":
    main()
