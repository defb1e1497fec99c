"""The fused kernel of a GPU, by Triton's interpreter, against the reference."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from fedlaw._random import client_keys
from fedlaw.models import flatten, mlp
from fedlaw.simulation import Jobs, LocalWork, shuffled, train
from fedlaw.simulation.fused import Shape, mlp_shape, supports, train_fused

pytest.importorskip("triton", reason="Triton is for Linux on x86-64")


def _given(hidden: tuple[int, ...], classes: int = 10, seed: int = 0):
    """Four jobs of two models, their sizes such that batches end early, late and on the spot."""
    torch.manual_seed(seed)
    model = mlp((1, 6, 6), classes, hidden)
    sizes = torch.tensor([37, 20, 16, 5])
    index = torch.arange(4 * 37).view(4, 37)
    order = shuffled(index, sizes, 2, client_keys(4, seed))
    start = flatten(model)
    params = torch.stack([start, 1.1 * start])
    inputs, labels = torch.randn(4 * 37, 1, 6, 6), torch.randint(0, classes, (4 * 37,))
    return model, params, inputs, labels, Jobs(torch.tensor([0, 1, 0, 1]), order, sizes)


@pytest.mark.parametrize("loss_point", ["after", "before"])
@pytest.mark.parametrize(
    ("hidden", "classes", "batch"), [((20, 12), 10, 16), ((24,), 17, 10), ((16, 40), 3, 32)]
)
def test_agrees_with_the_reference(hidden, classes, batch, loss_point):
    given = _given(hidden, classes)
    work = LocalWork(epochs=2, batch_size=batch, lr=0.1, loss_point=loss_point)
    expected = train(*given, work, backend="sequential")
    found = train_fused(*given, work, BK=16)
    torch.testing.assert_close(found.updates, expected.updates, rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("hidden", "classes"), [((20, 12), 10), ((24,), 17)])
def test_half_precision_rounds_operands_only(hidden, classes):
    """Two epochs from operands of 10 bits: updates agree to half a percent, and no further."""
    given = _given(hidden, classes)
    work = LocalWork(epochs=2, batch_size=16, lr=0.1)
    expected = train(*given, work, backend="sequential")
    found = train_fused(*given, work, half=True, BK=16)
    apart = (found.updates - expected.updates).norm(dim=1) / expected.updates.norm(dim=1)
    assert apart.max() < 5e-3
    assert apart.min() > 1e-5
    torch.testing.assert_close(found.losses, expected.losses, rtol=2e-3, atol=1e-4)


def test_half_precision_bounds_what_is_out_of_its_range():
    model, params, inputs, labels, jobs = _given((20,))
    inputs[0, 0, 0, 0] = 1e30
    found = train_fused(model, params, inputs, labels, jobs, LocalWork(epochs=1, lr=1e-3), half=True, BK=16)
    assert not found.updates[1:].isnan().any()  # nor does anybody else's training notice


def test_padding_of_a_batch_never_counts():
    """A job of 5 examples in batches of 16: what its padding repeats must weigh nothing."""
    model, params, inputs, labels, jobs = _given((20, 12))
    work = LocalWork(epochs=1, batch_size=16, lr=0.5)
    last = Jobs(jobs.start[3:], jobs.order[3:, :1], jobs.sizes[3:])
    found = train_fused(model, params, inputs, labels, last, work, BK=16)
    expected = train(model, params, inputs, labels, last, work, backend="sequential")
    torch.testing.assert_close(found.updates, expected.updates, rtol=1e-4, atol=2e-6)


def test_which_models_it_is_for():
    linear, relu = nn.Linear, nn.ReLU
    assert mlp_shape(mlp((1, 28, 28), 10)) == Shape(784, 128, 64, 10)
    for other in (
        nn.Sequential(nn.Flatten(), linear(4, 2)),
        nn.Sequential(linear(4, 3), nn.Tanh(), linear(3, 2)),
        nn.Sequential(linear(4, 3, bias=False), relu(), linear(3, 2)),
        nn.Sequential(linear(4, 3), relu(), linear(3, 3), relu(), linear(3, 3), relu(), linear(3, 2)),
        nn.Sequential(linear(4, 3), linear(3, 3), linear(3, 2)),
        linear(4, 2),
    ):
        assert mlp_shape(other) is None
    model, params, inputs, _, _ = _given((20,))
    assert not supports(model, params, inputs, LocalWork())  # a CPU has faster ways


def test_fedlaw_does_not_need_triton():
    code = "import sys, fedlaw.simulation; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
