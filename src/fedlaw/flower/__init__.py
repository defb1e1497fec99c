"""FedLAW and every rule of `fedlaw.aggregators` as Flower strategies, for federations of real machines.

strategy = fedlaw.flower.FedLAW("hardened", Settings(alpha=0.05), Federation(min_nodes=30, store="results.sqlite"))
result = strategy.start(grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=100, timeout=600)

This room carries messages, screens what they hold and keeps checkpoints; `fedlaw.server` decides whom to trust.
"""

try:
    import flwr as _flwr
except ModuleNotFoundError as error:
    raise ImportError("fedlaw.flower needs Flower: pip install 'fedlaw[flower]'") from error

from fedlaw.flower.client import Task, Trained, client
from fedlaw.flower.federation import Federation
from fedlaw.flower.local import LocalGrid
from fedlaw.flower.strategy import FedLAW, RobustStrategy
from fedlaw.server import Settings

__all__ = ["FedLAW", "Federation", "LocalGrid", "RobustStrategy", "Settings", "Task", "Trained", "client"]

del _flwr
