"""What a mini-batch is made of once its rows are decided: parts that know how to give a range of rows."""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from anybatch.batch.containers import container_of, holds_tensors, map_tensors
from anybatch.batch.kinds import Container, Slicer
from anybatch.batch.leaves import Array, holds_only_scalars


class Taker:
    """How the tensors of a range of rows are taken: this one gives views where they are."""

    def rows_of(self, source: Tensor, dim: int, start: int, rows: int) -> Tensor:
        """Rows `start` to `start + rows` of a tensor."""
        return source.narrow(dim, start, rows)

    def element(self, source: Tensor) -> Tensor:
        """A tensor that belongs to one row."""
        return source

    def shared(self, source: Tensor) -> Tensor:
        """A tensor that every piece gets whole."""
        return source

    def at_home(self) -> AbstractContextManager[Any]:
        """A context for work on the mini-batch where it lives."""
        return nullcontext()


class Part(ABC):
    """An argument, or a part of one."""

    @abstractmethod
    def take(self, start: int, rows: int, taker: Taker) -> Any:
        """The part for rows `start` to `start + rows`."""

    @property
    @abstractmethod
    def structure(self) -> Hashable:
        """Types, dtypes, numbers of dims and which entries have rows; no sizes and no values."""


@final
@dataclass(frozen=True, eq=False)
class Whole(Part):
    """Something that every piece gets whole."""

    value: Any
    holds_tensors: bool

    def take(self, start: int, rows: int, taker: Taker) -> Any:
        return map_tensors(self.value, taker.shared) if self.holds_tensors else self.value

    @property
    def structure(self) -> Hashable:
        return "whole", structure_of(self.value)


@final
@dataclass(frozen=True, eq=False)
class Rows(Part):
    """A tensor or array with rows along `dim` (not negative)."""

    value: Array
    dim: int

    def take(self, start: int, rows: int, taker: Taker) -> Any:
        if isinstance(self.value, Tensor):
            return taker.rows_of(self.value, self.dim, start, rows)
        return self.value[(slice(None),) * self.dim + (slice(start, start + rows),)]

    @property
    def structure(self) -> Hashable:
        return "rows", structure_of(self.value), self.dim


@final
@dataclass(frozen=True, eq=False)
class Runs(Part):
    """A tensor or array whose rows lie one after another along dim 0.

    Attributes:
        bounds: Where each row begins, and where the last one ends.
    """

    value: Array
    bounds: tuple[int, ...]

    def take(self, start: int, rows: int, taker: Taker) -> Any:
        begin, end = self.bounds[start], self.bounds[start + rows]
        if isinstance(self.value, Tensor):
            return taker.rows_of(self.value, 0, begin, end - begin)
        return self.value[begin:end]

    @property
    def structure(self) -> Hashable:
        return "runs", structure_of(self.value)


@final
@dataclass(frozen=True, eq=False)
class CutAsOne(Part):
    """Something whose parts are tied together, so that it is cut by what knows its kind.

    Attributes:
        dim: Where the caller says that its rows are.
    """

    value: Any
    slicer: Slicer
    dim: int

    def take(self, start: int, rows: int, taker: Taker) -> Any:
        # What requires grad is cut with its graph, so that each piece's gradient finds its way back.
        with torch.enable_grad(), taker.at_home():
            taken = self.slicer.cut(self.value, self.dim, start, start + rows)
        return map_tensors(taken, taker.element)

    @property
    def structure(self) -> Hashable:
        return "cut as one", structure_of(self.value), self.dim


@final
@dataclass(frozen=True, eq=False)
class RowList(Part):
    """A list or tuple with one element per row."""

    value: Any
    container: Container

    def take(self, start: int, rows: int, taker: Taker) -> Any:
        elements = list(self.value[start : start + rows])
        if not holds_only_scalars(elements):
            elements = [map_tensors(element, taker.element) for element in elements]
        return self.container.rebuild(self.value, elements)

    @property
    def structure(self) -> Hashable:
        first = self.value[0]
        kind = structure_of(first) if container_of(first) is None else type(first)
        return "row list", type(self.value), kind


@final
@dataclass(frozen=True, eq=False)
class Branch(Part):
    """A container of parts."""

    value: Any
    container: Container
    keys: tuple[Hashable, ...]
    parts: tuple[Part, ...]

    def take(self, start: int, rows: int, taker: Taker) -> Any:
        return self.container.rebuild(self.value, [part.take(start, rows, taker) for part in self.parts])

    @property
    def structure(self) -> Hashable:
        return type(self.value), tuple(zip(self.keys, (part.structure for part in self.parts), strict=True))


def structure_of(value: Any) -> Hashable:
    """The structure of something that passes whole."""
    if isinstance(value, Tensor):
        return type(value), value.dtype, value.ndim, value.requires_grad
    if isinstance(value, np.ndarray):
        return type(value), value.dtype.char, value.ndim
    container = container_of(value)
    if container is None or (container.is_list and not holds_tensors(value)):
        return (type(value),)
    return type(value), tuple((key, structure_of(child)) for key, child in container.children(value))
