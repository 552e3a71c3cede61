"""The named arguments of one call, laid out: which entries have rows and which pass whole."""

from collections.abc import Hashable, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from anybatch.batch.amounts import row_amounts
from anybatch.batch.containers import container_of, holds_tensors
from anybatch.batch.declared import BALANCED, BatchDim, Declared, Rule, child_path, dim_of, read_batch_dim
from anybatch.batch.kinds import Container
from anybatch.batch.leaves import SCALARS, Array, is_array
from anybatch.batch.lists import read_list
from anybatch.batch.parts import Branch, CutAsOne, Part, RowList, Rows, Runs, Taker, Whole
from anybatch.batch.slicers import slicer_of
from anybatch.batch.survey import count_rows, how_to_declare, refuse


@dataclass(frozen=True, eq=False)
class Layout:
    """The named arguments of one call, with every entry's rows decided.

    Attributes:
        rows: Rows of the mini-batch, at least 1.
        parts: The arguments by name.
        amounts: How much each row holds, where pieces are to be balanced by that.
    """

    rows: int
    parts: Mapping[str, Part]
    amounts: Sequence[int] | None = None

    def cut(self, start: int, stop: int) -> dict[str, Any]:
        """The arguments for rows `start` to `stop`: views where the batch lives, in their own containers."""
        return self.take(start, stop - start, Taker())

    def take(self, start: int, rows: int, taker: Taker) -> dict[str, Any]:
        """The arguments for `rows` rows from `start`, their tensors taken by `taker`."""
        # In inference mode jagged tensors can't be cut or detached (torch 2.13).
        is_inference = torch.is_inference_mode_enabled()
        with torch.inference_mode(False) if is_inference else nullcontext():
            return {name: part.take(start, rows, taker) for name, part in self.parts.items()}

    @cached_property
    def device(self) -> torch.device | None:
        """Where the first tensor with rows lives, to which outputs go back; None without such a tensor."""
        locator = _Locator()
        self.take(0, 1, locator)
        return locator.found

    @cached_property
    def structure(self) -> Hashable:
        """What calls of one pattern have in common: types, dtypes, numbers of dims, where the rows are."""
        return tuple((name, part.structure) for name, part in self.parts.items())


class _Locator(Taker):
    """Takes nothing, and remembers where the first tensor with rows is."""

    def __init__(self) -> None:
        self.found: torch.device | None = None

    def rows_of(self, source: Tensor, dim: int, start: int, rows: int) -> Tensor:
        return self.element(source)

    def element(self, source: Tensor) -> Tensor:
        self.found = self.found or source.device
        return source


def lay_out(arguments: Mapping[str, Any], batch_dim: BatchDim = 0) -> Layout:
    """Decide for each entry of the named arguments whether it has rows, and along which dim, or passes whole.

    Tensors and arrays have rows along their batch dim; those of one row, 0-dim ones and scalars pass whole. A
    list or tuple holds either one element per row or entries with rows of their own; the number of rows tells
    which.

    Args:
        arguments: The named arguments.
        batch_dim: Where the rows are: an int for all, or per path (`"x"`, `"batch.table"`, `"pair.0"`) an
            int, None for an entry that all rows share, or "list" for a list with one element per row. On a
            list, an int says that it is a container whose tensors have rows at that dim. "balanced" declares
            rows that differ in what they hold; pieces then hold nearly the same. The path of another entry
            says that this one's rows lie one after another, with their lengths in the other. The longest
            matching path wins; others use 0.

    Returns:
        The layout, which holds on to the arguments and copies nothing.

    Raises:
        BatchError: The entries disagree on the number of rows, are ambiguous, have no rows or can't be cut.
    """
    declared = read_batch_dim(batch_dim, arguments)
    rows = count_rows(arguments, declared)
    builder = _Builder(declared, rows)
    parts = {name: builder.part(value, name, declared.default) for name, value in arguments.items()}
    refuse(builder.problems)
    return Layout(rows, parts, builder.amounts)


class _Builder:
    """Builds the parts of one layout, whose number of rows is known, and collects what stands in the way."""

    def __init__(self, declared: Declared, rows: int) -> None:
        self.declared = declared
        self.rows = rows
        self.problems: list[str] = []
        self.amounts: list[int] | None = None

    def part(self, value: Any, path: str, inherited: Rule) -> Part:
        rule = self.declared.rule(path, inherited)
        container = container_of(value)
        if rule is None and not self.declared.is_below(path):
            return _whole(value)
        if (slicer := slicer_of(value)) is not None:
            self._weigh(value, rule)
            return CutAsOne(value, slicer, dim_of(rule))
        if is_array(value):
            return self._array(value, rule)
        if container is None:
            return self._object(value, path)
        if container.is_list and self._is_row_list(value, path, rule):
            self._weigh(value, rule)
            return RowList(value, container)
        return self._branch(value, container, path, rule)

    def _weigh(self, value: Any, rule: Rule) -> None:
        amounts = row_amounts(value) if rule == BALANCED else None
        if amounts is not None:
            before = self.amounts or [0] * self.rows
            self.amounts = [old + new for old, new in zip(before, amounts, strict=True)]

    def _array(self, value: Array, rule: Rule) -> Part:
        lengths = self.declared.lengths_for(value, rule)
        if lengths is not None:
            return Runs(value, tuple(accumulate(lengths, initial=0)))
        has_rows = isinstance(rule, int) and value.ndim and value.shape[rule] == self.rows
        return Rows(value, rule % value.ndim) if isinstance(rule, int) and has_rows else _whole(value)

    def _object(self, value: Any, path: str) -> Part:
        looks_like_rows = (
            isinstance(value, Sized) and not isinstance(value, SCALARS) and len(value) == self.rows
        )
        if looks_like_rows and self.rows > 1:
            self.problems.append(
                f"{path} has as many elements as there are rows, {self.rows}, but can't be cut "
                f"({type(value).__name__}). Give a list, teach the kind with `anybatch.batch.register`, or "
                f"declare that all rows share it: `batch_dim={{{path!r}: None}}`."
            )
        return _whole(value)

    def _is_row_list(self, value: Any, path: str, rule: Rule) -> bool:
        reading = read_list(value, path, rule, self.declared, self.rows)
        if reading.is_ambiguous(self.rows):
            self.problems.append(
                f"{path} is ambiguous: it has {self.rows} elements and its entries have {self.rows} rows. "
                f"{how_to_declare(path)}"
            )
        return self.rows in reading.as_rows.rows and self.rows not in reading.as_container.rows

    def _branch(self, value: Any, container: Container, path: str, rule: Rule) -> Part:
        pairs = list(container.children(value))
        parts = tuple(self.part(child, child_path(path, key), rule) for key, child in pairs)
        if all(isinstance(part, Whole) for part in parts):
            return _whole(value)
        return Branch(value, container, tuple(key for key, _ in pairs), parts)


def _whole(value: Any) -> Whole:
    return Whole(value, holds_tensors(value))
