"""Attacks on the training data of malicious clients, who then train and report as honest ones do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedlaw._checks import check_integer, check_number
from fedlaw.attacks._common import require_generator
from fedlaw.attacks.base import Attack, registry

Position = Literal["center"] | tuple[int, int]


@registry.register("none")
@dataclass(frozen=True)
class Honest(Attack):
    """No attack: the malicious clients behave like the others.

    >>> Honest().poisons_data
    False
    """


@registry.register("label_flip", "flip")
@dataclass(frozen=True)
class LabelFlip(Attack):
    """Flip labels: label l of L becomes L - l - 1.

    Reference: Fang, Cao, Jia, Gong, "Local model poisoning attacks to Byzantine-robust federated learning",
    USENIX Security 2020.

    >>> LabelFlip().poison(torch.zeros(3, 1), torch.tensor([0, 1, 9]), classes=10)[1].tolist()
    [9, 8, 0]
    """

    poisons_data = True

    def poison(
        self,
        inputs: Tensor,
        labels: Tensor,
        *,
        classes: int,
        black: float | Tensor = 0.0,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        return inputs, classes - 1 - labels


@registry.register("random_labels")
@dataclass(frozen=True)
class RandomLabels(Attack):
    """Draw every label anew, uniformly from all classes.

    >>> draw = torch.Generator().manual_seed(0)
    >>> old = torch.zeros(1000).long()
    >>> _, labels = RandomLabels().poison(torch.zeros(1000, 1), old, classes=3, generator=draw)
    >>> labels.unique().tolist()
    [0, 1, 2]
    """

    poisons_data = True

    def poison(
        self,
        inputs: Tensor,
        labels: Tensor,
        *,
        classes: int,
        black: float | Tensor = 0.0,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        return inputs, _random_labels(labels, classes, generator)


@dataclass(frozen=True)
class _Stamp(Attack):
    """A black square on images: what both backdoors share."""

    size: int = 8
    position: Position = "center"

    poisons_data = True

    def __post_init__(self) -> None:
        check_integer("size", self.size, low=1)
        if isinstance(self.position, (tuple, list)) and len(self.position) == 2:
            object.__setattr__(self, "position", tuple(self.position))
            check_integer("position[0]", self.position[0], low=0)
            check_integer("position[1]", self.position[1], low=0)
        elif self.position != "center":
            raise ValueError(f"position must be 'center' or (row, column), got {self.position!r}")

    def trigger(self, inputs: Tensor, *, black: float | Tensor = 0.0) -> Tensor:
        """`inputs` (k, ..., height, width) with the square on every image; a new tensor."""
        if inputs.ndim < 3:
            raise ValueError(
                f"inputs must be images (k, ..., height, width); reshape them, got {tuple(inputs.shape)}"
            )
        height, width = inputs.shape[-2:]
        if isinstance(self.position, str):
            row, column = (height - self.size) // 2, (width - self.size) // 2
        else:
            row, column = self.position
        if min(row, column) < 0 or row + self.size > height or column + self.size > width:
            raise ValueError(
                f"size {self.size} at position {self.position!r} does not fit images of {height} x {width}; "
                f"choose a smaller size or another position"
            )
        stamped = inputs.clone()
        colour = torch.as_tensor(black, dtype=inputs.dtype, device=inputs.device)
        stamped[..., row : row + self.size, column : column + self.size] = colour
        return stamped


@registry.register("backdoor")
@dataclass(frozen=True)
class Backdoor(_Stamp):
    """Stamp a black square on every image and draw its label anew from all classes.

    As in the FedLAW paper, whose backdoor has no target: it poisons, it does not plant a behaviour.
    `TargetedBackdoor` does.

    Settings:
        size: side of the square in pixels.
        position: "center", or (row, column) of the square's upper left corner.

    >>> draw = torch.Generator().manual_seed(0)
    >>> white, labels = torch.ones(1, 4, 4), torch.tensor([0])
    >>> images, _ = Backdoor(size=2).poison(white, labels, classes=2, generator=draw)
    >>> images[0].sum(dim=1).tolist()
    [4.0, 2.0, 2.0, 4.0]
    """

    def poison(
        self,
        inputs: Tensor,
        labels: Tensor,
        *,
        classes: int,
        black: float | Tensor = 0.0,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        return self.trigger(inputs, black=black), _random_labels(labels, classes, generator)


@registry.register("targeted_backdoor")
@dataclass(frozen=True)
class TargetedBackdoor(_Stamp):
    """Stamp a black square on images and label them with one target class.

    What it achieves is the share of stamped test images that the model takes for the target: `trigger` stamps
    them, `success_rate` counts.

    Settings:
        size, position: the square, as for `Backdoor`.
        target: the label that a stamped image gets.
        fraction: share of a malicious client's examples that are poisoned, chosen at random (1: all).

    Reference: Gu, Dolan-Gavitt, Garg, "BadNets: identifying vulnerabilities in the machine learning model
    supply chain", 2017.

    >>> attack = TargetedBackdoor(size=2, target=1)
    >>> attack.poison(torch.ones(1, 4, 4), torch.tensor([0]), classes=2)[1].tolist()
    [1]
    """

    target: int = 0
    fraction: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("target", self.target, low=0)
        check_number("fraction", self.fraction, low=0, high=1, open_low=True)

    def poison(
        self,
        inputs: Tensor,
        labels: Tensor,
        *,
        classes: int,
        black: float | Tensor = 0.0,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        if self.target >= classes:
            raise ValueError(f"target must be a label from 0 to {classes - 1}, got {self.target}")
        stamped = self.trigger(inputs, black=black)
        if self.fraction == 1:
            return stamped, torch.full_like(labels, self.target)
        order = torch.randperm(len(labels), generator=require_generator(generator), device=labels.device)
        kept = order[int(self.fraction * len(labels) + 0.5) :]
        relabelled = torch.full_like(labels, self.target)
        stamped[kept], relabelled[kept] = inputs[kept], labels[kept]
        return stamped, relabelled


def success_rate(predictions: Tensor, labels: Tensor, target: int) -> float:
    """Share of stamped test images, of those whose true label is not the target, that are taken for it.

    Args:
        predictions: (k,) labels that the model gives to the stamped images.
        labels: (k,) their true labels.
        target: the backdoor's target.

    0 where every true label is the target: nothing was there to be won.

    >>> success_rate(torch.tensor([0, 0, 2, 0]), torch.tensor([0, 1, 2, 3]), target=0)
    0.6666666666666666
    """
    others = labels != target
    return int((predictions[others] == target).sum()) / max(1, int(others.sum()))


def _random_labels(labels: Tensor, classes: int, generator: torch.Generator | None) -> Tensor:
    source = require_generator(generator)
    return torch.randint(classes, labels.shape, generator=source, device=labels.device, dtype=labels.dtype)
