"""On a CPU a job's result does not depend, to the last bit, on chunks, threads, order or company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedlaw._random import client_keys
from fedlaw.simulation import Backend, Jobs, LocalWork, Trained, shuffled, train

# Awkward on purpose: sizes that are no multiple of anything, batches and layers that fill no cache line.
SIZES = [37, 5, 61, 37, 20, 64, 1, 90, 33, 12, 37, 48]


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(75, 33), nn.ReLU(), nn.Linear(33, 17), nn.ReLU(), nn.Linear(17, 7)
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32, 9), nn.ReLU(), nn.Linear(9, 7),
    )  # fmt: skip


def setting(make: object, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Jobs]:
    torch.manual_seed(seed)
    model: nn.Module = make()  # type: ignore[operator]
    params = torch.cat([p.detach().flatten() for p in model.parameters()]).to(dtype)[None]
    sizes = torch.tensor(SIZES).roll(seed)
    n, total = len(SIZES), sum(SIZES)
    index = (sizes.cumsum(0) - sizes)[:, None] + torch.arange(int(sizes.max()))
    order = shuffled(index, sizes, 2, client_keys(len(sizes), seed))
    inputs = torch.randn(total, 3, 5, 5, dtype=dtype)
    return (
        params,
        inputs,
        torch.randint(0, 7, (total,)),
        Jobs(torch.zeros(n, dtype=torch.int64), order, sizes),
    )


def same(found: Trained, expected: Trained) -> bool:
    return torch.equal(found.updates, expected.updates) and torch.equal(found.losses, expected.losses)


@pytest.mark.parametrize(
    ("backend", "make", "dtype", "batch_size"),
    [
        ("batched", mlp, torch.float32, 16),
        ("batched", mlp, torch.float32, 13),
        ("batched", mlp, torch.float64, 16),
        ("batched", mlp, torch.float64, 13),
        ("batched", cnn, torch.float32, 13),
        ("vmap", mlp, torch.float32, 13),
        ("vmap", cnn, torch.float64, 16),
    ],
)
def test_chunks_threads_and_company(
    backend: Backend, make: object, dtype: torch.dtype, batch_size: int
) -> None:
    model: nn.Module = make()  # type: ignore[operator]
    params, inputs, labels, jobs = setting(make, 0, dtype)
    work = LocalWork(epochs=2, batch_size=batch_size, lr=0.05)

    def go(jobs: Jobs, threads: int = 1, chunk: int | None = None) -> Trained:
        return train(model, params, inputs, labels, jobs, work, backend=backend, threads=threads, chunk=chunk)

    expected = go(jobs)
    for chunk in (1, 2, 3, 4, 7, len(jobs)):
        for threads in (1, 2):
            assert same(go(jobs, threads, chunk), expected), (chunk, threads)

    # Alone, and in another order.
    for job in (0, 6, 7):
        one = Jobs(jobs.start[[job]], jobs.order[[job]], jobs.sizes[[job]])
        assert same(go(one), Trained(expected.updates[[job]], expected.losses[[job]])), job
    back = torch.arange(len(jobs)).flip(0)
    reverse = go(Jobs(jobs.start[back], jobs.order[back], jobs.sizes[back]), chunk=5)
    assert same(reverse, Trained(expected.updates[back], expected.losses[back]))

    # Stacked with another experiment: its own start, its own data.
    params2, inputs2, labels2, jobs2 = setting(make, 1, dtype)
    expected2 = train(model, params2, inputs2, labels2, jobs2, work, backend=backend)
    moved = torch.where(jobs2.order >= 0, jobs2.order + len(inputs), -1)
    both = train(
        model,
        torch.cat([params, params2]),
        torch.cat([inputs, inputs2]),
        torch.cat([labels, labels2]),
        Jobs.stack([jobs, Jobs(jobs2.start, moved, jobs2.sizes)], rows=[1, 1]),
        work,
        backend=backend,
        threads=2,
        chunk=5,
    )
    n = len(jobs)
    assert same(Trained(both.updates[:n], both.losses[:n]), expected)
    assert same(Trained(both.updates[n:], both.losses[n:]), expected2)


def test_the_setting_of_the_benchmark() -> None:
    """Layers of the real size, whose products take other paths than small ones."""
    model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    torch.manual_seed(0)
    params = torch.cat([p.detach().flatten() for p in model.parameters()])[None]
    sizes = torch.tensor([100, 90, 100, 88, 64])
    index = (sizes.cumsum(0) - sizes)[:, None] + torch.arange(100)
    inputs, labels = torch.randn(442, 784), torch.randint(0, 10, (442,))
    order = shuffled(index, sizes, 1, client_keys(len(sizes), 0))
    jobs = Jobs(torch.zeros(5, dtype=torch.int64), order, sizes)
    work = LocalWork(epochs=1)
    expected = train(model, params, inputs, labels, jobs, work, threads=1, chunk=1)
    for chunk in (2, 3, 4, 5):
        assert same(train(model, params, inputs, labels, jobs, work, threads=2, chunk=chunk), expected), chunk


def test_threads_that_fail_say_so() -> None:
    """An error in a worker reaches the caller, and torch's number of threads is put back."""
    params, inputs, labels, jobs = setting(mlp, 0, torch.float32)
    before = torch.get_num_threads()
    with pytest.raises((RuntimeError, IndexError)):
        train(mlp(), params, inputs, labels + 100, jobs, LocalWork(2), threads=2, chunk=1)
    assert torch.get_num_threads() == before
