"""With class weights the mean divides by their sum over the labels (pytorch/pytorch#72047)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .whole import assert_whole

LABELS = torch.tensor([0, 0, 0, 1, 2, -100, 3, 3, 1])
WEIGHTS = (0.1, 1.0, 5.0, 20.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("is_weighted", [True, False], ids=["weighted", "unweighted"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("ignore_index", [-100, 0, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_hard_labels(
    is_weighted: bool, label_smoothing: float, ignore_index: int, reduction: str, dtype: torch.dtype
) -> None:
    """Class weights, label smoothing and ignored labels in every combination are exact at every cut."""
    options: dict[str, Any] = {
        "weight": torch.tensor(WEIGHTS, dtype=dtype) if is_weighted else None,
        "label_smoothing": label_smoothing,
        "ignore_index": ignore_index,
        "reduction": reduction,
    }
    labels = LABELS.masked_fill(LABELS == -100, ignore_index)
    net = nn.Linear(5, 4).to(dtype)
    batch = {"x": torch.randn(9, 5).to(dtype), "labels": labels}
    for ub_size in (1, 2, 3, 4, 8):
        assert_whole(lambda x, labels: F.cross_entropy(net(x), labels, **options), batch, net, ub_size)


@pytest.mark.parametrize("is_weighted", [True, False], ids=["weighted", "unweighted"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_soft_labels(is_weighted: bool, label_smoothing: float) -> None:
    """Soft targets divide by the rows, with class weights too."""
    weight = torch.tensor(WEIGHTS) if is_weighted else None
    net = nn.Linear(5, 4)
    batch = {"x": torch.randn(9, 5), "target": torch.rand(9, 4).softmax(1)}

    def step(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(net(x), target, weight=weight, label_smoothing=label_smoothing)

    for ub_size in (1, 2, 3, 4, 8):
        assert_whole(step, batch, net, ub_size)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_pixel_labels(label_smoothing: float, reduction: str) -> None:
    """Class weights over pixels, of which some are ignored, are exact as well."""
    labels = torch.randint(0, 4, (5, 3, 3)).masked_fill(torch.rand(5, 3, 3) < 0.4, 255)
    labels[1] = 255
    weight = torch.tensor(WEIGHTS)
    net = nn.Conv2d(2, 4, 1)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(
            net(x), labels, weight, ignore_index=255, label_smoothing=label_smoothing, reduction=reduction
        )

    for ub_size in (1, 2, 3, 4):
        assert_whole(step, {"x": torch.randn(5, 2, 3, 3), "labels": labels}, net, ub_size)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_class_weights_by_hand(label_smoothing: float) -> None:
    """The sum of the labels' weights is the right weight of a piece."""
    weight = torch.tensor(WEIGHTS)
    net = nn.Linear(5, 4)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(net(x), labels, weight, label_smoothing=label_smoothing)

    batch = {"x": torch.randn(9, 5), "labels": LABELS}
    for ub_size in (1, 2, 3, 4):
        assert_whole(step, batch, net, ub_size, weight=lambda labels: weight[labels[labels >= 0]].sum())
