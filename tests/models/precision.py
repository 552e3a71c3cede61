"""How exact a model can be: the rounding error of its own whole mini-batch, where it uses float32 inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class DoubleThroughout(TorchFunctionMode):
    """Runs a model in float64 also where it asks for float32, as the norms and losses of some models do."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer each request for float32 with float64."""
        if function is Tensor.float:
            return args[0].double()
        doubled = [torch.float64 if argument is torch.float32 else argument for argument in args]
        options = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return function(*doubled, **options)
