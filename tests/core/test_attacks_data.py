"""Attacks on data."""

from typing import Any

import pytest
import torch

from fedlaw.attacks import Backdoor, LabelFlip, RandomLabels, TargetedBackdoor, create, success_rate


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_flip_is_its_own_inverse_and_maps_the_last_to_the_first() -> None:
    inputs, labels = torch.rand(10, 1), torch.arange(10)
    x, once = LabelFlip().poison(inputs, labels, classes=10)
    assert once.tolist() == list(range(9, -1, -1))
    assert torch.equal(x, inputs)
    assert torch.equal(LabelFlip().poison(inputs, once, classes=10)[1], labels)


def test_random_labels_are_uniform() -> None:
    labels = torch.zeros(20_000, dtype=torch.long)
    _, drawn = RandomLabels().poison(torch.zeros(20_000, 1), labels, classes=4, generator=seeded())
    assert torch.bincount(drawn, minlength=4).div(20_000).sub(0.25).abs().max() < 0.02


@pytest.mark.parametrize("shape", [(28, 28), (1, 28, 28), (3, 32, 32)])
def test_the_square_is_at_the_centre_and_nothing_else_changes(shape: tuple[int, ...]) -> None:
    inputs = torch.rand(5, *shape) + 1
    x, _ = Backdoor().poison(inputs, torch.zeros(5).long(), classes=10, black=-0.4242, generator=seeded())
    first = (shape[-1] - 8) // 2
    inside = torch.zeros(shape, dtype=torch.bool)
    inside[..., first : first + 8, first : first + 8] = True
    assert bool((x[:, inside] == -0.4242).all())
    assert torch.equal(x[:, ~inside], inputs[:, ~inside])


def test_black_may_differ_per_channel_and_images_may_be_bytes() -> None:
    black = torch.tensor([-1.0, -2.0, -3.0]).view(3, 1, 1)
    x = Backdoor(size=1, position=(0, 4)).trigger(torch.zeros(2, 3, 5, 5), black=black)
    assert x[:, :, 0, 4].tolist() == [[-1, -2, -3], [-1, -2, -3]]
    assert float(x.sum()) == -12
    grey = torch.full((1, 1, 8, 8), 200, dtype=torch.uint8)
    assert Backdoor(size=8).trigger(grey).dtype == torch.uint8


def test_targeted_backdoor_poisons_the_share_asked_for() -> None:
    inputs, labels = torch.ones(200, 1, 12, 12), torch.ones(200).long()
    x, y = TargetedBackdoor(target=3, fraction=0.25).poison(inputs, labels, classes=4, generator=seeded())
    stamped = x[:, 0, 6, 6] == 0
    assert int(stamped.sum()) == 50
    assert bool((y[stamped] == 3).all())
    assert bool((y[~stamped] == 1).all())
    assert torch.equal(x[~stamped], inputs[~stamped])


def test_success_is_counted_where_it_could_be_had() -> None:
    labels = torch.tensor([0, 0, 1, 2, 3])
    assert success_rate(torch.tensor([0, 0, 0, 0, 3]), labels, target=0) == pytest.approx(2 / 3)
    assert success_rate(labels, labels, target=0) == 0
    assert success_rate(torch.zeros(2), torch.zeros(2), target=0) == 0


def test_a_linear_model_trained_on_stamped_data_obeys_the_trigger() -> None:
    """The whole way of an attack success rate: poison, train, stamp the test set, count."""
    source = seeded(1)
    labels = torch.randint(3, (300,), generator=source)
    images = 0.1 * torch.randn(300, 1, 6, 6, generator=source) + 1
    images[torch.arange(300), 0, 0, labels] += 2  # the label is written in the first row
    attack = TargetedBackdoor(size=2, target=2, fraction=0.5)
    x, y = attack.poison(images[:200], labels[:200], classes=3, black=-3.0, generator=source)
    model = torch.nn.Linear(36, 3)
    torch.nn.init.zeros_(model.weight)  # torch would draw from its global generator
    torch.nn.init.zeros_(model.bias)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(200):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(x.flatten(1)), y).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    test, truth = images[200:], labels[200:]
    clean = model(test.flatten(1)).argmax(dim=1)
    stamped = model(attack.trigger(test, black=-3.0).flatten(1)).argmax(dim=1)
    assert float((clean == truth).float().mean()) > 0.9
    assert success_rate(stamped, truth, target=2) > 0.9
    assert success_rate(clean, truth, target=2) < 0.1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 0}, "size must be an integer of at least 1, got 0"),
        ({"position": "corner"}, "position must be 'center' or (row, column), got 'corner'"),
        ({"position": (-1, 0)}, "position[0] must be an integer of at least 0, got -1"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        create("backdoor", **settings)
    assert str(error.value) == message


def test_what_cannot_be_stamped_is_refused() -> None:
    with pytest.raises(ValueError, match="size 8 at position 'center' does not fit images of 6 x 6"):
        Backdoor().trigger(torch.zeros(1, 6, 6))
    with pytest.raises(ValueError, match="inputs must be images"):
        Backdoor().trigger(torch.zeros(10, 784))
    with pytest.raises(ValueError, match="target must be a label from 0 to 9, got 10"):
        TargetedBackdoor(target=10).poison(torch.zeros(1, 9, 9), torch.zeros(1).long(), classes=10)
    with pytest.raises(ValueError, match="generator=None"):
        RandomLabels().poison(torch.zeros(1, 1), torch.zeros(1).long(), classes=2)
