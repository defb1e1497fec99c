"""Backends for any module: `vmap` by torch.func, and the sequential reference."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from fedlaw.models.vector import layout, unflatten
from fedlaw.simulation.jobs import Jobs, LocalWork, Trained


class VmapKernel:
    """k copies of any module, each with parameters of its own: several by torch.func, one by plain autograd.

    Local training is in training mode, scores are in evaluation mode; floating buffers are each job's own.
    The arguments and the methods are those of BatchedKernel.
    """

    def __init__(self, model: nn.Module, shape: tuple[int, ...], jobs: int, width: int, like: Tensor) -> None:
        # A copy, since each thread puts its own jobs' tensors into it.
        self._model = copy.deepcopy(model).to(like.device, like.dtype)
        self._slots = layout(model)
        self._state = {
            slot.name: torch.zeros((jobs, *slot.shape), dtype=like.dtype, device=like.device)
            for slot in self._slots
        }
        self._tensors = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        self._trained = [name for name, p in self._model.named_parameters() if p.requires_grad]

    @staticmethod
    def activations(model: nn.Module, examples: Tensor) -> int:
        """Numbers that all modules together put out, for one example."""
        model = copy.deepcopy(model).to(examples.device).eval()
        count = 0

        def add(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal count
            count += output.numel() if isinstance(output, Tensor) else 0

        for module in model.modules():
            module.register_forward_hook(add)
        with torch.no_grad():
            model.to(examples.dtype if examples.is_floating_point() else torch.float32)(examples)
        return -(-count // len(examples))

    @staticmethod
    def stacks(model: nn.Module, device: torch.device) -> bool:
        """Whether jobs should step together: not on a CPU, where only the layers of `batched` gain by it, and
        where a stacked operation of another kind may round differently from the same operation alone."""
        return device.type != "cpu"

    def load(self, theta: Tensor) -> None:
        for name, tensor in unflatten(theta, self._slots).items():
            self._state[name][: len(theta)].copy_(tensor)

    def flat(self, k: int, out: Tensor | None = None) -> Tensor:
        return torch.cat([tensor[:k].flatten(1) for tensor in self._state.values()], dim=1, out=out)

    def step(self, lo: int, x: Tensor, y: Tensor, weight: Tensor, lr: float) -> None:
        self._model.train()
        if len(x) == 1:
            self._become(lo)
            trained = {name: self._tensors[name] for name in self._trained}
            with torch.enable_grad():
                loss = (cross_entropy(self._model(x[0]), y[0], reduction="none") * weight[0]).sum()
            found = torch.autograd.grad(
                loss, list(trained.values()), allow_unused=True, materialize_grads=True
            )
            gradients = dict(zip(trained, found, strict=True))
        else:
            state = self._jobs(lo, len(x))
            trained = {name: state.pop(name) for name in self._trained}
            gradients = vmap(grad(self._loss))(trained, state, x, y, weight)
        for name, gradient in gradients.items():
            trained[name].sub_(gradient, alpha=lr)

    def losses(self, lo: int, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.scores(lo, x).movedim(-1, 1), y, reduction="none")

    def scores(self, lo: int, x: Tensor) -> Tensor:
        self._model.eval()
        if len(x) == 1:
            self._become(lo)
            alone: Tensor = self._model(x[0])
            return alone.unsqueeze(0)
        scores: Tensor = vmap(self._call)(self._jobs(lo, len(x)), x)
        return scores

    def _become(self, job: int) -> None:
        """Let the module's tensors be those of one job: what moves them moves the job's."""
        for name, tensor in self._tensors.items():
            tensor.data = self._state[name][job]

    def _jobs(self, lo: int, k: int) -> dict[str, Tensor]:
        return {name: tensor[lo : lo + k] for name, tensor in self._state.items()}

    def _call(self, state: dict[str, Tensor], x: Tensor) -> Tensor:
        scores: Tensor = functional_call(self._model, state, (x,))
        return scores

    def _loss(
        self, trained: dict[str, Tensor], rest: dict[str, Tensor], x: Tensor, y: Tensor, weight: Tensor
    ) -> Tensor:
        scores = self._call({**trained, **rest}, x)
        return (cross_entropy(scores, y, reduction="none") * weight).sum()


def train_sequential(
    model: nn.Module, params: Tensor, inputs: Tensor, labels: Tensor, jobs: Jobs, work: LocalWork
) -> Trained:
    """The reference: job after job, batch after batch, by autograd; see `train`."""
    model = copy.deepcopy(model).to(params.device)
    slots = layout(model)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    updates = torch.empty((len(jobs), params.shape[1]), dtype=params.dtype, device=params.device)
    losses = torch.empty(len(jobs), dtype=params.dtype, device=params.device)

    def loss(vector: Tensor, examples: Tensor) -> Tensor:
        state, total = unflatten(vector, slots), torch.zeros_like(params[0, 0])
        model.eval()
        with torch.no_grad():
            for batch in torch.split(examples, work.batch_size):
                scores = functional_call(model, state, (inputs[batch],))
                total += cross_entropy(scores, labels[batch], reduction="sum")
        return total / len(examples)

    for job, size in enumerate(jobs.sizes.tolist()):
        order = jobs.order[job, :, :size]
        theta = params[jobs.start[job]]
        state = {name: tensor.detach().clone() for name, tensor in unflatten(theta, slots).items()}
        weights = [state[name].requires_grad_() for name in trained]
        model.train()
        for epoch in order:
            for batch in torch.split(epoch, work.batch_size):
                with torch.enable_grad():
                    scores = functional_call(model, state, (inputs[batch],))
                    mean = cross_entropy(scores, labels[batch])
                gradients = torch.autograd.grad(mean, weights, allow_unused=True, materialize_grads=True)
                with torch.no_grad():
                    for weight, gradient in zip(weights, gradients, strict=True):
                        weight.sub_(gradient, alpha=work.lr)
        psi = torch.cat([tensor.detach().flatten() for tensor in state.values()])
        updates[job] = (theta - psi) / work.lr
        losses[job] = loss(theta if work.loss_point == "before" else psi, order[0])
    return Trained(updates, losses)
