"""What every registered attack must do, whatever it is; a new one is tested by being registered."""

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedlaw import attacks
from fedlaw.attacks import View

NAMES = attacks.names()
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
ROUNDS = (1, 2, 3, 5, 21, 40)


def fleet(n: int, m: int, device: str = "cpu") -> Tensor:
    """m malicious clients among n, not all in a row."""
    mask = torch.zeros(n, dtype=torch.bool, device=device)
    mask[torch.arange(n, device=device) * 5 % n < m] = True
    assert int(mask.sum()) == m
    return mask


def mean_rule(updates: Tensor) -> Tensor:
    return updates.mean(dim=0)


def view_of(
    malicious: Tensor,
    acting: Tensor | None = None,
    *,
    d: int = 9,
    dtype: torch.dtype = torch.float64,
    seed: int = 3,
) -> View:
    """A view as a simulator builds it: `malicious` of the whole roster, `acting` those who misbehave now."""
    source = torch.Generator().manual_seed(seed)
    n, device = len(malicious), malicious.device
    numbers = torch.randn(n + 2, d, generator=source, dtype=torch.float64).to(device=device, dtype=dtype)
    return View(
        updates=numbers[:n] + 0.5,
        losses=numbers[n, :1].abs() + torch.linspace(0.1, 1, n, dtype=dtype, device=device),
        malicious=malicious if acting is None else acting,
        params=numbers[n + 1],
        alpha=0.1,
        generator=torch.Generator(device=device).manual_seed(7),
        rule=mean_rule,
        ranks=attacks.ranks(malicious),
        crew=int(malicious.sum()),
        layers=(d // 2, d - d // 2),
    )


def images(seed: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return torch.rand(40, 2, 12, 10, generator=source) + 0.5, torch.randint(5, (40,), generator=source)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_shape_type_finiteness(name: str, dtype: torch.dtype, device: str) -> None:
    attack, malicious = attacks.create(name), fleet(12, 4, device)
    for round in ROUNDS:
        acting = attack.acting(round, malicious)
        view = replace(view_of(malicious, acting, dtype=dtype), round=round)
        forged = attack.forge(view)
        assert forged.updates.shape == (int(acting.sum()), 9)
        assert forged.losses.shape == (int(acting.sum()),)
        assert forged.updates.dtype == forged.losses.dtype == dtype
        assert forged.updates.device == view.updates.device
        assert bool(forged.updates.isfinite().all())
        assert bool(forged.losses.isfinite().all())


@pytest.mark.parametrize("name", NAMES)
def test_same_generator_same_bits_and_inputs_unchanged(name: str) -> None:
    attack, malicious = attacks.create(name), fleet(12, 4)
    view, untouched = view_of(malicious), view_of(malicious)
    first = attack.forge(view)
    first.updates.add_(1.0)  # what is sent belongs to the sender: writing to it must reach nobody else
    first.losses.add_(1.0)
    for field in ("updates", "losses", "params", "malicious", "ranks"):
        assert torch.equal(getattr(view, field), getattr(untouched, field)), field
    second = attack.forge(untouched)
    assert torch.equal(first.updates, second.updates + 1.0)
    assert torch.equal(first.losses, second.losses + 1.0)


@pytest.mark.parametrize("name", NAMES)
def test_acting_clients_are_malicious_clients(name: str) -> None:
    attack = attacks.create(name)
    ever = torch.zeros(12, dtype=torch.bool)
    for round in range(1, 41):
        for malicious in (fleet(12, 4), fleet(12, 0), fleet(12, 12)):
            before = malicious.clone()
            acting = attack.acting(round, malicious)
            assert acting.dtype == torch.bool
            assert acting.shape == malicious.shape
            assert torch.equal(malicious, before)
            assert not bool((acting & ~malicious).any())
        ever |= attack.acting(round, fleet(12, 4))
    assert torch.equal(ever, fleet(12, 4))  # by round 40 every default attack has used all its clients


@pytest.mark.parametrize("name", NAMES)
def test_single_and_double_precision_agree(name: str) -> None:
    attack, malicious = attacks.create(name), fleet(12, 4)
    wide = attack.forge(view_of(malicious, dtype=torch.float64))
    narrow = attack.forge(view_of(malicious, dtype=torch.float32))
    torch.testing.assert_close(narrow.updates.double(), wide.updates, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(narrow.losses.double(), wide.losses, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("n", "m"), [(6, 0), (6, 6), (6, 5), (1, 1), (2, 1)])
@pytest.mark.parametrize("d", [1, 4])
def test_corner_cases_are_defined(name: str, n: int, m: int, d: int) -> None:
    """Nobody acts, nobody is honest, one honest client: always m finite rows."""
    forged = attacks.create(name).forge(view_of(fleet(n, m), d=d))
    assert forged.updates.shape == (m, d)
    assert forged.losses.shape == (m,)
    assert bool(forged.updates.isfinite().all())
    assert bool(forged.losses.isfinite().all())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0.0, 2.0])
def test_no_spread_at_all(name: str, value: float) -> None:
    """All updates, losses and parameters alike (or zero): deviations vanish, nothing divides by them."""
    view = view_of(fleet(6, 2))
    flat = replace(
        view,
        updates=torch.full_like(view.updates, value),
        losses=torch.full_like(view.losses, value),
        params=torch.full_like(view.params, value),
    )
    forged = attacks.create(name).forge(flat)
    assert bool(forged.updates.isfinite().all())
    assert bool(forged.losses.isfinite().all())


@pytest.mark.parametrize("name", NAMES)
def test_description_round_trip(name: str) -> None:
    attack = attacks.create(name)
    spec = json.loads(json.dumps(attacks.describe(attack)))
    assert attacks.parse(spec) == attack
    assert hash(attacks.parse(spec)) == hash(attack)
    assert attacks.parse(name) == attack
    assert attacks.parse({"name": name}) == attack


@pytest.mark.parametrize("name", NAMES)
def test_poisoned_data(name: str) -> None:
    attack = attacks.create(name)
    inputs, labels = images()

    def poisoned(seed: int) -> tuple[Tensor, Tensor]:
        source = torch.Generator().manual_seed(seed)
        member = attack.member(0, 4)
        return member.poison(inputs, labels, classes=5, black=-1.0, generator=source)

    x, y = poisoned(1)
    assert x.shape == inputs.shape
    assert x.dtype == inputs.dtype
    assert y.shape == labels.shape
    assert y.dtype == labels.dtype
    assert 0 <= int(y.min()) <= int(y.max()) < 5
    again = poisoned(1)
    assert torch.equal(x, again[0])
    assert torch.equal(y, again[1])
    for old, new in zip(images(), (inputs, labels), strict=True):
        assert torch.equal(old, new)
    changed = not (torch.equal(x, inputs) and torch.equal(y, labels))
    assert changed == attack.poisons_data


@pytest.mark.parametrize("name", NAMES)
def test_summary_and_unknown_settings(name: str) -> None:
    summary = attacks.registry.summaries()[name]
    assert 10 < len(summary) < 120
    with pytest.raises(ValueError, match=f"attack '{name}' has no setting 'nonsense'; it takes"):
        attacks.create(name, nonsense=1)


def test_the_names_users_know() -> None:
    wanted = [
        "none",
        "label_flip",
        "random_labels",
        "backdoor",
        "targeted_backdoor",
        "inverse_gradient",
        "global_parameter",
        "double",
        "lie",
        "noisy_lie",
        "mimic_misaligned",
        "ipm",
        "min_max",
        "min_sum",
        "mimic",
        "gaussian",
        "optimized_lie",
        "optimized_ipm",
        "scale",
        "sleeper",
        "turns",
        "schedule",
        "split",
        "forge_loss",
        "misaligned",
    ]
    assert set(wanted) <= set(NAMES)
    for alias, name in {"flip": "label_flip", "inverse": "inverse_gradient", "alie": "lie"}.items():
        assert attacks.create(alias) == attacks.create(name)
    with pytest.raises(
        ValueError, match=r"unknown attack 'labelflip' \(did you mean 'label_flip'\?\); there are: "
    ):
        attacks.create("labelflip")
