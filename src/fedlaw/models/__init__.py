"""Models by name or import path, and a model's state as one vector."""

from fedlaw.models.factory import create
from fedlaw.models.networks import cnn, logistic, mlp, registry
from fedlaw.models.vector import Slot, assign, check_trainable, count_parameters, flatten, layout, unflatten

__all__ = [
    "Slot",
    "assign",
    "check_trainable",
    "cnn",
    "count_parameters",
    "create",
    "flatten",
    "layout",
    "logistic",
    "mlp",
    "registry",
    "unflatten",
]
