"""The convolution kernels of a GPU, by Triton's interpreter, against autograd in double precision."""

import copy

import pytest
import torch
from torch import Tensor, nn

from fedlaw.models import cnn
from fedlaw.models.vector import flatten
from fedlaw.simulation.conv_gpu import ConvKernel
from fedlaw.simulation.conv_plan import plan, supports, tiles
from fedlaw.simulation.reading import UnknownLayer

pytest.importorskip("triton", reason="Triton is for Linux on x86-64")


def block(inputs: int, outs: int, groups: int, **settings) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outs, **{"kernel_size": 3, "padding": 1, **settings})
    return [conv, nn.GroupNorm(groups, outs), nn.ReLU(), nn.MaxPool2d(2)]


def usual() -> tuple[nn.Module, tuple[int, int, int]]:
    return cnn((3, 8, 8), 5, channels=(8, 16), groups=4), (3, 8, 8)


def uneven() -> tuple[nn.Module, tuple[int, int, int]]:
    """No powers of two, sizes that halve unevenly, no bias, a large kernel with little padding, hidden layers."""
    layers = [*block(1, 6, 3, bias=False), *block(6, 12, 2, kernel_size=5), *block(12, 20, 20)]
    tail = [nn.Flatten(), nn.Linear(20, 9), nn.ReLU(), nn.Linear(9, 5, bias=False)]
    return nn.Sequential(*layers, *tail), (1, 13, 14)


def large() -> tuple[nn.Module, tuple[int, int, int]]:
    """More channels than one tile holds."""
    return cnn((2, 8, 8), 3, channels=(16, 160), hidden=(4,), groups=8), (2, 8, 8)


def starts(make, jobs: int) -> Tensor:
    """Parameters of `jobs` models; norms whose weights and biases are not all equal."""
    theta = torch.stack([flatten(make()[0]) for _ in range(jobs)])
    return theta + 0.1 * torch.randn_like(theta)


def stepped(model: nn.Module, theta: Tensor, x: Tensor, y: Tensor, weight: Tensor, lr: float) -> Tensor:
    """One model's parameters after one step, by autograd in float64."""
    model = copy.deepcopy(model).double()
    nn.utils.vector_to_parameters(theta.double(), model.parameters())
    loss = nn.functional.cross_entropy(model(x.double()), y, reduction="none") @ weight.double()
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    return theta.double() - lr * torch.cat([part.flatten() for part in gradient])


@pytest.mark.parametrize("make", [usual, uneven, large])
def test_steps_agree_with_autograd(make):
    """Job 0 does not train; job 1 has a full batch, job 2 one that is padded with what must not be looked at."""
    torch.manual_seed(0)
    (model, shape), jobs, width, lr = make(), 3, 2, 0.5
    classes = model[-1].out_features
    theta = starts(make, jobs)
    kernel = ConvKernel(model, shape, jobs, width, theta)
    kernel.load(theta)
    expected = theta.double()
    for _ in range(2):
        x, y = torch.randn(2, width, *shape), torch.randint(0, classes, (2, width))
        x[1, 1] = torch.nan
        weight = torch.tensor([[0.25, 0.75], [1.0, 0.0]])
        kernel.step(1, x, y, weight, lr)
        for job, real in ((0, 2), (1, 1)):
            given = (x[job, :real], y[job, :real], weight[job, :real])
            expected[job + 1] = stepped(model, expected[job + 1].float(), *given, lr)
    found = kernel.flat(jobs)
    assert torch.equal(found[0], theta[0])
    torch.testing.assert_close(found, expected.float(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("make", [usual, uneven, large])
def test_half_precision_rounds_operands_and_nothing_else(make):
    """Steps are as right as eleven bits allow, small gradients included; what is not trained is kept in full."""
    torch.manual_seed(3)
    (model, shape), width, lr = make(), 2, 0.5
    theta = starts(make, 3)
    kernel = ConvKernel(model, shape, 3, width, theta, half=True)
    kernel.load(theta)
    assert torch.equal(kernel.flat(3), theta)
    x, y = torch.randn(2, width, *shape).half(), torch.randint(0, model[-1].out_features, (2, width))
    weight = torch.tensor([[0.25, 0.75], [1e-4, 0.0]])  # the second job's gradients would be lost below 6e-8
    kernel.step(1, x, y, weight, lr)
    found = kernel.flat(3)
    assert torch.equal(found[0], theta[0])
    for job, real in ((0, 2), (1, 1)):
        given = (x[job, :real].float(), y[job, :real], weight[job, :real])
        moved = stepped(model, theta[job + 1], *given, lr) - theta[job + 1].double()
        error = (found[job + 1].double() - theta[job + 1].double() - moved).norm() / moved.norm()
        assert error < 4e-3, error
    kernel.step(1, x, y, weight, lr)  # the copies that products read have moved with the parameters
    again = ConvKernel(model, shape, 3, width, theta, half=True)
    again.load(found)
    again.step(1, x, y, weight, lr)
    assert torch.equal(again.flat(3), kernel.flat(3))


@pytest.mark.parametrize("make", [usual, uneven])
def test_scores_agree_with_the_model(make):
    """Of fewer jobs and narrower batches than there is room for, after batches that filled it."""
    torch.manual_seed(1)
    model, shape = make()
    theta = starts(make, 2)
    kernel = ConvKernel(model, shape, 2, 3, theta)
    kernel.load(theta)
    kernel.scores(0, torch.randn(2, 3, *shape))
    x = torch.randn(2, *shape)
    nn.utils.vector_to_parameters(theta[1], model.parameters())
    with torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(kernel.scores(1, x.unsqueeze(0))[0], expected, rtol=1e-5, atol=1e-5)
    y = torch.tensor([[1, 4]])
    losses = nn.functional.cross_entropy(expected, y[0], reduction="none")
    torch.testing.assert_close(kernel.losses(1, x.unsqueeze(0), y)[0], losses, rtol=1e-5, atol=1e-5)


def test_parameters_come_back_as_they_were():
    for make in (usual, uneven, large):
        model, shape = make()
        theta = starts(make, 3)
        kernel = ConvKernel(model, shape, 4, 1, theta)
        kernel.load(theta)
        assert torch.equal(kernel.flat(3), theta)
        room = torch.empty_like(theta[:2])
        assert kernel.flat(2, out=room) is room
        assert torch.equal(room, theta[:2])


def test_a_diverged_model_is_its_own_affair():
    torch.manual_seed(2)
    model, shape = usual()
    theta = starts(usual, 2)
    x, y, weight = torch.randn(2, 2, *shape), torch.randint(0, 5, (2, 2)), torch.full((2, 2), 0.5)
    found = []
    for first in (theta[0], torch.full_like(theta[0], torch.nan)):
        kernel = ConvKernel(model, shape, 2, 2, theta)
        kernel.load(torch.stack([first, theta[1]]))
        kernel.step(0, x, y, weight, 0.1)
        found.append(kernel.flat(2))
    assert found[1][0].isnan().all()
    assert torch.equal(found[0][1], found[1][1])


def test_which_models_it_is_for():
    shape = (3, 8, 8)
    assert len(plan(cnn((3, 32, 32), 10), (3, 32, 32))[0]) == 3
    assert len(plan(cnn((1, 28, 28), 10, hidden=(64,)), (1, 28, 28))[1]) == 2
    assert not supports(cnn(shape, 10, groups=8), shape, torch.device("cpu"))
    end = [nn.Flatten(), nn.Linear(4 * 16, 2)]
    for other in (
        [*block(3, 4, 2, stride=2), nn.Flatten(), nn.Linear(16, 2)],
        [*block(3, 4, 2)[:3], nn.Flatten(), nn.Linear(256, 2)],
        [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.GroupNorm(2, 4), nn.MaxPool2d(2), *end],
        [*block(3, 4, 2)[:3], nn.MaxPool2d(3, 2, 1), *end],
        [*block(3, 4, 2), nn.Flatten(), nn.ReLU(), nn.Linear(4 * 16, 2)],
        [nn.Flatten(), nn.Linear(192, 2)],
    ):
        with pytest.raises(UnknownLayer):
            plan(nn.Sequential(*other), shape)
    with pytest.raises(UnknownLayer, match="too large"):
        plan(cnn((3, 128, 128), 10), (3, 128, 128))
    with pytest.raises(UnknownLayer, match="first block is too large"):
        plan(cnn((3, 32, 32), 10, channels=(128, 256)), (3, 32, 32))
    with pytest.raises(UnknownLayer, match="too many channels"):
        plan(cnn((64, 8, 8), 10), (64, 8, 8))


@pytest.mark.parametrize("exact", [True, False])
def test_tiles_hold_whole_groups_within_bounds(exact):
    for channels, shape, groups in (
        ((32, 64, 128), (3, 32, 32), 8),
        ((64, 128), (3, 32, 32), 8),
        ((24, 48), (1, 28, 28), 4),
        ((8, 512), (3, 16, 16), 8),
    ):
        blocks, _ = plan(cnn(shape, 10, channels=channels, groups=groups), shape)
        for each in blocks:
            found = tiles(each, exact)
            for name in ("forward", "first", "norm"):
                numbers = 4 * each.cells * found[name]["BG"] * each.size
                assert numbers <= 32_768
            assert found["forward"]["BG"] * each.size >= 16
            assert each.cells % found["first"]["SPLIT"] == 0
            assert each.cells // found["first"]["SPLIT"] >= 16
