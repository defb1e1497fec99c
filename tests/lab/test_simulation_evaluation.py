"""Evaluation and random streams."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedlaw._random import generator
from fedlaw.simulation import evaluate


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 4))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 4)
    )


def tanh() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 4))


def setting(make: object) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    models = [make() for _ in range(3)]  # type: ignore[operator]
    params = torch.stack([nn.utils.parameters_to_vector(m.parameters()).detach() for m in models]).double()
    return models[0], params, torch.randn(50, 3, 2, 2).double(), torch.randint(0, 3, (50,))


@pytest.mark.parametrize("make", [mlp, cnn, tanh])
def test_evaluate_matches_the_model(make: object) -> None:
    model, params, inputs, labels = setting(make)
    found = evaluate(model, params, inputs, labels, classes=4, batch=16)
    for row, vector in enumerate(params):
        reference: nn.Module = make().double()  # type: ignore[operator]
        nn.utils.vector_to_parameters(vector, reference.parameters())
        scores = reference(inputs)
        right = scores.argmax(1) == labels
        assert found.accuracy[row] == right.double().mean()
        torch.testing.assert_close(found.loss[row], nn.functional.cross_entropy(scores, labels))
        for each in range(3):
            torch.testing.assert_close(found.per_class[row, each], right[labels == each].double().mean())
    assert found.per_class[:, 3].isnan().all()  # no example of that class
    assert found.finite.all()


def test_one_model_at_a_time_or_several_on_any_threads() -> None:
    model, params, inputs, labels = setting(mlp)
    together = evaluate(model, params, inputs, labels, classes=4, threads=1, batch=16)
    for row, vector in enumerate(params):
        alone = evaluate(model, vector, inputs, labels, classes=4, threads=2, batch=16)
        assert alone.accuracy.ndim == 0
        for one, many in zip(alone, together, strict=True):
            torch.testing.assert_close(one, many[row], rtol=0, atol=0, equal_nan=True)


def test_divergence_is_flagged() -> None:
    model, params, inputs, labels = setting(mlp)
    params[1, 3] = float("nan")
    params[2] = float("inf")
    found = evaluate(model, params, inputs, labels, classes=4)
    assert found.finite.tolist() == [True, False, False]
    assert found.loss.isfinite().tolist() == [True, False, False]
    assert ((found.accuracy >= 0) & (found.accuracy <= 1)).all()


def test_evaluate_refuses() -> None:
    model, params, inputs, labels = setting(mlp)
    with pytest.raises(ValueError, match="classes=2"):
        evaluate(model, params, inputs, labels, classes=2)
    with pytest.raises(ValueError, match="no examples"):
        evaluate(model, params, inputs[:0], labels[:0], classes=4)
    with pytest.raises(ValueError, match="params must be"):
        evaluate(model, params[0, 1:], inputs, labels, classes=4)


def test_streams_are_apart_and_repeat() -> None:
    keys = [(0, 1, 1, "shuffle"), (1, 1, 1, "shuffle"), (0, 2, 1, "shuffle"), (0, 1, 2, "shuffle"),
            (0, 1, 1, "noise"), (0, 11, 1, "shuffle"), (0, 1, 11, "shuffle"), (-1, 1, 1, "shuffle")]  # fmt: skip
    drawn = [torch.rand(4, generator=generator(*key)) for key in keys]
    assert len({tuple(each.tolist()) for each in drawn}) == len(keys)
    for key, each in zip(keys, drawn, strict=True):
        assert torch.equal(torch.rand(4, generator=generator(*key)), each)
    # Recorded: another value here would change every result there is.
    assert generator(0, 1, 1, "shuffle").initial_seed() == 744725297792312001
