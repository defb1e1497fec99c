"""Own data, the seeded split and the scaling."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import TensorDataset

from fedlaw.data import (
    DataError,
    Dataset,
    datasets,
    fit_scaling,
    from_arrays,
    from_torch,
    load,
    prepare,
    split,
)

RNG = np.random.default_rng(0)


def numbered(count):
    """A data set whose i-th input is i."""
    return from_arrays(np.arange(count, dtype=np.float32)[:, None], np.arange(count) % 3, classes=3)


@given(
    count=st.integers(10, 300),
    seed=st.integers(0, 2**40),
    weights=st.tuples(st.floats(0.1, 1), st.floats(0, 1), st.floats(0.1, 1)),
)
def test_a_split_takes_every_example_once_and_keeps_labels_with_inputs(count, seed, weights):
    fractions = [weight / sum(weights) for weight in weights]
    parts = split(numbered(count), seed=seed, fractions=fractions)
    inputs = np.concatenate([part.inputs[:, 0] for part in parts]).astype(int)
    assert sorted(inputs) == list(range(count))
    for part, fraction in zip(parts, fractions, strict=True):
        assert abs(len(part) - fraction * count) <= 1
        np.testing.assert_array_equal(part.labels, part.inputs[:, 0].astype(int) % 3)


FIRST_SPLIT = [11, 17, 8, 12, 0, 18, 5, 13, 4, 14, 7, 6, 16, 10, 9, 2]


def test_the_split_of_a_seed_never_changes():
    parts = split(numbered(20), seed=7)
    assert parts.train.inputs[:, 0].astype(int).tolist() == FIRST_SPLIT
    assert split(numbered(20), seed=8).train.inputs[:, 0].astype(int).tolist() != FIRST_SPLIT


def test_the_split_ignores_and_spares_global_random_state():
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    before = np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    first = prepare(load("digits"), seed=3)
    assert (np.random.get_state()[1] == before[0]).all()  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[1])
    np.random.seed(2)  # noqa: NPY002
    torch.manual_seed(2)
    second = prepare(load("digits"), seed=3)
    assert torch.equal(first.train.inputs, second.train.inputs)
    assert torch.equal(first.test.labels, second.test.labels)


def test_the_paper_s_split_sizes():
    sizes = [len(part) for part in split(numbered(70_000), seed=0)]
    assert sizes == [56_000, 7_000, 7_000]


@pytest.mark.parametrize(
    ("fractions", "says"),
    [
        ((0.8, 0.3, 0.1), "at most 1"),
        ((0.8, 0.2), "three numbers"),
        ((-0.1, 0.5, 0.5), "at least 0"),
        ((0.0, 0.5, 0.5), "no training"),
        ((0.9, 0.1, 0.0), "no test"),
        ((30, 0, 20), "ask for 50 examples, there are 40"),
        ((float("nan"), 0.1, 0.1), "at least 0"),
    ],
)
def test_fractions_that_make_no_split_are_refused(fractions, says):
    with pytest.raises(ValueError, match=says):
        split(numbered(40), seed=0, fractions=fractions)


@pytest.mark.parametrize("seed", [-1, 0.5, True, None])
def test_seeds_are_natural_numbers(seed):
    with pytest.raises(ValueError, match="seed"):
        split(numbered(10), seed=seed)


def test_known_constants_scale_named_sets_and_black_is_where_zero_goes():
    grey = Dataset(
        "grey", RNG.integers(0, 256, (40, 1, 4, 4), dtype=np.uint8), np.zeros(40, np.int64), 10,
        unit=255.0, mean=(0.1307,), std=(0.3081,),
    )  # fmt: skip
    data = prepare(grey, seed=0)
    raw = torch.from_numpy(split(grey, seed=0).train.inputs.copy()).double()
    torch.testing.assert_close(data.train.inputs, ((raw / 255 - 0.1307) / 0.3081).float())
    assert data.black == pytest.approx(-0.1307 / 0.3081)
    mean, std = (0.5, 0.4, 0.3), (0.25, 0.2, 0.1)
    colour = Dataset(
        "colour", RNG.integers(0, 256, (40, 3, 4, 4), dtype=np.uint8), np.zeros(40, np.int64), 10,
        unit=255.0, mean=mean, std=std,
    )  # fmt: skip
    data = prepare(colour, seed=0)
    raw = torch.from_numpy(split(colour, seed=0).test.inputs.copy()).double()
    expected = (raw / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(data.test.inputs, expected.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(data.black, torch.tensor([-2.0, -2.0, -3.0]).view(3, 1, 1))
    assert data.train.inputs.dtype == torch.float32


def test_digits_are_standardised_by_one_pair_of_numbers_from_the_training_part_alone():
    digits = load("digits")
    data = prepare(digits, seed=0)
    assert data.train.inputs.mean().item() == pytest.approx(0, abs=1e-5)
    assert data.train.inputs.std(correction=0).item() == pytest.approx(1, abs=1e-5)
    train = split(digits, seed=0).train.inputs
    assert data.scaling.shift.item() == pytest.approx(train.mean(dtype=np.float64))
    assert data.scaling.shift.item() != pytest.approx(digits.inputs.mean(dtype=np.float64), abs=1e-6)
    assert data.black == pytest.approx(data.train.inputs.min().item())


def test_rows_are_standardised_by_feature_and_constant_features_are_centred():
    inputs = np.column_stack([RNG.normal(5, 3, 100), RNG.normal(-2, 0.1, 100), np.full(100, 1e6)])
    data = prepare(from_arrays(inputs, np.zeros(100, int)), seed=0)
    torch.testing.assert_close(data.train.inputs.mean(0), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(data.train.inputs.std(0, correction=0), torch.tensor([1.0, 1.0, 0.0]))
    assert data.black == 0.0


def test_unit_and_none():
    digits = load("digits")
    unit = prepare(digits, seed=0, scaling="unit")
    assert (unit.train.inputs.min(), unit.train.inputs.max(), unit.black) == (0, 1, 0)
    none = prepare(digits, seed=0, scaling="none")
    np.testing.assert_array_equal(none.train.inputs.numpy(), split(digits, seed=0).train.inputs)
    rows = prepare(numbered(50), seed=0, scaling="unit", fractions=(0.9, 0, 0.1))
    assert (rows.train.inputs.min(), rows.train.inputs.max()) == (0, 1)
    assert rows.validation.inputs.shape == (0, 1)
    with pytest.raises(ValueError, match="standard, unit, none"):
        fit_scaling(digits, "minmax")


def test_preparing_leaves_the_data_set_alone():
    inputs = RNG.normal(size=(30, 4)).astype(np.float32)
    kept = inputs.copy()
    data = from_arrays(inputs, np.zeros(30, int))
    prepare(data, seed=0).train.inputs.zero_()
    np.testing.assert_array_equal(inputs, kept)
    np.testing.assert_array_equal(data.inputs, kept)
    inputs[:] = 0  # nor does the data set follow the caller's array
    np.testing.assert_array_equal(data.inputs, kept)
    with pytest.raises(ValueError, match="read-only"):
        data.inputs[0] = 1


@pytest.mark.parametrize(
    ("inputs", "labels", "settings", "says"),
    [
        (np.zeros((3, 2)), [0, 1], {}, r"shape \(3,\)"),
        (np.zeros(3), [0, 1, 2], {}, r"\(N, d\)"),
        (np.zeros((0, 2)), [], {}, "N >= 1"),
        (np.array([[1.0], [np.nan], [np.inf]]), [0, 0, 0], {}, "2 of 3 inputs hold NaN"),
        (np.array([[1e300]]), [0], {}, "infinite"),
        (np.array([["a"], ["b"]]), [0, 1], {}, "encode text"),
        (np.zeros((2, 8, 8, 3)), [0, 1], {}, "channels first"),
        (np.zeros((2, 2)), [0.5, 1], {}, "fractions"),
        (np.zeros((2, 2)), [-1, 1], {}, "-1 to 1"),
        (np.zeros((2, 2)), [0, 5], {"classes": 3}, r"0 \.\. 2, got 0 to 5"),
        (np.zeros((2, 2)), [0, 1], {"class_names": ["a"], "classes": 2}, "1 class_names for 2"),
        (np.zeros((2, 2)), [0, 1], {"keys": [1]}, "keys"),
        (np.zeros((2, 2)), [[0, 1], [1, 0]], {}, r"labels must have shape \(N,\)"),
    ],
)
def test_own_arrays_of_the_wrong_form_are_refused(inputs, labels, settings, says):
    with pytest.raises(DataError, match=says) as caught:
        from_arrays(inputs, labels, name="mine", **settings)
    assert str(caught.value).startswith("mine: ")
    assert "\n" not in str(caught.value)


def test_own_arrays_of_any_kind():
    assert from_arrays(np.zeros((2, 8, 8), np.uint8), [0, 1]).input_shape == (1, 8, 8)
    assert from_arrays(torch.zeros(2, 3, 8, 8), torch.tensor([0, 1])).input_shape == (3, 8, 8)
    assert from_arrays([[1, 2], [3, 4]], [True, False]).labels.tolist() == [1, 0]
    named = from_arrays(np.zeros((3, 1)), ["b", "a", "b"], keys=["x", "y", "x"])
    assert (named.labels.tolist(), named.class_names) == ([1, 0, 1], ("a", "b"))
    parts = split(named, seed=0, fractions=(2, 0, 1))
    assert sorted([*parts.train.keys, *parts.test.keys]) == ["x", "x", "y"]


class Pictures(TorchDataset):
    """Items as torchvision gives them without a transform: something that looks like a PIL image, and an int."""

    class Picture:
        def __init__(self, array):
            self.array = array

        def getbands(self):
            return ("R", "G", "B")

        def __array__(self, dtype=None, copy=None):
            return self.array

    def __init__(self, arrays):
        self.arrays = arrays

    def __len__(self):
        return len(self.arrays)

    def __getitem__(self, index):
        return self.Picture(self.arrays[index]), index % 2


def test_torch_datasets():
    inputs, labels = torch.rand(6, 3, 4, 4), torch.arange(6) % 3
    data = from_torch(TensorDataset(inputs, labels), name="mine")
    np.testing.assert_array_equal(data.inputs, inputs.numpy())
    assert (data.labels.tolist(), data.classes, data.name) == ([0, 1, 2, 0, 1, 2], 3, "mine")
    arrays = RNG.integers(0, 256, (4, 5, 6, 3), dtype=np.uint8)
    pictures = from_torch(Pictures(arrays))
    np.testing.assert_array_equal(pictures.inputs, arrays.transpose(0, 3, 1, 2))
    assert pictures.unit == 255


def test_torch_datasets_of_the_wrong_form_are_refused():
    with pytest.raises(DataError, match="map-style"):
        from_torch(iter([]))
    with pytest.raises(DataError, match="no items"):
        from_torch([])
    with pytest.raises(DataError, match="item 0 is not a pair"):
        from_torch([1, 2])
    with pytest.raises(DataError, match="item 1 has shape"):
        from_torch([(np.zeros(2), 0), (np.zeros(3), 0)])


def test_data_sets_by_name_and_import_path(monkeypatch, tmp_path):
    assert datasets.names() == ("cifar10", "cifar100", "digits", "fashion_mnist", "mnist")
    assert all(summary for summary in datasets.summaries().values())
    (tmp_path / "own_sets.py").write_text(
        "import numpy as np\nfrom fedlaw.data import from_arrays\n"
        "def make(size=5):\n    return from_arrays(np.zeros((size, 2)), np.zeros(size, int))\n"
        "def wrong():\n    return 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert len(load("own_sets:make", size=7)) == 7
    for name, says in {
        "own_sets:wrong": "gave a int",
        "own_sets:missing": "has no 'missing'",
        "not_there_at_all:make": "no module 'not_there_at_all'",
        "own_sets:make()": "not an import path",
        "minst": "did you mean 'mnist'",
    }.items():
        with pytest.raises(ValueError, match=says):
            load(name)
    with pytest.raises(ValueError, match="no setting 'size'"):
        load("digits", size=3)
