"""Local training of all clients at once, evaluation, and the random streams of a run."""

from fedlaw.simulation.evaluation import Evaluation, evaluate
from fedlaw.simulation.jobs import Jobs, LocalWork, Trained, shuffled
from fedlaw.simulation.streams import generator
from fedlaw.simulation.training import BACKENDS, Backend, train

__all__ = [
    "BACKENDS",
    "Backend",
    "Evaluation",
    "Jobs",
    "LocalWork",
    "Trained",
    "evaluate",
    "generator",
    "shuffled",
    "train",
]
