"""One suite for every registered rule: it satisfies the invariants it declares, and the contract of all rules."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedlaw import aggregators as agg
from fedlaw.aggregators import (
    BOUNDED,
    IDENTICAL,
    PERMUTATION,
    ROBUST,
    SCALE,
    TRANSLATION,
    Aggregate,
    PreAggregator,
    Rule,
    TooFewUpdates,
)


@dataclass(frozen=True)
class Example:
    """A rule with valid settings for 11 rows or more, and how many arbitrary rows it is to stand."""

    rule: Rule
    f: int = 0
    without: frozenset[str] = field(default_factory=frozenset)  # invariants these very settings give up

    @property
    def invariants(self) -> frozenset[str]:
        return self.rule.invariants - self.without


EXAMPLES: dict[str, list[Example]] = {
    "mean": [Example(agg.Mean()), Example(agg.Mean(weighted=False))],
    "median": [Example(agg.Median(), f=5)],
    "trimmed_mean": [Example(agg.TrimmedMean(f), f) for f in (0, 2, 5)],
    "meamed": [Example(agg.Meamed(f), f) for f in (0, 2, 5)],
    "krum": [
        Example(agg.Krum(0)),
        Example(agg.Krum(3), 3),
        Example(agg.Krum(4), 4),
        Example(agg.Krum(3, neighbors=7), 3),
        Example(agg.Krum(3, neighbors=0.5), 3),
    ],
    "multi_krum": [
        Example(agg.MultiKrum(3), 3),
        Example(agg.MultiKrum(4, selected=3), 4),
        Example(agg.MultiKrum(3, selected=0.4, neighbors=5), 3),
    ],
    "bulyan": [
        # its last pick counts one neighbour, so two rows that are each other's nearest always tie
        Example(agg.Bulyan(2), 2, frozenset({PERMUTATION})),
        Example(agg.Bulyan(0)),
        Example(agg.Bulyan(3, selected=5, nearest=3, neighbors=5), 2),
        Example(agg.Bulyan(1, selected=0.7, nearest=0.3), 1),
    ],
    "geometric_median": [
        Example(agg.GeometricMedian(nu=1e-12, iterations=100, start="median"), 5),
        Example(agg.GeometricMedian(start="median"), 5, frozenset({ROBUST, SCALE})),
        Example(agg.GeometricMedian(), 0, frozenset({ROBUST, BOUNDED, SCALE})),
        Example(
            agg.GeometricMedian(nu=0.1, start="zero"), 0, frozenset({ROBUST, BOUNDED, TRANSLATION, SCALE})
        ),
    ],
    "centered_clipping": [
        Example(agg.CenteredClipping(tau=1.0), 5),
        Example(agg.CenteredClipping(tau=0.5, iterations=3, start="zero"), 5),
        Example(agg.CenteredClipping(tau=2.0, iterations=2, start="mean"), 0, frozenset({BOUNDED})),
    ],
    "huber": [
        Example(agg.Huber(tau=0.5), 5),
        Example(agg.Huber(tau=5.0, start="mean"), 0, frozenset({BOUNDED})),
        Example(agg.Huber(tau=0.1, start="zero", iterations=500), 2),
    ],
    "bucketing": [Example(agg.Bucketing(2)), Example(agg.Bucketing(1)), Example(agg.Bucketing(4))],
    "nearest_neighbor_mixing": [Example(agg.NearestNeighborMixing(f)) for f in (0, 3, 5)],
    "clip": [Example(agg.Clip()), Example(agg.Clip(0.7))],
    "arc": [Example(agg.ARC(f)) for f in (0, 2, 5)],
    "monna": [
        Example(agg.MoNNA(3), 3),
        Example(agg.MoNNA(5, pivot=2), 5),
        Example(agg.MoNNA(4, "reference"), 4),
    ],
    "caf": [Example(agg.CAF(f), f) for f in (0, 2, 4, 5)],
    "mda": [Example(agg.MDA(f), f) for f in (0, 2, 3)],
    "dnc": [Example(agg.DnC(3)), Example(agg.DnC(2, iterations=3, subsample=2, fraction=1.5))],
    "foolsgold": [Example(agg.FoolsGold()), Example(agg.FoolsGold(confidence=2.0))],
    "signguard": [Example(agg.SignGuard(), 0), Example(agg.SignGuard(coordinates=1.0), 3)],
    "fltrust": [Example(agg.FLTrust(), 5)],
    "chain": [
        Example(agg.Chain(agg.Clip(), agg.Bucketing(2), agg.Krum(1))),
        Example(agg.Chain(agg.NearestNeighborMixing(3), agg.TrimmedMean(3))),
        Example(agg.Chain(agg.ARC(2), agg.CenteredClipping(1.0, iterations=2))),
        Example(agg.Chain(agg.Median())),
    ],
}
ALL = [
    pytest.param(example, id=f"{example.rule!r}") for examples in EXAMPLES.values() for example in examples
]

few = settings(max_examples=10)  # per rule and test: there are some sixty rules
seeds = st.integers(0, 2**32 - 1)
row_numbers = st.integers(11, 15)
dimensions = st.integers(1, 7)


def call(rule: Rule, x: Tensor, seed: int = 0, **more: Any) -> Aggregate:
    """Call with everything a rule may want. Warnings about settings outside a guarantee are not the subject."""
    generator = torch.Generator().manual_seed(seed)
    reference = torch.ones((*x.shape[:-2], x.shape[-1]), dtype=x.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return rule(x, **{"generator": generator, "reference": reference, **more})


def rows(seed: int, n: int, d: int, offset: float = 0.0) -> Tensor:
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x + offset


def attacked(seed: int, n: int, d: int, f: int, size: float) -> Tensor:
    """n rows, f of them (anywhere) arbitrary: of `size`, in one cluster, or everywhere."""
    source = torch.Generator().manual_seed(seed)
    x = rows(seed + 1, n, d)
    bad = torch.randn(f, d, generator=source, dtype=torch.float64)
    if seed % 3 == 0:
        bad = bad[:1].expand(f, d)
    x[torch.randperm(n, generator=source)[:f]] = size * bad
    return x


def close(a: Tensor, b: Tensor, tolerance: float = 1e-7) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * max(1.0, float(b.abs().max())))


def test_every_registered_rule_has_examples() -> None:
    assert set(agg.names()) == set(EXAMPLES)


# What all rules promise.


@pytest.mark.parametrize("example", ALL)
@few
@given(seed=seeds, n=row_numbers, d=dimensions)
def test_shape_dtype_and_input_untouched(example: Example, seed: int, n: int, d: int) -> None:
    x = rows(seed, n, d)
    before = x.clone()
    result = call(example.rule, x)
    assert torch.equal(x, before)
    assert result.vector.dtype == x.dtype
    assert bool(result.vector.isfinite().all())
    expected = (example.rule.rows(n), d) if isinstance(example.rule, PreAggregator) else (d,)
    assert result.vector.shape == expected
    # A second call with the aggregate's own state must not write into the first result.
    first = result.vector.clone()
    call(example.rule, x, state=result.state)
    assert torch.equal(result.vector, first)


@pytest.mark.parametrize("example", ALL)
@few
@given(seed=seeds, n=row_numbers, d=dimensions)
def test_weights_reproduce_the_vector(example: Example, seed: int, n: int, d: int) -> None:
    x = rows(seed, n, d)
    result = call(example.rule, x)
    if result.weights is None:
        return
    expected = (example.rule.rows(n), n) if isinstance(example.rule, PreAggregator) else (n,)
    assert result.weights.shape == expected
    assert bool((result.weights >= 0).all())
    close(result.weights @ x, result.vector)


@pytest.mark.parametrize("example", ALL)
@few
@given(seed=seeds)
def test_a_batch_is_a_loop(example: Example, seed: int) -> None:
    x = torch.stack([rows(seed + i, 11, 4, offset=i) for i in range(6)])
    source = torch.Generator().manual_seed(seed)
    alone = [call(example.rule, each, generator=source) for each in x]
    together = call(example.rule, x.reshape(2, 3, 11, 4), seed)
    close(together.vector.flatten(0, 1), torch.stack([each.vector for each in alone]))
    if together.weights is not None:
        close(together.weights.flatten(0, 1), torch.stack([each.weights for each in alone]))  # type: ignore[misc]
    second = call(example.rule, x.reshape(2, 3, 11, 4), seed, state=together.state)
    source = torch.Generator().manual_seed(seed)
    alone = [
        call(example.rule, each, generator=source, state=before.state)
        for each, before in zip(x, alone, strict=True)
    ]
    close(second.vector.flatten(0, 1), torch.stack([each.vector for each in alone]))


@pytest.mark.parametrize("example", ALL)
@few
@given(seed=seeds, n=row_numbers, d=dimensions)
def test_float32_is_close_to_float64(example: Example, seed: int, n: int, d: int) -> None:
    x = rows(seed, n, d).float()
    narrow = call(example.rule, x).vector
    assert narrow.dtype == torch.float32
    close(narrow.double(), call(example.rule, x.double()).vector, 1e-3)


@pytest.mark.parametrize("example", ALL)
@few
@given(seed=seeds)
def test_the_same_generator_gives_the_same_bits(example: Example, seed: int) -> None:
    x = rows(seed, 12, 5)
    assert torch.equal(call(example.rule, x, seed).vector, call(example.rule, x, seed).vector)


@pytest.mark.parametrize("example", ALL)
def test_too_few_rows_are_refused(example: Example) -> None:
    least = example.rule.minimum()
    assert call(example.rule, rows(0, least, 3)).vector.shape[-1] == 3
    with pytest.raises(TooFewUpdates, match=f"at least {least} updates, got {least - 1}"):
        call(example.rule, rows(0, least - 1, 3))


@pytest.mark.parametrize("example", ALL)
def test_integers_are_refused(example: Example) -> None:
    with pytest.raises(ValueError, match="floating-point"):
        example.rule(torch.ones(11, 3, dtype=torch.int64))


@pytest.mark.parametrize("example", ALL)
def test_rows_need_not_be_contiguous(example: Example) -> None:
    x = rows(3, 11, 10)[:, ::2]
    close(call(example.rule, x).vector, call(example.rule, x.contiguous()).vector)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("example", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_accelerator_gives_the_same(example: Example, dtype: torch.dtype) -> None:
    x = torch.stack([rows(seed, 13, 5) for seed in range(4)]).to(dtype)
    counts = torch.arange(1, 14).expand(4, 13)
    reference = torch.ones((4, 5), dtype=dtype, device="cuda")
    here = call(example.rule, x, counts=counts)
    there = call(example.rule, x.cuda(), counts=counts.cuda(), reference=reference)
    assert there.vector.is_cuda
    close(there.vector.cpu(), here.vector, 1e-3 if dtype == torch.float32 else 1e-7)
    if here.weights is not None:
        assert there.weights is not None
        close(there.weights.cpu(), here.weights, 1e-3 if dtype == torch.float32 else 1e-7)


# What a rule promises by its `invariants`.


def check_permutation(example: Example, seed: int, n: int, d: int) -> None:
    x = rows(seed, n, d)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    plain, shuffled = call(example.rule, x), call(example.rule, x[order])
    if isinstance(example.rule, PreAggregator):
        close(shuffled.vector, plain.vector[order])
        return
    close(shuffled.vector, plain.vector)
    if plain.weights is not None and shuffled.weights is not None:
        close(shuffled.weights, plain.weights[order])


def check_translation(example: Example, seed: int, n: int, d: int) -> None:
    x = rows(seed, n, d)
    shift = 10 * rows(seed + 1, 1, d)[0]
    moved = call(example.rule, x + shift, reference=torch.ones(d, dtype=x.dtype) + shift)
    close(moved.vector, call(example.rule, x).vector + shift, 1e-5)


def check_scale(example: Example, seed: int, n: int, d: int) -> None:
    x = rows(seed, n, d)
    for factor in (1e-3, 37.0):
        scaled = call(example.rule, factor * x, reference=factor * torch.ones(d, dtype=x.dtype))
        close(scaled.vector / factor, call(example.rule, x).vector, 1e-4)


def check_identical(example: Example, seed: int, n: int, d: int) -> None:
    row = rows(seed, 1, d, offset=3.0)
    result = call(example.rule, row.expand(n, d))
    close(result.vector, row.expand_as(result.vector) if result.vector.ndim == 2 else row[0])


def check_bounded(example: Example, seed: int, n: int, d: int) -> None:
    for size in (1e2, 1e6, 1e12):
        x = attacked(seed, n, d, example.f, size)
        if isinstance(example.rule, agg.MoNNA):
            x[example.rule.pivot if isinstance(example.rule.pivot, int) else 0] = 1.0  # the pivot is honest
        # Honest rows are standard normal: 30 sqrt(d) is far outside them, and far below `size` sqrt(d).
        assert float(call(example.rule, x).vector.norm()) <= 30 * d**0.5
    narrow = call(example.rule, attacked(seed, n, d, example.f, 1e17).float()).vector
    assert bool(narrow.isfinite().all())


def check_robust(example: Example, seed: int, n: int, d: int) -> None:
    kappa = example.rule.kappa(n)
    assert kappa is not None
    for size in (0.5, 3.0, 1e3):
        x = attacked(seed, n, d, example.f, size)
        vector = call(example.rule, x).vector
        source = torch.Generator().manual_seed(seed)
        for _ in range(5):  # the bound holds for every set of n - f rows, whoever is honest
            subset = x[torch.randperm(n, generator=source)[: n - example.f]]
            center = subset.mean(0)
            spread = (subset - center).square().sum(-1).mean()
            assert float((vector - center).square().sum()) <= kappa * float(spread) * (1 + 1e-6) + 1e-12


CHECKS: dict[str, Callable[[Example, int, int, int], None]] = {
    PERMUTATION: check_permutation,
    TRANSLATION: check_translation,
    SCALE: check_scale,
    IDENTICAL: check_identical,
    BOUNDED: check_bounded,
    ROBUST: check_robust,
}


@pytest.mark.parametrize("example", ALL)
@few
@given(seed=seeds, n=row_numbers, d=dimensions)
def test_declared_invariants(example: Example, seed: int, n: int, d: int) -> None:
    for invariant in sorted(example.invariants):
        CHECKS[invariant](example, seed, n, d)


def test_robust_rules_name_their_kappa() -> None:
    for param in ALL:
        example: Example = param.values[0]  # type: ignore[assignment]
        if ROBUST in example.rule.invariants:
            kappa = example.rule.kappa(15)
            assert kappa is not None
            assert kappa >= 0


# A rule from elsewhere is held to the same.


def test_a_registered_rule_of_somebody_else_goes_through_the_same_checks() -> None:
    @dataclass(frozen=True)
    class Midrange(Rule):
        """Middle between the extremes of each coordinate."""

        invariants: ClassVar[frozenset[str]] = frozenset({PERMUTATION, TRANSLATION, SCALE, IDENTICAL})

        def __call__(self, updates: Tensor, **_: Any) -> Aggregate:
            self._require(updates)
            return Aggregate((updates.amax(-2) + updates.amin(-2)) / 2)

    @dataclass(frozen=True)
    class Boastful(Midrange):
        """The same, claiming more than it can keep."""

        invariants: ClassVar[frozenset[str]] = frozenset({BOUNDED})

    agg.register("midrange")(Midrange)
    try:
        example = Example(agg.create("midrange"))
        for invariant in example.invariants:
            CHECKS[invariant](example, 1, 11, 3)
        assert agg.describe(example.rule) == {"name": "midrange"}
        assert "Middle between" in agg.registry.summaries()["midrange"]
        with pytest.raises(AssertionError):
            check_bounded(Example(Boastful(), f=1), 1, 11, 3)
    finally:
        del agg.registry._factories["midrange"]
