"""Partitions as properties (nothing lost, nobody empty, the right law), and the choice of attackers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedlaw.data import Partition, choose_malicious, malicious_count, partition, partitions

SETTINGS = {
    "q_groups": [{"q": 0.9}, {"q": 0.6}, {"q": 1.0}, {"q": 0.0}],
    "dirichlet": [{"alpha": 1.0, "tries": 10_000}, {"alpha": 1e6}],
    "iid": [{}],
    "shards": [{"per_client": 1}, {"per_client": 2}],
    "natural": [{}],
}
CASES = [(name, settings) for name, choices in SETTINGS.items() for settings in choices]


def rng(seed=0):
    return np.random.default_rng(seed)


def test_every_partition_is_covered_here():
    assert partitions.names() == tuple(sorted(SETTINGS))


@given(
    case=st.sampled_from(CASES),
    clients=st.integers(1, 12),
    classes=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_every_example_goes_to_exactly_one_client_and_nobody_is_empty(case, clients, classes, seed):
    name, settings = case
    labels = rng(seed).integers(0, classes, 40 + 10 * clients)
    kept = labels.copy()
    keys = np.arange(len(labels)) % 15
    found = partition(name, labels, clients, generator=rng(seed), classes=classes, keys=keys, **settings)
    assert len(found) == clients
    assert sorted(np.concatenate(found.indices)) == list(range(len(labels)))
    assert found.counts.min() >= 1
    assert found.counts.sum() == len(labels)
    assert all((np.diff(own) > 0).all() for own in found.indices)
    assert all(own.dtype == np.int64 for own in found.indices)
    np.testing.assert_array_equal(labels, kept)
    again = partition(name, labels, clients, generator=rng(seed), classes=classes, keys=keys, **settings)
    assert all((a == b).all() for a, b in zip(found.indices, again.indices, strict=True))


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_global_random_state_is_neither_used_nor_changed(name):
    labels, keys = np.arange(100) % 10, np.arange(100) % 7
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    partition(name, labels, 5, generator=rng(), keys=keys)
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002


@pytest.mark.parametrize("q", [0.1, 0.6, 0.9])
def test_q_groups_follow_the_paper_s_law(q):
    per_label, classes, clients = 4000, 10, 200
    labels = np.repeat(np.arange(classes), per_label)
    found = partition("q_groups", labels, clients, q=q, generator=rng(1))
    np.testing.assert_array_equal(found.groups, np.repeat(np.arange(10), 20))
    owner = np.empty(len(labels), int)
    for client, own in enumerate(found.indices):
        owner[own] = client
    law = np.full((classes, classes), (1 - q) / (classes - 1))
    np.fill_diagonal(law, q)
    seen = np.zeros((classes, classes))
    np.add.at(seen, (labels, found.groups[owner]), 1)
    assert stats.chisquare(seen.ravel(), (per_label * law).ravel(), ddof=classes - 1).pvalue > 1e-3
    for group in range(classes):  # and uniformly to the clients of a group
        assert stats.chisquare(found.counts[found.groups == group]).pvalue > 1e-4


def test_q_groups_when_clients_are_no_multiple_of_labels():
    labels = np.arange(3000) % 10
    found = partition("q_groups", labels, 25, q=1.0, generator=rng())
    sizes = np.bincount(found.groups)
    assert (len(sizes), sizes.min(), sizes.max()) == (10, 2, 3)
    for own, group in zip(found.indices, found.groups, strict=True):
        assert (labels[own] == group).all()


def test_q_groups_with_fewer_clients_than_labels():
    labels = np.arange(3000) % 10
    found = partition("q_groups", labels, 5, q=1.0, generator=rng())
    np.testing.assert_array_equal(found.groups, np.arange(5))
    for client, own in enumerate(found.indices):
        assert set(labels[own]) == {2 * client, 2 * client + 1}


def test_cifar_100_has_a_hundred_groups_of_two():
    found = partition("q_groups", np.arange(10_000) % 100, 200, q=0.9, generator=rng())
    np.testing.assert_array_equal(np.bincount(found.groups), np.full(100, 2))


def test_a_client_left_empty_gets_one_example_of_its_group():
    labels = np.array([0] * 30 + [1] * 3)  # three clients draw three examples: some would go without
    for seed in range(20):
        found = partition("q_groups", labels, 6, q=1.0, generator=rng(seed))
        assert found.counts[3:].tolist() == [1, 1, 1]
        assert all(
            (labels[own] == group).all() for own, group in zip(found.indices, found.groups, strict=True)
        )
    none_of_label_1 = partition("q_groups", np.zeros(20, int), 4, q=1.0, classes=2, generator=rng())
    assert none_of_label_1.counts[2:].tolist() == [1, 1]


def test_dirichlet_goes_from_one_label_a_client_to_iid():
    labels = np.repeat(np.arange(10), 500)

    def largest_share(alpha):
        found = partition("dirichlet", labels, 10, alpha=alpha, generator=rng())
        return np.mean([np.bincount(labels[own], minlength=10).max() / len(own) for own in found.indices])

    assert largest_share(0.05) > 0.6 > largest_share(1.0) > 0.2 > largest_share(1e5) > 0.0999


def test_dirichlet_keeps_its_minimum_or_says_that_it_cannot():
    labels = np.repeat(np.arange(10), 100)
    found = partition("dirichlet", labels, 10, alpha=0.5, minimum=20, tries=1000, generator=rng())
    assert found.counts.min() >= 20
    with pytest.raises(ValueError, match=r"alpha 0.01 .* raise alpha, lower minimum or take fewer clients"):
        partition("dirichlet", labels, 50, alpha=0.01, minimum=10, generator=rng())
    with pytest.raises(ValueError, match="needs 1100 examples, there are 1000"):
        partition("dirichlet", labels, 10, minimum=110, generator=rng())


def test_shards_hold_few_labels_and_equal_shares():
    labels = rng().permutation(np.repeat(np.arange(10), 60))
    found = partition("shards", labels, 30, per_client=2, generator=rng())
    assert set(found.counts) == {20}
    assert max(len(np.unique(labels[own])) for own in found.indices) <= 2
    assert (
        np.mean([len(np.unique(labels[own])) for own in found.indices]) > 1.5
    )  # dealt, not handed out in order


def test_natural_keys_stay_together():
    keys = rng().choice(["a", "b", "c", "d", "e", "f", "g"], 200)
    found = partition("natural", np.zeros(200, int), 3, keys=keys, generator=rng())
    owners = {key: [i for i, own in enumerate(found.indices) if key in keys[own]] for key in np.unique(keys)}
    assert all(len(who) == 1 for who in owners.values())
    per_client = np.bincount([who[0] for who in owners.values()])
    assert per_client.max() - per_client.min() <= 1
    assert found.groups is None


@pytest.mark.parametrize(
    ("name", "clients", "settings", "says"),
    [
        ("q_groups", 5, {"q": 1.1}, "q must lie between 0 and 1"),
        ("q_groups", 0, {}, "clients must lie between 1 and the number of training examples, 20, got 0"),
        ("iid", 21, {}, "20, got 21"),
        ("dirichlet", 5, {"alpha": 0}, "alpha must be above 0"),
        ("dirichlet", 5, {"minimum": 0}, "minimum"),
        ("shards", 5, {"per_client": 0}, "per_client"),
        ("shards", 5, {"per_client": 5}, "25 shards of 20"),
        ("natural", 5, {}, "keys"),
        ("natural", 5, {"keys": np.arange(20) % 4}, "at most the number of keys, 4"),
        ("natural", 5, {"keys": [1, 2]}, "shape of labels"),
        ("q_group", 5, {}, "did you mean 'q_groups'"),
        ("iid", 5, {"q": 0.5}, "no setting 'q'"),
        ("iid", 5, {"classes": 1}, "below classes"),
    ],
)
def test_settings_that_make_no_partition_are_refused(name, clients, settings, says):
    with pytest.raises(ValueError, match=says):
        partition(name, np.arange(20) % 2, clients, generator=rng(), **settings)


@pytest.mark.parametrize("labels", [[], [[0, 1]], [0.5, 1.0], [-1, 0]])
def test_labels_must_be_class_numbers(labels):
    with pytest.raises(ValueError, match="labels"):
        partition("iid", labels, 1, generator=rng())


@given(per_group=st.integers(1, 8), count=st.integers(0, 40), seed=st.integers(0, 99))
def test_attackers_fill_whole_groups(per_group, count, seed):
    n = 5 * per_group
    count = min(count, n)
    groups = np.repeat(np.arange(5), per_group)
    parts = Partition(tuple(np.array([i]) for i in range(n)), groups)
    mask = choose_malicious(parts, count, generator=rng(seed))
    held = np.bincount(groups[mask], minlength=5)
    assert held.sum() == count
    assert sum(0 < size < per_group for size in held) <= 1  # one group in part, at most
    assert (held > 0).sum() == -(-count // per_group)  # the paper's number of groups


def test_the_groups_of_the_attackers_vary_with_the_seed():
    parts = Partition(tuple(np.array([i]) for i in range(30)), np.repeat(np.arange(10), 3))
    chosen = [choose_malicious(parts, 0.4, generator=rng(seed)) for seed in range(200)]
    assert all(mask.sum() == 12 for mask in chosen)
    assert stats.chisquare(np.sum(chosen, axis=0).reshape(10, 3).mean(axis=1)).pvalue > 1e-3
    in_part = choose_malicious(parts, 1, generator=rng(1))
    assert in_part.sum() == 1


def test_random_and_listed_attackers():
    parts = Partition(tuple(np.array([i]) for i in range(20)))
    mask = choose_malicious(parts, 0.25, how="random", generator=rng())
    assert (mask.sum(), mask.dtype, mask.shape) == (5, bool, (20,))
    assert np.flatnonzero(choose_malicious(parts, how=[3, 1])).tolist() == [1, 3]
    assert not choose_malicious(parts, how=[]).any()
    assert not choose_malicious(parts, 0.0, how="random").any()
    assert choose_malicious(parts, 1.0, how="random", generator=rng()).all()


@pytest.mark.parametrize(
    ("malicious", "count"), [(0.4, 12), (0.29, 8), (0.0, 0), (1.0, 30), (1, 1), (0.1, 3), (0.7, 21), (30, 30)]
)
def test_fractions_are_rounded_down_and_integers_are_counts(malicious, count):
    assert malicious_count(30, malicious) == count


def test_rounding_down_is_not_fooled_by_floats():
    for clients in range(1, 300):
        for count in range(clients + 1):
            assert malicious_count(clients, count / clients) == count


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"malicious": 1.2}, "fraction between 0 and 1"),
        ({"malicious": -1}, "count between 0 and 4"),
        ({"malicious": 5}, "count between 0 and 4"),
        ({"malicious": 2}, "needs a partition with groups"),
        ({"malicious": 2, "how": "all"}, "'groups', 'random' or a list"),
        ({"malicious": 2, "how": "random", "generator": None}, "needs a generator"),
        ({"how": [4]}, "from 0 to 3"),
        ({"how": [1, 1]}, "twice"),
        ({"how": [0.5]}, "client numbers"),
    ],
)
def test_choices_that_make_no_sense_are_refused(settings, says):
    parts = Partition(tuple(np.array([i]) for i in range(4)))
    with pytest.raises(ValueError, match=says):
        choose_malicious(parts, **{"generator": rng(), **settings})
