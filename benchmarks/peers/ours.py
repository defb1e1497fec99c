"""fedlaw's backends, and the loop one would write without a simulator. Examples lie in one pool, in no order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from worker import Array, Work, serve

from fedlaw.models import assign, cnn, mlp
from fedlaw.simulation import Jobs, LocalWork, Trained, train
from fedlaw.simulation.gram import PoolMemory


def plain_loop(
    model: nn.Module, params: Tensor, inputs: Tensor, labels: Tensor, jobs: Jobs, work: LocalWork
) -> Trained:
    """Load the model, torch.optim.SGD, client after client."""
    local, loss_of = copy.deepcopy(model), nn.CrossEntropyLoss()
    updates, losses = torch.empty(len(jobs), params.shape[1], device=params.device), []
    for job, size in enumerate(jobs.sizes.tolist()):
        theta, order = params[jobs.start[job]], jobs.order[job, :, :size]
        assign(local, theta)
        optimizer = torch.optim.SGD(local.parameters(), lr=work.lr)
        for epoch in order:
            for batch in epoch.split(work.batch_size):
                optimizer.zero_grad()
                loss_of(local(inputs[batch]), labels[batch]).backward()
                optimizer.step()
        with torch.no_grad():
            losses.append(loss_of(local(inputs[order[0]]), labels[order[0]]))
            updates[job] = (theta - nn.utils.parameters_to_vector(local.parameters())) / work.lr
    return Trained(updates, torch.stack(losses))


def make(work: Work) -> tuple[Callable[[], Trained], Callable[[Trained], tuple[Array, Array]]]:
    """One round of `work.variant`: plain, or a backend."""
    torch.set_num_threads(work.cores)
    given, labels = torch.from_numpy(work.inputs), torch.from_numpy(work.labels)
    n, m, shape = *given.shape[:2], tuple(given.shape[2:])
    model = (
        mlp(shape, work.classes, work.hidden)
        if work.model == "mlp"
        else cnn(shape, work.classes, (32, 64), (128,))
    )
    model = model.to(work.device)
    place = torch.from_numpy(np.random.default_rng(1).permutation(n * m))
    pool, classes = torch.empty_like(given).flatten(0, 1), torch.empty_like(labels).flatten()
    pool[place], classes[place] = given.flatten(0, 1), labels.flatten()
    order = place.view(n, 1, m).expand(n, work.epochs, m).contiguous().to(work.device)
    if work.variant == "reshuffled":  # as an experiment has it
        order = order.gather(-1, torch.rand(order.shape, generator=torch.manual_seed(1)).argsort(-1))
    sizes = torch.full((n,), m, device=work.device)
    jobs = Jobs(torch.zeros_like(sizes), order, sizes)
    params = torch.from_numpy(work.params).to(work.device).unsqueeze(0)
    local = LocalWork(epochs=work.epochs, batch_size=work.batch, lr=work.lr)
    pool, classes = pool.to(work.device), classes.to(work.device)

    memory = PoolMemory() if work.variant == "later" else None

    def run() -> Trained:
        if work.variant == "plain":
            made = plain_loop(model, params, pool, classes, jobs, local)
        else:
            backend: Any = "batched" if work.variant in ("reshuffled", "later") else work.variant
            made = train(model, params, pool, classes, jobs, local, backend=backend, memory=memory)
        if params.is_cuda:
            torch.cuda.synchronize()
        return made

    def results(made: Trained) -> tuple[Array, Array]:
        return (params - local.lr * made.updates).cpu().numpy(), made.losses.cpu().numpy()

    return run, results


if __name__ == "__main__":
    serve(make, ("torch",))
