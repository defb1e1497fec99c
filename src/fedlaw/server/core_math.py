"""Pure functions of core judging, over (..., n), and the state they work on."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from fedlaw.screening import masked_median
from fedlaw.server.judge import Evidence, Exclusion


@dataclass(frozen=True)
class CoreState:
    """All that core judging remembers. Scalars are (...), clients (..., n), the record (..., J, n).

    judged: judged rounds so far. since: rounds since the freeze. frozen: bool. competence: the core's median
    windowed cosine at the freeze. excluded: `Exclusion` codes. strikes, copies: how often. asked, scored: in
    judged rounds. total, decay: accumulated score and what it is divided by. early, early_rounds: sum and
    number of cosines in a client's own rounds of the too-good check. core, members: bool. weights: final ones.
    cosines: c of every judged round, NaN where there was none. burst, burst_rounds, burst_asked: of the refresh
    under way. joining: bursts in a row above the threshold. until: judged rounds at the freeze. assembly: like
    cosines, with everybody's direction. appeal: the judged round in which a new core was seated, 0: in none.
    outvoted: judged rounds in a row in which most clients were against a core that a minority held. cores: like
    cosines, who was in the core. peaks: every client's largest recent mean cosine. faded: judged rounds in a row
    in which next to nothing was left of them. quiet: (..., J, 1) bool, when the core had nothing to judge by.
    outside, settled: who would be left out if judging ended now, or would have been in a round since the signal
    faded, and for how many judged rounds in a row nobody joined them. given: every client's weights, summed over
    all steps.
    """

    judged: Tensor
    since: Tensor
    frozen: Tensor
    competence: Tensor
    excluded: Tensor
    strikes: Tensor
    copies: Tensor
    asked: Tensor
    scored: Tensor
    total: Tensor
    decay: Tensor
    early: Tensor
    early_rounds: Tensor
    core: Tensor
    members: Tensor
    weights: Tensor
    cosines: Tensor
    burst: Tensor
    burst_rounds: Tensor
    burst_asked: Tensor
    joining: Tensor
    until: Tensor
    assembly: Tensor
    appeal: Tensor
    outvoted: Tensor
    cores: Tensor
    peaks: Tensor
    faded: Tensor
    quiet: Tensor
    outside: Tensor
    settled: Tensor
    given: Tensor


def hold(done: Tensor, old: CoreState, new: CoreState) -> CoreState:
    """The old state where an experiment is `done` (...), the new one elsewhere."""

    def either(name: str) -> Tensor:
        before, after = getattr(old, name), getattr(new, name)
        return torch.where(done.reshape(done.shape + (1,) * (before.ndim - done.ndim)), before, after)

    return CoreState(**{field.name: either(field.name) for field in fields(old)})


def row_of(record: Tensor, judged: Tensor) -> Tensor:
    """(..., J, 1) bool: which row of a record (..., J, n) belongs to the judged round `judged` (...), from 0."""
    return (torch.arange(record.shape[-2], device=record.device) == judged.unsqueeze(-1)).unsqueeze(-1)


def windowed_mean(cosines: Tensor, window: int | Tensor) -> Tensor:
    """Mean (..., n) of each client's last `window` entries of cosines (..., J, n) that are not NaN.

    `window` may be one number for each client, (..., 1, n).

    >>> windowed_mean(torch.tensor([[1.0, 5.0], [2.0, float("nan")], [4.0, 7.0]]), 2)
    tensor([3., 6.])
    """
    there = ~cosines.isnan()
    from_the_end = there.flip(-2).cumsum(-2).flip(-2)
    inside = there & (from_the_end <= window)
    return torch.where(inside, cosines, 0.0).sum(-2) / inside.sum(-2)


def lowest_mean(cosines: Tensor, window: int | Tensor, share: float) -> Tensor:
    """Mean (..., n) of the lowest `share` of each client's last `window` entries that are not NaN.

    >>> lowest_mean(torch.tensor([[9.0, 1.0], [1.0, 2.0], [-3.0, 3.0], [2.0, 4.0], [0.0, 5.0]]), 4, 0.5)
    tensor([-1.5000,  2.5000])
    """
    there = ~cosines.isnan()
    inside = there & (there.flip(-2).cumsum(-2).flip(-2) <= window)
    few = (inside.sum(-2, keepdim=True) * share - 1e-9).ceil()
    ordered = torch.where(inside, cosines, torch.inf).sort(dim=-2).values
    place = torch.arange(cosines.shape[-2], device=cosines.device).unsqueeze(-1)
    return torch.where(place < few, ordered, 0.0).sum(-2) / few.squeeze(-2)


def lowest_rounds(cosines: Tensor, compared: Tensor, window: int, times: int) -> Tensor:
    """(..., J) bool: those rounds, of the last `window` of cosines (..., J, n), in which most stood lowest.

    By the median client of `compared`. They are as many as it takes to hear each of those `times` times on average,
    to the nearest round; none before there were so many.

    >>> record = torch.tensor([[0.3, 0.2, 0.4], [-0.1, -0.3, 0.5], [0.3, 0.1, 0.3], [-0.3, -0.1, 0.7]])
    >>> lowest_rounds(record, torch.ones(3, dtype=torch.bool), 4, 2)
    tensor([False,  True, False,  True])
    """
    there = ~cosines.isnan() & compared.unsqueeze(-2)
    spoken = there.any(-1)
    inside = spoken & (spoken.flip(-1).cumsum(-1).flip(-1) <= window)
    answers = (there & inside.unsqueeze(-1)).sum((-2, -1)) / inside.sum(-1)
    rounds = (times * compared.sum(-1) / answers).round().unsqueeze(-1)
    median = masked_median(cosines, there)
    chosen = (rank(torch.where(inside, -median, -torch.inf)) < rounds) & inside
    return chosen & (chosen.sum(-1, keepdim=True) == rounds)


def mean_over(record: Tensor, rounds: Tensor) -> Tensor:
    """Mean (..., n) of a record (..., J, n) over some of its rounds (..., J); NaN for who has no entry in them.

    >>> mean_over(torch.tensor([[1.0, 5.0], [2.0, 7.0], [4.0, float("nan")]]), torch.tensor([True, False, True]))
    tensor([2.5000, 5.0000])
    """
    counted = rounds.unsqueeze(-1) & ~record.isnan()
    return torch.where(counted, record, 0.0).sum(-2) / counted.sum(-2)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean (...) of values (..., n) where `mask` is true; 0 where it nowhere is."""
    return torch.where(mask, values, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)


def cosines(weights: Tensor, along: Tensor, length: Tensor, evidence: Evidence) -> Tensor:
    """Step 3's c_i with z = sum_i w_i g~_i, given g_i . z and |z|; 0 for a client without direction or company."""
    w = weights.to(torch.float64)
    top = along.to(torch.float64) - w * evidence.own.to(torch.float64)
    bottom = (1 - w) * evidence.norms.to(torch.float64) * length.to(torch.float64).unsqueeze(-1)
    return torch.where(bottom > 0, top / bottom.clamp(min=1e-300), 0.0)


def rank(score: Tensor) -> Tensor:
    """Place of each entry (..., n), 0 for the largest; equal entries by index."""
    return _places(score.argsort(dim=-1, descending=True, stable=True))


def _places(order: Tensor) -> Tensor:
    """The inverse of a permutation (..., n): where in `order` each index stands."""
    places = torch.arange(order.shape[-1], device=order.device).expand(order.shape)
    return torch.zeros_like(order).scatter(-1, order, places)


def worst(score: Tensor, scored: Tensor) -> Tensor:
    """(..., 1) the least score of those that answered."""
    return torch.where(scored, score, torch.inf).amin(-1, keepdim=True)


def seats(heard: Tensor, attackers_below: float) -> Tensor:
    """(..., 1) seats of a core where `heard` (..., n) clients, the excluded among them, have been heard.

    >>> seats(torch.ones(200, dtype=torch.bool), 0.45).item()
    110
    """
    count = heard.sum(-1, keepdim=True)
    return count - (count * attackers_below + 1e-9).floor().to(count.dtype)


def uniform(mask: Tensor, fallback: Tensor) -> Tensor:
    """(..., n) equal weights on `mask`, on `fallback` where the mask is empty."""
    mask = torch.where(mask.any(-1, keepdim=True), mask, fallback)
    return mask.to(torch.float64) / mask.sum(-1, keepdim=True).clamp(min=1)


def by_count(members: Tensor, counts: Tensor, cap: float) -> Tensor:
    """(..., n) weights of members proportional to min(count, cap * median count)."""
    counts = counts.to(torch.float64)
    bound = cap * masked_median(counts, members).unsqueeze(-1)
    kept = torch.where(members, torch.minimum(counts, bound), 0.0)
    return kept / kept.sum(-1, keepdim=True).clamp(min=1e-300)


def caught_up(weights: Tensor, given: Tensor, rounds: Tensor, most: float) -> Tensor:
    """(..., n) `weights` of a step that make up, within `rounds` (...), for what a client had no part in.

    Owed is what a client's share of all steps so far falls short of its weight's; nobody has more than `most` times
    its weight, nor less than none.

    >>> even = torch.full((4,), 0.25)
    >>> caught_up(even, torch.tensor([4.0, 4.0, 0.0, 0.0]), torch.tensor(16), 4.0)
    tensor([0.1250, 0.1250, 0.3750, 0.3750])
    """
    total = torch.where(weights > 0, given, 0.0).sum(-1, keepdim=True)
    owed = (weights * total - given) / rounds.clamp(min=1).unsqueeze(-1)
    lifted = torch.minimum((weights + owed).clamp(min=0), most * weights)
    lifted = lifted / lifted.sum(-1, keepdim=True).clamp(min=1)
    room = (most * weights - lifted).clamp(min=0)  # what the bound took goes to those who are farther from it
    missing = (1 - lifted.sum(-1, keepdim=True)).clamp(min=0)
    return lifted + missing * room / room.sum(-1, keepdim=True).clamp(min=1e-300)


def exclude(excluded: Tensor, guilty: Tensor, reason: Exclusion) -> Tensor:
    """Codes with `reason` for those guilty that were not excluded before."""
    return torch.where(guilty & (excluded == 0), int(reason), excluded)


def largest(values: Tensor, mask: Tensor, most: int, excluded: Tensor) -> Tensor:
    """Of `mask`, as many with the largest values as may still be excluded."""
    room = most - (excluded != 0).sum(-1, keepdim=True)
    return mask & (rank(torch.where(mask, values, -torch.inf)) < room)


def whole_clusters(labels: Tensor, mask: Tensor, most: int, excluded: Tensor) -> Tensor:
    """Of `mask`, whole clusters by lowest label, as long as they fit into what may still be excluded."""
    room = most - (excluded != 0).sum(-1, keepdim=True)
    sizes = torch.zeros_like(labels).scatter_add(-1, labels, mask.to(labels.dtype))
    sizes = torch.where(sizes <= room, sizes, 0)
    fits = (sizes > 0) & (sizes.cumsum(-1) <= room)
    return mask & fits.gather(-1, labels)


def widest_gap(values: Tensor, mask: Tensor, above: int, below: Tensor) -> tuple[Tensor, Tensor]:
    """Widest gap (..., 1) in the sorted values of `mask`, and who is above it (..., n).

    Only gaps with at least `above` entries above and at least `below` (..., 1) entries below them count; where
    there is none the gap is -inf and nobody is above it.
    """
    ordered, order = torch.where(mask, values, torch.inf).sort(dim=-1, stable=True)
    place = torch.arange(values.shape[-1], device=values.device).expand(ordered.shape)
    gaps = ordered - torch.cat([ordered[..., :1], ordered[..., :-1]], dim=-1)
    allowed = (place >= 1) & (place >= below) & (mask.sum(-1, keepdim=True) - place >= above)
    gap, start = torch.where(allowed, gaps, -torch.inf).max(dim=-1, keepdim=True)
    return gap, mask & (_places(order) >= start) & torch.isfinite(gap)


def two_groups(values: Tensor, mask: Tensor, least: int, most: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The values (..., n) of `mask` cut in two where the spread within the parts is smallest (Otsu's criterion).

    The lower part has at least `least` and at most `most` (..., 1) of them. Returns how far the parts are apart:
    the difference of their means over the sum of their deviations (..., 1), 0 where there is no such cut; the mean
    of the lower one (..., 1); and who is in it (..., n). One group, whatever its spread, comes to 1.3 if its values
    are normally and to 1.7 if they are uniformly distributed.

    >>> values = torch.tensor([0.0, 1.0, 10.0, 11.0, 12.0])
    >>> apart, mean, lower = two_groups(values, values >= 0, 1, torch.tensor([2]))
    >>> round(float(apart), 1), float(mean), lower.tolist()
    (8.0, 0.5, [True, True, False, False, False])
    """
    ordered, order = torch.where(mask, values, torch.inf).to(torch.float64).sort(dim=-1, stable=True)
    count = mask.sum(-1, keepdim=True)
    below = torch.arange(1, values.shape[-1], device=values.device).expand(ordered[..., 1:].shape)
    finite = torch.where(torch.isfinite(ordered), ordered, 0.0)
    sums, squares = finite.cumsum(-1), (finite * finite).cumsum(-1)
    above = (count - below).clamp(min=1)
    low, high = sums[..., :-1] / below, (sums[..., -1:] - sums[..., :-1]) / above
    spread_low = (squares[..., :-1] / below - low * low).clamp(min=0)
    spread_high = ((squares[..., -1:] - squares[..., :-1]) / above - high * high).clamp(min=0)
    allowed = (below >= least) & (below <= most) & (below < count)
    if not allowed.shape[-1]:  # a single client
        nothing = torch.zeros_like(finite)
        return nothing, nothing, mask & False
    within = torch.where(allowed, below * spread_low + above * spread_high, torch.inf)
    cut = within.argmin(-1, keepdim=True)
    deviations = spread_low.gather(-1, cut).sqrt() + spread_high.gather(-1, cut).sqrt()
    mean = low.gather(-1, cut)
    apart = (high.gather(-1, cut) - mean) / deviations.clamp(min=1e-12)
    found = allowed.any(-1, keepdim=True)
    return torch.where(found, apart, 0.0), mean, mask & (_places(order) <= cut) & found
