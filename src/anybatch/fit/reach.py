"""What a function can name before it runs: modules, leaves that belong to none, and random generators."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module

from anybatch.exact.compiled import is_compiled
from anybatch.fit.generators import is_generator

_LARGEST_CONTAINER = 64
_DEEPEST_CALL = 2


@dataclass(frozen=True, eq=False)
class Reach:
    """What was found, each once.

    Attributes:
        modules: Without their children.
        leaves: Tensors that require grad and are the result of nothing.
        generators: Random generators, of torch, numpy or Python.
        is_compiled: Does torch.compile take the function, or one of the modules?
    """

    modules: tuple[Module, ...]
    leaves: tuple[Tensor, ...]
    generators: tuple[Any, ...]
    is_compiled: bool


def in_reach(function: Callable[..., Any], arguments: Iterable[Any] = ()) -> Reach:
    """Looks through arguments, closure, globals, defaults, and the object that the function is bound to.

    Containers of more than 64 entries are passed over: they hold data.
    """
    seen: set[int] = set()
    found: list[Any] = []
    for value in (*arguments, *_named_by(function)):
        found += _in(value, seen)
    modules = tuple(value for value in found if isinstance(value, Module))
    leaves = tuple(value for value in found if isinstance(value, Tensor))
    generators = tuple(value for value in found if is_generator(value))
    return Reach(modules, leaves, generators, any(map(is_compiled, (function, *modules))))


def _in(value: Any, seen: set[int]) -> Iterator[Any]:
    is_container = isinstance(value, Mapping) or type(value) in (list, tuple)
    is_part = isinstance(value, Module) or is_generator(value)
    if not (is_container or is_part or isinstance(value, Tensor)) or id(value) in seen:
        return
    seen.add(id(value))
    if is_part or (isinstance(value, Tensor) and value.is_leaf and value.requires_grad):
        yield value
    elif is_container and len(value) <= _LARGEST_CONTAINER:
        for child in value.values() if isinstance(value, Mapping) else value:
            yield from _in(child, seen)


def _named_by(function: Any) -> Iterator[Any]:
    yield function
    if isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values())
        yield from _named_by(function.func)
    elif inspect.ismethod(function):
        yield from _owned_by(function.__self__)
        yield from _named_by(function.__func__)
    elif inspect.isfunction(function):
        yield from _variables_of(function)
        if hasattr(function, "__wrapped__"):
            yield from _named_by(function.__wrapped__)
    elif hasattr(function, "_torchdynamo_orig_callable"):
        yield from _named_by(function._torchdynamo_orig_callable)
    elif not isinstance(function, Module):
        yield from _owned_by(function)


def _owned_by(owner: Any) -> Iterator[Any]:
    yield owner
    if hasattr(owner, "__dict__") and not isinstance(owner, Module):
        yield from vars(owner).values()


def _variables_of(function: Any, depth: int = 0) -> Iterator[Any]:
    """What a function names, and what the functions of its own module that it names do."""
    variables = inspect.getclosurevars(function)
    named = [*variables.nonlocals.values(), *variables.globals.values()]
    yield from named
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for other in named if depth < _DEEPEST_CALL else ():
        if inspect.isfunction(other) and other.__module__ == function.__module__:
            yield from _variables_of(other, depth + 1)
