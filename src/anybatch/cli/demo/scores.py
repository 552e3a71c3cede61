"""How well a classifier does on each class, from its predictions."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["score"]


def score(predicted: Tensor, labels: Tensor, classes: int) -> dict[str, float]:
    """Accuracy and the unweighted means over the classes of precision, recall and F1.

    Args:
        predicted: Predicted classes, int64, (rows,).
        labels: True classes, int64, (rows,).
        classes: Number of classes.

    Returns:
        `accuracy`, `precision`, `recall` and `f1`, each 0 to 1. A figure that would be 0/0, as of a class
        that is never predicted, counts 0.
    """
    confusion = torch.bincount(labels * classes + predicted, minlength=classes**2).reshape(classes, classes)
    hits = confusion.diagonal().double()
    precision = _ratio(hits, confusion.sum(0))
    recall = _ratio(hits, confusion.sum(1))
    return {
        "accuracy": (hits.sum() / confusion.sum()).item(),
        "precision": precision.mean().item(),
        "recall": recall.mean().item(),
        "f1": _ratio(2 * precision * recall, precision + recall).mean().item(),
    }


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole > 0, part / whole, torch.zeros_like(part))
