"""Which modules run in a call, and which of them make one run differ from the next."""

import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.compiler import is_compiling
from torch.nn import Module, RNNBase
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_pre_hooks,
)

_KEY = -1
_watching = threading.local()
_TWICE = re.compile(r"Using `torch\.compile\(module\)` when there are global hooks")
_ON_COMPILED_MODULES = ("ignore", _TWICE, UserWarning, None, 0)


def is_noisy(module: Module) -> bool:
    """Does the module draw random numbers, or depend on the batch, in training mode only?"""
    return isinstance(module, (_BatchNorm, _DropoutNd, RNNBase))


def has_backward_hooks(modules: Iterable[Module]) -> bool:
    """Does a hook see the gradients that pass through one of the modules?"""
    own = any(module._backward_hooks or module._backward_pre_hooks for module in modules)
    return own or bool(_global_backward_hooks or _global_backward_pre_hooks)


@contextmanager
def watching(seen: Callable[[Module], None]) -> Iterator[None]:
    """Calls `seen` with every module of this thread that is about to run forward, each time it does."""
    outer = getattr(_watching, "seen", None)
    _watching.seen = seen
    # Under a key that stays the same: torch.compile guards on the keys of global hooks (torch 2.13), and
    # `register_module_forward_pre_hook` gives a new one each time, so each call would be compiled again.
    _global_forward_pre_hooks[_KEY] = _notify
    try:
        with _hushed_compiler():
            yield
    finally:
        _watching.seen = outer
        if outer is None:
            _global_forward_pre_hooks.pop(_KEY, None)


@contextmanager
def _hushed_compiler() -> Iterator[None]:
    """Filters torch's warning that a global hook sees a compiled module twice: here it may.

    Python is not told of the filter: it would repeat, call by call, all warnings that it gives once.
    """
    if "torch._dynamo" not in sys.modules:
        yield
        return
    filters: list[Any] = warnings.filters  # type: ignore[assignment]  # the list itself, which Python reads
    filters.insert(0, _ON_COMPILED_MODULES)
    try:
        yield
    finally:
        if _ON_COMPILED_MODULES in filters:
            filters.remove(_ON_COMPILED_MODULES)


def _notify(module: Module, _inputs: Any) -> None:
    if not is_compiling():
        seen = getattr(_watching, "seen", None)
        if seen is not None:
            seen(module)
