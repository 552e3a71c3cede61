"""What is known about a kind of container: how it is opened and rebuilt and, for some, how it is cut."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Children = Callable[[Any], Iterable[tuple[Hashable, Any]]]
Rebuild = Callable[[Any, list[Any]], Any]


class CannotCut(Exception):
    """One value of a kind that is otherwise cut has no rows; the text goes on after the value's path."""


@dataclass(frozen=True)
class Slicer:
    """How rows are taken from something whose entries are tied together and can't be cut one by one.

    Attributes:
        rows: The rows of a value, given the dim at which the caller says they are; raises `CannotCut`.
        cut: Rows `start` to `stop` of a value, as a value of the same kind, from `(value, dim, start, stop)`.
            Differentiable where the value's tensors require grad.
        sizes: How much each row holds, in any unit; None where all rows hold the same.
        join: Several values put together, rows in order; None where they are given back as a list.
    """

    rows: Callable[[Any, int], int]
    cut: Callable[[Any, int, int, int], Any]
    sizes: Callable[[Any], Sequence[int]] | None = None
    join: Callable[[list[Any]], Any] | None = None


@dataclass(frozen=True)
class Container:
    """How to open and rebuild one kind of container.

    Attributes:
        children: `(key, child)` for everything that a container holds, always in the same order.
        rebuild: A new container like the given one, around new children in that order.
        is_list: Whether it is a plain list or tuple, whose elements may be rows as well as entries.
        is_object: Whether its children are an object's attributes, so that it may be no batch at all.
        slicer: How its rows are taken, where its children can't be cut one by one.
    """

    children: Children
    rebuild: Rebuild
    is_list: bool = False
    is_object: bool = False
    slicer: Slicer | None = None
