"""The first layer through the Gram matrix of a job's inputs: the same training, by fewer products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedlaw import _pages as pages
from fedlaw._random import client_keys
from fedlaw.models import flatten, mlp
from fedlaw.simulation import Jobs, LocalWork, Trained, gram, shuffled, train, training
from fedlaw.simulation.gram import GramKernel, PoolMemory, gram_rows, places

SIZES = [37, 5, 61, 37, 20, 64, 1, 90, 33, 12, 37, 48]


def plain() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(75, 33), nn.ReLU(), nn.Linear(33, 17), nn.ReLU(), nn.Linear(17, 7)
    )


def without_bias() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(75, 32, bias=False), nn.ReLU(), nn.Linear(32, 7, bias=False))


def clipped() -> nn.Module:
    """Something before the first layer, nothing between it and the next, and no linear layer last."""
    return nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(75, 16), nn.Linear(16, 7), nn.ReLU())


MODELS = {"plain": plain, "without_bias": without_bias, "clipped": clipped}


def setting(
    name: str, epochs: int = 2, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, Tensor, Tensor, Tensor, Jobs]:
    torch.manual_seed(seed)
    params = torch.stack([flatten(MODELS[name]()).detach() for _ in range(2)]).to(dtype)
    sizes = torch.tensor(SIZES).roll(seed)
    index = (sizes.cumsum(0) - sizes)[:, None] + torch.arange(int(sizes.max()))
    order = shuffled(index, sizes, epochs, client_keys(len(sizes), seed))
    inputs = torch.randn(sum(SIZES), 3, 5, 5, dtype=dtype)
    labels = torch.randint(0, 7, (sum(SIZES),))
    return MODELS[name](), params, inputs, labels, Jobs(torch.arange(len(sizes)) % 2, order, sizes)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let every job go through its Gram matrix; the jobs that did are counted."""
    counts: list[int] = []
    kept = GramKernel.train

    def counted(self: GramKernel, pool: Tensor, labels: Tensor, index: Tensor, *rest: object) -> Tensor:
        counts.append(len(index))
        return kept(self, pool, labels, index, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(training, "_LEAST_STEP", 0)
    monkeypatch.setattr(gram, "_WORTH", float("inf"))
    monkeypatch.setattr(GramKernel, "train", counted)
    return counts


@pytest.mark.parametrize("loss_point", ["before", "after"])
@pytest.mark.parametrize("batch_size", [13, 16, 100])
@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_reference(always: list[int], name: str, batch_size: int, loss_point: str) -> None:
    given = setting(name, epochs=3)
    work = LocalWork(epochs=3, batch_size=batch_size, lr=0.1, loss_point=loss_point)  # type: ignore[arg-type]
    expected = train(*given, work, backend="sequential")
    found = train(*given, work, threads=2)
    assert sum(always) == len(SIZES)
    torch.testing.assert_close(found.updates, expected.updates, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-9, atol=1e-10)


def same(found: Trained, expected: Trained) -> bool:
    return torch.equal(found.updates, expected.updates) and torch.equal(found.losses, expected.losses)


@pytest.mark.parametrize(
    ("name", "dtype", "batch_size"),
    [
        ("plain", torch.float32, 13),
        ("plain", torch.float32, 16),
        ("plain", torch.float64, 13),
        ("without_bias", torch.float32, 16),
        ("clipped", torch.float32, 13),
    ],
)
def test_company_changes_no_bit(always: list[int], name: str, dtype: torch.dtype, batch_size: int) -> None:
    model, params, inputs, labels, jobs = setting(name, dtype=dtype)
    work = LocalWork(epochs=2, batch_size=batch_size, lr=0.05)

    def go(jobs: Jobs, threads: int = 1, chunk: int | None = None) -> Trained:
        return train(model, params, inputs, labels, jobs, work, threads=threads, chunk=chunk)

    expected = go(jobs)
    for chunk, threads in ((1, 1), (2, 2), (3, 1), (5, 2), (12, 2)):
        assert same(go(jobs, threads, chunk), expected), (chunk, threads)
    for job in (0, 6, 7):
        alone = Jobs(jobs.start[[job]], jobs.order[[job]], jobs.sizes[[job]])
        assert same(go(alone), Trained(expected.updates[[job]], expected.losses[[job]])), job
    back = torch.arange(len(jobs)).flip(0)
    found = go(Jobs(jobs.start[back], jobs.order[back], jobs.sizes[back]), chunk=5)
    assert same(found, Trained(expected.updates[back], expected.losses[back]))
    assert sum(always) == 7 * len(SIZES) + 3


def test_the_real_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's MLP goes this way by itself, bits and all, at least as close to the truth as the direct form."""
    model, work = mlp((1, 28, 28), 10), LocalWork(epochs=3)
    torch.manual_seed(0)
    sizes = torch.tensor([100, 90, 100, 97, 64, 280, 8])
    index = (sizes.cumsum(0) - sizes)[:, None] + torch.arange(280)
    inputs, labels = torch.randn(int(sizes.sum()), 1, 28, 28), torch.randint(0, 10, (int(sizes.sum()),))
    jobs = Jobs(torch.zeros_like(sizes), shuffled(index, sizes, 3, client_keys(7, 0)), sizes)
    params = flatten(model).detach()[None]
    assert [gram_rows(model, (1, 28, 28), n, work, 8, params) for n in (100, 280, 281, 600)] == [
        104,
        280,
        288,
        0,
    ]
    expected = train(model, params, inputs, labels, jobs, work, threads=1, chunk=1)
    for chunk in (2, 3, 7):
        assert same(train(model, params, inputs, labels, jobs, work, threads=2, chunk=chunk), expected), chunk
    exact = train(model, params.double(), inputs.double(), labels, jobs, work).updates

    monkeypatch.setattr(gram, "_WORTH", 0.0)
    direct = train(model, params, inputs, labels, jobs, work)
    assert not torch.equal(direct.updates[0], expected.updates[0])
    assert torch.equal(direct.updates[6], expected.updates[6])  # too small a job to change its way
    # By job, and the median, since a ReLU that is hit within rounding of 0 sets one job apart in either form.
    errors = [
        ((found.updates - exact).norm(dim=1) / exact.norm(dim=1)).median() for found in (expected, direct)
    ]
    assert errors[0] <= 1.1 * errors[1] < 1e-4


def test_epochs_over_different_examples(always: list[int]) -> None:
    """A job that does not visit the same examples in every epoch is trained directly, its neighbours are not."""
    model, params, inputs, labels, jobs = setting("plain")
    order = jobs.order.clone()
    order[3, 1, 0], order[4, 1, 2] = 0, order[4, 1, 3]  # another's example; one twice and one not at all
    jobs = Jobs(jobs.start, order, jobs.sizes)
    work = LocalWork(epochs=2, batch_size=16, lr=0.1)
    expected = train(model, params, inputs, labels, jobs, work, backend="sequential")
    found = train(model, params, inputs, labels, jobs, work)
    assert sum(always) == len(SIZES) - 2
    torch.testing.assert_close(found.updates, expected.updates, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-9, atol=1e-10)


def test_what_is_not_finite_stays_with_its_job(always: list[int]) -> None:
    model, params, inputs, labels, jobs = setting("plain", dtype=torch.float32)
    work = LocalWork(epochs=2, batch_size=16)
    clean = train(model, params, inputs, labels, jobs, work, chunk=3)
    spoiled = inputs.clone()
    spoiled[jobs.order[3, 0, 5]] = float("nan")
    found = train(model, params, spoiled, labels, jobs, work, chunk=3)
    others = torch.arange(len(jobs)) != 3
    assert same(
        Trained(found.updates[others], found.losses[others]),
        Trained(clean.updates[others], clean.losses[others]),
    )
    assert found.updates[3].isnan().all()
    assert found.losses[3].isnan()


def test_places() -> None:
    torch.manual_seed(0)
    sizes = torch.tensor([9, 4])
    index = torch.where(torch.arange(9) < sizes[:, None], torch.randperm(18).view(2, 9), -1)
    order = shuffled(index, sizes, 3, client_keys(2, 0))
    found, place, alike = places(order, sizes, 16)
    assert alike.all()
    for job, size in enumerate(sizes.tolist()):
        for epoch in range(3):
            assert torch.equal(found[job][place[job, epoch, :size]], order[job, epoch, :size])
            assert torch.equal(place[job, epoch].sort().values, torch.arange(16))
            assert torch.equal(place[job, epoch, size:], torch.arange(size, 16))
        assert (found[job, size:] == found[job, 0]).all()
    order[1, 2, 0] = order[0, 0, 0]
    assert places(order, sizes, 16)[2].tolist() == [True, False]


def test_when_it_pays() -> None:
    like = torch.zeros(1)
    model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))

    def rows(size: int, epochs: int = 3, model: nn.Module = model) -> int:
        features = next(model.parameters()).shape[1]
        return gram_rows(model, (features,), size, LocalWork(epochs=epochs), 8, like)

    assert rows(280) == 280
    assert rows(280, epochs=1) == 0  # every product with the weights is made once only
    assert rows(2000) == 0  # the Gram matrix is too large
    assert rows(280, model=nn.Sequential(nn.Linear(784, 10))) == 0  # the first layer is the last
    odd = nn.Sequential(nn.Linear(783, 127), nn.ReLU(), nn.Linear(127, 10))
    assert [rows(n, model=odd) for n in (256, 257, 265)] == [256, 272, 272]  # whole cache lines
    for size in range(50, 300, 7):
        assert size <= rows(size, model=odd) <= 1.15 * size or rows(size, model=odd) - size < 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_room_on_huge_pages(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """It behaves as any tensor does, and lives as long as a view of it."""
    monkeypatch.setattr(pages, "_LARGE", 0)
    room = pages.large_empty((3, 700), torch.zeros(1, dtype=dtype))
    assert (room.shape, room.dtype, room.data_ptr() % 64) == ((3, 700), dtype, 0)
    view = room.fill_(2.0)[1:, 5:]
    del room
    assert torch.equal(view.clone() + 1, torch.full((2, 695), 3.0, dtype=dtype))
    assert pages.large_empty((0, 5), torch.zeros(1)).shape == (0, 5)


@pytest.mark.parametrize("name", [*MODELS])
def test_what_is_remembered_changes_no_bit(
    name: str, always: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round after round, in other orders, with other models, on more threads, beside other jobs."""
    formed: list[int] = []
    kept = GramKernel._form_gram

    def counted(self: GramKernel, bias: float) -> None:
        formed.append(len(self._x))
        kept(self, bias)

    monkeypatch.setattr(GramKernel, "_form_gram", counted)
    model, params, inputs, labels, jobs = setting(name, dtype=torch.float32)
    memory, work = PoolMemory(), LocalWork(epochs=2, batch_size=16, lr=0.1)
    index = jobs.order[:, 0].clone()
    for turn in range(3):
        order = shuffled(index, jobs.sizes, 2, client_keys(len(jobs), turn))
        now = Jobs(jobs.start, order, jobs.sizes)
        fresh = train(model, params + turn, inputs, labels, now, work, backend="batched")
        formed.clear()
        again = train(
            model,
            params + turn,
            inputs,
            labels,
            now,
            work,
            backend="batched",
            threads=1 + turn,
            memory=memory,
        )
        assert sum(formed) == (len(jobs) if turn == 0 else 0)
        assert torch.equal(again.updates, fresh.updates)
        assert torch.equal(again.losses, fresh.losses)
    few = Jobs(jobs.start[2:7], jobs.order[2:7], jobs.sizes[2:7])
    formed.clear()
    some = train(model, params, inputs, labels, few, work, backend="batched", memory=memory)
    assert not formed
    assert torch.equal(
        some.updates, train(model, params, inputs, labels, few, work, backend="batched").updates
    )


def test_memory_has_a_limit(always: list[int]) -> None:
    model, params, inputs, labels, jobs = setting("plain", dtype=torch.float32)
    work = LocalWork(epochs=2, batch_size=16, lr=0.1)
    small = PoolMemory(limit=40_000)
    fresh = train(model, params, inputs, labels, jobs, work, backend="batched")
    for _ in range(2):
        found = train(model, params, inputs, labels, jobs, work, backend="batched", memory=small)
        assert torch.equal(found.updates, fresh.updates)
    assert 0 < sum(each.nbytes for each in small._kept.values()) <= 40_000
