"""One Python thread per core for torch and NumPy operations that release the interpreter."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


def each(items: Sequence[T], make: Callable[[], Callable[[T], R]]) -> Iterator[R]:
    """do(item) for every item, in order, `do` being what `make()` gives; lazily, so results need not pile up.

    As many Python threads as torch would use, each with a `do` of its own (and so with buffers of its own), and
    every torch operation inside on one thread. An item's result is therefore the same bits whatever the number of
    threads; whoever cuts the items by the data alone, and adds results in order, is independent of it too.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        yield from _here(items, make)
    elif len(items) <= 1:
        torch.set_num_threads(1)
        try:
            yield from list(_here(items, make))
        finally:
            torch.set_num_threads(threads)
    else:
        yield from _there(items, make, threads)


def _here(items: Sequence[T], make: Callable[[], Callable[[T], R]]) -> Iterator[R]:
    do = make()
    for item in items:
        with torch.no_grad():
            result = do(item)
        yield result


def _there(items: Sequence[T], make: Callable[[], Callable[[T], R]], threads: int) -> Iterator[R]:
    own = threading.local()
    inference = torch.is_inference_mode_enabled()  # a mode of the thread, like the gradient's

    def mode() -> AbstractContextManager[object]:
        return torch.inference_mode() if inference else torch.no_grad()

    def work(item: T) -> R:
        with mode():
            if not hasattr(own, "do"):
                torch.set_num_threads(1)
                own.do = make()
            result: R = own.do(item)
            return result

    try:
        with ThreadPoolExecutor(min(threads, len(items))) as pool:
            yield from pool.map(work, items)
    finally:
        # Each worker set its own number; what threads made later start with is the process's, and set back here.
        torch.set_num_threads(threads)
