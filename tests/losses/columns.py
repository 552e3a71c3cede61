"""The mini-batches of the loss table: one function per column, looked up by the name a loss asks for.

Every column has its rows first. The label and mask columns are uneven on purpose: at the cuts of the table
some pieces have many counted entries, some few and some none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Generator, Tensor

FEATURES, CLASSES, TOKENS, VOCABULARY, SIDE = 5, 4, 5, 6, 4

_LABELS = torch.tensor([0, 3, 1, 3, 2, 0, 1, 0, 0, 2, 1, 3])
_IGNORED = torch.tensor([0, -100, 3, 3, 1, -100, -100, -100, 2, 0, -100, 1])
_COUNTED_TOKENS = torch.tensor([5, 1, 3, 0, 2, 1, 0, 4, 5, 0, 1, 2])
_WEIGHTS = torch.tensor([0.5, 2.0, 0.1, 1.0, 3.0, 0.2, 0.7, 5.0, 0.3, 1.5, 0.9, 0.05], dtype=torch.float64)


def _normal(*shape: int) -> Callable[[int, Generator], Tensor]:
    return lambda rows, generator: torch.randn(rows, *shape, generator=generator, dtype=torch.float64)


def _uniform(*shape: int) -> Callable[[int, Generator], Tensor]:
    return lambda rows, generator: torch.rand(rows, *shape, generator=generator, dtype=torch.float64)


def _whole(high: int, *shape: int, low: int = 0) -> Callable[[int, Generator], Tensor]:
    return lambda rows, generator: torch.randint(low, high, (rows, *shape), generator=generator)


def _sign(*shape: int) -> Callable[[int, Generator], Tensor]:
    return lambda rows, generator: torch.randn(rows, *shape, generator=generator, dtype=torch.float64).sign()


def _fixed(values: Tensor) -> Callable[[int, Generator], Tensor]:
    return lambda rows, generator: values[:rows].clone()


def _soft(rows: int, generator: Generator) -> Tensor:
    return torch.randn(rows, CLASSES, generator=generator, dtype=torch.float64).softmax(1)


def _multilabel(rows: int, generator: Generator) -> Tensor:
    classes = torch.stack([torch.randperm(CLASSES, generator=generator) for _ in range(rows)])
    return classes.masked_fill(torch.arange(CLASSES) >= 1 + torch.arange(rows)[:, None] % 3, -1)


def _ignored_from(
    start: Callable[[int], int], stop: Callable[[int], int]
) -> Callable[[int, Generator], Tensor]:
    def labels(rows: int, generator: Generator) -> Tensor:
        labels = _LABELS[:rows].clone()
        labels[start(rows) : stop(rows)] = -100
        return labels

    return labels


def _tags(rows: int, generator: Generator) -> Tensor:
    tags = torch.randint(0, VOCABULARY, (rows, TOKENS), generator=generator)
    return tags.masked_fill(torch.arange(TOKENS) >= _COUNTED_TOKENS[:rows, None], -100)


def _segments(rows: int, generator: Generator) -> Tensor:
    labels = torch.randint(0, 3, (rows, SIDE, SIDE), generator=generator)
    labels[torch.rand(rows, SIDE, SIDE, generator=generator) < torch.linspace(0, 1, rows)[:, None, None]] = (
        255
    )
    return labels


def _counted(labels: Callable[[int, Generator], Tensor]) -> Callable[[int, Generator], Tensor]:
    return lambda rows, generator: (labels(rows, generator) != -100).double()


_tail_ignored = _ignored_from(lambda rows: rows // 2, lambda rows: rows)
_head_ignored = _ignored_from(lambda rows: 0, lambda rows: rows // 2)
_all_ignored = _ignored_from(lambda rows: 0, lambda rows: rows)

COLUMNS: dict[str, Callable[[int, Generator], Tensor]] = {
    "x": _normal(FEATURES),
    "x2": _normal(FEATURES),
    "y": _normal(CLASSES),
    "y2": _normal(CLASSES),
    "unit": _uniform(CLASSES),
    "binary": lambda rows, generator: (_uniform(CLASSES)(rows, generator) < 0.4).double(),
    "sign": _sign(),
    "signs": _sign(CLASSES),
    "count": _whole(6, CLASSES),
    "label": _fixed(_LABELS),
    "ignored": _fixed(_IGNORED),
    "tail_ignored": _tail_ignored,
    "head_ignored": _head_ignored,
    "all_ignored": _all_ignored,
    "multilabel": _multilabel,
    "soft": _soft,
    "w": _fixed(_WEIGHTS),
    "mask": _counted(_fixed(_IGNORED)),
    "tail_mask": _counted(_tail_ignored),
    "head_mask": _counted(_head_ignored),
    "no_mask": _counted(_all_ignored),
    "advantage": _normal(),
    "ids": _whole(VOCABULARY, TOKENS),
    "tags": _tags,
    "token_mask": _counted(_tags),
    "length": lambda rows, generator: _COUNTED_TOKENS[:rows].clamp(min=1),
    "picture": _normal(2, SIDE, SIDE),
    "segments": _segments,
    "blobs": lambda rows, generator: (_uniform(3, SIDE, SIDE)(rows, generator) < 0.3).double(),
    "transcript": _whole(VOCABULARY, 2, low=1),
    "transcript_length": lambda rows, generator: 1 + torch.arange(rows) % 2,
    "frames": lambda rows, generator: TOKENS - torch.arange(rows) % 2,
}


def mini_batch(names: Iterable[str], rows: int, seed: int) -> dict[str, Tensor]:
    """Make the named columns with `rows` rows each.

    Each column has a generator of its own, so a column does not depend on which others are asked for.
    """
    order = list(COLUMNS)
    return {
        name: COLUMNS[name](rows, Generator().manual_seed(1000 * seed + order.index(name))) for name in names
    }
