"""Which modules run in a call, and which of them make one run differ from the next."""

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
_ON_COMPILED_MODULES = r"Using `torch\.compile\(module\)` when there are global hooks"


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
    _hush_compiler()
    outer = getattr(_watching, "seen", None)
    _watching.seen = seen
    # Under a key that stays the same: torch.compile guards on the keys of global hooks (torch 2.13), and
    # `register_module_forward_pre_hook` gives a new one each time, so each call would be compiled again.
    _global_forward_pre_hooks[_KEY] = _notify
    try:
        yield
    finally:
        _watching.seen = outer
        if outer is None:
            _global_forward_pre_hooks.pop(_KEY, None)


def _hush_compiler() -> None:
    """Filters torch's warning that a global hook sees a compiled module twice: here it may.

    Once, and not around each call: entering and leaving a filter makes Python repeat all other warnings.
    """
    known = (message for _, message, *_ in warnings.filters if message is not None)
    if "torch._dynamo" in sys.modules and all(message.pattern != _ON_COMPILED_MODULES for message in known):
        warnings.filterwarnings("ignore", _ON_COMPILED_MODULES, UserWarning)


def _notify(module: Module, _inputs: Any) -> None:
    if not is_compiling():
        seen = getattr(_watching, "seen", None)
        if seen is not None:
            seen(module)
