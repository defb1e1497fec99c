"""Data sets, their split and scaling, how clients share them, and who attacks."""

from fedlaw.data import sources as _sources  # registers the named data sets
from fedlaw.data.base import DataError, Dataset, load
from fedlaw.data.base import registry as datasets
from fedlaw.data.fetch import download
from fedlaw.data.malicious import choose_malicious, malicious_count
from fedlaw.data.own import from_arrays, from_torch
from fedlaw.data.partitioning import Partition, Partitioner, partition
from fedlaw.data.partitioning import registry as partitions
from fedlaw.data.sources import resolve_data_dir
from fedlaw.data.splits import Examples, Prepared, Scaling, Split, fit_scaling, prepare, split

__all__ = [
    "DataError",
    "Dataset",
    "Examples",
    "Partition",
    "Partitioner",
    "Prepared",
    "Scaling",
    "Split",
    "choose_malicious",
    "datasets",
    "download",
    "fit_scaling",
    "from_arrays",
    "from_torch",
    "load",
    "malicious_count",
    "partition",
    "partitions",
    "prepare",
    "resolve_data_dir",
    "split",
]

del _sources
