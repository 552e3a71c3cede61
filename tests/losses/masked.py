"""Masked and weighted means written by hand, and sums with a divisor of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .table import Loss, exact, unclear


def _squares(z: Tensor, y: Tensor) -> Tensor:
    return (z - y).square().mean(1)


def _crosses(z: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(z, labels.clamp(min=0), reduction="none")


def _token_crosses(tokens: Tensor, tags: Tensor) -> Tensor:
    return F.cross_entropy(tokens.transpose(1, 2), tags, reduction="none")


def _over_sum(rowwise: Tensor, mask: Tensor) -> Tensor:
    return (rowwise * mask).sum() / mask.sum()


def _over_clamped(rowwise: Tensor, mask: Tensor) -> Tensor:
    return (rowwise * mask).sum() / mask.sum().clamp(min=1)


def _over_python_max(rowwise: Tensor, mask: Tensor) -> Tensor:
    return (rowwise * mask).sum() / max(1, int(mask.sum()))


def _selected(rowwise: Tensor, mask: Tensor) -> Tensor:
    return rowwise[mask.bool()].mean()


def _selected_by_call(rowwise: Tensor, mask: Tensor) -> Tensor:
    return torch.masked_select(rowwise, mask.bool()).mean()


def _selected_by_index(rowwise: Tensor, mask: Tensor) -> Tensor:
    return rowwise.index_select(0, mask.nonzero().squeeze(1)).mean()


def _where(rowwise: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.bool(), rowwise, 0.0).sum() / mask.sum()


def _where_counted_as_integers(rowwise: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.bool(), rowwise, torch.zeros_like(rowwise)).sum() / mask.bool().sum()


def _filled(rowwise: Tensor, mask: Tensor) -> Tensor:
    return rowwise.masked_fill(~mask.bool(), 0.0).sum() / mask.sum()


def _contracted(rowwise: Tensor, mask: Tensor) -> Tensor:
    return torch.dot(rowwise, mask) / mask.sum()


def _multiplied_by_the_reciprocal(rowwise: Tensor, mask: Tensor) -> Tensor:
    return (rowwise * mask).sum() * (1 / mask.sum())


def _normalised_mask(rowwise: Tensor, mask: Tensor) -> Tensor:
    return (rowwise * (mask / mask.sum())).sum()


def _mean_over_fraction(rowwise: Tensor, mask: Tensor) -> Tensor:
    return (rowwise * mask).mean() / mask.mean()


def _over_items(rowwise: Tensor, mask: Tensor) -> Tensor:
    return (rowwise * mask).sum() / mask.sum().item()


def _over_sum_with_epsilon(rowwise: Tensor, mask: Tensor) -> Tensor:
    return (rowwise * mask).sum() / (mask.sum() + 1e-8)


def _over_sum_with_a_large_epsilon(rowwise: Tensor, mask: Tensor) -> Tensor:
    return (rowwise * mask).sum() / (mask.sum() + 1.0)


def _mean_over_fraction_with_epsilon(rowwise: Tensor, mask: Tensor) -> Tensor:
    return (rowwise * mask).mean() / (mask.mean() + 1e-6)


WAYS = {
    "masked, over the sum": _over_sum,
    "masked, over the clamped sum": _over_clamped,
    "masked, over a python max": _over_python_max,
    "selected, mean": _selected,
    "masked_select, mean": _selected_by_call,
    "index_select, mean": _selected_by_index,
    "where, over the sum": _where,
    "where, over a count": _where_counted_as_integers,
    "masked_fill, over the sum": _filled,
    "dot, over the sum": _contracted,
    "masked, times the reciprocal": _multiplied_by_the_reciprocal,
    "masked mean over fraction": _mean_over_fraction,
    "masked, over a number": _over_items,
    "masked, over the sum with epsilon": _over_sum_with_epsilon,
}

# Nothing that can be read from a piece tells these from a loss that does add up, or from one that doesn't.
HARD_WAYS = {
    "masked, over the sum with a large epsilon": _over_sum_with_a_large_epsilon,
    "normalised mask": _normalised_mask,
    "masked mean over fraction with epsilon": _mean_over_fraction_with_epsilon,
}


def _over_some_rows() -> list[Loss]:
    return [
        loss
        for name, way in WAYS.items()
        for loss in exact(
            {
                name: lambda z, ignored, mask, way=way: way(_crosses(z, ignored), mask),
                f"{name}, last rows masked": lambda z, y, tail_mask, way=way: way(_squares(z, y), tail_mask),
                f"{name}, first rows masked": lambda z, y, head_mask, way=way: way(_squares(z, y), head_mask),
            }
        )
    ]


def _over_no_row() -> list[Loss]:
    ways = (_over_sum, _over_clamped, _selected, _where, _over_sum_with_epsilon)
    return exact(
        {
            f"{way.__name__.strip('_').replace('_', ' ')}, every row masked": (
                lambda z, y, no_mask, way=way: way(_squares(z, y), no_mask)
            )
            for way in ways
        }
    )


MASKED: list[Loss] = [
    *_over_some_rows(),
    *_over_no_row(),
    *exact(
        {
            "tokens, masked, over the sum": lambda tokens, tags, token_mask: _over_sum(
                _token_crosses(tokens, tags), token_mask
            ),
            "tokens, masked, over the clamped sum": lambda tokens, tags, token_mask: _over_clamped(
                _token_crosses(tokens, tags), token_mask
            ),
            "tokens, selected before the loss": lambda tokens, tags: F.cross_entropy(
                tokens[tags != -100], tags[tags != -100]
            ),
            "tokens, selected, sum over count": lambda tokens, tags: (
                F.cross_entropy(tokens[tags != -100], tags[tags != -100], reduction="sum")
                / (tags != -100).sum()
            ),
            "tokens, sum over count": lambda tokens, tags: (
                F.cross_entropy(tokens.flatten(0, 1), tags.flatten(), reduction="sum") / (tags != -100).sum()
            ),
            "tokens, log_softmax and gather": lambda tokens, tags, token_mask: (
                (
                    -tokens.log_softmax(-1).gather(-1, tags.clamp(min=0)[..., None]).squeeze(-1) * token_mask
                ).sum()
                / token_mask.sum()
            ),
        },
        weight=lambda tags: (tags != -100).sum(),
    ),
    *exact(
        {
            "tokens, shifted": lambda tokens, tags: F.cross_entropy(
                tokens[:, :-1].flatten(0, 1), tags[:, 1:].flatten()
            )
        },
        weight=lambda tags: (tags[:, 1:] != -100).sum(),
    ),
    *exact(
        {
            "tokens, mean per row, mean": lambda tokens, tags, token_mask: (
                (_token_crosses(tokens, tags) * token_mask).sum(1) / token_mask.sum(1).clamp(min=1)
            ).mean(),
        },
        weight="rows",
    ),
    *exact(
        {
            "weighted mean": lambda z, y, w: (w * _squares(z, y)).sum() / w.sum(),
            "weighted mean, entries": lambda z, y, w: (w[:, None] * (z - y).square()).sum() / (4 * w.sum()),
            "weighted mean, matmul": lambda z, y, w: (w @ (z - y).square()).mean() / w.sum(),
        },
        weight=lambda w: w.sum(),
    ),
    *exact({"weighted, mean": lambda z, y, w: (w * _squares(z, y)).mean()}, weight="rows"),
    *exact(
        {
            "sum": lambda z, y: _squares(z, y).sum(),
            "sum / 100": lambda z, y: _squares(z, y).sum() / 100,
            "0.01 * sum": lambda z, y: 0.01 * _squares(z, y).sum(),
            "sum / 32 * 0.5": lambda z, y: _squares(z, y).sum() / 32 * 0.5,
            "mean * n": lambda z, y: _squares(z, y).mean() * len(z),
            "negative sum": lambda z, y: -_squares(z, y).sum(),
            "sum of a weighted sum": lambda z, y, w: (w * _squares(z, y)).sum(),
        },
        weight="sum",
    ),
    *exact(
        {
            "mean": lambda z, y: _squares(z, y).mean(),
            "1 - mean": lambda z, y: 1 - _squares(z, y).mean(),
            "2 * mean + 3": lambda z, y: 2 * _squares(z, y).mean() + 3,
            "mean / 0.3": lambda z, y: _squares(z, y).mean() / 0.3,
            "sum / n": lambda z, y: _squares(z, y).sum() / z.shape[0],
            "sum / tensor n": lambda z, y: _squares(z, y).sum() / torch.tensor(z.shape[0]),
            "sum * (1 / n)": lambda z, y: _squares(z, y).sum() * (1.0 / z.shape[0]),
            "nanmean": lambda z, y: torch.nanmean(_squares(z, y)),
            "in place": lambda z, y: (z - y).square().mean(1).mul_(2).mean().div_(3),
        },
        weight="rows",
    ),
    *unclear(
        {name: lambda z, y, mask, way=way: way(_squares(z, y), mask) for name, way in HARD_WAYS.items()}
    ),
    # For one row torch multiplies by the weight instead of contracting: refused at pieces of one row.
    *unclear({"weighted mean, einsum": lambda z, y, w: torch.einsum("n,nd->", w, (z - y).abs()) / w.sum()}),
    *unclear(
        {
            "weights, clamped where they are small": lambda z, y, w: (
                (w * _squares(z, y)).sum() / w.sum().clamp(min=1)
            ),
            "tokens, cropped to the longest row, mean": lambda tokens, length: (
                tokens[:, : int(length.max())].square().mean()
            ),
            "tokens, masked, over the cropped size": lambda tokens, tags, token_mask, length: (
                (_token_crosses(tokens, tags) * token_mask).sum() / (len(tokens) * int(length.max()))
            ),
            "sum / (n - 1)": lambda z, y: _squares(z, y).sum() / (len(z) - 1 + 1e-3),
            "sum / (n + 3)": lambda z, y: _squares(z, y).sum() / (len(z) + 3),
            "sum * n": lambda z, y: _squares(z, y).sum() * len(z),
            "sum / sqrt n": lambda z, y: _squares(z, y).sum() / len(z) ** 0.5,
            "sum / n squared": lambda z, y: _squares(z, y).sum() / len(z) ** 2,
            "quantile weights": lambda z, y, w: (
                (_squares(z, y) * (w > w.quantile(0.5))).sum() / (w > w.quantile(0.5)).sum()
            ),
        }
    ),
]
