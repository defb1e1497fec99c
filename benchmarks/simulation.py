"""Seconds per round of local training: a plain PyTorch loop against each backend, same work, same results.

    python benchmarks/simulation.py                 # 200 clients x 280 examples, MLP 784-128-64-10
    python benchmarks/simulation.py --model cnn     # 20 clients x 80 examples, CNN on 3x32x32, batch 16

Everybody trains every client for all epochs and returns updates and losses over each client's full data; data are
random numbers of the right shape. Contestants take turns; the best repeat of each counts.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from functools import partial

import torch
from _common import compare, machine
from torch import Tensor, nn

from fedlaw._random import generator
from fedlaw.models import cnn, flatten, mlp
from fedlaw.simulation import Jobs, LocalWork, Trained, shuffled, train


def plain_loop(
    model: nn.Module, params: Tensor, inputs: Tensor, labels: Tensor, jobs: Jobs, work: LocalWork
) -> Trained:
    """What one would write without a simulator: load the model, torch.optim.SGD, client after client."""
    local, loss_of = copy.deepcopy(model), nn.CrossEntropyLoss()
    updates, losses = torch.empty(len(jobs), params.shape[1], device=params.device), []
    for job, size in enumerate(jobs.sizes.tolist()):
        theta, order = params[jobs.start[job]], jobs.order[job, :, :size]
        with torch.no_grad():
            nn.utils.vector_to_parameters(theta, local.parameters())
            for parameter in local.parameters():
                parameter.data = parameter.data.clone()  # they are views of theta until here
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("mlp", "cnn"), default="mlp")
    parser.add_argument("--clients", type=int, help="default 200 (cnn: 20)")
    parser.add_argument("--samples", type=int, help="of each client; default 280 (cnn: 80)")
    parser.add_argument("--batch-size", type=int, help="default 64 (cnn: 16)")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, help="default: torch's own number")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--skip", nargs="*", default=[], help="contestants to leave out")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    clients, samples, batch = (200, 280, 64) if args.model == "mlp" else (20, 80, 16)
    clients, samples = args.clients or clients, args.samples or samples
    shape = (1, 28, 28) if args.model == "mlp" else (3, 32, 32)
    torch.manual_seed(0)
    model = (mlp(shape, 10) if args.model == "mlp" else cnn(shape, 10, (32, 64), (128,))).to(args.device)
    work = LocalWork(epochs=args.epochs, batch_size=args.batch_size or batch)

    examples = clients * samples
    inputs = torch.randn(examples, *shape, device=args.device)
    labels = torch.randint(0, 10, (examples,), device=args.device)
    sizes = torch.full((clients,), samples, device=args.device)
    index = torch.arange(examples, device=args.device).view(clients, samples)
    order = shuffled(index, sizes, work.epochs, generator(0, 1, 1, "shuffle"))
    jobs = Jobs(torch.zeros_like(sizes), order, sizes)
    params = flatten(model).unsqueeze(0)

    given = (model, params, inputs, labels, jobs, work)
    contestants: dict[str, Callable[[], Trained]] = {"plain loop": partial(plain_loop, *given)}
    for backend in ("sequential", "vmap", "batched"):
        contestants[backend] = partial(train, *given, backend=backend)
    contestants = {name: run for name, run in contestants.items() if name not in args.skip}
    print(machine())
    print(
        f"{args.model}, {params.shape[1]:,} parameters, {clients} clients x {samples} examples, batch "
        f"{work.batch_size}, {work.epochs} epochs, {args.device}; best of {args.repeats}"
    )
    seconds = compare(contestants, args.repeats)
    first = min(next(iter(seconds.values())))
    reference = next(iter(contestants.values()))()
    print(f"{'':12}{'s/round':>9}{'median':>9}{'us/example':>12}{'ratio':>7}{'difference':>12}")
    for name, each in seconds.items():
        best, median = min(each), sorted(each)[len(each) // 2]
        found = contestants[name]()
        off = (found.updates - reference.updates).norm() / reference.updates.norm()
        per_example = 1e6 * best / (examples * work.epochs)
        print(f"{name:12}{best:9.3f}{median:9.3f}{per_example:12.2f}{first / best:7.2f}{off:12.1e}")


if __name__ == "__main__":
    main()
