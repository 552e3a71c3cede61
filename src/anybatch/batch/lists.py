"""A list or tuple may hold one element per row, or be a container of entries that have rows themselves.

`[image, image, image]` is three rows; `[images, labels]` is two entries. Only the number of rows tells them
apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from anybatch.batch.containers import container_of, holds_arrays
from anybatch.batch.declared import PER_ROW, Declared, Rule, child_path, dim_of
from anybatch.batch.entries import is_entry, possible_rows
from anybatch.batch.leaves import NUMBERS, holds_only_scalars, is_scalar_type
from anybatch.batch.rows import ANY, IMPOSSIBLE, Possible, exactly, or_any, together


@dataclass(frozen=True)
class TwoReadings:
    """The two readings of a list.

    Attributes:
        as_rows: The numbers of rows that it can stand for with one element per row.
        as_container: Those that it can stand for as a container of entries.
    """

    as_rows: Possible
    as_container: Possible

    @property
    def possible(self) -> Possible:
        """The numbers of rows that it can stand for in either reading."""
        return Possible(
            self.as_rows.rows | self.as_container.rows,
            fits_any=self.as_rows.fits_any or self.as_container.fits_any,
        )

    def is_ambiguous(self, rows: int) -> bool:
        """Whether both readings give `rows` rows; of a single row either cuts the same."""
        return rows > 1 and rows in self.as_rows.rows and rows in self.as_container.rows


def read_list(
    value: Sequence[Any], path: str, rule: Rule, declared: Declared, wanted: int | None = None
) -> TwoReadings:
    """Read a list or tuple both ways.

    Args:
        value: The list or tuple.
        path: Where it is.
        rule: The rule that holds there.
        declared: Everything that is declared.
        wanted: The number of rows, where it is known; other readings are then left out early.
    """
    if rule in PER_ROW:
        return TwoReadings(exactly(len(value)), IMPOSSIBLE)
    if declared.is_container(path):
        return TwoReadings(IMPOSSIBLE, _as_container(value, path, rule, declared, wanted))
    as_rows = _as_rows(value)
    as_container = _as_container(value, path, rule, declared, wanted)
    passes_whole = as_container.fits_any and not as_rows.rows and holds_arrays(value)
    return TwoReadings(as_rows, as_container if passes_whole else Possible(as_container.rows))


def _as_rows(value: Sequence[Any]) -> Possible:
    if len(value) == 0 or (len(value) == 1 and not holds_arrays(value)):
        return or_any(len(value))
    return exactly(len(value)) if is_of_one_kind(value) else IMPOSSIBLE


def _as_container(
    value: Sequence[Any], path: str, rule: Rule, declared: Declared, wanted: int | None
) -> Possible:
    if holds_only_scalars(value):
        return ANY
    children = (
        _possible(child, child_path(path, index), rule, declared, wanted) for index, child in enumerate(value)
    )
    return together(children)


def _possible(value: Any, path: str, inherited: Rule, declared: Declared, wanted: int | None) -> Possible:
    """The numbers of rows of one element, read as an entry."""
    rule = declared.rule(path, inherited)
    if is_entry(value):
        found = ANY if rule is None else declared.rows(value, rule) or possible_rows(value, dim_of(rule))
    elif (container := container_of(value)) is None or (rule is None and not declared.is_below(path)):
        found = ANY
    elif container.is_list:
        found = read_list(value, path, rule, declared, wanted).possible
    else:
        children = container.children(value)
        found = together(
            _possible(child, child_path(path, key), rule, declared, wanted) for key, child in children
        )
    return found if wanted is None else Possible(found.rows & {wanted}, found.fits_any)


def is_of_one_kind(value: Sequence[Any]) -> bool:
    """Whether the elements can be rows: of the same type; tensors of the same dtype and number of dims."""
    types = set(map(type, value))
    if types == {Tensor}:
        return len({(row.dtype, row.ndim) for row in value}) == 1
    if any(issubclass(kind, Tensor | np.ndarray) for kind in types):
        return len(set(map(_array_kind, value))) == 1
    if types <= {type(None)}:
        return False
    if all(map(is_scalar_type, types)):
        types.discard(type(None))  # a missing string or number is still a row
    return len(types) == 1 or all(issubclass(kind, NUMBERS) for kind in types)


def _array_kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Tensor, value.dtype, value.ndim
    if isinstance(value, np.ndarray):
        return np.ndarray, value.dtype.char, value.ndim
    return type(value)
