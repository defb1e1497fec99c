"""The matrix products of one round and nothing else, in cache: what no way of training can be faster than.

For every batch of every client: x W^T, and, going back, the weight gradient of each layer and the input gradient of
each layer but the first; then x W^T for the loss over all examples. Operands are the same few matrices again and
again, so nothing is read from memory. One Python thread a core, four clients in a batched product: large enough
that calling it costs nothing, small enough for the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor
from worker import Array, Work, serve

_AT_ONCE = 4  # clients in one batched product


def products(work: Work, features: int, examples: int, backward: bool) -> list[tuple[int, int, int]]:
    """(rows, inner, columns) of each product that `examples` examples take."""
    made, width = [], features
    for layer, out in enumerate((*work.hidden, work.classes)):
        made.append((examples, width, out))
        if backward:
            made.append((out, examples, width))
            if layer:
                made.append((examples, out, width))
        width = out
    return made


def of_one_client(work: Work, features: int, m: int) -> list[tuple[int, int, int]]:
    """All products of one client."""
    sizes = [min(work.batch, m - at) for at in range(0, m, work.batch)]
    epoch = [product for size in sizes for product in products(work, features, size, backward=True)]
    return epoch * work.epochs + [p for size in sizes for p in products(work, features, size, backward=False)]


def make(work: Work) -> tuple[Callable[[], None], Callable[[None], tuple[Array, Array]]]:
    """One round's products."""
    torch.set_num_threads(1)
    n, m, features = work.flat_inputs.shape
    shapes = of_one_client(work, features, m)

    def operands() -> list[tuple[Tensor, Tensor, Tensor]]:
        kinds = {
            (a, b, c): (torch.randn(_AT_ONCE, a, b), torch.randn(_AT_ONCE, b, c), torch.empty(_AT_ONCE, a, c))
            for a, b, c in shapes
        }
        return [kinds[shape] for shape in shapes]

    parts = [(n // work.cores + (core < n % work.cores), operands()) for core in range(work.cores)]

    def share(part: tuple[int, list[tuple[Tensor, Tensor, Tensor]]]) -> None:
        clients, calls = part
        with torch.no_grad():
            for at in range(0, clients, _AT_ONCE):
                k = min(_AT_ONCE, clients - at)
                for a, b, c in calls:
                    torch.bmm(a[:k], b[:k], out=c[:k])

    def run() -> None:
        with ThreadPoolExecutor(work.cores) as pool:
            list(pool.map(share, parts))

    flops = n * sum(2 * a * b * c for a, b, c in shapes)
    return run, lambda _: (np.zeros(1), np.array([flops], np.float64))


if __name__ == "__main__":
    serve(make, ("torch",))
