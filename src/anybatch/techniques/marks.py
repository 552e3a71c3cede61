"""What Python objects hold, looked at before and after: which of it was written to?"""

from collections import deque
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CODE = (nn.Module, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_LARGEST_CONTAINER = 64
_DEEPEST = 4

# What a module keeps for itself, and hooks that others hang onto it.
_OF_MODULES = frozenset({*vars(nn.Module()), "forward"})


class Mark(NamedTuple):
    """One value as it was.

    Attributes:
        path: By which name it is reached.
        value: The object itself; held, so that no other can take its place in memory.
        state: Its version for a tensor, its length for a container.
    """

    path: str
    value: Any
    state: int

    @property
    def is_object(self) -> bool:
        """Is it neither a plain value nor a tensor?"""
        return not isinstance(self.value, (*_PLAIN, Tensor))

    def is_as(self, other: "Mark") -> bool:
        """Is it still the same, with nothing written to it?"""
        is_value = type(self.value) is type(other.value) and isinstance(self.value, _PLAIN)
        is_same = self.value is other.value or (is_value and self.value == other.value)
        return is_same and self.state == other.state


def marks(values: Iterable[tuple[str, Any]], *, is_close: bool = True) -> list[Mark]:
    """Marks of values, each object once; modules and classes are passed over.

    Args:
        values: Values, each with the name by which it is reached.
        is_close: Whether what they hold is looked at too, and not their length alone.
    """
    seen: set[int] = set()
    depth = _DEEPEST if is_close else 0
    return [mark for path, value in values for mark in _marks(path, value, depth, seen)]


def attributes(modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, Any]]:
    """What modules hold beside parameters, buffers, modules and hooks; and which buffers they have."""
    found = []
    for name, module in modules:
        held = vars(module)
        found += [(f"{name}.{key}", held[key]) for key in held if key not in _OF_MODULES]
        found.append((f"{name} buffers", " ".join(module._buffers)))
    return found


def first_difference(before: list[Mark], after: list[Mark]) -> str | None:
    """The path of the first value that was written to; None where there is none."""
    known = {mark.path: mark for mark in before}
    for mark in after:
        old = known.pop(mark.path, None)
        if old is None or not old.is_as(mark):
            return mark.path
    return next(iter(known), None)


def version_of(tensor: Tensor) -> int:
    """Counts what was written to a tensor; what was made in inference mode does not count."""
    return -1 if tensor.is_inference() else tensor._version


def _marks(path: str, value: Any, depth: int, seen: set[int]) -> Iterator[Mark]:
    if isinstance(value, _PLAIN):
        yield Mark(path, value, 0)
    elif not isinstance(value, _CODE) and id(value) not in seen:
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield Mark(path, value, version_of(value))
            return
        yield Mark(path, value, len(value) if isinstance(value, _CONTAINERS) else 0)
        for key, child in _held_by(value) if depth else ():
            yield from _marks(path + key, child, depth - 1, seen)


def _held_by(value: Any) -> Iterator[tuple[str, Any]]:
    """What a container or an object holds, by how it is written; large containers hold data."""
    if not isinstance(value, _CONTAINERS):
        for name, child in getattr(value, "__dict__", {}).items():
            yield f".{name}", child
    elif len(value) <= _LARGEST_CONTAINER:
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield f"[{key!r}]", child
