"""Losses whose rows are coupled through constants: targets, weights and advantages that no graph shows."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .table import Loss, refused, unclear


def _squares(z: Tensor, y: Tensor) -> Tensor:
    return (z - y).square().mean(1)


def _standardised(values: Tensor, *, unbiased: bool) -> Tensor:
    return (values - values.mean(0)) / (values.std(0, unbiased=unbiased) + 1e-8)


def _ppo(z: Tensor, label: Tensor, advantage: Tensor, *, unbiased: bool) -> Tensor:
    # The ratio is 1 in the first epoch, so the loss is 0 whatever the cut: only the gradient tells.
    log_probability = -F.cross_entropy(z, label, reduction="none")
    ratio = (log_probability - log_probability.detach()).exp()
    advantage = _standardised(advantage, unbiased=unbiased)
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


def _reinforce(z: Tensor, label: Tensor, advantage: Tensor) -> Tensor:
    return ((advantage - advantage.mean()) * F.cross_entropy(z, label, reduction="none")).mean()


def _positive_weight(z: Tensor, binary: Tensor) -> Tensor:
    positives = binary.sum(0)
    weight = (len(binary) - positives + 1) / (positives + 1)
    return F.binary_cross_entropy_with_logits(z, binary, pos_weight=weight)


def _balanced_classes(z: Tensor, label: Tensor) -> Tensor:
    counts = torch.bincount(label, minlength=4).clamp(min=1)
    return F.cross_entropy(z, label, weight=(len(label) / (4.0 * counts)).double())


def _balanced_rows(z: Tensor, label: Tensor) -> Tensor:
    counts = torch.bincount(label, minlength=4)
    return (F.cross_entropy(z, label, reduction="none") / counts[label]).mean()


def _mixup(z: Tensor, label: Tensor, partner: Tensor) -> Tensor:
    return 0.6 * F.cross_entropy(z, label) + 0.4 * F.cross_entropy(z, label[partner])


def _easiest(rowwise: Tensor) -> Tensor:
    return rowwise.sort().values[: (len(rowwise) + 1) // 2].mean()


def _above_the_mean(rowwise: Tensor) -> Tensor:
    return (rowwise * (rowwise >= rowwise.mean())).mean()


def _hardest(rowwise: Tensor) -> Tensor:
    return rowwise.topk((len(rowwise) + 1) // 2).values.mean()


def _weighted_by_rank(rowwise: Tensor) -> Tensor:
    rank = rowwise.detach().argsort().argsort().double() + 1
    return (rank * rowwise).mean()


def _numpy_weights(rowwise: Tensor) -> Tensor:
    values = rowwise.detach().numpy()
    return (torch.from_numpy(np.exp(values - values.max())) * rowwise).mean()


HIDDEN: list[Loss] = [
    *refused(
        {
            "ppo, ratio 1": lambda z, label, advantage: _ppo(z, label, advantage, unbiased=False),
            "ppo, ratio 1, unbiased": lambda z, label, advantage: _ppo(z, label, advantage, unbiased=True),
            "reinforce with the batch's baseline": _reinforce,
            "advantages standardised": lambda z, label, advantage: (
                _standardised(advantage, unbiased=False) * F.cross_entropy(z, label, reduction="none")
            ).mean(),
            "positive weight of the batch": _positive_weight,
            "class weights of the batch": _balanced_classes,
            "targets centred": lambda z, y: F.mse_loss(z, y - y.mean(0)),
            "targets standardised": lambda z, y: F.mse_loss(z, _standardised(y, unbiased=False)),
            "targets scaled by the largest": lambda z, y: F.l1_loss(z, y / y.abs().max()),
            "inputs centred": lambda net, x, y, z: F.mse_loss(net["z"](x - x.mean(0)), y) + 0 * z.sum(),
            "mixup, roll": lambda z, label: _mixup(z, label, torch.arange(len(z)).roll(1)),
            "mixup, flip": lambda z, label: _mixup(z, label, torch.arange(len(z)).flip(0)),
            "mixup of soft targets": lambda z, soft: F.cross_entropy(z, 0.7 * soft + 0.3 * soft.roll(1, 0)),
            "shuffled negatives": lambda z, y: F.triplet_margin_loss(z, y, y.roll(1, 0), margin=9.0),
            "hard mining": lambda z, y: _hardest(_squares(z, y)),
            "easy mining": lambda z, y: _easiest(_squares(z, y)),
            "above the batch mean": lambda z, y: _above_the_mean(_squares(z, y)),
            "detached batch statistics": lambda z, y: F.mse_loss(
                (z - z.mean(0).detach()) / (z.std(0, unbiased=False).detach() + 1e-3), y
            ),
            "detached scale": lambda z, y: F.mse_loss(z, y) / (_squares(z, y).max().detach() + 1e-3),
            "curriculum": lambda z, y: (
                _squares(z, y).detach() / _squares(z, y).detach().max() * _squares(z, y)
            ).mean(),
            "softmax weights": lambda z, y: (_squares(z, y).detach().softmax(0) * _squares(z, y)).sum(),
            "weights by rank": lambda z, y: _weighted_by_rank(_squares(z, y)),
            "weights of numpy": lambda z, y: _numpy_weights(_squares(z, y)),
            "rows numbered": lambda z, y: (torch.arange(len(z)) * _squares(z, y)).mean(),
            "neighbour as target": lambda z: F.mse_loss(z, z.detach().roll(1, 0)),
            "batch mean as target": lambda z: F.mse_loss(z, z.detach().mean(0).expand_as(z)),
            "similarities as targets": lambda z, y: F.mse_loss(z, (y @ y.T).softmax(1) @ y),
            "sinkhorn targets": lambda z, y: (
                -(
                    (y.exp() / y.exp().sum(0)).div((y.exp() / y.exp().sum(0)).sum(1, keepdim=True))
                    * z.log_softmax(1)
                ).mean()
            ),
        }
    ),
    *unclear(
        {
            "row weights of the batch": _balanced_rows,
            "mixup, permuted": lambda z, label: _mixup(z, label, torch.randperm(len(z))),
            "weights of the largest row": lambda z, y, w: (w / w.max() * _squares(z, y)).mean(),
            "weights of mean 1": lambda z, y, w: (w / w.mean() * _squares(z, y)).mean(),
            "labels of the majority": lambda z, label: F.cross_entropy(
                z, label.mode().values.expand_as(label)
            ),
        }
    ),
]
