"""pfl: its simulated backend, federated averaging, and PyTorch model.

It sums updates as they come, so only their mean can be compared. The loss after training is one of its metrics;
its own way of evaluating would take it before training as well, and is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from _torch import examples, network
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.common_types import Population
from pfl.context import CentralContext
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from worker import Array, Work, serve


class Network(nn.Module):
    """The MLP with the two methods that pfl asks for."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.body, self.loss_of = network(work), nn.CrossEntropyLoss()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        value: Tensor = self.loss_of(self.body(x), y)
        return value

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        return {"loss": Weighted.from_unweighted(float(self.loss(x, y)))}


class Averaging(FederatedAveraging):  # type: ignore[misc]
    """Federated averaging whose clients report their loss after training."""

    def train_one_user(self, initial: Any, model: Any, dataset: Any, context: Any) -> Any:
        statistics, _ = super().train_one_user(initial, model, dataset, context)
        return statistics, model.evaluate(dataset)


def make(work: Work) -> tuple[Callable[[], Any], Callable[[Any], tuple[Array, Array]]]:
    """One round."""
    torch.set_num_threads(work.cores)
    x, y = examples(work)
    n = len(x)
    body = Network(work)
    model = PyTorchModel(body, torch.optim.SGD, torch.optim.SGD(body.parameters(), lr=1.0))
    users = [PyTorchTensorDataset((x[i], y[i]), user_id=str(i)) for i in range(n)]
    data = FederatedDataset(lambda i: users[i], get_user_sampler("minimize_reuse", list(range(n))))
    backend = SimulatedBackend(training_data=data, val_data=data)
    local = NNTrainHyperParams(
        local_num_epochs=work.epochs, local_learning_rate=work.lr, local_batch_size=work.batch
    )
    algorithm = Averaging()
    context = CentralContext(
        current_central_iteration=0,
        do_evaluation=False,
        cohort_size=n,
        population=Population.TRAIN,
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=1, evaluation_frequency=0, train_cohort_size=n, val_cohort_size=0
        ),
        model_train_params=local,
        seed=0,
    )

    def run() -> Any:
        return backend.gather_results(model, algorithm, central_context=context)

    def results(made: Any) -> tuple[Array, Array]:
        statistics, metrics = made
        moved = torch.cat([statistics[name].flatten() for name, _ in body.named_parameters()]) / n
        loss = next(value.overall_value for name, value in metrics if "loss" in str(name))
        return work.params + moved.numpy(), np.array([loss])

    return run, results


if __name__ == "__main__":
    serve(make, ("pfl", "torch"))
