"""What Python objects hold, looked at before and after: which of it was written to?"""

import inspect
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

_CONTAINERS = (list, tuple, set, frozenset, deque)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_LARGEST_CONTAINER = 64
_DEEPEST = 4

# What a module keeps for itself, and hooks that others hang onto it.
_OF_MODULES = frozenset({*vars(nn.Module()), "forward"})


@dataclass(frozen=True, eq=False)
class Mark:
    """One value as it was.

    Attributes:
        path: By which name it is reached.
        value: The object itself; held, so that no other can take its place in memory.
        state: Its version for a tensor, its length for a container.
    """

    path: str
    value: Any
    state: int

    def is_as(self, other: "Mark") -> bool:
        """Is it still the same, with nothing written to it?"""
        is_value = type(self.value) is type(other.value) and isinstance(self.value, _PLAIN)
        is_same = self.value is other.value or (is_value and self.value == other.value)
        return is_same and self.state == other.state


def marks(values: Iterable[tuple[str, Any]]) -> list[Mark]:
    """Marks of values and of what they hold; modules and classes are passed over."""
    return [mark for path, value in values for mark in _marks(path, value, _DEEPEST)]


def attributes(modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, Any]]:
    """What modules hold beside parameters, buffers, modules and hooks; and which buffers they have."""
    found = []
    for name, module in modules:
        found += [(f"{name}.{key}", value) for key, value in vars(module).items() if key not in _OF_MODULES]
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


def _marks(path: str, value: Any, depth: int) -> Iterator[Mark]:
    if isinstance(value, nn.Module) or inspect.isclass(value) or inspect.isroutine(value):
        return
    if isinstance(value, Tensor):
        yield Mark(path, value, version_of(value))
    elif isinstance(value, _PLAIN):
        yield Mark(path, value, 0)
    elif isinstance(value, (dict, *_CONTAINERS)):
        yield Mark(path, value, len(value))
        if depth and len(value) <= _LARGEST_CONTAINER:
            for key, child in value.items() if isinstance(value, dict) else enumerate(value):
                yield from _marks(f"{path}[{key!r}]", child, depth - 1)
    else:
        yield Mark(path, value, 0)
        if depth and hasattr(value, "__dict__") and not inspect.ismodule(value):
            for key, child in vars(value).items():
                yield from _marks(f"{path}.{key}", child, depth - 1)
