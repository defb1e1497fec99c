"""A real federation on loopback, TLS and node authentication, every process stopped by its id."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent

APP = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "loopback"
version = "0.1.0"
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["loopback"]

[tool.flwr.app]
publisher = "fedlaw"

[tool.flwr.app.components]
serverapp = "loopback.server:app"
clientapp = "loopback.client:app"

[tool.flwr.app.config]
rounds = 5
store = ""
marks = ""
roster = ""
resume = false
timeout = 60.0
"""

# Clients without torch: a new process for every message starts in a second. Each pulls the model to its own target.
CLIENT = """
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    part, config = int(context.node_config["partition-id"]), message.content["config"]
    mark = Path(str(context.run_config["marks"])) / f"{part}.{config['server-round']}.{config['phase']}"
    mark.touch()
    if part == 2 and config["phase"] == 2:
        time.sleep(300)  # killed long before
    x = message.content["arrays"]["x"].numpy()
    x = x + np.float32(0.5) * (np.float32(1 + 0.01 * part) - x)
    content = {"arrays": ArrayRecord({"x": Array(x)}),
               "metrics": MetricRecord({"train_loss": float(((x - 1) ** 2).mean()), "num-examples": 10})}
    return Message(RecordDict(content), reply_to=message)
"""

SERVER = """
import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp

from fedlaw.flower import Federation, FedLAW, Settings
from fedlaw.server import Published

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    roster = tuple(int(node) for node in str(config["roster"]).split(",") if node) or None
    strategy = FedLAW(
        Published(attackers=0.34, weight_rounds=3),
        Settings(alpha=0.5),
        Federation(min_nodes=3, roster=roster, poll=0.5, store=str(config["store"]), resume=bool(config["resume"])),
    )
    model = ArrayRecord({"x": Array(np.zeros(1000, np.float32))})
    strategy.start(grid, model, num_rounds=int(config["rounds"]), timeout=float(config["timeout"]))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def descendants(pid: int) -> list[int]:
    """Ids of the processes that `pid` started, and theirs; also those that left its process group."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, todo = [], [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill -9, with everything it started: as if its machine lost power."""
    doomed = [process.pid, *descendants(process.pid)]
    for pid in doomed:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(timeout=30)


def until(found: Callable[[], Any], seconds: float, what: str) -> Any:
    """What `found` returns once it is true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := found():
            return value
        time.sleep(0.5)
    raise TimeoutError(f"{what}: not within {seconds:g} s")


class Loopback:
    """SuperLink, SuperNodes and the `flwr` command in a folder of their own. A context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.store = folder / "results.sqlite"
        self.marks = folder / "marks"
        self.processes: list[subprocess.Popen[bytes]] = []
        self._environment = {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "OMP_NUM_THREADS": "1",
        }
        self.marks.mkdir()
        (folder / "flwr").mkdir()
        (folder / "flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "loopback"\n\n[superlink.loopback]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{folder / "ca.crt"}"\n'
        )
        package = folder / "app" / "loopback"
        package.mkdir(parents=True)
        (folder / "app" / "pyproject.toml").write_text(APP)
        for name, text in (("__init__", '"""."""\n'), ("client", CLIENT), ("server", SERVER)):
            (package / f"{name}.py").write_text(text)

    def __enter__(self) -> Loopback:
        self._certificates()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                kill(process)

    def _certificates(self) -> None:
        def openssl(*words: str) -> None:
            subprocess.run(["openssl", *words], cwd=self.folder, check=True, capture_output=True, timeout=60)

        (self.folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
        new = ("-newkey", "rsa:2048", "-nodes", "-subj")
        openssl("req", "-x509", *new, "/CN=test CA", "-days", "2", "-keyout", "ca.key", "-out", "ca.crt")
        openssl("req", *new, "/CN=localhost", "-keyout", "server.key", "-out", "server.csr")
        signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
        openssl("x509", "-req", "-in", "server.csr", *signed, "-out", "server.pem")

    def start(self, *command: str, log: str) -> subprocess.Popen[bytes]:
        """A process in the background, its output in a file."""
        with (self.folder / log).open("ab") as out:
            process = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                cwd=self.folder,
                env=self._environment,
                stdout=out,
                stderr=out,
            )
        self.processes.append(process)
        return process

    def superlink(self) -> subprocess.Popen[bytes]:
        """SuperLink, listening."""
        process = self.start(
            *("flower-superlink", "--host", "127.0.0.1", "--port", str(self.port), "--enable-supernode-auth"),
            *("--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"),
            *("--disable-runtime-dependency-installation", "--database", "state.db"),
            log="superlink.log",
        )

        def listening() -> bool:
            assert process.poll() is None, (self.folder / "superlink.log").read_text()[-2000:]
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self.port)) == 0

        until(listening, 120, "SuperLink")
        return process

    def key(self, name: str) -> None:
        """A key pair for a node."""
        command = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-C", "", "-f", name]
        subprocess.run(command, cwd=self.folder, check=True, timeout=60)

    def node(self, name: str, part: int) -> subprocess.Popen[bytes]:
        """A SuperNode that shows its key."""
        return self.start(
            *("flower-supernode", "--root-certificates", "ca.crt", "--superlink", f"127.0.0.1:{self.port}"),
            *("--auth-supernode-private-key", name, "--host", "127.0.0.1", "--port", str(free_port())),
            *("--node-config", f"partition-id={part} num-partitions=3"),
            log=f"{name}.log",
        )

    def flwr(self, *words: str) -> Any:
        """The answer of a `flwr` command, as data."""
        done = subprocess.run(
            [str(BIN / "flwr"), *words, "--format", "json"],
            cwd=self.folder, env=self._environment, capture_output=True, check=False, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, (done.stdout + done.stderr).decode()
        return json.loads(done.stdout)

    def run(self, **config: Any) -> str:
        """Begin a run; its id."""
        given = {"store": str(self.store), "marks": str(self.marks), **config}
        words = " ".join(f"{name}={json.dumps(value)}" for name, value in given.items())
        return str(self.flwr("run", "app", "loopback", "--run-config", words)["run-id"])

    def status(self, run: str) -> str:
        """Where a run stands."""
        return str(self.flwr("ls", "loopback", "--run-id", run)["runs"][0]["status"])
