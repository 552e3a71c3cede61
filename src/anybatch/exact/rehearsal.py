"""A forward run of the user's function that leaves no trace, as `_rehearse.py` provides it."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.autograd.graph import Node

from anybatch.exact.clamps import Clamps


@dataclass(frozen=True, eq=False)
class Rehearsal:
    """One forward run whose traces have been removed.

    Attributes:
        losses: With their graphs.
        values: Small intermediate results, by node.
        inputs: The ids of leaves that belong to this run alone.
        not_comparable: Why its numbers say nothing about those of another run; None where they do.
        clamps: Numbers that were clamped or read in it.
        conditions: A context for its backward, in which a checkpoint runs forward again as it did before.
    """

    losses: tuple[torch.Tensor, ...]
    values: Mapping[Node, torch.Tensor]
    inputs: frozenset[int]
    not_comparable: str | None
    clamps: Clamps = field(default_factory=Clamps)
    conditions: Callable[[], AbstractContextManager[Any]] = nullcontext


class NoRoom(Exception):
    """The device has no memory for a run of more rows than a piece has."""


class Rehearse(Protocol):
    """Runs the user's function on rows `start` to `stop`."""

    def __call__(self, start: int, stop: int, *, keeps: bool, records: bool = True) -> Rehearsal:
        """Runs it, keeping large saved tensors (`keeps`) or not, and recording small results or not."""
