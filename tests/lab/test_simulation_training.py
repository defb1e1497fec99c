"""Local training: every backend against plain SGD, gradients against autograd, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fedlaw._random import client_keys
from fedlaw.simulation import Jobs, LocalWork, shuffled, train
from fedlaw.simulation.batched import BatchedKernel
from fedlaw.simulation.functional import VmapKernel
from fedlaw.simulation.jobs import schedule

SIZES = [23, 8, 40, 1, 23, 17]


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(48, 11), nn.ReLU(), nn.Linear(11, 7), nn.ReLU(), nn.Linear(7, 5)
    )


def logistic() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 5))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, padding=1), nn.GroupNorm(3, 6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5),
    )  # fmt: skip


def odd() -> nn.Module:
    """The same layers in other places, with other settings, nested, without biases, one ReLU used twice."""
    relu = nn.ReLU()
    return nn.Sequential(
        relu,
        nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), nn.Conv2d(3, 4, 3, stride=2, bias=False), relu),
        nn.Flatten(),
        nn.Linear(4, 6, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6, 5),
    )


MODELS = {"mlp": mlp, "logistic": logistic, "cnn": cnn, "odd": odd}


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def setting(
    make: object = mlp,
    sizes: list[int] = SIZES,
    epochs: int = 2,
    dtype: torch.dtype = torch.float64,
    rows: int = 2,
) -> tuple[nn.Module, Tensor, Tensor, Tensor, Jobs]:
    """A model, two starting points, a pool of 4x4 images of 3 channels, and a job for every size."""
    torch.manual_seed(0)
    params = torch.stack([flat(make()) for _ in range(rows)]).to(dtype)  # type: ignore[operator]
    n, longest = len(sizes), max(sizes)
    inputs = torch.randn(sum(sizes), 3, 4, 4, dtype=dtype)
    labels = torch.randint(0, 5, (sum(sizes),))
    ends = torch.tensor(sizes).cumsum(0)
    index = torch.full((n, longest), -1)
    for i, size in enumerate(sizes):
        index[i, :size] = torch.arange(int(ends[i]) - size, int(ends[i]))
    counts = torch.tensor(sizes)
    order = shuffled(index, counts, epochs, client_keys(len(counts), 1))
    return make(), params, inputs, labels, Jobs(torch.arange(n) % rows, order, counts)  # type: ignore[operator]


def by_hand(
    model: nn.Module, params: Tensor, inputs: Tensor, labels: Tensor, jobs: Jobs, work: LocalWork
) -> tuple[Tensor, Tensor]:
    """What anybody would write: torch.optim.SGD on a copy of the module for every client."""
    updates, losses = [], []
    for job in range(len(jobs)):
        size, theta = int(jobs.sizes[job]), params[jobs.start[job]]
        local = copy.deepcopy(model).to(params.dtype)
        nn.utils.vector_to_parameters(theta.clone(), local.parameters())
        mine = jobs.order[job, 0, :size].sort().values
        before = nn.functional.cross_entropy(local(inputs[mine]), labels[mine]).item()
        optimizer = torch.optim.SGD(local.parameters(), lr=work.lr)
        for epoch in range(work.epochs):
            for at in range(0, size, work.batch_size):
                batch = jobs.order[job, epoch, at : min(size, at + work.batch_size)]
                optimizer.zero_grad()
                nn.functional.cross_entropy(local(inputs[batch]), labels[batch]).backward()
                optimizer.step()
        after = nn.functional.cross_entropy(local(inputs[mine]), labels[mine]).item()
        updates.append((theta - flat(local)) / work.lr)
        losses.append(before if work.loss_point == "before" else after)
    return torch.stack(updates), torch.tensor(losses, dtype=params.dtype)


@pytest.mark.parametrize("loss_point", ["before", "after"])
@pytest.mark.parametrize("backend", ["sequential", "vmap", "batched"])
@pytest.mark.parametrize("name", MODELS)
def test_every_backend_is_plain_sgd(name: str, backend: str, loss_point: str) -> None:
    model, params, inputs, labels, jobs = setting(MODELS[name])
    work = LocalWork(epochs=2, batch_size=16, lr=0.1, loss_point=loss_point)  # type: ignore[arg-type]
    updates, losses = by_hand(model, params, inputs, labels, jobs, work)
    found = train(model, params, inputs, labels, jobs, work, backend=backend, threads=2)  # type: ignore[arg-type]
    torch.testing.assert_close(found.updates, updates, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(found.losses, losses, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_backends_agree_in_single_precision(name: str) -> None:
    model, params, inputs, labels, jobs = setting(MODELS[name], dtype=torch.float32)
    work = LocalWork(epochs=2, batch_size=16)
    expected = train(model, params, inputs, labels, jobs, work, backend="sequential")
    for backend in ("vmap", "batched"):
        found = train(model, params, inputs, labels, jobs, work, backend=backend)  # type: ignore[arg-type]
        # (theta - psi) / lr is rounded at the size of theta, about 1e-7, and then multiplied by 1 / lr = 100.
        torch.testing.assert_close(found.updates, expected.updates, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(found.losses, expected.losses, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_batched_backward_is_the_gradient(name: str) -> None:
    """One step at lr 1 moves the parameters by minus autograd's gradient, for several models stacked."""
    model = MODELS[name]().double()
    torch.manual_seed(2)
    k, width = (1 if not BatchedKernel.stacks(model, torch.device("cpu")) else 3), 6
    theta = torch.randn(k, flat(model).numel(), dtype=torch.float64) / 3
    x = torch.randn(k, width, 3, 4, 4, dtype=torch.float64)
    y = torch.randint(0, 5, (k, width))
    weight = torch.rand(k, width, dtype=torch.float64)
    kernel = BatchedKernel(model, (3, 4, 4), k, width, theta)
    kernel.load(theta)
    with torch.no_grad():
        kernel.step(0, x.clone(), y, weight, 1.0)
    for i in range(k):
        nn.utils.vector_to_parameters(theta[i], model.parameters())
        each = nn.functional.cross_entropy(model(x[i]), y[i], reduction="none")
        gradients = torch.autograd.grad((each * weight[i]).sum(), list(model.parameters()))
        expected = torch.cat([g.flatten() for g in gradients])
        torch.testing.assert_close(theta[i] - kernel.flat(k)[i], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [BatchedKernel, VmapKernel])
@pytest.mark.parametrize("name", MODELS)
def test_stacked_models_match_one_by_one(name: str, kind: type[BatchedKernel] | type[VmapKernel]) -> None:
    """What a GPU runs, all models together (convolutions as groups of one), gives what each gives alone."""
    model, k, width = MODELS[name]().double(), 3, 6
    torch.manual_seed(3)
    theta = torch.randn(k, flat(model).numel(), dtype=torch.float64) / 3
    x = torch.randn(k, width, 3, 4, 4, dtype=torch.float64)
    y = torch.randint(0, 5, (k, width))
    weight = torch.rand(k, width, dtype=torch.float64)
    stacked = kind(model, (3, 4, 4), k, width, theta)
    stacked.load(theta)
    with torch.no_grad():
        stacked.step(0, x, y, weight, 0.5)
        losses = stacked.losses(0, x, y)
        for i in range(k):
            one = kind(model, (3, 4, 4), 1, width, theta)
            one.load(theta[i : i + 1])
            one.step(0, x[i : i + 1], y[i : i + 1], weight[i : i + 1], 0.5)
            torch.testing.assert_close(stacked.flat(k)[i], one.flat(1)[0], rtol=1e-10, atol=1e-12)
            loss = one.losses(0, x[i : i + 1], y[i : i + 1])
            torch.testing.assert_close(losses[i], loss[0], rtol=1e-10, atol=1e-12)


def test_inputs_are_left_alone() -> None:
    model, params, inputs, labels, jobs = setting(odd)
    before = [t.clone() for t in (params, inputs, labels, jobs.order, flat(model))]
    mode, threads = model.training, torch.get_num_threads()
    for backend in ("sequential", "vmap", "batched"):
        train(model, params, inputs, labels, jobs, LocalWork(2, 16), backend=backend, threads=2)  # type: ignore[arg-type]
    for now, then in zip((params, inputs, labels, jobs.order, flat(model)), before, strict=True):
        assert torch.equal(now, then)
    assert model.training == mode
    assert torch.get_num_threads() == threads


class Centered(nn.Module):
    """A layer with state: it subtracts a running mean of what it saw in training."""

    mean: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.copy_(0.9 * self.mean + 0.1 * x.mean(0).detach())
        return x - self.mean


def test_layers_that_look_across_a_batch() -> None:
    """Padding never enters batch statistics, and buffers are each job's own, part of the vector."""

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(48, 6),
            nn.BatchNorm1d(6, track_running_stats=False),
            Centered(6),
            nn.Linear(6, 5),
        )

    model, params, inputs, labels, jobs = setting(make, sizes=[23, 10, 40])
    params = torch.cat([params, torch.full((2, 6), 0.5)], dim=1).double()
    work = LocalWork(epochs=2, batch_size=16, lr=0.1)
    expected = train(model, params, inputs, labels, jobs, work, backend="sequential")
    found = train(model, params, inputs, labels, jobs, work, backend="auto")
    torch.testing.assert_close(found.updates, expected.updates, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-9, atol=1e-10)
    assert (found.updates[:, -6:].abs() > 1e-3).all()


def test_frozen_parameters_stay() -> None:
    model, params, inputs, labels, jobs = setting(mlp)
    model[1].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    expected = train(model, params, inputs, labels, jobs, LocalWork(2, 16), backend="sequential")
    found = train(model, params, inputs, labels, jobs, LocalWork(2, 16), backend="auto")
    torch.testing.assert_close(found.updates, expected.updates, rtol=1e-9, atol=1e-10)
    assert not found.updates[:, : 48 * 11].any()
    assert found.updates[:, 48 * 11 :].any()


@pytest.mark.parametrize("backend", ["sequential", "vmap", "batched"])
def test_divergence_is_a_result(backend: str) -> None:
    """A learning rate that blows up, and a start that is not finite, concern their own job only."""
    model, params, inputs, labels, jobs = setting(mlp, dtype=torch.float32, rows=3)
    params[1], params[2] = float("nan"), params[2] * 1e30
    found = train(model, params, inputs, labels, jobs, LocalWork(2, 16), backend=backend)  # type: ignore[arg-type]
    finite = found.updates.isfinite().all(1)
    assert finite[jobs.start == 0].all()
    assert not finite[jobs.start == 1].any()
    assert found.losses[jobs.start == 1].isnan().all()
    assert found.losses[jobs.start == 0].isfinite().all()
    blown = train(model, params[:1], inputs, labels, Jobs(jobs.start * 0, jobs.order, jobs.sizes),
                  LocalWork(2, 16, lr=1e30), backend=backend)  # type: ignore[arg-type]  # fmt: skip
    assert not blown.losses[2].isfinite()


def test_no_jobs() -> None:
    model, params, inputs, labels, _ = setting(mlp)
    none = torch.zeros(0, dtype=torch.int64)
    jobs = Jobs(none, torch.zeros((0, 1, 4), dtype=torch.int64), none)
    for backend in ("sequential", "vmap", "batched"):
        found = train(model, params, inputs, labels, jobs, LocalWork(1), backend=backend)  # type: ignore[arg-type]
        assert found.updates.shape == (0, params.shape[1])
        assert found.losses.shape == (0,)


def test_unknown_layers() -> None:
    _, params, inputs, labels, jobs = setting(mlp)
    work = LocalWork(2, 16)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(48, 11), nn.Tanh(), nn.Linear(11, 7), nn.ReLU(), nn.Linear(7, 5)
    )
    with pytest.raises(ValueError, match=r"model\[2\]'?, Tanh.*backend='vmap'"):
        train(model, params, inputs, labels, jobs, work, backend="batched")
    expected = train(model, params, inputs, labels, jobs, work, backend="sequential")
    found = train(model, params, inputs, labels, jobs, work)
    torch.testing.assert_close(found.updates, expected.updates, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([nn.Conv2d(3, 3, 3, groups=3), nn.Flatten(), nn.Linear(12, 5)], "groups"),
        ([nn.Conv2d(3, 5, 3, padding="same"), nn.Flatten(), nn.Linear(80, 5)], "padding given by name"),
        ([nn.GroupNorm(1, 3, affine=False), nn.Flatten(), nn.Linear(48, 5)], "not affine"),
        ([nn.Flatten(2), nn.Flatten(), nn.Linear(48, 5)], "some of the dimensions"),
        ([nn.Linear(4, 5)], "Flatten must be before"),
        ([nn.Flatten(), nn.Unflatten(1, (3, 4, 4)), nn.Flatten(), nn.Linear(48, 5)], "no known kind"),
        ([nn.Conv2d(3, 5, 3)], "ends in class scores"),
    ],
)
def test_layers_set_up_otherwise(layers: list[nn.Module], reason: str) -> None:
    model = nn.Sequential(*layers)
    _, _, inputs, labels, jobs = setting(mlp, rows=1)
    with pytest.raises(ValueError, match=reason):
        train(model, flat(model)[None].double(), inputs, labels, jobs, LocalWork(2), backend="batched")


def test_refusals() -> None:
    model, params, inputs, labels, jobs = setting(mlp)
    work = LocalWork(2, 16)
    with pytest.raises(ValueError, match="job 1 has 0 examples"):
        Jobs(jobs.start[:2], jobs.order[:2], torch.tensor([3, 0]))
    with pytest.raises(ValueError, match=r"start \(C,\)"):
        Jobs(jobs.start[:2], jobs.order, jobs.sizes)
    with pytest.raises(ValueError, match="padding"):
        Jobs(jobs.start, jobs.order, jobs.sizes + (jobs.sizes == 1))
    with pytest.raises(ValueError, match="epochs"):
        train(model, params, inputs, labels, jobs, LocalWork(3, 16))
    with pytest.raises(ValueError, match="unknown backend 'fast'"):
        train(model, params, inputs, labels, jobs, work, backend="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="params must be"):
        train(model, params[:, 1:], inputs, labels, jobs, work)
    with pytest.raises(ValueError, match="rows 0 to 0"):
        train(model, params[:1], inputs, labels, jobs, work)
    with pytest.raises(ValueError, match="convert"):
        train(model, params.float(), inputs, labels, jobs, work)
    with pytest.raises(ValueError, match="index the 50 inputs"):
        train(model, params, inputs[:50], labels[:50], jobs, work)
    with pytest.raises(ValueError, match="chunk must be"):
        train(model, params, inputs, labels, jobs, work, chunk=0)
    with pytest.raises(ValueError, match="Dropout"):
        train(nn.Sequential(*model, nn.Dropout(0.5)), params, inputs, labels, jobs, work)
    with pytest.raises(ValueError, match="takes 48 channels or features"):
        train(model, params, inputs[:, :2], labels, jobs, work)
    for bad in ({"epochs": 0}, {"batch_size": 2.5}, {"lr": float("nan")}, {"loss_point": "later"}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            LocalWork(**bad)  # type: ignore[arg-type]


def test_shuffled_orders() -> None:
    sizes = torch.tensor([5, 3, 7])
    index = torch.where(torch.arange(7) < sizes[:, None], torch.arange(21).view(3, 7), -1)
    order = shuffled(index, sizes, 200, client_keys(3, 0))
    wider = torch.nn.functional.pad(index, (0, 4), value=-1)
    again = shuffled(wider, sizes, 200, client_keys(3, 0))
    assert torch.equal(again[..., :7], order)  # padding changes nothing
    assert (again[..., 7:] == -1).all()
    alone = shuffled(index[1:2], sizes[1:2], 200, client_keys(3, 0)[1:2])
    assert torch.equal(alone, order[1:2])  # neighbours change nothing
    assert not torch.equal(order, shuffled(index, sizes, 200, client_keys(3, 1)))
    for i, size in enumerate(sizes.tolist()):
        assert torch.equal(order[i, :, :size].sort(-1).values, index[i, :size].expand(200, size))
        assert (order[i, :, size:] == -1).all()
    # Every example comes first about equally often: 200 draws over 7, standard deviation 5.
    first = order[2, :, 0].bincount(minlength=21)[14:]
    assert ((first - 200 / 7).abs() < 25).all()


def test_schedule_covers_every_example_once_and_wastes_little() -> None:
    sizes = [130, 129, 128, 65, 64, 9, 1]
    for together in (True, False):
        runs = schedule(sizes, batch_size=64, multiple=8, together=together)
        for job, size in enumerate(sizes):
            mine = [(at, width) for lo, hi, at, width in runs if lo <= job < hi]
            assert [at for at, _ in mine] == list(range(0, size, 64))
            assert 0 <= sum(width for _, width in mine) - size < 8
        assert together or all(hi == lo + 1 for lo, hi, _, _ in runs)


def test_stacked_jobs() -> None:
    order = torch.arange(4).view(1, 1, 4)
    one = Jobs(torch.tensor([1]), order, torch.tensor([4]))
    two = Jobs(torch.tensor([0]), order[..., :2], torch.tensor([2]))
    both = Jobs.stack([one, two], rows=[2, 1])
    assert both.start.tolist() == [1, 2]
    assert both.order.tolist() == [[[0, 1, 2, 3]], [[0, 1, -1, -1]]]
    assert both.sizes.tolist() == [4, 2]
