"""Fast paths of the shared linear algebra against plain float64, on inputs made to break them."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from fedlaw import _gram, _linalg, screening
from fedlaw import aggregators as agg
from fedlaw._gram import gram
from fedlaw._linalg import (
    distances_to,
    paired_products,
    pairwise_sq_distances,
    reduce_sorted_columns,
    row_products,
    row_squares,
    weighted_sum,
    weighted_sums,
)
from fedlaw.aggregators import bucketing

N, D = 40, 9_001  # large enough for the fast paths, and no multiple of anything


@pytest.fixture(params=["cpu", "accelerator"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of doing it; that of an accelerator is arithmetic that a CPU can do as well."""
    if request.param != "cpu":
        as_on_an_accelerator(monkeypatch)
    return str(request.param)


def as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (_gram, _linalg, bucketing):
        monkeypatch.setattr(module, "on_cpu", lambda x: False)
        monkeypatch.setattr(module, "DEVICE_ELEMENTS", 1 << 17)  # several blocks
    monkeypatch.setattr(_linalg, "_CACHED_ELEMENTS", 1 << 15)


def normal(seed: int = 0, n: int = N, d: int = D) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def copies() -> Tensor:
    x = normal()
    x[1:12] = x[0] + 1e-3 * normal(1, 11)
    x[12] = x[0]
    return x


def giants() -> Tensor:
    x = normal()
    x[:3] *= 1e17
    x[3] = x[2]
    x[4:6] *= 1e-20
    return x


HARD: dict[str, Callable[[], Tensor]] = {
    "normal": normal,
    "a shared offset": lambda: normal() + 1e4,
    "copies": copies,
    "all alike": lambda: normal(n=1).expand(N, D).clone(),
    "tiny": lambda: 1e-18 * normal(),
    "huge": lambda: 1e15 * normal(),
    "giants among them": giants,
    "zero rows": lambda: normal() * (torch.arange(N) % 2).unsqueeze(-1),
    "one direction": lambda: normal(n=1) * torch.linspace(1, 1.01, N).unsqueeze(-1) + 1e-3 * normal(3),
}


@pytest.mark.parametrize("kind", HARD)
def test_distances_are_right_to_1e_5_of_themselves(kind: str, path: str) -> None:
    x = HARD[kind]()
    wide = x.double()
    exact = torch.stack([(wide - row).square().sum(-1) for row in wide])
    ours = pairwise_sq_distances(x)
    # What is left of two rows of float32 numbers cannot be known better than to the last digit of the larger one.
    center = wide.median(0).values
    size = (wide - center).square().sum(-1)
    rounding = 1e-13 * (size.unsqueeze(-1) + size + size.sort().values[3 * N // 4])
    assert bool(((ours - exact).abs() <= 1e-5 * exact + rounding).all())
    assert torch.equal(ours, ours.mT)
    assert not bool(ours.diagonal().any())


@pytest.mark.parametrize("kind", HARD)
def test_gram_products(kind: str, path: str) -> None:
    x = HARD[kind]()
    wide = x.double()
    for center in (False, True):
        rows = wide - wide.mean(0) if center else wide
        exact = rows @ rows.mT
        ours = gram(x, center=center)
        length = exact.diagonal().clamp(min=1e-300).sqrt()
        uncentered = (
            0.0 if path == "cpu" else 1e-14 * wide.norm(dim=-1, keepdim=True)
        )  # centred after the product
        bound = (
            2e-6 * length.unsqueeze(-1) * length + 1e-13 * exact.abs().max() + uncentered * wide.norm(dim=-1)
        )
        assert bool(((ours - exact).abs() <= bound).all())


@pytest.mark.parametrize("kind", HARD)
def test_products_with_one_vector(kind: str, path: str) -> None:
    x = HARD[kind]()
    wide = x.double()
    weights = torch.rand(N, generator=torch.Generator().manual_seed(5))
    for point in (x.mean(0), x[0], normal(9, 1)[0], torch.zeros(D)):
        exact = (wide - point.double()).square().sum(-1).sqrt()
        for squares in (None, row_squares(x)):
            torch.testing.assert_close(distances_to(x, point, squares=squares), exact, rtol=1e-5, atol=0)
        reach = wide.norm(dim=-1) * point.double().norm()
        assert bool(((row_products(x, point) - wide @ point.double()).abs() <= 5e-6 * reach).all())
    torch.testing.assert_close(row_squares(x), wide.square().sum(-1), rtol=1e-5, atol=1e-38)
    bound = 1e-6 * (weights.double().unsqueeze(-1) * wide.abs()).sum(0)
    assert bool(((weighted_sum(weights, x) - weights.double() @ wide).abs() <= bound + 1e-40).all())
    twice = weighted_sums(torch.stack([weights, weights]), x)
    assert bool(((twice - weights.double() @ wide).abs() <= bound + 1e-40).all())


def test_one_row_and_no_more(path: str) -> None:
    x = normal(n=1)
    torch.testing.assert_close(gram(x), x.double() @ x.double().mT, rtol=1e-6, atol=0)
    assert pairwise_sq_distances(x).tolist() == [[0.0]]


def test_what_comes_in_batches_or_other_layouts_is_the_same(path: str) -> None:
    x = torch.stack([HARD["normal"](), HARD["copies"](), HARD["a shared offset"]()])
    point = x.mean(-2)
    for of in (
        pairwise_sq_distances,
        lambda y: distances_to(y, y[..., 0, :]),
        lambda y: gram(y, center=True),
    ):
        torch.testing.assert_close(of(x), torch.stack([of(each) for each in x]), rtol=1e-5, atol=1e-3)
    strided = x[0].mT.contiguous().mT
    torch.testing.assert_close(weighted_sum(torch.ones(N), strided), weighted_sum(torch.ones(N), x[0]))
    torch.testing.assert_close(
        distances_to(strided, point[0]), distances_to(x[0], point[0]), rtol=1e-5, atol=0
    )
    rtol = 1e-7 if path == "cpu" else 1e-5
    torch.testing.assert_close(row_products(x, point)[1], row_products(x[1], point[1]), rtol=rtol, atol=1e-7)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


RULES = [
    agg.Mean(), agg.Median(), agg.TrimmedMean(16), agg.Meamed(16), agg.Krum(16), agg.MultiKrum(16), agg.Bulyan(9),
    agg.GeometricMedian(), agg.CenteredClipping(iterations=2), agg.Huber(iterations=3), agg.MoNNA(16), agg.CAF(16),
    agg.DnC(16, subsample=7000), agg.FoolsGold(), agg.SignGuard(), agg.FLTrust(), agg.MDA(1), agg.Bucketing(2),
    agg.Bucketing(3), agg.NearestNeighborMixing(16), agg.Clip(), agg.ARC(16),
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("d", [700, 70_001])
def test_the_number_of_threads_changes_no_bit(rule: agg.Rule, d: int, threads: None) -> None:
    x = normal(d=d)
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(rule(x, generator=torch.Generator().manual_seed(0), reference=x[0]).vector)
        assert torch.get_num_threads() == count
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_an_accelerator_does_the_same_in_its_own_way(rule: agg.Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(d=30_001) + normal(1, 1, 30_001)
    x[3] = x[2]
    here = rule(x, generator=torch.Generator().manual_seed(0), reference=x[0])
    as_on_an_accelerator(monkeypatch)
    there = rule(x, generator=torch.Generator().manual_seed(0), reference=x[0])
    torch.testing.assert_close(there.vector, here.vector, rtol=1e-4, atol=1e-5)
    if here.weights is not None:
        torch.testing.assert_close(there.weights, here.weights, rtol=1e-4, atol=1e-6)


def test_sorted_columns_in_inference_mode_and_half_precision(threads: None) -> None:
    torch.set_num_threads(2)
    x = normal()
    with torch.inference_mode():
        assert torch.equal(reduce_sorted_columns(x, lambda c: c[:, 0]), x.amin(0))
        assert agg.Krum(16)(x).vector.shape == (D,)
    narrow = x.bfloat16()
    assert torch.equal(reduce_sorted_columns(narrow, lambda c: c[:, -1]), narrow.amax(0))


# ------------------------------------------------------------------------------------------- copies


def by_gram(x: Tensor, factors: Tensor, radius: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The clusters by all pairs in float64 and a search for components."""
    rows = x.double() * factors.double().unsqueeze(-1)
    near = torch.stack([(rows - row).norm(dim=-1) < radius for row in rows]) & mask & mask.unsqueeze(-1)
    labels = torch.arange(len(x))
    for _ in range(len(x)):
        for i in range(len(x)):
            joined = near[i].nonzero().flatten()
            if len(joined):
                labels[joined] = labels[i] = min(int(labels[joined].min()), int(labels[i]))
    return labels, torch.stack([(labels == label).sum() for label in labels])


def chain() -> Tensor:
    """Each near the next only: one cluster, though its ends are far apart."""
    x = normal()
    step = normal(4, 1)[0] / normal(4, 1)[0].norm()
    for i in range(1, 15):
        x[i] = x[0] + i * 0.04 * x[0].norm() * step
    return x


def cancelling() -> Tensor:
    """Differences that vanish in sums of neighbours: far apart, and the sums cannot tell."""
    x = normal(n=1).expand(N, D).clone()
    alternating = torch.tensor([1.0, -1.0]).repeat(D)[:D]
    return x + torch.arange(N).unsqueeze(-1) * alternating


def aligned() -> Tensor:
    """Near-copies whose differences the sums enlarge as much as they can."""
    x = normal()
    x[:10] = x[0] + 0.04 * torch.rand(10, 1, generator=torch.Generator().manual_seed(2))
    return x


@pytest.mark.parametrize("make", [normal, copies, chain, cancelling, aligned, *list(HARD.values())[1:]])
def test_the_check_for_copies_finds_what_all_pairs_show(make: Callable[[], Tensor], path: str) -> None:
    x = make()
    mask = torch.arange(N) != 7
    norms = x.double().norm(dim=-1)
    radius, factors = screening.clip_to_median(norms, mask)
    for ratio in (0.05, 0.3):
        labels, sizes = screening.copy_clusters(x, factors, ratio * radius, mask)
        expected, counts = by_gram(x, factors, ratio * radius, mask)
        assert torch.equal(labels, expected)
        assert torch.equal(sizes, counts)
    both = screening.copy_clusters(
        torch.stack([x, x.flip(0)]),
        torch.stack([factors, factors.flip(0)]),
        (0.05 * radius).expand(2),
        mask.expand(2, N),
    )
    assert torch.equal(both[0][0], screening.copy_clusters(x, factors, 0.05 * radius, mask)[0])


@pytest.mark.parametrize("kind", HARD)
def test_products_row_by_row(kind: str, path: str) -> None:
    x, y = HARD[kind](), normal(8)
    exact = (x.double() * y.double()).sum(-1)
    reach = x.double().norm(dim=-1) * y.double().norm(dim=-1)
    for left, right in ((x, y), (x.mT.contiguous().mT, y)):
        assert bool(((paired_products(left, right) - exact).abs() <= 1e-6 * reach).all())
