"""The data sets that have names: digits out of the box, four more from a folder in torchvision's layout."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlaw.data.arrays_pickle import read_arrays
from fedlaw.data.base import DataError, Dataset, registry
from fedlaw.data.idx import read_idx

ENVIRONMENT = "FEDLAW_DATA"
_FASHION_NAMES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)


def resolve_data_dir(data_dir: str | os.PathLike[str] | None, name: str) -> Path:
    """The folder of data files: `data_dir`, else the environment variable FEDLAW_DATA, else a DataError."""
    chosen = data_dir if data_dir is not None else os.environ.get(ENVIRONMENT)
    if not chosen:
        raise DataError(
            f"dataset {name!r} needs a folder of data files: name one with --data-dir (data_dir) or "
            f"{ENVIRONMENT}; `fedlaw data get {name}` fills it"
        )
    return Path(chosen).expanduser()


@registry.register("digits")
def digits() -> Dataset:
    """Handwritten digits, 1,797 grey 8x8 images, 10 classes; comes with scikit-learn.

    The test set of the UCI "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak, 1998), pixels 0
    to 16. Nothing to download.

    >>> digits().input_shape
    (1, 8, 8)
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return Dataset(
        name="digits",
        inputs=bunch.images.astype(np.float32)[:, None],
        labels=bunch.target.astype(np.int64),
        classes=10,
        class_names=tuple("0123456789"),
        unit=16.0,
    )


@registry.register("mnist")
def mnist(data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """Handwritten digits, 70,000 grey 28x28 images, 10 classes; read from --data-dir.

    LeCun, Cortes and Burges, 1998. Files ``MNIST/raw/*-ubyte``, plain or ``.gz``; training and test images
    together, in that order.
    """
    folder = resolve_data_dir(data_dir, "mnist")
    inputs, labels = _read_idx_pairs(folder / "MNIST" / "raw", "mnist")
    return Dataset("mnist", inputs, labels, 10, tuple("0123456789"), None, 255.0, (0.1307,), (0.3081,))


@registry.register("fashion_mnist")
def fashion_mnist(data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """Photographs of clothes, 70,000 grey 28x28 images, 10 classes; read from --data-dir.

    Xiao, Rasul and Vollgraf, 2017. Files ``FashionMNIST/raw/*-ubyte``, plain or ``.gz``; training and test
    images together, in that order.
    """
    folder = resolve_data_dir(data_dir, "fashion_mnist")
    inputs, labels = _read_idx_pairs(folder / "FashionMNIST" / "raw", "fashion_mnist")
    return Dataset("fashion_mnist", inputs, labels, 10, _FASHION_NAMES, None, 255.0, (0.2860,), (0.3530,))


@registry.register("cifar10")
def cifar10(data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """Photographs of animals and vehicles, 60,000 colour 32x32 images, 10 classes; read from --data-dir.

    Krizhevsky, 2009. Files ``cifar-10-batches-py/{data_batch_1..5,test_batch,batches.meta}``; training and
    test images together, in that order.
    """
    folder = resolve_data_dir(data_dir, "cifar10") / "cifar-10-batches-py"
    files = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    inputs, labels = _read_cifar(folder, files, "labels", "cifar10")
    names = _read_names(folder / "batches.meta", "label_names", 10)
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    return Dataset("cifar10", inputs, labels, 10, names, None, 255.0, mean, std)


@registry.register("cifar100")
def cifar100(data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """Photographs of a hundred kinds of things, 60,000 colour 32x32 images; read from --data-dir.

    Krizhevsky, 2009. Files ``cifar-100-python/{train,test,meta}``, fine labels; training and test images
    together, in that order.
    """
    folder = resolve_data_dir(data_dir, "cifar100") / "cifar-100-python"
    inputs, labels = _read_cifar(folder, ["train", "test"], "fine_labels", "cifar100")
    names = _read_names(folder / "meta", "fine_label_names", 100)
    mean, std = (0.5071, 0.4866, 0.4409), (0.2673, 0.2564, 0.2762)
    return Dataset("cifar100", inputs, labels, 100, names, None, 255.0, mean, std)


def _existing(candidates: list[Path], name: str) -> Path:
    """The first of the files that is there."""
    for path in candidates:
        if path.is_file():
            return path
    raise DataError(
        f"dataset {name!r}: no {candidates[-1]}; point --data-dir (data_dir) or {ENVIRONMENT} at the folder "
        f"that has it, or run `fedlaw data get {name}`"
    )


def _read_idx_pairs(folder: Path, name: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images (N, 1, H, W) and labels (N,) of the training files followed by the test files."""
    images, labels = [], []
    for stem in ("train", "t10k"):
        pair = []
        for kind, dimensions in (("images", 3), ("labels", 1)):
            plain = folder / f"{stem}-{kind}-idx{dimensions}-ubyte"
            path = _existing([plain, plain.with_name(plain.name + ".gz")], name)
            pair.append(read_idx(path, dimensions))
        if len(pair[0]) != len(pair[1]):
            raise DataError(f"{folder}: {len(pair[0])} images and {len(pair[1])} labels in the {stem} files")
        images.append(pair[0])
        labels.append(pair[1])
    if images[0].shape[1:] != (28, 28) or images[1].shape[1:] != (28, 28):
        raise DataError(
            f"{folder}: images of {images[0].shape[1:]} and {images[1].shape[1:]}, 28x28 expected"
        )
    return np.concatenate(images)[:, None], np.concatenate(labels).astype(np.int64)


def _read_cifar(
    folder: Path, files: list[str], label_key: str, name: str
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images (N, 3, 32, 32) and labels (N,) of the files, one after the other."""
    images, labels = [], []
    for file in files:
        path = _existing([folder / file], name)
        batch = read_arrays(path)
        x, y = batch.get("data"), batch.get(label_key)
        if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != 3072:
            raise DataError(f"{path}: 'data' must be a uint8 array (N, 3072), got {_describe(x)}")
        labels.append(_cifar_labels(y, len(x), path))
        images.append(x.reshape(-1, 3, 32, 32))
    return np.concatenate(images), np.concatenate(labels)


def _cifar_labels(labels: Any, count: int, path: Path) -> NDArray[np.int64]:
    if isinstance(labels, list) and all(type(label) is int and 0 <= label < 256 for label in labels):
        labels = np.array(labels, np.int64)
    whole = isinstance(labels, np.ndarray) and labels.dtype.kind in "iu"
    if not whole or labels.shape != (count,):
        raise DataError(f"{path}: labels must be {count} small integers, got {_describe(labels)}")
    found: NDArray[np.int64] = labels.astype(np.int64)
    return found


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {value.shape}"
    return f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__


def _read_names(path: Path, key: str, classes: int) -> tuple[str, ...]:
    """Names of the classes, or none where the file is absent: only figures need them."""
    if not path.is_file():
        return ()
    names = read_arrays(path).get(key)
    if not isinstance(names, list) or len(names) != classes:
        raise DataError(f"{path}: {key!r} must be a list of {classes} names, got {_describe(names)}")
    texts = [name.decode("latin1") if isinstance(name, bytes) else name for name in names]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f"{path}: {key!r} must hold names only")
    return tuple(texts)
