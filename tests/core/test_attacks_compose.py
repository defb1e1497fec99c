"""When, by whom, side by side, and with which losses: attacks made of attacks."""

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedlaw import attacks
from fedlaw.attacks import (
    IPM,
    Attack,
    Forged,
    ForgeLoss,
    GlobalParameter,
    Honest,
    InverseGradient,
    LabelFlip,
    Misaligned,
    Scale,
    Schedule,
    Split,
    Turns,
    View,
    describe,
    double,
    mimic_misaligned,
    parse,
    ranks,
    sleeper,
)


@dataclass(frozen=True)
class Marked(Attack):
    """Sends its mark, and says what it saw through the loss: how many it takes for honest."""

    mark: float = 0.0

    def forge(self, view: View) -> Forged:
        seen = torch.full_like(view.own_losses, float(view.honest.sum()))
        return Forged(torch.full_like(view.own_updates, self.mark), seen)


def view_for(attack: Attack, round: int, malicious: Tensor, asked: Tensor | None = None) -> View:
    """What a simulator hands over in `round`; `asked` are the indices of the clients that were asked."""
    n = len(malicious)
    asked = torch.arange(n) if asked is None else asked
    updates = torch.arange(1.0, n + 1, dtype=torch.float64).unsqueeze(1).repeat(1, 3)
    return View(
        updates[asked],
        torch.linspace(1, 2, n, dtype=torch.float64)[asked],
        attack.acting(round, malicious)[asked],
        torch.ones(3, dtype=torch.float64),
        round=round,
        generator=torch.Generator().manual_seed(0),
        ranks=ranks(malicious)[asked],
        crew=int(malicious.sum()),
    )


FLEET = torch.tensor([False, True, True, False, True, True, False, True, False, False])


@given(
    start=st.integers(1, 6),
    length=st.none() | st.integers(0, 6),
    every=st.integers(1, 3),
    share=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    round=st.integers(1, 15),
)
def test_schedule(start: int, length: int | None, every: int, share: float, round: int) -> None:
    stop = None if length is None else start + length
    schedule = Schedule(LabelFlip(), start=start, stop=stop, every=every, share=share)
    on = round in range(start, 100 if stop is None else stop + 1, every)
    members = {0.0: [], 0.2: [1], 0.5: [1, 2, 4], 1.0: [1, 2, 4, 5, 7]}[share]
    assert schedule.acting(round, FLEET).nonzero().flatten().tolist() == (members if on else [])
    for rank, client in enumerate([1, 2, 4, 5, 7]):
        assert schedule.member(rank, 5) == (LabelFlip() if client in members else Honest())


def test_schedule_passes_everything_else_on() -> None:
    schedule = Schedule(IPM(epsilon=2.0), start=4)
    view = view_for(schedule, 4, FLEET)
    assert torch.equal(schedule.forge(view).updates, IPM(epsilon=2.0).forge(view).updates)
    assert not schedule.poisons_data
    assert Schedule("flip").poisons_data
    assert Schedule("optimized_lie").needs_rule
    assert not Schedule("lie").needs_rule


def test_nested_schedules_act_where_both_do() -> None:
    inner = Schedule("flip", start=3, stop=6)
    outer = Schedule(inner, start=5, share=0.5)
    assert [int(outer.acting(k, FLEET).sum()) for k in range(1, 9)] == [0, 0, 0, 0, 3, 3, 0, 0]


@given(
    n=st.integers(2, 30),
    data=st.data(),
    shares=st.sampled_from(
        [None, (0.5, 0.25, 0.25), (0.1, 0.1, 0.1), (0.0, 1.0, 0.0), (1 / 3, 1 / 3, 1 / 3)]
    ),
)
def test_parts_are_disjoint_and_only_unassigned_clients_are_idle(
    n: int, data: st.DataObject, shares: tuple[float, ...] | None
) -> None:
    malicious = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    crew = int(malicious.sum())
    split = Split((Marked(1.0), Marked(2.0), Marked(3.0)), shares=shares)
    view = view_for(split, 1, malicious)
    sent = view.updates.clone()
    sent[view.malicious] = split.forge(view).updates
    assert torch.equal(sent[~malicious], view.updates[~malicious])
    sizes = [0, 0, 0, 0]
    for rank, client in enumerate(malicious.nonzero().flatten().tolist()):
        member = split.member(rank, crew)
        mark = member.mark if isinstance(member, Marked) else 0.0
        assert float(sent[client, 0]) == (mark or client + 1.0)  # idle ones send their own
        sizes[int(mark)] += 1
    for size, share in zip(sizes[1:], shares or (1 / 3,) * 3, strict=True):
        assert abs(size - share * crew) <= 1
    if shares is None or sum(shares) > 0.99:
        assert sizes[0] == 0


def test_parts_take_for_honest_only_those_who_act_in_no_part() -> None:
    split = Split((Marked(1.0), Marked(2.0)))
    forged = split.forge(view_for(split, 1, FLEET))
    assert forged.losses.tolist() == [5.0] * 5  # ten clients, five malicious
    assert forged.updates[:, 0].tolist() == [1.0, 1.0, 1.0, 2.0, 2.0]


def test_a_client_keeps_its_part_whoever_acts_or_is_asked() -> None:
    """The second half stays the second half when the first sleeps, and when some clients were not asked."""
    attack = Split((Schedule(Marked(1.0), stop=3), Schedule(Marked(2.0), start=2)))
    for round, marks in {1: {1: 1, 2: 1, 4: 1}, 2: {1: 1, 2: 1, 4: 1, 5: 2, 7: 2}, 4: {5: 2, 7: 2}}.items():
        for asked in (torch.arange(10), torch.tensor([0, 2, 5, 7, 8]), torch.tensor([7, 1])):
            view = view_for(attack, round, FLEET, asked)
            sent = view.updates.clone()
            sent[view.malicious] = attack.forge(view).updates
            for row, client in zip(sent, asked.tolist(), strict=True):
                assert float(row[0]) == marks.get(client, client + 1)


def test_nested_splits() -> None:
    inner = Split((Marked(1.0), Marked(2.0)))
    attack = Split((inner, Marked(3.0)), shares=(0.8, 0.2))
    assert attack.forge(view_for(attack, 1, FLEET)).updates[:, 0].tolist() == [1, 1, 2, 2, 3]
    assert attack.member(2, 5) == Marked(2.0)


def test_a_split_within_a_schedules_share_divides_that_share() -> None:
    attack = Schedule(Split((Marked(1.0), Marked(2.0))), share=0.8)
    view = view_for(attack, 1, FLEET)
    assert attack.forge(view).updates[:, 0].tolist() == [1, 1, 2, 2]
    assert [attack.member(rank, 5) for rank in (1, 2, 4)] == [Marked(1.0), Marked(2.0), Honest()]


def test_split_without_ranks_is_refused_rather_than_guessed() -> None:
    view = replace(view_for(double(), 2, FLEET), ranks=None)
    with pytest.raises(ValueError, match=r"View\.ranks and View\.crew must be given"):
        double().forge(view)


def test_parts_that_poison_do_so_by_member() -> None:
    attack = Split(("flip", "inverse"))
    assert attack.poisons_data
    inputs, labels = torch.zeros(3, 1), torch.tensor([0, 1, 2])
    assert attack.member(0, 2).poison(inputs, labels, classes=3)[1].tolist() == [2, 1, 0]
    assert attack.member(1, 2).poison(inputs, labels, classes=3)[1].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="parts poison data differently"):
        attack.poison(inputs, labels, classes=3)


@pytest.mark.parametrize(
    ("persistent", "counts"),
    [
        (False, [0, 3, 0, 0, 2, 0, 0]),
        (True, [0, 3, 3, 3, 5, 5, 5]),
        ((False, True), [0, 3, 0, 0, 2, 2, 2]),
        ((True, False), [0, 3, 3, 3, 5, 3, 3]),
    ],
)
def test_double_once_or_persistent(persistent: Any, counts: list[int]) -> None:
    attack = double(persistent=persistent)
    assert [int(attack.acting(k, FLEET).sum()) for k in range(1, 8)] == counts
    assert not bool((attack.acting(2, FLEET) & double(persistent=False).acting(5, FLEET)).any())


def test_double_sends_inverse_and_noise() -> None:
    attack = double(persistent=True)
    view = view_for(attack, 6, FLEET)
    forged = attack.forge(view)
    assert torch.equal(forged.updates[:3], -view.own_updates[:3])
    noise = replace(view, malicious=view.malicious & (ranks(FLEET) >= 3))
    again = replace(noise, generator=torch.Generator().manual_seed(0))
    assert torch.equal(forged.updates[3:], GlobalParameter().forge(again).updates)
    assert torch.equal(forged.losses, view.own_losses)


def test_sleeper_wakes_after_its_rounds() -> None:
    attack = sleeper("ipm", rounds=20)
    assert not bool(attack.acting(20, FLEET).any())
    assert torch.equal(attack.acting(21, FLEET), FLEET)
    assert attack == Schedule(IPM(), start=21)
    assert sleeper("flip").poisons_data


def test_turns_are_taken_by_all_at_once_and_begin_with_the_good_ones() -> None:
    attack = Turns("ipm", honest=2, lasting=3)
    acting = [bool(attack.acting(k, FLEET).any()) for k in range(1, 11)]
    assert acting == [False, False, True, True, True] * 2
    assert torch.equal(attack.acting(3, FLEET), FLEET)
    assert torch.equal(Turns("ipm", honest=0).acting(1, FLEET), FLEET)
    assert bool(Turns(Schedule("ipm", share=0.5), honest=0).acting(1, FLEET).any())
    assert Turns("flip").poisons_data
    with pytest.raises(ValueError, match="lasting must be"):
        Turns(lasting=0)


@pytest.mark.parametrize("rho", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("ddof", [0, 1])
def test_forged_losses(rho: float, ddof: int) -> None:
    attack = ForgeLoss(InverseGradient(), rho=rho, ddof=ddof)
    view = view_for(attack, 1, FLEET)
    honest = view.losses[~FLEET].numpy()
    forged = attack.forge(view)
    expected = honest.mean() - rho * honest.std(ddof=ddof)
    torch.testing.assert_close(forged.losses, torch.full((5,), float(expected), dtype=torch.float64))
    assert torch.equal(forged.updates, -view.own_updates)


def test_noise_makes_forged_losses_differ() -> None:
    attack = ForgeLoss(Honest(), rho=0.0, noise=0.5)
    malicious = torch.arange(1000) < 800
    view = view_for(attack, 1, malicious)
    std = float(view.honest_losses.std(correction=0))
    losses = attack.forge(view).losses
    assert float(losses.std()) == pytest.approx(0.5 * std, rel=0.1)
    assert float(losses.mean()) == pytest.approx(float(view.honest_losses.mean()), abs=0.1 * std)
    assert torch.equal(
        attack.forge(view_for(attack, 1, malicious)).updates, view.own_updates
    )  # honest otherwise


def test_mimic_misaligned_is_both_halves() -> None:
    attack = mimic_misaligned(eta=0.1, rho=0.3)
    assert attack == ForgeLoss(Misaligned(eta=0.1), rho=0.3)
    view = view_for(attack, 1, FLEET)
    forged = attack.forge(view)
    torch.testing.assert_close(
        (forged.updates + view.own_updates).norm(dim=1), torch.full((5,), 0.1).double()
    )
    honest = view.losses[~FLEET]
    torch.testing.assert_close(forged.losses, (honest.mean() - 0.3 * honest.std(correction=0)).expand(5))


def test_scale_multiplies_what_the_inner_attack_sends() -> None:
    view = view_for(Honest(), 1, FLEET)
    assert torch.equal(Scale(factor=4.0).forge(view).updates, 4 * view.own_updates)
    assert torch.equal(Scale("inverse", factor=4.0).forge(view).updates, -4 * view.own_updates)
    assert Scale("targeted_backdoor").poisons_data


def test_parse_shorthand() -> None:
    assert parse({"name": "lie", "z": 1.5}) == attacks.LIE(z=1.5)
    assert parse({"name": "flip", "start": 5, "stop": 9, "share": 0.5}) == Schedule(
        LabelFlip(), start=5, stop=9, share=0.5
    )
    spec = {"name": "ipm", "epsilon": 2.0, "loss": {"rho": 1.0}, "every": 2}
    assert parse(spec) == Schedule(ForgeLoss(IPM(epsilon=2.0), rho=1.0), every=2)
    assert parse({"name": "sleeper", "attack": {"name": "ipm", "epsilon": 3}, "rounds": 7}) == Schedule(
        IPM(epsilon=3), start=8
    )
    assert parse({"name": "schedule", "attack": "flip", "start": 2}) == Schedule(LabelFlip(), start=2)
    assert parse({"name": "backdoor", "position": [0, 3]}) == attacks.Backdoor(position=(0, 3))
    assert parse(InverseGradient()) == InverseGradient()


def test_parse_leaves_its_argument_alone() -> None:
    spec = {"name": "split", "parts": [{"name": "flip", "start": 3}, "lie"], "shares": [0.5, 0.5]}
    before = json.dumps(spec)
    parse(spec)
    assert json.dumps(spec) == before


@pytest.mark.parametrize(
    "attack",
    [
        Split((Schedule("flip", start=3), ForgeLoss("lie", rho=1.0)), shares=(0.25, 0.5)),
        Scale(Schedule(attacks.TargetedBackdoor(target=3, position=(1, 2)), stop=10), factor=2.5),
        double(persistent=(True, False), rounds=(3, 4)),
        mimic_misaligned(rho=1.0),
        sleeper(attacks.OptimizedLIE(evaluations=4), rounds=3),
        Turns(attacks.OptimizedLIE(evaluations=4), lasting=2),
    ],
)
def test_round_trip_of_nested_attacks(attack: Attack) -> None:
    assert parse(json.loads(json.dumps(describe(attack)))) == attack


def test_what_is_not_registered_cannot_be_described() -> None:
    with pytest.raises(ValueError, match="cannot be described; register its class"):
        describe(Marked(1.0))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (3, "attack must be a name or a mapping with a name, such as {'name': 'lie'}, got 3"),
        ({"z": 1}, "attack must be a name or a mapping with a name, such as {'name': 'lie'}, got {'z': 1}"),
        ({"name": "ipm", "loss": 3}, "loss must be a mapping of settings, such as {'rho': 0.3}, got 3"),
        ({"name": "flip", "start": 0}, "start must be an integer of at least 1, got 0"),
        (
            {"name": "flip", "start": 5, "stop": 4},
            "stop (last round; None: no end) must be an integer of at least 5, got 4",
        ),
        ({"name": "flip", "share": 1.5}, "share must be a finite number at least 0 and at most 1, got 1.5"),
        ({"name": "split", "parts": []}, "parts must be a list of at least one attack, got ()"),
        ({"name": "split", "shares": [1]}, "shares must be one number per part (2), got (1,)"),
        ({"name": "split", "shares": [0.6, 0.6]}, "shares must add up to at most 1, got (0.6, 0.6)"),
        ({"name": "double", "rounds": 2}, "rounds must be two values, one for each half, got 2"),
        ({"name": "flip", "depth": 2}, "attack 'flip' has no setting 'depth'; it takes none"),
    ],
)
def test_wrong_specs_say_what_is_wrong(spec: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(spec)
    assert str(error.value) == message
