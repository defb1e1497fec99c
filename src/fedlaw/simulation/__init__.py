"""Local training of all clients at once, and evaluation."""

from fedlaw.simulation.evaluation import Evaluation, evaluate
from fedlaw.simulation.jobs import Jobs, LocalWork, Trained, shuffled
from fedlaw.simulation.training import BACKENDS, Backend, train

__all__ = [
    "BACKENDS",
    "Backend",
    "Evaluation",
    "Jobs",
    "LocalWork",
    "Trained",
    "evaluate",
    "shuffled",
    "train",
]
