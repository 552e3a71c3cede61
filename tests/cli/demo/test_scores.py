"""Accuracy, precision, recall and F1."""

from __future__ import annotations

import pytest
import torch
from sklearn import metrics

from anybatch.cli.demo.scores import score


def test_score_by_hand() -> None:
    """Of 6 rows 4 are right; class 0: 2 of 3 found, 2 of 2 right; class 1: 2 of 3 found, 2 of 4 right."""
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    predicted = torch.tensor([0, 0, 1, 1, 1, 0])
    scores = score(predicted, labels, classes=2)
    assert scores == pytest.approx({"accuracy": 4 / 6, "precision": 4 / 6, "recall": 4 / 6, "f1": 4 / 6})


@pytest.mark.parametrize("absent", [None, 3])
def test_score_agrees_with_scikit_learn(absent: int | None) -> None:
    """Macro figures are scikit-learn's, also with a class that is never predicted."""
    labels = torch.randint(5, (200,))
    predicted = torch.where(torch.rand(200) < 0.6, labels, torch.randint(5, (200,)))
    if absent is not None:
        predicted[predicted == absent] = 0
    precision, recall, f1, _ = metrics.precision_recall_fscore_support(
        labels, predicted, average="macro", zero_division=0
    )
    accuracy = metrics.accuracy_score(labels, predicted)
    expected = {"accuracy": accuracy, "precision": precision, "recall": recall, "f1": f1}
    assert score(predicted, labels, classes=5) == pytest.approx(expected)
