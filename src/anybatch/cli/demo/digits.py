"""Real handwritten digits: 1,797 images of 8 x 8 pixels, collected at NIST and shipped with scikit-learn."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

__all__ = ["Digits", "is_installed", "load_digits", "read_digits", "write_digits"]

_TEST_SHARE = 5
_BRIGHTEST = 16


@final
@dataclass(frozen=True)
class Digits:
    """The images and labels, split for training and test.

    Attributes:
        images: Training images, float32, (rows, 1, 8, 8), 0 to 1.
        labels: Training labels, int64, (rows,), 0 to 9.
        test_images: As `images`, of other rows.
        test_labels: As `labels`, of other rows.
    """

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def is_installed() -> bool:
    """Whether scikit-learn, which ships the digits, is installed."""
    from importlib.util import find_spec

    return find_spec("sklearn") is not None


def load_digits() -> Digits:
    """Reads the digits from scikit-learn and keeps every fifth of a fixed random order for the test."""
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    is_test = torch.arange(len(labels)) % _TEST_SHARE == 0
    image_rows = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)[order] / _BRIGHTEST
    label_rows = torch.tensor(labels, dtype=torch.int64)[order]
    return Digits(image_rows[~is_test], label_rows[~is_test], image_rows[is_test], label_rows[is_test])


def write_digits(digits: Digits, file: Path) -> None:
    """Writes the digits for the children, which then need not load scikit-learn."""
    torch.save(astuple(digits), file)


def read_digits(file: Path) -> Digits:
    """Reads what `write_digits` wrote."""
    return Digits(*torch.load(file, weights_only=True))
