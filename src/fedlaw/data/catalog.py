"""Where the named data sets are published, and the digests of what is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Remote:
    """One file to download: its name, size in bytes and SHA-256; of an archive, the MD5 of what is taken out."""

    file: str
    size: int
    sha256: str
    members: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """Where a data set comes from (the first base address that answers) and where its files go."""

    bases: tuple[str, ...]
    folder: str
    files: tuple[Remote, ...]


SOURCES: dict[str, Source] = {
    "mnist": Source(
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist",
            "https://storage.googleapis.com/cvdf-datasets/mnist",
        ),
        "MNIST/raw",
        (
            Remote(
                "train-images-idx3-ubyte.gz",
                9912422,
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            ),
            Remote(
                "train-labels-idx1-ubyte.gz",
                28881,
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            ),
            Remote(
                "t10k-images-idx3-ubyte.gz",
                1648877,
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            ),
            Remote(
                "t10k-labels-idx1-ubyte.gz",
                4542,
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            ),
        ),
    ),
    "fashion_mnist": Source(
        (
            "https://fashion-mnist.s3.eu-central-1.amazonaws.com",
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        ),
        "FashionMNIST/raw",
        (
            Remote(
                "train-images-idx3-ubyte.gz",
                26421880,
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            ),
            Remote(
                "train-labels-idx1-ubyte.gz",
                29515,
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            ),
            Remote(
                "t10k-images-idx3-ubyte.gz",
                4422102,
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            ),
            Remote(
                "t10k-labels-idx1-ubyte.gz",
                5148,
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            ),
        ),
    ),
    "cifar10": Source(
        ("https://www.cs.toronto.edu/~kriz",),
        "",
        (
            Remote(
                "cifar-10-python.tar.gz",
                170498071,
                "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
                {
                    "cifar-10-batches-py/data_batch_1": "c99cafc152244af753f735de768cd75f",
                    "cifar-10-batches-py/data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
                    "cifar-10-batches-py/data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
                    "cifar-10-batches-py/data_batch_4": "634d18415352ddfa80567beed471001a",
                    "cifar-10-batches-py/data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
                    "cifar-10-batches-py/test_batch": "40351d587109b95175f43aff81a1287e",
                    "cifar-10-batches-py/batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
                },
            ),
        ),
    ),
    "cifar100": Source(
        ("https://www.cs.toronto.edu/~kriz",),
        "",
        (
            Remote(
                "cifar-100-python.tar.gz",
                169001437,
                "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
                {
                    "cifar-100-python/train": "16019d7e3df5f24257cddd939b257f8d",
                    "cifar-100-python/test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
                    "cifar-100-python/meta": "7973b15100ade9c7d40fb424638fde48",
                },
            ),
        ),
    ),
}
