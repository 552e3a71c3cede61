"""Logits that are computed when somebody asks for their values, and by chunks where cross entropy does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from anybatch.memory.device import autocast_state

_KEEP_ROWS = {Tensor.contiguous, Tensor.clone}
_RESHAPE = {Tensor.view, Tensor.reshape, torch.reshape}
_FACTS = {
    Tensor.size,
    Tensor.dim,
    Tensor.ndimension,
    Tensor.numel,
    Tensor.is_floating_point,
    Tensor.__len__,
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout", "is_sparse")
    ),
}
_TO_FLOATS = {Tensor.float: torch.float32, Tensor.double: torch.float64}


@final
class Head:
    """A linear layer, and how its rows are cut."""

    def __init__(self, layer: nn.Linear, options: Any) -> None:
        self._layer = layer
        self._options = options
        self._has_warned = False

    def dtype_of(self, hidden: Tensor) -> torch.dtype:
        enabled, low = autocast_state(hidden.device)
        return low if enabled and hidden.dtype != torch.float64 else hidden.dtype

    @property
    def classes(self) -> int:
        return self._layer.out_features

    def logits(self, hidden: Tensor, asked_by: Callable[..., Any]) -> Tensor:
        """All of them, as the layer itself gives them."""
        if torch.is_grad_enabled() and not self._has_warned:
            self._has_warned = True
            name = getattr(asked_by, "__name__", repr(asked_by))
            warnings.warn(
                f"`ChunkedHead`: `{name}` asked for all logits, {tuple(hidden.shape[:-1])} by "
                f"{self.classes}, so they are in memory. Give them to `cross_entropy` only.",
                stacklevel=4,
            )
        return functional.linear(hidden, self._layer.weight, self._layer.bias)

    def losses(self, hidden: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
        """The loss of each row, 0 for ignored ones."""
        dtype = self.dtype_of(hidden)
        bias = self._layer.bias
        call: Any = functional.linear_cross_entropy
        losses: Tensor = call(
            hidden.to(dtype),
            self._layer.weight.to(dtype),
            target,
            linear_bias=None if bias is None else bias.to(dtype),
            weight=None if weight is None else weight.to(dtype),
            reduction="none",
            ignore_index=ignore_index,
            options=self._options,
        )
        return losses


@final
class LateLogits(Tensor):
    """Stands for `linear(hidden)`; its last dimension is that of the classes."""

    _head: Head
    _hidden: Tensor

    @classmethod
    def of(cls, head: Head, hidden: Tensor, dtype: torch.dtype | None = None) -> LateLogits:
        made: LateLogits = Tensor._make_wrapper_subclass(
            cls,
            (*hidden.shape[:-1], head.classes),
            dtype=dtype or head.dtype_of(hidden),
            device=hidden.device,
            requires_grad=torch.is_grad_enabled(),
        )
        made._head, made._hidden = head, hidden
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override] # the stub names no argument
        return f"LateLogits of {tuple(self._hidden.shape[:-1])} by {self._head.classes}"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        late = args[0] if args and isinstance(args[0], cls) else None
        if late is not None or "input" in kwargs:
            found = _late(late if late is not None else kwargs["input"], func, args, kwargs)
            if found is not None:
                return found
        return func(
            *_all_there(args, func), **dict(zip(kwargs, _all_there(kwargs.values(), func), strict=True))
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override] # the stub has self
        raise AssertionError(f"{func} passed by __torch_function__")

    def _there(self, asked_by: Any) -> Tensor:
        return self._head.logits(self._hidden, asked_by).to(self.dtype)

    def _with(self, hidden: Tensor) -> LateLogits:
        return LateLogits.of(self._head, hidden, self.dtype)


def _late(logits: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The result without all values; None where it takes them."""
    if not isinstance(logits, LateLogits):
        return None
    if func is functional.cross_entropy:
        return _cross_entropy(*args, **kwargs)
    if func in _KEEP_ROWS and not kwargs:
        return logits
    if func in _TO_FLOATS and not kwargs:
        return LateLogits.of(logits._head, logits._hidden, _TO_FLOATS[func])
    if func in _RESHAPE and not kwargs:
        return _reshaped(logits, args[1] if isinstance(args[1], (tuple, list)) else args[1:])
    if func is Tensor.__getitem__:
        return _indexed(logits, args[1] if isinstance(args[1], tuple) else (args[1],))
    return None


def _reshaped(logits: LateLogits, shape: Any) -> LateLogits | None:
    if len(shape) < 2 or shape[-1] != logits._head.classes:
        return None
    return logits._with(logits._hidden.reshape(*shape[:-1], logits._hidden.shape[-1]))


def _indexed(logits: LateLogits, key: tuple[Any, ...]) -> LateLogits | None:
    """Rows that are chosen by whole numbers and slices; None where classes are chosen, or by other means."""
    is_simple = all(each is Ellipsis or type(each) in (int, slice) for each in key)
    if not is_simple or key.count(Ellipsis) > 1 or key in ((), (Ellipsis,)):
        return None
    reaches_classes = key[-1] is not Ellipsis and (Ellipsis in key or len(key) == logits.dim())
    if reaches_classes and key[-1] != slice(None):
        return None
    return logits._with(logits._hidden[key])


def _cross_entropy(
    input: LateLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    is_usual = size_average is None and reduce is None and reduction in ("mean", "sum", "none")
    is_by_number = target.dtype == torch.int64 and target.dim() == 1 and input.dim() == 2
    if not is_usual or not is_by_number or label_smoothing != 0:
        return None
    losses = input._head.losses(input._hidden, target, weight, ignore_index)
    wide = losses.to(torch.promote_types(losses.dtype, torch.float32))
    return _reduced(wide, target, weight, ignore_index, reduction).to(input.dtype)


def _reduced(
    losses: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str
) -> Tensor:
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    counts = target != ignore_index
    if weight is None:
        return losses.sum() / counts.sum()
    return losses.sum() / (weight[target * counts] * counts).sum()


def _all_there(values: Any, asked_by: Any) -> list[Any]:
    return [_there(each, asked_by) for each in values]


def _there(value: Any, asked_by: Any) -> Any:
    if isinstance(value, LateLogits):
        return value._there(asked_by)
    if type(value) in (tuple, list):
        return type(value)(_there(each, asked_by) for each in value)
    return value
