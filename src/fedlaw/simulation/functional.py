"""Backends for any module: `vmap` by torch.func, and the sequential reference."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from fedlaw.simulation.jobs import Jobs, LocalWork, Trained


def layout(model: nn.Module) -> dict[str, Tensor]:
    """What the flat parameter vector (d,) of `model` is made of, in order: parameters, then floating buffers."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    return {**dict(model.named_parameters()), **buffers}


def counters(model: nn.Module) -> dict[str, Tensor]:
    """The model's other buffers, such as batch norm's count of batches: they start anew in every job."""
    return {name: buffer for name, buffer in model.named_buffers() if not buffer.is_floating_point()}


def dimension(model: nn.Module) -> int:
    """d, the length of the flat parameter vector."""
    return sum(tensor.numel() for tensor in layout(model).values())


def unflatten(model: nn.Module, vectors: Tensor) -> dict[str, Tensor]:
    """Views of vectors (..., d) in the shapes (..., *shape) of the model's parameters and buffers, by name."""
    tensors = layout(model)
    pieces = torch.split(vectors, [tensor.numel() for tensor in tensors.values()], dim=-1)
    lead = vectors.shape[:-1]
    return {
        name: piece.view(*lead, *like.shape)
        for (name, like), piece in zip(tensors.items(), pieces, strict=True)
    }


class VmapKernel:
    """k copies of any module, each with parameters of its own, stepped by vmap over torch.func.grad.

    Local training is in training mode, scores are in evaluation mode; floating buffers are each job's own.
    The arguments and the methods are those of BatchedKernel.
    """

    def __init__(self, model: nn.Module, shape: tuple[int, ...], jobs: int, width: int, like: Tensor) -> None:
        # functional_call swaps the module's tensors while it runs: two threads must not share a module.
        self._model = copy.deepcopy(model).to(like.device)
        self._state = {
            name: torch.zeros((jobs, *tensor.shape), dtype=like.dtype, device=like.device)
            for name, tensor in layout(model).items()
        }
        self._counters = {
            name: buffer.expand(jobs, *buffer.shape).clone() for name, buffer in counters(self._model).items()
        }
        self._trained = [name for name, p in model.named_parameters() if p.requires_grad]
        self._gradient = vmap(grad(self._loss))
        self._scores = vmap(self._call)

    @staticmethod
    def stacks(model: nn.Module, device: torch.device) -> bool:
        """Whether jobs should step together: it is what vmap is for."""
        return True

    def load(self, theta: Tensor) -> None:
        for name, tensor in unflatten(self._model, theta).items():
            self._state[name][: len(theta)].copy_(tensor)
        for name, buffer in counters(self._model).items():
            self._counters[name].copy_(buffer)

    def flat(self, k: int) -> Tensor:
        return torch.cat([tensor[:k].flatten(1) for tensor in self._state.values()], dim=1)

    def step(self, lo: int, x: Tensor, y: Tensor, weight: Tensor, lr: float) -> None:
        self._model.train()
        state = self._jobs(lo, len(x))
        trained = {name: state.pop(name) for name in self._trained}
        for name, gradient in self._gradient(trained, state, x, y, weight).items():
            trained[name].sub_(gradient, alpha=lr)

    def losses(self, lo: int, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.scores(lo, x).movedim(-1, 1), y, reduction="none")

    def scores(self, lo: int, x: Tensor) -> Tensor:
        self._model.eval()
        scores: Tensor = self._scores(self._jobs(lo, len(x)), x)
        return scores

    def _jobs(self, lo: int, k: int) -> dict[str, Tensor]:
        return {name: tensor[lo : lo + k] for name, tensor in {**self._state, **self._counters}.items()}

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
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    updates = torch.empty((len(jobs), params.shape[1]), dtype=params.dtype, device=params.device)
    losses = torch.empty(len(jobs), dtype=params.dtype, device=params.device)

    def loss(vector: Tensor, examples: Tensor) -> Tensor:
        model.eval()
        with torch.no_grad():
            scores = functional_call(model, unflatten(model, vector), (inputs[examples],))
            return cross_entropy(scores, labels[examples])

    for job, size in enumerate(jobs.sizes.tolist()):
        order = jobs.order[job, :, :size]
        theta = params[jobs.start[job]]
        psi = theta.clone()
        state = {name: tensor.detach() for name, tensor in unflatten(model, psi).items()}  # views of psi
        state.update({name: buffer.clone() for name, buffer in counters(model).items()})
        weights = [state[name].requires_grad_() for name in trained]
        model.train()
        for epoch in order:
            for batch in epoch.split(work.batch_size):
                scores = functional_call(model, state, (inputs[batch],))
                gradients = torch.autograd.grad(
                    cross_entropy(scores, labels[batch]), weights, allow_unused=True, materialize_grads=True
                )
                with torch.no_grad():
                    for weight, gradient in zip(weights, gradients, strict=True):
                        weight.sub_(gradient, alpha=work.lr)
        updates[job] = (theta - psi) / work.lr
        losses[job] = loss(theta if work.loss_point == "before" else psi, order[0])
    return Trained(updates, losses)
