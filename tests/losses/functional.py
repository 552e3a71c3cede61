"""Every loss of `torch.nn.functional`, in every reduction that it has and in the usual ones by hand."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .table import Loss, exact

CLASS_WEIGHTS = torch.tensor([0.1, 1.0, 5.0, 20.0], dtype=torch.float64)
POSITIVE_WEIGHTS = torch.tensor([1.0, 3.0, 0.5, 10.0], dtype=torch.float64)
TAG_WEIGHTS = torch.tensor([0.1, 1.0, 5.0, 20.0, 2.0, 0.3], dtype=torch.float64)


def cosine_distance(a: Tensor, b: Tensor) -> Tensor:
    return 1.0 - F.cosine_similarity(a, b)


def _ctc(
    tokens: Tensor, transcript: Tensor, frames: Tensor, transcript_length: Tensor, reduction: str
) -> Tensor:
    log_probabilities = tokens.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(
        log_probabilities, transcript, frames, transcript_length, reduction=reduction, zero_infinity=True
    )


def _by_row(rowwise: Tensor) -> Tensor:
    return rowwise.reshape(len(rowwise), -1)


# The mean of these divides by the number of rows or of elements, so the rows are a right weight.
PLAIN: dict[str, Callable[..., Tensor]] = {
    "mse": lambda z, y, reduction: F.mse_loss(z, y, reduction=reduction),
    "l1": lambda z, y, reduction: F.l1_loss(z, y, reduction=reduction),
    "smooth l1": lambda z, y, reduction: F.smooth_l1_loss(z, y, reduction=reduction, beta=0.5),
    "huber": lambda z, y, reduction: F.huber_loss(z, y, reduction=reduction, delta=0.7),
    "bce": lambda z, unit, reduction: F.binary_cross_entropy(z.sigmoid(), unit, reduction=reduction),
    "bce with logits": lambda z, binary, reduction: F.binary_cross_entropy_with_logits(
        z, binary, reduction=reduction
    ),
    "bce with logits, weights": lambda z, binary, unit, reduction: F.binary_cross_entropy_with_logits(
        z, binary, weight=unit, pos_weight=POSITIVE_WEIGHTS, reduction=reduction
    ),
    "kl div": lambda z, soft, reduction: F.kl_div(z.log_softmax(1), soft, reduction=reduction),
    "kl div, log target": lambda z, soft, reduction: F.kl_div(
        z.log_softmax(1), soft.log(), reduction=reduction, log_target=True
    ),
    "poisson nll": lambda z, count, reduction: F.poisson_nll_loss(z, count.double(), reduction=reduction),
    "poisson nll, full": lambda z, count, reduction: F.poisson_nll_loss(
        z, count.double(), full=True, reduction=reduction
    ),
    "gaussian nll": lambda z, z2, y, reduction: F.gaussian_nll_loss(z, y, z2.exp(), reduction=reduction),
    "gaussian nll, one variance": lambda z, y, s, reduction: F.gaussian_nll_loss(
        z, y, s.exp().expand_as(z), full=True, reduction=reduction
    ),
    "cosine embedding": lambda z, y, sign, reduction: F.cosine_embedding_loss(
        z, y, sign, margin=0.2, reduction=reduction
    ),
    "hinge embedding": lambda z, signs, reduction: F.hinge_embedding_loss(z, signs, reduction=reduction),
    "margin ranking": lambda z, y, signs, reduction: F.margin_ranking_loss(
        z, y, signs, margin=0.3, reduction=reduction
    ),
    "multi margin": lambda z, label, reduction: F.multi_margin_loss(z, label, reduction=reduction),
    "multi margin, weights": lambda z, label, reduction: F.multi_margin_loss(
        z, label, p=2, weight=CLASS_WEIGHTS, reduction=reduction
    ),
    "multilabel margin": lambda z, multilabel, reduction: F.multilabel_margin_loss(
        z, multilabel, reduction=reduction
    ),
    "multilabel soft margin": lambda z, binary, reduction: F.multilabel_soft_margin_loss(
        z, binary, reduction=reduction
    ),
    "multilabel soft margin, weights": lambda z, binary, reduction: F.multilabel_soft_margin_loss(
        z, binary, weight=POSITIVE_WEIGHTS, reduction=reduction
    ),
    "soft margin": lambda z, signs, reduction: F.soft_margin_loss(z, signs, reduction=reduction),
    "triplet margin": lambda z, z2, y, reduction: F.triplet_margin_loss(z, z2, y, reduction=reduction),
    "triplet margin, swap": lambda z, y, y2, reduction: F.triplet_margin_loss(
        z, y, y2, swap=True, p=1, reduction=reduction
    ),
    "triplet margin, cosine": lambda z, z2, y, reduction: F.triplet_margin_with_distance_loss(
        z, z2, y, distance_function=cosine_distance, reduction=reduction
    ),
    "ctc": _ctc,
    "cross entropy": lambda z, label, reduction: F.cross_entropy(z, label, reduction=reduction),
    "cross entropy, smoothing": lambda z, label, reduction: F.cross_entropy(
        z, label, label_smoothing=0.2, reduction=reduction
    ),
    "cross entropy, soft": lambda z, soft, reduction: F.cross_entropy(z, soft, reduction=reduction),
    "cross entropy, soft, weights": lambda z, soft, reduction: F.cross_entropy(
        z, soft, weight=CLASS_WEIGHTS, label_smoothing=0.1, reduction=reduction
    ),
    "nll": lambda z, label, reduction: F.nll_loss(z.log_softmax(1), label, reduction=reduction),
    "linear cross entropy": lambda z, output, label, reduction: F.linear_cross_entropy(
        z, output, label % 3, reduction=reduction
    ),
}


def _counted_labels(ignored: Tensor) -> Tensor:
    return (ignored != -100).sum()


def _counted_tokens(tags: Tensor) -> Tensor:
    return (tags != -100).sum()


def _counted_pixels(segments: Tensor) -> Tensor:
    return (segments != 255).sum()


def _class_weights(ignored: Tensor) -> Tensor:
    return CLASS_WEIGHTS[ignored[ignored != -100]].sum()


# The mean of these divides by what the labels count, which no number of rows gives.
COUNTED: dict[str, tuple[Callable[..., Tensor], Any]] = {
    "cross entropy, ignored": (
        lambda z, ignored, reduction: F.cross_entropy(z, ignored, reduction=reduction),
        _counted_labels,
    ),
    "cross entropy, ignored, smoothing": (
        lambda z, ignored, reduction: F.cross_entropy(z, ignored, label_smoothing=0.1, reduction=reduction),
        _counted_labels,
    ),
    "cross entropy, ignored, weights": (
        lambda z, ignored, reduction: F.cross_entropy(z, ignored, weight=CLASS_WEIGHTS, reduction=reduction),
        _class_weights,
    ),
    "cross entropy, ignored, weights, smoothing": (
        lambda z, ignored, reduction: F.cross_entropy(
            z, ignored, weight=CLASS_WEIGHTS, label_smoothing=0.3, reduction=reduction
        ),
        _class_weights,
    ),
    "cross entropy, one label ignored": (
        lambda z, label, reduction: F.cross_entropy(z, label, ignore_index=0, reduction=reduction),
        lambda label: (label != 0).sum(),
    ),
    "nll, ignored, weights": (
        lambda z, ignored, reduction: F.nll_loss(
            z.log_softmax(1), ignored, weight=CLASS_WEIGHTS, reduction=reduction
        ),
        _class_weights,
    ),
    "cross entropy over flat tokens": (
        lambda tokens, tags, reduction: F.cross_entropy(
            tokens.flatten(0, 1), tags.flatten(), reduction=reduction
        ),
        _counted_tokens,
    ),
    "cross entropy over tokens": (
        lambda tokens, tags, reduction: F.cross_entropy(tokens.transpose(1, 2), tags, reduction=reduction),
        _counted_tokens,
    ),
    "cross entropy over tokens, weights": (
        lambda tokens, tags, reduction: F.cross_entropy(
            tokens.transpose(1, 2), tags, weight=TAG_WEIGHTS, label_smoothing=0.1, reduction=reduction
        ),
        None,
    ),
    "cross entropy over pixels": (
        lambda image, segments, reduction: F.cross_entropy(
            image, segments, ignore_index=255, reduction=reduction
        ),
        _counted_pixels,
    ),
    "nll over pixels": (
        lambda image, segments, reduction: F.nll_loss(
            image.log_softmax(1), segments, ignore_index=255, reduction=reduction
        ),
        _counted_pixels,
    ),
    "mse, weighted": (
        lambda z, y, unit, reduction: F.mse_loss(z, y, weight=unit, reduction=reduction),
        lambda unit: unit.sum(),
    ),
    "l1, weighted": (
        lambda z, y, unit, reduction: F.l1_loss(z, y, weight=unit, reduction=reduction),
        lambda unit: unit.sum(),
    ),
    "huber, weighted": (
        lambda z, y, unit, reduction: F.huber_loss(z, y, weight=unit, reduction=reduction),
        "rows",
    ),
}

BY_HAND: dict[str, tuple[Callable[[Tensor], Tensor], Any]] = {
    "mean by hand": (lambda rowwise: rowwise.mean(), "rows"),
    "sum by hand": (lambda rowwise: rowwise.sum(), "sum"),
    "sum per row, mean": (lambda rowwise: _by_row(rowwise).sum(1).mean(), "rows"),
    "mean of rows, sum": (lambda rowwise: rowwise.mean(0).sum(), "rows"),
    "mean of means": (lambda rowwise: _by_row(rowwise).mean(1).mean(), "rows"),
    "view, mean": (lambda rowwise: rowwise.reshape(-1, 1).mean(0).squeeze(), "rows"),
    "sum over rows, mean": (lambda rowwise: rowwise.sum(0).mean(), "sum"),
    "mean over all dims": (lambda rowwise: _by_row(rowwise).mean(dim=(0, 1)), "rows"),
    "mean, kept dims": (lambda rowwise: rowwise.mean(0, keepdim=True).sum(-1).reshape(()), "rows"),
    "sum, divided by rows": (lambda rowwise: rowwise.sum() / len(rowwise), "rows"),
    "sum, divided by elements": (lambda rowwise: rowwise.sum() / rowwise.numel(), "rows"),
}


def _reduced(function: Callable[..., Tensor], by_hand: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def loss(**given: Tensor) -> Tensor:
        return by_hand(function(**given, reduction="none"))

    signature = inspect.signature(function)
    names = [parameter for name, parameter in signature.parameters.items() if name != "reduction"]
    loss.__signature__ = signature.replace(parameters=names)  # type: ignore[attr-defined]  # what the table reads
    return loss


def _plain() -> list[Loss]:
    losses: list[Loss] = []
    by_hand = list(BY_HAND.items())
    for index, (name, function) in enumerate(PLAIN.items()):
        losses += exact({f"{name}, mean": partial(function, reduction="mean")}, weight="rows")
        losses += exact({f"{name}, sum": partial(function, reduction="sum")}, weight="sum")
        for reduction, (reduce, weight) in (
            by_hand[index % len(by_hand)],
            by_hand[(index + 4) % len(by_hand)],
        ):
            losses += exact({f"{name}, none, {reduction}": _reduced(function, reduce)}, weight=weight)
    return losses


def _all_reductions_of_one() -> list[Loss]:
    return [
        loss
        for reduction, (reduce, weight) in BY_HAND.items()
        for loss in exact({f"squares, {reduction}": _reduced(PLAIN["mse"], reduce)}, weight=weight)
    ]


def _counting() -> list[Loss]:
    losses: list[Loss] = []
    for name, (function, weight) in COUNTED.items():
        losses += exact({f"{name}, mean": partial(function, reduction="mean")}, weight=weight)
        losses += exact({f"{name}, sum": partial(function, reduction="sum")}, weight="sum")
        losses += exact({f"{name}, none, sum": _reduced(function, torch.sum)}, weight="sum")
    return losses


FUNCTIONAL: list[Loss] = [
    *_plain(),
    *_all_reductions_of_one(),
    *_counting(),
    *exact(
        {"kl div, batchmean": lambda z, soft: F.kl_div(z.log_softmax(1), soft, reduction="batchmean")},
        weight="rows",
    ),
    *exact(
        {
            "cross entropy, last rows ignored": lambda z, tail_ignored: F.cross_entropy(z, tail_ignored),
            "cross entropy, last rows ignored, weights": lambda z, tail_ignored: F.cross_entropy(
                z, tail_ignored, weight=CLASS_WEIGHTS, label_smoothing=0.1
            ),
            "cross entropy, first rows ignored": lambda z, head_ignored: F.cross_entropy(z, head_ignored),
            "cross entropy, first rows ignored, weights": lambda z, head_ignored: F.cross_entropy(
                z, head_ignored, weight=CLASS_WEIGHTS, label_smoothing=0.1
            ),
        }
    ),
    *exact(
        {
            "cross entropy, every row ignored": lambda z, all_ignored: F.cross_entropy(z, all_ignored),
            "cross entropy, every row ignored, sum": lambda z, all_ignored: F.cross_entropy(
                z, all_ignored, reduction="sum"
            ),
            "cross entropy, every row ignored, weights": lambda z, all_ignored: F.cross_entropy(
                z, all_ignored, weight=CLASS_WEIGHTS
            ),
        }
    ),
]
