"""State that a function keeps outside of modules: what a run on fakes must not leave fakes in."""

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import CellType
from typing import Any, final

from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Module

__all__ = ["Belongings"]

_CONTAINERS = (list, dict, set, deque)
_DEEPEST = 3
_LARGEST_CONTAINER = 100_000
_EMPTY = object()


@final
class Belongings:
    """Variables, containers and objects that a function can change, as they are now.

    Values are not copied, for a run on fakes changes none: only which of them are held.
    """

    def __init__(self, function: Callable[..., Any], arguments: Iterable[Any] = ()) -> None:
        self._kept: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        for value in (function, *arguments):
            self._keep(value, _DEEPEST)

    def put_back(self) -> bool:
        """Gives everything that now holds a fake what it held before; returns whether there was anything."""
        changed = [(owner, before) for owner, before in self._kept if _holds_fake(owner)]
        for owner, before in changed:
            _put(owner, before)
        return bool(changed)

    def _keep(self, value: Any, depth: int) -> None:
        if depth < 0 or id(value) in self._seen or isinstance(value, Module):
            return
        self._seen.add(id(value))
        if inspect.isfunction(value):
            self._keep_variables(value, depth)
        elif inspect.ismethod(value):
            self._keep(value.__self__, depth)
            self._keep(value.__func__, depth)
        elif isinstance(value, CellType):
            before = _content(value)
            self._kept.append((value, before))
            self._keep(before, depth)
        elif isinstance(value, _CONTAINERS) and len(value) <= _LARGEST_CONTAINER:
            self._kept.append((value, value.copy()))
            for child in list(value.values() if isinstance(value, dict) else value):
                self._keep(child, depth - 1)
        elif hasattr(value, "__dict__") and not inspect.isclass(value) and not inspect.ismodule(value):
            self._keep(vars(value), depth - 1)

    def _keep_variables(self, function: Any, depth: int) -> None:
        for cell in function.__closure__ or ():
            self._keep(cell, depth - 1)
        names = set(function.__code__.co_names) & function.__globals__.keys()
        for name in names:
            self._kept.append(((function.__globals__, name), function.__globals__[name]))
            self._keep(function.__globals__[name], depth - 1)
        for default in function.__defaults__ or ():
            self._keep(default, depth - 1)
        self._keep(vars(function), depth)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is in it yet
        return _EMPTY


def _holds_fake(owner: Any) -> bool:
    return any(_is_or_holds_fake(value, _DEEPEST) for value in _held_by(owner))


def _is_or_holds_fake(value: Any, depth: int) -> bool:
    """A tuple, or an object, that the run made is not kept by itself: what holds it is put back."""
    if isinstance(value, FakeTensor):
        return True
    if depth < 0 or isinstance(value, Module) or inspect.isclass(value) or inspect.ismodule(value):
        return False
    if isinstance(value, tuple | list | set | frozenset | deque) and len(value) <= _LARGEST_CONTAINER:
        held: Iterable[Any] = list(value)
    elif isinstance(value, dict) and len(value) <= _LARGEST_CONTAINER:
        held = list(value.values())
    elif hasattr(value, "__dict__") and not callable(value):
        held = list(vars(value).values())
    else:
        return False
    return any(_is_or_holds_fake(each, depth - 1) for each in held)


def _held_by(owner: Any) -> Iterator[Any]:
    if isinstance(owner, tuple):
        variables, name = owner
        yield variables.get(name)
    elif isinstance(owner, CellType):
        yield _content(owner)
    else:
        yield from owner.values() if isinstance(owner, dict) else owner


def _put(owner: Any, before: Any) -> None:
    if isinstance(owner, tuple):
        variables, name = owner
        variables[name] = before
    elif isinstance(owner, CellType):
        owner.cell_contents = before
    else:
        owner.clear()
        (owner.extend if isinstance(owner, list | deque) else owner.update)(before)
