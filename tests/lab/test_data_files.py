"""The readers of data files: tiny files in torchvision's layout, damaged and hostile ones, and the real ones."""

import gzip
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from fedlaw.data import DataError, load
from fedlaw.data.arrays_pickle import read_arrays
from fedlaw.data.idx import read_idx

RNG = np.random.default_rng(0)


def idx_bytes(array):
    header = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_idx_set(folder, compressed, train=7, test=3):
    folder.mkdir(parents=True)
    images = RNG.integers(0, 256, (train + test, 28, 28), dtype=np.uint8)
    labels = RNG.integers(0, 10, train + test, dtype=np.uint8)
    for stem, part in (("train", slice(0, train)), ("t10k", slice(train, None))):
        for kind, array in (("images-idx3", images[part]), ("labels-idx1", labels[part])):
            content = idx_bytes(array)
            name = f"{stem}-{kind}-ubyte" + (".gz" if compressed else "")
            (folder / name).write_bytes(gzip.compress(content) if compressed else content)
    return images, labels


def python2_pickle(data, labels, label_key=b"labels"):
    """A batch as Python 2 and the numpy of its day wrote it: protocol 2, byte strings, numpy.core."""

    def text(value):
        return b"U" + bytes([len(value)]) + value

    def integer(value):
        return b"J" + struct.pack("<i", value)

    raw = data.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
        b"(K\x01" + integer(data.shape[0]) + integer(data.shape[1]) + b"\x86"
        b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R"
        b"(K\x03" + text(b"|") + b"NNN" + integer(-1) + integer(-1) + b"K\x00tb"
        b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
    )
    label_list = b"](" + b"".join(integer(int(label)) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(label_key) + label_list + b"u."


@pytest.mark.parametrize("compressed", [True, False], ids=["gz", "plain"])
@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_idx_sets_are_training_then_test_files(tmp_path, name, folder, compressed):
    images, labels = write_idx_set(tmp_path / folder / "raw", compressed)
    data = load(name, data_dir=tmp_path)
    np.testing.assert_array_equal(data.inputs, images[:, None])
    np.testing.assert_array_equal(data.labels, labels)
    assert (data.classes, len(data.class_names)) == (10, 10)


def test_the_environment_names_the_folder(tmp_path, monkeypatch):
    write_idx_set(tmp_path / "MNIST" / "raw", True)
    monkeypatch.setenv("FEDLAW_DATA", str(tmp_path))
    assert len(load("mnist")) == 10


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10", "cifar100"])
def test_missing_data_names_the_setting_and_the_remedy(name, tmp_path, monkeypatch):
    monkeypatch.delenv("FEDLAW_DATA", raising=False)
    for settings in ({}, {"data_dir": tmp_path}):
        with pytest.raises(DataError) as caught:
            load(name, **settings)
        message = str(caught.value)
        assert "\n" not in message
        for part in ("--data-dir", "FEDLAW_DATA", f"fedlaw data get {name}"):
            assert part in message


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not an IDX file"),
        (b"\1\0\x08\3" + bytes(20), "not an IDX file"),
        (b"\0\0\x0d\3" + bytes(20), "type code 13"),
        (b"\0\0\x08\1" + bytes(20), "1 dimensions"),
        (b"\0\0\x08\3" + bytes(5), "within its header"),
        (b"\0\0\x08\3" + struct.pack(">III", 2, 2, 2) + bytes(7), "only 7"),
        (b"\0\0\x08\3" + struct.pack(">III", 2, 2, 2) + bytes(9), "more"),
        (b"\0\0\x08\3" + struct.pack(">III", 2**31, 2**31, 2**31), "admitted"),
        (b"\0\0\x08\3" + struct.pack(">III", 0, 28, 28), "admitted"),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_that_lie_are_refused(tmp_path, content, says, suffix):
    path = tmp_path / f"images{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    with pytest.raises(DataError, match=says) as caught:
        read_idx(path, 3)
    assert str(path) in str(caught.value)


def test_damaged_gzip_is_said(tmp_path):
    whole = gzip.compress(idx_bytes(RNG.integers(0, 256, (5, 28, 28))))
    path = tmp_path / "images.gz"
    for content in (whole[: len(whole) // 2], b"not gzip at all", whole[:40] + b"\xff" * 40 + whole[80:]):
        path.write_bytes(content)
        with pytest.raises(DataError):
            read_idx(path, 3)


def test_a_gzip_bomb_is_read_no_further_than_its_header_says(tmp_path):
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(b"\0\0\x08\3" + struct.pack(">III", 1, 28, 28) + bytes(1 << 24)))
    with pytest.raises(DataError, match="more"):
        read_idx(path, 3)


def test_images_and_labels_must_agree(tmp_path):
    folder = tmp_path / "MNIST" / "raw"
    write_idx_set(folder, False)
    (folder / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros(6, np.uint8)))
    with pytest.raises(DataError, match="7 images and 6 labels"):
        load("mnist", data_dir=tmp_path)
    (folder / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.full(7, 10, np.uint8)))
    with pytest.raises(DataError, match=r"0 \.\. 9"):
        load("mnist", data_dir=tmp_path)


def write_cifar(root, name, write):
    images = RNG.integers(0, 256, (12, 3072), dtype=np.uint8)
    if name == "cifar10":
        folder, key, classes = root / "cifar-10-batches-py", "labels", 10
        files = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
        meta, meta_key = "batches.meta", "label_names"
    else:
        folder, key, classes = root / "cifar-100-python", "fine_labels", 100
        files, meta, meta_key = ["train", "test"], "meta", "fine_label_names"
    folder.mkdir(parents=True)
    labels = RNG.integers(0, classes, 12)
    each = 12 // len(files)
    for i, file in enumerate(files):
        part = slice(i * each, (i + 1) * each)
        (folder / file).write_bytes(write(images[part], labels[part].tolist(), key))
    (folder / meta).write_bytes(pickle.dumps({meta_key: [f"class {i}" for i in range(classes)]}))
    return images.reshape(-1, 3, 32, 32), labels


WRITERS = {f"protocol {p}": p for p in range(6)}


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("writer", ["python 2", *WRITERS])
def test_cifar_is_read_however_it_was_pickled(tmp_path, name, writer):
    def write(data, labels, key):
        if writer == "python 2":
            return python2_pickle(data, labels, key.encode())
        return pickle.dumps({"data": data, key: labels}, protocol=WRITERS[writer])

    images, labels = write_cifar(tmp_path, name, write)
    data = load(name, data_dir=tmp_path)
    np.testing.assert_array_equal(data.inputs, images)
    np.testing.assert_array_equal(data.labels, labels)
    assert data.class_names[1] == "class 1"


@pytest.mark.parametrize("protocol", range(6))
def test_arrays_come_back_as_they_were(tmp_path, protocol):
    arrays = {
        "bytes": RNG.integers(0, 256, (3, 4), dtype=np.uint8),
        "big_endian": np.arange(5, dtype=">i4"),
        "fortran": np.asfortranarray(RNG.normal(size=(3, 2))),
        "scalar": np.array(7, np.int64),
        "empty": np.zeros((0, 3), np.float32),
    }
    path = tmp_path / "arrays"
    path.write_bytes(pickle.dumps({**arrays, "plain": [1, "a", None, (2.5, {"b": b"c"})]}, protocol=protocol))
    found = read_arrays(path)
    assert found.pop("plain") == [1, "a", None, (2.5, {"b": b"c"})]
    assert found.keys() == arrays.keys()
    for key, array in arrays.items():
        np.testing.assert_array_equal(found[key], array)
        assert found[key].dtype == array.dtype


def test_old_module_names_are_admitted(tmp_path):
    new = pickle.dumps({"data": np.arange(3)}, protocol=2)
    path = tmp_path / "old"
    path.write_bytes(new.replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
    np.testing.assert_array_equal(read_arrays(path)["data"], np.arange(3))


class Runs:
    """Pickles as a call to os.system."""

    def __reduce__(self):
        return os.system, ("touch owned",)


HOSTILE = {
    "a call": (pickle.dumps({"data": Runs()}), "system"),
    "an old style call": (b"(cos\nsystem\nS'touch owned'\nos.", "OBJ|system"),
    "an instance": (b"(S'touch owned'\nios\nsystem\n.", "INST"),
    "builtins": (b'c__builtin__\neval\n(S\'open("owned", "w")\'\ntR.', "eval"),
    "numpy's loader": (b"cnumpy\nload\n(S'x'\ntR.", "numpy.load"),
    "another codec": (b"}(U\x04datac_codecs\nencode\n(V\nVrot13\ntRu.", "latin1"),
    "an object array": (pickle.dumps({"data": np.array([print, 1], dtype=object)}), "refused"),
    "a structured array": (pickle.dumps({"data": np.zeros(2, [("a", "i4")])}), "refused"),
    "an extension": (b"\x80\x02\x82\x01.", "EXT1"),
    "a persistent id": (b"Px\n.", "PERSID"),
    "a huge memo": (b"\x80\x02K\x01r\xff\xff\xff\x7f.", "memo"),
    "a huge string": (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.", "damaged"),
    "a huge bytearray": (b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"x.", "damaged"),
    "a changed name": (b"\x80\x02cnumpy\ndtype\n}U\x01aK\x01sb.", "refused"),
    "nothing": (b"", "damaged"),
    "a list": (pickle.dumps([1]), "list"),
    "a key that is no text": (pickle.dumps({1: 2}), "keys"),
    "a stack underflow": (b"\x80\x02R.", "damaged"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_pickles_are_refused_by_name(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    content, says = HOSTILE[case]
    path = tmp_path / "hostile"
    path.write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        read_arrays(path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "owned").exists()


def test_a_claimed_shape_is_not_allocated(tmp_path):
    content = pickle.dumps({"data": np.zeros((2, 2), np.uint8)}, protocol=2)
    claimed = content.replace(b"K\x02K\x02\x86", b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86")
    assert claimed != content
    path = tmp_path / "claims"
    path.write_bytes(claimed)
    with pytest.raises(DataError, match="needs 4611686014132420609 bytes, the pickle has 4"):
        read_arrays(path)


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"data": np.zeros((2, 3071), np.uint8), "labels": [0, 1]}, "3072"),
        ({"data": np.zeros((2, 3072), np.float32), "labels": [0, 1]}, "uint8"),
        ({"labels": [0, 1]}, "NoneType"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [0]}, "2 small integers"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [0, "1"]}, "2 small integers"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [0, 10]}, r"0 \.\. 9"),
        ({"data": [[0]], "labels": [0]}, "a list of 1"),
    ],
)
def test_cifar_batches_of_the_wrong_form_are_refused(tmp_path, batch, says):
    write_cifar(tmp_path, "cifar10", lambda x, y, key: pickle.dumps({"data": x, key: y}))
    (tmp_path / "cifar-10-batches-py" / "data_batch_2").write_bytes(pickle.dumps(batch))
    with pytest.raises(DataError, match=says):
        load("cifar10", data_dir=tmp_path)


REAL = {  # examples, mean of all pixels of the training files / 255, training labels of class 0
    "mnist": (70000, 0.1306605, 5923),
    "fashion_mnist": (70000, 0.2860406, 6000),
    "cifar10": (60000, 0.4733630, 5000),
    "cifar100": (60000, 0.4781806, 500),
}


@pytest.mark.parametrize("name", REAL)
def test_real_files(name):
    root = os.environ.get("FEDLAW_DATA")
    if not root:
        pytest.skip("needs real data files: set FEDLAW_DATA to a folder in torchvision's layout")
    folders = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST", "cifar10": "cifar-10-batches-py"}
    if not (Path(root) / folders.get(name, "cifar-100-python")).is_dir():
        pytest.skip(f"FEDLAW_DATA has no files of {name}")
    data = load(name)
    size, mean, zeros = REAL[name]
    train = len(data) * 6 // 7 if data.input_shape[0] == 1 else 50000
    assert len(data) == size
    assert data.inputs[:train].mean() / 255 == pytest.approx(mean, abs=1e-5)
    assert (data.labels[:train] == 0).sum() == zeros
    for known, axis in ((data.mean, np.mean), (data.std, np.std)):
        found = axis(data.inputs[:train:5] / np.float32(255), axis=(0, 2, 3), dtype=np.float64)
        np.testing.assert_allclose(known, found, atol=3e-3)
