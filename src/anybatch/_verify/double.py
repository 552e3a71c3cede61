"""A run in float64 throughout: the modules, the arguments, and what the function asks to be float32."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from anybatch._run import eager
from anybatch._verify.scene import Scene

_WIDE = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}
_CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)


@contextmanager
def doubled(scene: Scene) -> Iterator[None]:
    """Turns every floating tensor of the scene's state to float64, and what is made on the way.

    To be used within `scene.undone()`, which turns all back.
    """
    for kept in scene.tensors:
        tensor = kept.tensor
        wide = _WIDE.get(tensor.dtype)
        if wide is not None:
            if tensor.is_leaf:
                tensor.grad = None
            tensor.data = tensor.data.to(wide)
    with eager(), _Widening():
        yield


class _Widening(TorchFunctionMode):
    """Answers requests for fewer digits with float64, as the norms and losses of some models make them.

    Autocast leaves float64 alone.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CASTS:
            return args[0].double()
        asked = [_wide(argument) for argument in args]
        named = {key: _wide(argument) for key, argument in (kwargs or {}).items()}
        return _widened(func(*asked, **named))


def _wide(argument: Any) -> Any:
    return _WIDE.get(argument, argument) if isinstance(argument, torch.dtype) else argument


def _widened(result: Any) -> Any:
    if type(result) is Tensor and result.dtype in _WIDE:
        return result.to(_WIDE[result.dtype])
    return result
