"""Which modules take part in a call: those in reach of the function before it runs, and those that run."""

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook

_watching = threading.local()


def in_reach(function: Callable[..., Any], arguments: Iterable[Any] = ()) -> list[Module]:
    """The modules that a function can name: arguments, closure, globals, defaults, the object it is bound to.

    Each is listed once, without its children.
    """
    values = [*arguments, *_named_by(function)]
    found = {id(module): module for value in values for module in _modules_in(value)}
    return list(found.values())


def _modules_in(value: Any) -> Iterator[Module]:
    if isinstance(value, Module):
        yield value
    elif isinstance(value, Mapping):
        for child in value.values():
            yield from _modules_in(child)
    elif type(value) in (list, tuple) and len(value) <= 64:
        for child in value:
            yield from _modules_in(child)


def _named_by(function: Any) -> Iterator[Any]:
    yield function
    if isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values())
        yield from _named_by(function.func)
    elif inspect.ismethod(function):
        owner = function.__self__
        yield owner
        yield from (
            vars(owner).values() if hasattr(owner, "__dict__") and not isinstance(owner, Module) else ()
        )
        yield from _named_by(function.__func__)
    elif inspect.isfunction(function):
        yield from _variables_of(function)
        if hasattr(function, "__wrapped__"):
            yield from _named_by(function.__wrapped__)
    elif hasattr(function, "_torchdynamo_orig_callable"):
        yield from _named_by(function._torchdynamo_orig_callable)


def _variables_of(function: Any) -> Iterator[Any]:
    variables = inspect.getclosurevars(function)
    yield from variables.nonlocals.values()
    yield from variables.globals.values()
    yield from function.__defaults__ or ()


def batch_norms(modules: Iterable[Module]) -> list[Module]:
    """Those of the modules that normalise with the statistics of the batch."""
    return [
        module
        for module in modules
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
    ]


@contextmanager
def watching(seen: Callable[[Module], None]) -> Iterator[None]:
    """Calls `seen` with every module of this thread that is about to run forward, each time it does.

    The hook is one function for the whole process: torch.compile guards on the identity of global hooks.
    """
    outer = getattr(_watching, "seen", None)
    _watching.seen = seen
    hook = register_module_forward_pre_hook(_notify)
    try:
        yield
    finally:
        hook.remove()
        _watching.seen = outer


def _notify(module: Module, _inputs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    seen = getattr(_watching, "seen", None)
    if seen is not None:
        seen(module)
