"""Losses that are nonlinear per row, contract over rows, gather rows into segments or loop over rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .table import Loss, exact, unclear


def _dice_per_row(image: Tensor, blobs: Tensor) -> Tensor:
    probability = image.sigmoid().flatten(1)
    blobs = blobs.flatten(1)
    return 1 - 2 * (probability * blobs).sum(1) / (probability.sum(1) + blobs.sum(1) + 1e-6)


def _focal(z: Tensor, label: Tensor) -> Tensor:
    cross = F.cross_entropy(z, label, reduction="none")
    return (1 - (-cross).exp()) ** 2 * cross


def _by_class(rowwise: Tensor, label: Tensor) -> Tensor:
    return torch.zeros(4, dtype=rowwise.dtype).index_add(0, label, rowwise)


def _loop_mean(z: Tensor, y: Tensor) -> Tensor:
    total = z.new_zeros(())
    for row, target in zip(z, y, strict=True):
        total = total + F.mse_loss(row, target)
    return total / len(z)


def _loop_sum(z: Tensor, y: Tensor) -> Tensor:
    return sum((F.l1_loss(row, target) for row, target in zip(z, y, strict=True)), z.new_zeros(()))


def _loop_stacked(z: Tensor, y: Tensor) -> Tensor:
    return torch.stack([F.mse_loss(row, target) for row, target in zip(z, y, strict=True)]).mean()


def _loop_by_index(z: Tensor, y: Tensor) -> Tensor:
    return torch.stack([F.mse_loss(z[i], y[i]).sqrt() for i in range(len(z))]).sum() / len(z)


def _loop_over_lengths(tokens: Tensor, length: Tensor) -> Tensor:
    return torch.stack(
        [row[:n].square().mean() for row, n in zip(tokens, length.tolist(), strict=True)]
    ).mean()


def _loop_over_all_lengths(tokens: Tensor, length: Tensor) -> Tensor:
    parts = [row[:n].square().sum(-1) for row, n in zip(tokens, length.tolist(), strict=True)]
    return torch.cat(parts).mean()


ROWWISE: list[Loss] = [
    *exact(
        {
            "root per row": lambda z, y: (z - y).square().sum(1).sqrt().mean(),
            "log per row": lambda z: z.square().sum(1).log1p().mean(),
            "norm per row": lambda z, y: (z - y).norm(dim=1).mean(),
            "linalg norm per row": lambda z, y: torch.linalg.vector_norm(z - y, dim=1).mean(),
            "softmax per row": lambda z, y: (z.softmax(1) * y).sum(1).mean(),
            "logsumexp per row": lambda z, label: (
                z.logsumexp(1) - z.gather(1, label[:, None]).squeeze(1)
            ).mean(),
            "entropy per row": lambda z: -(z.softmax(1) * z.log_softmax(1)).sum(1).mean(),
            "max per row": lambda z: z.max(1).values.mean(),
            "max norm per row": lambda z: z.abs().amax(1).mean(),
            "topk per row": lambda z: z.topk(2, dim=1).values.mean(),
            "sorted per row": lambda z, y: (z.sort(1).values - y.sort(1).values).square().mean(),
            "std per row": lambda z: z.std(1).mean(),
            "centred per row": lambda z, y: (z - z.mean(1, keepdim=True) - y).square().mean(),
            "cumulated per row": lambda z, y: (z.cumsum(1) - y).square().mean(),
            "normalised per row": lambda z, y: (F.normalize(z, dim=1) * F.normalize(y, dim=1)).sum(1).mean(),
            "cosine per row": lambda z, y: (1 - F.cosine_similarity(z, y)).mean(),
            "focal": lambda z, label: _focal(z, label).mean(),
            "dice per row": lambda image, blobs: _dice_per_row(image, blobs).mean(),
            "pixelwise mean per row": lambda image, blobs: (image - blobs).abs().mean((1, 2, 3)).mean(),
            "pairs inside a row": lambda tokens: (
                (tokens @ tokens.transpose(1, 2)).softmax(-1).square().mean()
            ),
            "clamped per row": lambda z, y: (1 - z * y).clamp(min=0).sum(1).mean(),
            "hinge satisfied everywhere": lambda z: F.relu(z - 100).mean() + 0.5 * z.mean(),
            "quantile loss": lambda z, y: torch.maximum(0.9 * (y - z), -0.1 * (y - z)).mean(),
            "charbonnier": lambda z, y: ((z - y).square() + 1e-3).sqrt().mean(),
            "evidential": lambda z, y: (torch.lgamma(z.exp() + 1) - y * z).mean(),
            "arc margin": lambda z, centers, label: F.cross_entropy(
                5 * F.normalize(z, dim=1) @ F.normalize(centers, dim=1).T, label
            ),
            "centre loss": lambda z, centers, label: (z - centers[label]).square().sum(1).mean(),
            "outer product per row": lambda z, y: torch.einsum("ni,nj->nij", z, y).square().mean(),
            "bilinear per row": lambda z, centers, y: torch.einsum("ni,ij,nj->n", z, centers, y).mean(),
            "mean of a bmm": lambda z, y: torch.bmm(z[:, None], y[:, :, None]).mean(),
            "mean of a max over tokens": lambda tokens: tokens.amax(1).mean(),
            "rows stacked twice": lambda z, z2, y: F.mse_loss(torch.cat([z, z2]), torch.cat([y, y])),
            "views stacked": lambda z, z2, y: torch.stack([z, z2], 1).sub(y[:, None]).square().mean(),
            "rows repeated": lambda z, y: F.l1_loss(z.repeat_interleave(3, 0), y.repeat_interleave(3, 0)),
            "rows repeated in blocks": lambda z, y: F.l1_loss(z.repeat(2, 1), y.repeat(2, 1)),
        },
        weight="rows",
    ),
    *exact(
        {
            "einsum over rows": lambda z, y: torch.einsum("nd,nd->", z, y) / len(z),
            "dot of flat rows": lambda z, y: torch.dot(z.flatten(), y.flatten()) / z.numel(),
            "vdot": lambda z, y: torch.vdot(z.flatten(), y.flatten()) / len(z),
            "inner": lambda z, y: torch.inner(z.flatten(), y.flatten()) / len(z),
            "two learned operands, einsum": lambda z, z2: torch.einsum("nd,nd->", z, z2.tanh()) / len(z),
            "matmul with constants, mean": lambda z, y: (y.T @ z).mean() / len(z),
            "matmul of learned operands": lambda z, z2: (z2.T @ z).trace() / len(z),
            "mv over rows": lambda z, w: torch.mv(z.T, w).sum() / len(z),
            "segments added": lambda z, y, label: _by_class((z - y).square().mean(1), label).sum() / len(z),
            "segments scattered": lambda z, label: (
                torch.zeros(4, dtype=z.dtype).scatter_add(0, label, z.exp().mean(1)) / len(z)
            ).sum(),
            "rows summed per token": lambda tokens: tokens.square().sum(0).mean() / len(tokens),
        },
        weight="rows",
    ),
    *exact(
        {
            "loop, mean": _loop_mean,
            "loop, stacked": _loop_stacked,
            "loop by index": _loop_by_index,
            "loop over lengths, mean of means": _loop_over_lengths,
            "unbound rows": lambda z, y: torch.stack(
                [(a - b).norm() for a, b in zip(z.unbind(), y.unbind(), strict=True)]
            ).mean(),
        },
        weight="rows",
        may_warn=True,
    ),
    *exact({"loop, sum": _loop_sum}, weight="sum", may_warn=True),
    *unclear({"loop over lengths, one mean": _loop_over_all_lengths}, weight=lambda length: length.sum()),
    *exact(
        {
            "split tokens": lambda tokens: sum(t.square().mean() for t in tokens.split(2, dim=1)) / 3,
            "chunks of features": lambda z, y: sum(
                F.mse_loss(a, b) for a, b in zip(z.chunk(2, dim=1), y.chunk(2, dim=1), strict=True)
            ),
            "list of means": lambda z, y: torch.stack(
                [F.mse_loss(z[:, i], y[:, i]) for i in range(4)]
            ).mean(),
            "columns by index": lambda z, y: (z[:, [0, 2]] - y[:, [1, 3]]).square().mean(),
        },
        weight="rows",
    ),
    *unclear(
        {
            "segments, nonlinear": lambda z, y, label: (
                _by_class((z - y).square().mean(1), label).sqrt().sum()
            ),
            "segments, mean per class": lambda z, y, label: (
                _by_class((z - y).square().mean(1), label) / torch.bincount(label, minlength=4).clamp(min=1)
            ).mean(),
        }
    ),
]
