"""Losses whose rows are coupled where the graph shows it: no sum over pieces gives them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .table import Loss, refused, unclear


def _squares(z: Tensor, y: Tensor) -> Tensor:
    return (z - y).square().mean(1)


def _info_nce(a: Tensor, b: Tensor) -> Tensor:
    similarity = F.normalize(a, dim=1) @ F.normalize(b, dim=1).T / 0.1
    return F.cross_entropy(similarity, torch.arange(len(a)))


def _clip(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
    logits = s.exp() * F.normalize(a, dim=1) @ F.normalize(b, dim=1).T
    order = torch.arange(len(a))
    return (F.cross_entropy(logits, order) + F.cross_entropy(logits.T, order)) / 2


def _simclr(a: Tensor, b: Tensor) -> Tensor:
    both = F.normalize(torch.cat([a, b]), dim=1)
    similarity = (both @ both.T / 0.5).fill_diagonal_(-1e9)
    return F.cross_entropy(similarity, torch.arange(2 * len(a)).roll(len(a)))


def _siglip(a: Tensor, b: Tensor) -> Tensor:
    signs = 2 * torch.eye(len(a), dtype=a.dtype) - 1
    return -F.logsigmoid(signs * (F.normalize(a, dim=1) @ F.normalize(b, dim=1).T)).sum() / len(a)


def _batch_hard(z: Tensor, label: Tensor) -> Tensor:
    distance = torch.cdist(z, z)
    same = label[:, None] == label
    positive = distance.masked_fill(~same, -9.0).amax(1)
    negative = distance.masked_fill(same, 9e9).amin(1)
    return (positive - negative.clamp(max=50.0) + 60).clamp(min=0).mean()


def _dice(image: Tensor, blobs: Tensor) -> Tensor:
    probability = image.sigmoid()
    return 1 - 2 * (probability * blobs).sum() / (probability.sum() + blobs.sum())


def _dice_per_class(image: Tensor, blobs: Tensor) -> Tensor:
    probability, dims = image.sigmoid(), (0, 2, 3)
    return (1 - 2 * (probability * blobs).sum(dims) / (probability.sum(dims) + blobs.sum(dims) + 1)).mean()


def _batch_norm_by_hand(z: Tensor, y: Tensor) -> Tensor:
    normed = (z - z.mean(0)) / (z.var(0, unbiased=False) + 1e-5).sqrt()
    return F.mse_loss(normed, y)


def _barlow_twins(z: Tensor, z2: Tensor) -> Tensor:
    a = (z - z.mean(0)) / (z.std(0, unbiased=False) + 1e-3)
    b = (z2 - z2.mean(0)) / (z2.std(0, unbiased=False) + 1e-3)
    correlation = a.T @ b / len(z)
    return (correlation - torch.eye(z.shape[1], dtype=z.dtype)).square().sum()


def _vicreg_variance(z: Tensor) -> Tensor:
    return F.relu(1 - (z.var(0, unbiased=False) + 1e-4).sqrt()).mean()


def _covariance(z: Tensor) -> Tensor:
    centred = z - z.mean(0)
    return (centred.T @ centred / len(z)).square().sum()


def _balance(z: Tensor) -> Tensor:
    probability = z.softmax(1)
    routed = F.one_hot(probability.argmax(1), 4).double().mean(0)
    return 4 * (routed * probability.mean(0)).sum()


def _balance_detached(z: Tensor) -> Tensor:
    probability = z.softmax(1).mean(0)
    return (probability * probability.detach()).sum()


def _mmd(z: Tensor, y: Tensor) -> Tensor:
    return (-torch.cdist(z, z).square()).exp().mean() - 2 * (-torch.cdist(z, y).square()).exp().mean()


def _concordance(z: Tensor, y: Tensor) -> Tensor:
    a, b = z[:, 0] - z[:, 0].mean(), y[:, 0] - y[:, 0].mean()
    return 1 - 2 * (a * b).mean() / (
        a.square().mean() + b.square().mean() + (z[:, 0].mean() - y[:, 0].mean()) ** 2
    )


def _recurrence(z: Tensor) -> Tensor:
    states = [z.new_zeros(z.shape[1])]
    for row in z:
        states.append((states[-1] + row).tanh())
    return torch.stack(states[1:]).mean()


COUPLED: list[Loss] = [
    *refused(
        {
            "info nce": lambda z, z2: _info_nce(z, z2),
            "clip": lambda z, z2, s: _clip(z, z2, s),
            "simclr": lambda z, z2: _simclr(z, z2),
            "siglip": lambda z, z2: _siglip(z, z2),
            "pairwise distances": lambda z: torch.cdist(z, z).square().mean(),
            "pairwise differences": lambda z: (z[:, None] - z[None]).abs().mean(),
            "pairwise ranking": lambda score, advantage: F.softplus(
                -(score[:, None] - score) * (advantage[:, None] - advantage).sign()
            ).mean(),
            "pdist": lambda z, z2: torch.pdist(torch.cat([z, z2])).mean(),
            "gram of rows": lambda z, y: (z @ z.T - y @ y.T).square().mean(),
            "batch hard triplet": _batch_hard,
            "dice over the batch": _dice,
            "dice over the batch per class": _dice_per_class,
            "tversky over the batch": lambda image, blobs: (
                1 - (image.sigmoid() * blobs).sum() / (0.3 * image.sigmoid().sum() + 0.7 * blobs.sum() + 1)
            ),
            "root of the mean": lambda z, y: F.mse_loss(z, y).sqrt(),
            "mean to a power": lambda z, y: F.mse_loss(z, y) ** 2,
            "exp of the mean": lambda z, y: F.mse_loss(z, y).exp(),
            "log of the mean": lambda z, y: F.mse_loss(z, y).log(),
            "softplus of the mean": lambda z: F.softplus(z.mean()),
            "flooding": lambda z, y: (F.mse_loss(z, y) - 0.1).abs() + 0.1,
            "clamped mean": lambda z, y: F.mse_loss(z, y).clamp(min=0.01),
            "square of the distance to a learned mean": lambda z, s: (z.mean() - s).square(),
            "std over rows": lambda z: z.std(0, unbiased=False).mean(),
            "var over the batch": lambda z, y: (z - y).var(unbiased=False),
            "max over rows": lambda z, y: _squares(z, y).max(),
            "amax over rows": lambda z, y: _squares(z, y).amax(0),
            "min over rows": lambda z: z.min(0).values.sum(),
            "median over rows": lambda z, y: _squares(z, y).median(),
            "quantile over rows": lambda z, y: _squares(z, y).quantile(0.7),
            "topk over rows": lambda z, y: _squares(z, y).topk(1).values.mean(),
            "logsumexp over rows": lambda z, y: _squares(z, y).logsumexp(0),
            "softmax over rows": lambda z, y: (_squares(z, y).softmax(0) * _squares(z, y)).sum(),
            "log softmax over rows": lambda z: -z.log_softmax(0)[:, 0].mean(),
            "product over rows": lambda z: z.exp().mean(1).prod(),
            "norm over the batch": lambda z, y: (z - y).norm(),
            "norm over rows": lambda z, y: (z - y).norm(dim=0).sum(),
            "relative error": lambda z, y: (z - y).norm() / y.norm(),
            "product of two means": lambda z, z2, y: F.mse_loss(z, y) * F.l1_loss(z2, y),
            "ratio of two means": lambda z, z2, y: F.mse_loss(z, y) / (1 + F.l1_loss(z2, y)),
            "ratio of two sums": lambda z, y: (z * y).exp().sum() / z.exp().sum(),
            "normalised learned weights": lambda z, score, y: (
                (score.exp() * _squares(z, y)).sum() / score.exp().sum()
            ),
            "harmonic mean of two means": lambda z, z2, y: 2 / (1 / F.mse_loss(z, y) + 1 / F.mse_loss(z2, y)),
            "larger of two means": lambda z, z2, y: torch.maximum(F.mse_loss(z, y), F.mse_loss(z2, y)),
            "logsumexp of means": lambda z, y, y2: torch.stack(
                [F.mse_loss(z, y), F.mse_loss(z, y2)]
            ).logsumexp(0),
            "centred by the batch": lambda z, y: F.mse_loss(z - z.mean(0), y),
            "batch norm by hand": _batch_norm_by_hand,
            "batch norm, functional": lambda image, blobs: F.mse_loss(
                F.batch_norm(image, None, None, training=True), blobs
            ),
            "barlow twins": _barlow_twins,
            "vicreg variance": _vicreg_variance,
            "covariance": _covariance,
            "mean prediction against a prior": lambda z: F.kl_div(
                z.softmax(1).mean(0).log(), torch.full((4,), 0.25, dtype=z.dtype), reduction="sum"
            ),
            "information maximisation": lambda z: (z.softmax(1).mean(0) * z.softmax(1).mean(0).log()).sum(),
            "maximum mean discrepancy": _mmd,
            "concordance": _concordance,
            "r squared": lambda z, y: (z - y).square().sum() / (y - y.mean(0)).square().sum(),
            "load balance": _balance,
            "load balance, detached": _balance_detached,
            "gradient penalty on the mean": lambda z, y, alpha: (
                torch.autograd.grad((z * alpha).square().mean(), alpha, create_graph=True)[0].square().sum()
            ),
            "cumulated over rows": lambda z: z.cumsum(0).square().mean(),
            "cumulated over rows, linear": lambda z: z[:, 0].cumsum(0).mean(),
            "differences of neighbours": lambda z: torch.cat([z, z[:1]]).diff(dim=0).square().mean(),
            "sorted over rows": lambda z, y: (z.sort(0).values - y.sort(0).values).abs().mean(),
            "recurrence over rows": _recurrence,
            "cox partial likelihood": lambda score: (
                (score - score.logcumsumexp(0)).neg().mean() + score.square().mean()
            ),
            "attention over rows": lambda z, y: F.mse_loss((z @ z.T).softmax(1) @ z, y),
            "mean under a learned mean": lambda z, y: (z.mean(0) * y).mean() + F.mse_loss(z, y),
        }
    ),
    *unclear(
        {
            # The squares add up, so these do too where the detached value is read as part of the denominator.
            "mean / its own value": lambda z, y: F.mse_loss(z, y) / F.mse_loss(z, y).detach(),
            "mean / another's value": lambda z, z2, y: F.mse_loss(z, y) / F.mse_loss(z2, y).detach(),
            "sum / sqrt n by constant": lambda z, y: _squares(z, y).sum() / torch.tensor(len(z)).sqrt(),
            "norm / sqrt n": lambda z, y: (z - y).norm() / len(z) ** 0.5,
            "mean of row pairs": lambda z: (z - z.roll(1, 0)).square().mean(),
            "rows against flipped rows": lambda z: (z * z.flip(0)).sum(1).mean(),
            "first row against all": lambda z: (z - z[:1]).square().mean(),
            "first row alone": lambda z: z[0].square().mean(),
            "last row alone": lambda z, y: F.mse_loss(z, y) + z[-1].square().sum(),
            "first half alone": lambda z: z[: (len(z) + 1) // 2].square().mean(),
        }
    ),
]
