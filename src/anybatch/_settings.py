"""The options of `apply`, checked at decoration."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anybatch.batch import BatchDim
from anybatch.errors import BatchError
from anybatch.exact.weights import Weights
from anybatch.memory.device import as_device

ON_INEXACT = ("raise", "warn", "ignore")


@dataclass(frozen=True, eq=False)
class Settings:
    """How a function is to be called in micro-batches.

    Attributes:
        batch_names: The arguments that are cut.
        ub_size: The largest number of rows in a piece.
        device: Where the pieces go; None for where the modules are.
        weights: How pieces weigh.
        on_inexact: What to do when a loss is found not to add up.
        batch_dim: Where the rows are.
    """

    batch_names: tuple[str, ...]
    ub_size: int
    device: torch.device | None
    weights: Weights
    on_inexact: str
    batch_dim: BatchDim


def settings(
    batch_names: Sequence[str],
    ub_size: int,
    device: Any,
    weight: Any,
    on_inexact: str,
    batch_dim: BatchDim,
) -> Settings:
    """Checks the options.

    Raises:
        BatchError: The names are no strings, or one comes twice.
        ValueError: Another option is out of its range.
    """
    names = _names(batch_names)
    if isinstance(ub_size, bool) or not hasattr(ub_size, "__index__") or operator.index(ub_size) < 1:
        raise ValueError(
            f"`apply`: `ub_size` is a number of rows, an int of at least 1. Got {ub_size!r}. Pass 1 or more."
        )
    if on_inexact not in ON_INEXACT:
        raise ValueError(f"`apply`: `on_inexact` is one of {ON_INEXACT}. Got {on_inexact!r}.")
    if isinstance(batch_dim, Mapping):
        batch_dim = dict(batch_dim)
    return Settings(
        names, operator.index(ub_size), as_device(device), Weights(weight, names), on_inexact, batch_dim
    )


def _names(batch_names: Any) -> tuple[str, ...]:
    is_list = isinstance(batch_names, (list, tuple))
    if not is_list or not all(isinstance(name, str) for name in batch_names):
        raise BatchError(
            f'`apply`: `batch_names` is a list of argument names, as in ["x", "label"]. Got {batch_names!r}.'
        )
    names = tuple(batch_names)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or not names:
        fact = f"{twice} twice" if twice else "none"
        raise BatchError(f"`apply`: `batch_names` names each batch argument once, at least one. Got {fact}.")
    return names
