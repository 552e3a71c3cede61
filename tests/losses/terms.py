"""Losses of several terms: shared and different denominators, parameters alone, coefficients, dicts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .table import Loss, exact, unclear


def _squares_of_parameters(net: nn.Module) -> Tensor:
    return sum((p.square().sum() for p in net.parameters()), torch.zeros((), dtype=torch.float64))


def _sizes_of_parameters(net: nn.Module) -> Tensor:
    return torch.stack([p.abs().mean() for p in net.parameters()]).sum()


def _only_when_labelled(z: Tensor, y: Tensor, tail_ignored: Tensor) -> Tensor:
    loss = F.mse_loss(z, y)
    if (tail_ignored != -100).any():
        loss = loss + F.cross_entropy(z, tail_ignored)
    return loss


def _only_when_labelled_first(z: Tensor, y: Tensor, head_ignored: Tensor) -> Tensor:
    loss = F.mse_loss(z, y)
    if (head_ignored != -100).any():
        loss = loss + F.cross_entropy(z, head_ignored)
    return loss


def _loop_over_present_classes(z: Tensor, label: Tensor) -> Tensor:
    return torch.stack([z[label == c, c].mean() for c in label.unique()]).mean()


def _mean_of_each_class(z: Tensor, label: Tensor) -> Tensor:
    return torch.stack([z[label == c].square().mean() for c in range(4)]).mean()


def _sum_of_each_class(z: Tensor, label: Tensor) -> Tensor:
    return torch.stack([z[label == c].square().sum() for c in range(4)]).sum()


def _homoscedastic(z: Tensor, y: Tensor, ignored: Tensor, s: Tensor, s2: Tensor) -> Tensor:
    return (-s).exp() * F.cross_entropy(z, ignored) + s + 0.5 * (-s2).exp() * F.mse_loss(z, y) + 0.5 * s2


def _shared_subgraph(z: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    difference = (z - y).tanh()
    return (
        difference.square().mean()
        + 0.1 * difference.abs().sum()
        + (difference[:, 0] * mask).sum() / mask.sum()
    )


def _same_reduction_twice(z: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(z, y)
    return loss + 0.5 * loss


def _shared_mean_under_two_coefficients(z: Tensor, y: Tensor, ignored: Tensor, s: Tensor) -> Tensor:
    mean, cross = F.mse_loss(z, y), F.cross_entropy(z, ignored)
    return s * (mean + cross) + 2 * mean


_ROWS = {
    "two means": lambda z, y, y2: F.mse_loss(z, y) + 0.3 * F.l1_loss(z, y2),
    "mean - mean": lambda z, y, y2: F.mse_loss(z, y) - 0.5 * F.smooth_l1_loss(z, y2),
    "stacked means": lambda z, y, y2: torch.stack([F.mse_loss(z, y), F.l1_loss(z, y2)]).sum(),
    "mean of stacked means": lambda z, y, y2: torch.stack([F.mse_loss(z, y), F.l1_loss(z, y2)]).mean(),
    "means in a cat": lambda z, y, y2: torch.cat([F.mse_loss(z, y)[None], F.l1_loss(z, y2).view(1)]).sum(),
    "python sum of means": lambda z, y, y2, label: sum(
        [F.mse_loss(z, y), F.l1_loss(z, y2), F.cross_entropy(z, label)]
    ),
    "lerp of means": lambda z, y, y2: 0.2 * F.mse_loss(z, y) + (1 - 0.2) * F.huber_loss(z, y2),
    "two heads": lambda z, z2, y, label: F.mse_loss(z, y) + F.cross_entropy(z2, label),
    "two inputs": lambda z, other, y: F.mse_loss(z, y) + F.mse_loss(other, y),
    "same reduction twice": _same_reduction_twice,
    "mean + learned constant": lambda z, y, s: F.mse_loss(z, y) + s.square(),
    "elastic net": lambda z, y, net: (
        F.mse_loss(z, y) + 1e-2 * _squares_of_parameters(net) + 1e-3 * _sizes_of_parameters(net)
    ),
    "product of a parameter's norm": lambda z, y, alpha: alpha.norm() * F.mse_loss(z, y) + alpha.sum(),
    "learned temperature": lambda z, label, s: F.cross_entropy(z * s.exp(), label),
    "learned weights of features": lambda z, y, alpha: ((z - y).square() * alpha.softmax(0)).sum(1).mean(),
    "learned coefficient of a mean": lambda z, y, s: (-s).exp() * F.mse_loss(z, y) + s,
    "division by a parameter": lambda z, y, s: F.mse_loss(z, y) / (2 * s.square()) + s.square().log(),
    "mean of a learned coefficient": lambda z, y, s: (s * (z - y).square()).mean(),
    "divided by learned and constant": lambda z, y, s: 3 * F.mse_loss(z, y) / s.exp() / 7,
}

_SUMS = {
    "two sums": lambda z, y, y2: F.mse_loss(z, y, reduction="sum") + 0.1 * (z - y2).abs().sum(),
    "learned coefficient of a sum": lambda z, y, s: (-s).exp() * F.mse_loss(z, y, reduction="sum") + 0 * s,
    "sum of each class": _sum_of_each_class,
}

_COUNTED = {
    "two counted terms": lambda z, z2, ignored: (
        F.cross_entropy(z, ignored) + 0.5 * F.cross_entropy(z2, ignored)
    ),
    "counted + weight decay": lambda z, ignored, net: (
        F.cross_entropy(z, ignored) + 1e-2 * _squares_of_parameters(net)
    ),
    "learned coefficient of a counted mean": lambda z, ignored, s: (
        (-s).exp() * F.cross_entropy(z, ignored) + s
    ),
}

_DIFFERENT = {
    "counted + mean": lambda z, y, ignored: F.cross_entropy(z, ignored) + 0.7 * F.mse_loss(z, y),
    "counted + mean, first rows ignored": lambda z, y, head_ignored: (
        F.cross_entropy(z, head_ignored) + F.mse_loss(z, y)
    ),
    "counted + mean, last rows ignored": lambda z, y, tail_ignored: (
        F.cross_entropy(z, tail_ignored) + F.mse_loss(z, y)
    ),
    "counted + mean + weight decay": lambda z, y, ignored, net: (
        F.cross_entropy(z, ignored) + F.mse_loss(z, y) + 1e-2 * _squares_of_parameters(net)
    ),
    "mean + sum": lambda z, y: F.mse_loss(z, y) + 0.01 * z.abs().sum(),
    "mean + sum + counted": lambda z, y, ignored: (
        F.mse_loss(z, y) + 0.01 * z.abs().sum() - 0.2 * F.cross_entropy(z, ignored)
    ),
    "stacked mean and sum": lambda z, y: torch.stack([F.mse_loss(z, y), z.abs().sum()]).mean(),
    "two masks": lambda z, y, mask, tail_mask: (
        ((z - y).square().mean(1) * mask).sum() / mask.sum()
        + ((z - y).abs().mean(1) * tail_mask).sum() / tail_mask.sum().clamp(min=1)
    ),
    "two label sets": lambda z, z2, ignored, tail_ignored: (
        F.cross_entropy(z, ignored) + F.cross_entropy(z2, tail_ignored)
    ),
    "boxes and classes": lambda z, z2, y, mask, label: (
        F.cross_entropy(z, label) + 5 * ((z2 - y).abs() * mask[:, None]).sum() / mask.sum().clamp(min=1)
    ),
    "tokens and rows": lambda tokens, z, tags, label: (
        F.cross_entropy(tokens.transpose(1, 2), tags) + F.cross_entropy(z, label)
    ),
    "homoscedastic uncertainty": _homoscedastic,
    "shared subgraph": _shared_subgraph,
    "sum of terms, halved": lambda z, y, ignored: (F.mse_loss(z, y) + F.cross_entropy(z, ignored)) / 2,
    "term only when labelled": _only_when_labelled,
    "term only when labelled, first rows not": _only_when_labelled_first,
    "mean and its negative": lambda z, y, ignored: (
        F.mse_loss(z, y) - F.mse_loss(z, y) + F.cross_entropy(z, ignored)
    ),
}

TERMS: list[Loss] = [
    *exact(_ROWS),
    *exact(_SUMS, weight="sum"),
    *exact(_COUNTED),
    *exact(_DIFFERENT),
    *exact(
        {
            "dict, one weight each": lambda z, y, ignored: {
                "mean": F.mse_loss(z, y),
                "counted": 0.7 * F.cross_entropy(z, ignored),
            },
        },
        weight={"mean": "rows", "counted": lambda ignored: (ignored != -100).sum()},
    ),
    *exact(
        {
            "dict, sum and auto": lambda z, y, ignored: {
                "sum": 0.1 * z.square().sum(),
                "counted": F.cross_entropy(z, ignored),
                "mean": (z - y).abs().mean(),
            },
        },
        weight={"sum": "sum", "counted": "auto", "mean": "rows"},
    ),
    *exact(
        {
            "dict of one": lambda z, y: {"loss": F.mse_loss(z, y)},
        },
        weight={"loss": "rows"},
    ),
    *unclear(
        {
            "shared mean under two coefficients": _shared_mean_under_two_coefficients,
            "sum of terms under one coefficient": lambda z, y, ignored, s: (
                s.exp() * (F.mse_loss(z, y) + F.cross_entropy(z, ignored)) - s
            ),
            "mean of each class": _mean_of_each_class,
            "mean of each present class": _loop_over_present_classes,
            "constant weights @ stack": lambda z, y, y2: (
                torch.tensor([0.3, 0.7], dtype=z.dtype) @ torch.stack([F.mse_loss(z, y), F.l1_loss(z, y2)])
            ),
            "learned weights @ stack": lambda z, y, y2, alpha: (
                alpha.softmax(0)[:2] @ torch.stack([F.mse_loss(z, y), F.l1_loss(z, y2)])
            ),
            "learned weights * stack": lambda z, y, y2, alpha: (
                alpha.softmax(0)[:2] * torch.stack([F.mse_loss(z, y), F.l1_loss(z, y2)])
            ).sum(),
            "clamped far away": lambda z, y: F.mse_loss(z, y).clamp(max=1e6),
            "nan to num": lambda z, y: torch.nan_to_num(F.mse_loss(z, y)),
            "where finite": lambda z, y: torch.where(F.mse_loss(z, y).isfinite(), F.mse_loss(z, y), 0.0),
            "where positive": lambda z, y: torch.where(z.mean() > 0, F.mse_loss(z, y), 2 * F.mse_loss(z, y)),
        }
    ),
]
