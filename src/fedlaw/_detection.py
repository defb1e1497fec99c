"""How well attackers were told from honest clients, by the weights that each was left with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Detection:
    """Who was told apart: a positive is a client taken for malicious.

    Ratios of the form 0/0: precision, where nobody is excluded, is 1 if nobody attacks and 0 if somebody does;
    recall, where nobody attacks, is 1; F1 is 1 where nobody attacks and nobody is excluded; the false exclusion
    rate, where nobody is honest, is 0. So a run without attackers in which nobody is excluded is perfect, and
    one that misses every attacker is not saved by having accused nobody.

    Attributes:
        true_positives: attackers excluded. false_positives: honest clients excluded.
        true_negatives: honest clients kept. false_negatives: attackers kept.
    """

    true_positives: int
    false_positives: int
    true_negatives: int
    false_negatives: int

    @property
    def precision(self) -> float:
        """Share of those excluded who attack."""
        missed_none = 1.0 if self.false_negatives == 0 else 0.0
        return _share(self.true_positives, self.true_positives + self.false_positives, missed_none)

    @property
    def recall(self) -> float:
        """Share of the attackers who are excluded."""
        return _share(self.true_positives, self.true_positives + self.false_negatives, 1.0)

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall: 2 TP / (2 TP + FP + FN)."""
        hits = 2 * self.true_positives
        return _share(hits, hits + self.false_positives + self.false_negatives, 1.0)

    @property
    def accuracy(self) -> float:
        """Share of all clients who are judged rightly."""
        right = self.true_positives + self.true_negatives
        return _share(right, right + self.false_positives + self.false_negatives, 1.0)

    @property
    def false_exclusion_rate(self) -> float:
        """Share of the honest clients who are excluded."""
        return _share(self.false_positives, self.false_positives + self.true_negatives, 0.0)

    def as_dict(self) -> dict[str, float]:
        """Counts and rates by name, for a table."""
        rates = ("precision", "recall", "f1", "accuracy", "false_exclusion_rate")
        return {**vars(self), **{name: getattr(self, name) for name in rates}}


def detection(weights: Tensor, malicious: Tensor, threshold: float | None = None) -> Detection:
    """Count who is excluded: weight at or below the threshold means taken for malicious.

    Args:
        weights: (n,) aggregation weights.
        malicious: (n,) bool, who attacks.
        threshold: None: 0.02 / n, which is the paper's 1e-4 for its 200 clients.

    >>> found = detection(torch.tensor([0.5, 0.5, 0.0, 0.0]), torch.tensor([False, False, False, True]))
    >>> found.precision, found.recall, found.accuracy
    (0.5, 1.0, 0.75)
    """
    if weights.ndim != 1 or weights.shape != malicious.shape:
        raise ValueError(
            f"weights and malicious must both be (n,), got {tuple(weights.shape)} and {tuple(malicious.shape)}"
        )
    if malicious.dtype != torch.bool:
        raise ValueError(f"malicious must be bool, True for an attacker, got {malicious.dtype}")
    excluded = weights <= (0.02 / max(1, len(weights)) if threshold is None else threshold)
    return Detection(
        true_positives=int((excluded & malicious).sum()),
        false_positives=int((excluded & ~malicious).sum()),
        true_negatives=int((~excluded & ~malicious).sum()),
        false_negatives=int((~excluded & malicious).sum()),
    )


def _share(part: int, whole: int, of_none: float) -> float:
    return part / whole if whole else of_none
