"""The containers that hold a batch's entries: how to open one, and how to rebuild it around new children."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from anybatch.batch.builtin import built_in
from anybatch.batch.kinds import Children, Container, Rebuild, Slicer
from anybatch.batch.leaves import holds_only_scalars, is_array

_registered: dict[type, Container] = {}


def register(
    kind: type,
    children: Children,
    rebuild: Rebuild,
    *,
    rows: Callable[[Any], int] | None = None,
    cut: Callable[[Any, int, int], Any] | None = None,
    sizes: Callable[[Any], Sequence[int]] | None = None,
    join: Callable[[list[Any]], Any] | None = None,
) -> None:
    """Teach `anybatch` to cut, move and join a further kind of container, and its subclasses.

    A kind that is registered again is replaced; the most specific class wins. Children are cut one by one, as
    they would be in a dict, unless `rows` and `cut` say how the container is cut as one.

    Args:
        kind: The class of the container.
        children: Given a container, its `(key, child)` pairs, always in the same order. Keys name the entries
            in `batch_dim` and in errors.
        rebuild: Given a container and a list of new children, in that order, a new container; the given one
            must stay as it is.
        rows: Given a container, its number of rows.
        cut: Given a container, `start` and `stop`, a new container of these rows. Where tensors in it require
            grad, gradients must flow through.
        sizes: Given a container, how much each of its rows holds, for `batch_dim={...: "balanced"}`.
        join: Given containers that the function returned for the pieces, one with all their rows. Without it
            outputs of this kind come back as a list, where `cut` is given.

    Raises:
        TypeError: `kind` is not a class; only one of `rows` and `cut` is given, or `sizes` or `join` without
            them.

    Example:
        >>> class Graphs:
        ...     def __init__(self, nodes, label):
        ...         self.nodes, self.label = nodes, label
        >>> register(
        ...     Graphs,
        ...     children=lambda graphs: vars(graphs).items(),
        ...     rebuild=lambda graphs, children: Graphs(*children),
        ... )
    """
    if not isinstance(kind, type):
        raise TypeError(f"`register`: kind must be a class. Got {kind!r}.")
    _registered[kind] = Container(children, rebuild, slicer=_slicer(rows, cut, sizes, join))
    _container_for.cache_clear()


def _slicer(
    rows: Callable[[Any], int] | None,
    cut: Callable[[Any, int, int], Any] | None,
    sizes: Callable[[Any], Sequence[int]] | None,
    join: Callable[[list[Any]], Any] | None,
) -> Slicer | None:
    if rows is not None and cut is not None:
        return Slicer(
            lambda value, _dim: rows(value),
            lambda value, _dim, start, stop: cut(value, start, stop),
            sizes,
            join,
        )
    if any(given is not None for given in (rows, cut, sizes, join)):
        raise TypeError(
            "`register`: a kind that is cut as one has `rows` and `cut`. Got not both. Give both."
        )
    return None


def container_of(value: Any) -> Container | None:
    """How to open `value`, or None where it is no known container."""
    return _container_for(type(value))  # type: ignore[arg-type]  # mypy: a class is not Hashable


@lru_cache(maxsize=1024)
def _container_for(kind: type) -> Container | None:
    for base in kind.__mro__:
        if base in _registered:
            return _registered[base]
    return built_in(kind)


def holds_tensors(value: Any) -> bool:
    """Whether there is a tensor in `value`, at any depth."""
    return _holds(value, lambda leaf: isinstance(leaf, Tensor))


def holds_arrays(value: Any) -> bool:
    """Whether there is a tensor or array in `value`, at any depth."""
    return _holds(value, is_array)


def _holds(value: Any, is_wanted: Callable[[Any], bool]) -> bool:
    if is_wanted(value):
        return True
    container = container_of(value)
    if container is None or (container.is_list and holds_only_scalars(value)):
        return False
    return any(_holds(child, is_wanted) for _, child in container.children(value))


def map_tensors(
    value: Any, change: Callable[[Tensor], Any], otherwise: Callable[[Any], Any] | None = None
) -> Any:
    """Apply `change` to the tensors in `value`, at any depth; what holds no changed one stays as it is.

    Args:
        value: Anything.
        change: What becomes of a tensor.
        otherwise: What becomes of anything that is neither a tensor nor a known container; None leaves it.
    """
    if isinstance(value, Tensor):
        return change(value)
    container = container_of(value)
    if container is None:
        return value if otherwise is None else otherwise(value)
    if container.is_list and holds_only_scalars(value):
        return value
    old = [child for _, child in container.children(value)]
    new = [map_tensors(child, change, otherwise) for child in old]
    if all(before is after for before, after in zip(old, new, strict=True)):
        return value
    return container.rebuild(value, new)
