"""Aggregation rules: n client updates in, one vector out.

>>> import torch
>>> from fedlaw.aggregators import Bucketing, Chain, Clip, Krum, create
>>> updates = torch.tensor([[1.0, 1.0], [1.1, 0.9], [0.9, 1.0], [1.0, 1.2], [1.2, 1.1], [-50.0, 80.0]])
>>> create("trimmed_mean", f=1)(updates).vector
tensor([1.0000, 1.0750])
>>> rule = Chain(Clip("median"), Bucketing(2), Krum(f=0))
>>> rule(updates, generator=torch.Generator().manual_seed(0)).vector.shape
torch.Size([2])
"""

from fedlaw.aggregators.base import (
    BOUNDED,
    IDENTICAL,
    PERMUTATION,
    ROBUST,
    SCALE,
    TRANSLATION,
    Aggregate,
    PreAggregator,
    Rule,
    State,
    TooFewUpdates,
    create,
    registry,
)
from fedlaw.aggregators.bucketing import Bucketing
from fedlaw.aggregators.bulyan import Bulyan
from fedlaw.aggregators.caf import CAF
from fedlaw.aggregators.chain import Chain
from fedlaw.aggregators.clip import ARC, Clip
from fedlaw.aggregators.clipping import CenteredClipping
from fedlaw.aggregators.coordinatewise import Meamed, Median, TrimmedMean
from fedlaw.aggregators.dnc import DnC
from fedlaw.aggregators.fltrust import FLTrust
from fedlaw.aggregators.foolsgold import FoolsGold
from fedlaw.aggregators.krum import Krum, MultiKrum
from fedlaw.aggregators.mda import MDA
from fedlaw.aggregators.mean import Mean
from fedlaw.aggregators.mixing import NearestNeighborMixing
from fedlaw.aggregators.monna import MoNNA
from fedlaw.aggregators.signguard import SignGuard
from fedlaw.aggregators.spec import describe, parse
from fedlaw.aggregators.weiszfeld import GeometricMedian, Huber

names = registry.names
register = registry.register

__all__ = [
    "ARC",
    "BOUNDED",
    "CAF",
    "IDENTICAL",
    "MDA",
    "PERMUTATION",
    "ROBUST",
    "SCALE",
    "TRANSLATION",
    "Aggregate",
    "Bucketing",
    "Bulyan",
    "CenteredClipping",
    "Chain",
    "Clip",
    "DnC",
    "FLTrust",
    "FoolsGold",
    "GeometricMedian",
    "Huber",
    "Krum",
    "Meamed",
    "Mean",
    "Median",
    "MoNNA",
    "MultiKrum",
    "NearestNeighborMixing",
    "PreAggregator",
    "Rule",
    "SignGuard",
    "State",
    "TooFewUpdates",
    "TrimmedMean",
    "create",
    "describe",
    "names",
    "parse",
    "register",
    "registry",
]
