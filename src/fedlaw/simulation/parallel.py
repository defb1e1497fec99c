"""Python threads for torch operations that release the interpreter: one operation thread each."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")

_process_setting = threading.Lock()


def in_parallel(items: list[T], worker: Callable[[], Callable[[T], None]], threads: int | None) -> None:
    """Do every item, on `threads` Python threads with one intra-operation thread each; None: here, unchanged.

    Each thread makes its own worker and takes items from the front of the list until none are left.
    """
    queue = deque(items)

    def work() -> None:
        with torch.no_grad():
            do = worker()
            while queue:
                try:
                    item = queue.popleft()
                except IndexError:  # another thread took the last one
                    return
                do(item)

    if threads is None:
        work()
        return
    with _one_thread_each():
        if threads == 1 or len(items) == 1:
            work()
            return
        with ThreadPoolExecutor(min(threads, len(items))) as pool:
            try:
                for future in [pool.submit(work) for _ in range(min(threads, len(items)))]:
                    future.result()
            finally:
                queue.clear()  # after an error or Ctrl-C the other threads stop at their next item


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Within, torch operations use one thread each. The setting is the whole process's: hence the lock."""
    with _process_setting:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)
