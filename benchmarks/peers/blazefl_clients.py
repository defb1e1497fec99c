"""BlazeFL: its thread pool or its process pool of clients, one torch thread each.

What a client does is the user's own code there: the loop of `_torch.train`, on a model that the thread or process
keeps. Processes are forked anew every round, as BlazeFL does, and hand models back in shared memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from _torch import examples, flat, network, stacked, train
from blazefl.core import IPCMode, ProcessPoolClientTrainer, SHMHandle, ThreadPoolClientTrainer
from torch import Tensor, nn
from worker import Array, Work, serve

_work: Work
_data: tuple[Tensor, Tensor]
_start: Tensor
_kept = threading.local()


@dataclass
class Package:
    """What a client sends back."""

    cid: int
    model: Any
    loss: float


def one_client(cid: int, start: Tensor) -> Package:
    """Train client `cid` from `start`."""
    if not hasattr(_kept, "model"):
        torch.set_num_threads(1)
        _kept.model = network(_work)
    with torch.no_grad():
        nn.utils.vector_to_parameters(start.clone(), _kept.model.parameters())
    loss = train(_kept.model, _data[0][cid], _data[1][cid], _work)
    return Package(cid, flat(_kept.model), loss)


class Threads(ThreadPoolClientTrainer[Package, Tensor]):  # type: ignore[misc]
    """Clients on threads."""

    def __init__(self, cores: int) -> None:
        self.num_parallels, self.device, self.device_count = cores, "cpu", 0
        self.cache: list[Package] = []
        self.stop_event = threading.Event()

    def worker(self, cid: int, device: str, payload: Tensor, stop_event: Any) -> Package:
        return one_client(cid, payload)


class Processes(ProcessPoolClientTrainer[Package, Tensor, int]):  # type: ignore[misc]
    """Clients on processes."""

    def __init__(self, cores: int, folder: Path) -> None:
        self.num_parallels, self.device, self.device_count = cores, "cpu", 0
        self.share_dir, self.ipc_mode = folder, IPCMode.SHARED_MEMORY
        self.cache: list[Package] = []
        self.manager = mp.Manager()
        self.stop_event = self.manager.Event()

    def prepare_uplink_package_buffer(self) -> Package:
        return Package(-1, torch.empty_like(_start), 0.0)

    def get_client_config(self, cid: int) -> int:
        return cid

    @staticmethod
    def worker(config: Any, payload: Any, device: str, stop_event: Any, *, shm_buffer: Any = None) -> Package:
        package = one_client(config, payload)
        shm_buffer.model.copy_(package.model)
        return Package(config, SHMHandle(), package.loss)


def make(work: Work) -> tuple[Callable[[], Any], Callable[[Any], tuple[Array, Array]]]:
    """One round as `work.variant`: threads or processes."""
    global _work, _data, _start
    torch.set_num_threads(1)
    _work, _data = work, examples(work)
    _start = torch.from_numpy(work.params)
    clients = list(range(len(_data[0])))
    trainer: Any = Threads(work.cores) if work.variant == "threads" else Processes(work.cores, work.folder)

    def run() -> Any:
        trainer.cache = []
        trainer.local_process(_start, clients)
        return [(package.model, package.loss) for package in sorted(trainer.cache, key=lambda p: p.cid)]

    return run, stacked


if __name__ == "__main__":
    serve(make, ("blazefl", "torch"))
