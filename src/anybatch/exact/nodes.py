"""What is known about single autograd nodes: what they multiply with, what they divide by.

The facts are those of torch's derivatives (tools/autograd/derivatives.yaml): which operands a node saves,
and under which name.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils._python_dispatch import _disable_current_modes

from anybatch.exact import operations
from anybatch.exact.graph import is_custom

Denominator = float | torch.Tensor
Reader = Callable[[Node], Denominator | None]

DENOMINATOR_ATTRIBUTE = "anybatch_denominator"
"""Set on the `ctx` of a custom autograd Function's forward: what its mean divides by (1 for a sum)."""

_readers: dict[str, Reader] = {}


def register(function: type[torch.autograd.Function] | str, reader: Reader) -> None:
    """Teaches anybatch to read the denominator of a custom autograd Function that returns a loss.

    Args:
        function: The Function, or the name of its backward node (`MyFunctionBackward`).
        reader: Given the backward node (attributes set on `ctx` in forward are attributes of it), returns
            what the loss's mean divides by in this call (a number or a 0-dim tensor, 1 for a sum), or None
            where it can't tell.

    Example:
        >>> import torch, anybatch.exact
        >>> class Halved(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x): ctx.rows = len(x); return x.mean()
        ...     @staticmethod
        ...     def backward(ctx, grad): return (grad / ctx.rows).expand(ctx.rows)
        >>> anybatch.exact.register(Halved, lambda node: node.rows)
    """
    _readers[function if isinstance(function, str) else f"{function.__name__}Backward"] = reader


class Unreadable(Exception):
    """A node on the way from the loss to its terms about which nothing is known."""


@dataclass(frozen=True)
class Constant:
    """A constant operand of a linear node. `value` multiplies, or divides, what comes from below."""

    value: Denominator
    divides: bool = False

    def tensor(self) -> torch.Tensor:
        """The value as a tensor of its own; a number that autograd saved is none (torch 2.13)."""
        if self.elements == 1:
            return torch.tensor(float(self.value), dtype=torch.float64)
        return torch.as_tensor(self.value)

    @property
    def elements(self) -> int:
        return self.value.numel() if isinstance(self.value, torch.Tensor) else 1


_PER_ELEMENT = {
    *("MseLossBackward0", "SmoothL1LossBackward0", "HuberLossBackward0", "SoftMarginLossBackward0"),
    *("BinaryCrossEntropyBackward0", "BinaryCrossEntropyWithLogitsBackward0"),
}
_PER_ROW = {"MultiMarginLossBackward0", "MultilabelMarginLossBackward0"}
NLL = {"NllLossBackward0", "NllLoss2DBackward0"}
_WITH_SIZES = _PER_ELEMENT | _PER_ROW
LOSSES = NLL | _WITH_SIZES
_MEAN, _SUM = 1, 2


def constant(node: Node, name: str, edge: int) -> Constant | None:
    """The constant with which the node weights what comes through the given input, if there is one."""
    if name in ("AddBackward0", "SubBackward0", "RsubBackward0", "RsubBackward1") and edge == 1:
        return Constant(saved(node, "alpha"))
    if name == "RsubBackward0" and edge == 0:
        return None
    if name == "RsubBackward1":
        return Constant(saved(node, "alpha"))
    inputs = [child for child, _ in node.next_functions]
    if name in operations.SCALING and sum(child is not None for child in inputs) == 1:
        other = saved(node, "other" if edge == 0 else "self")
        return Constant(other, divides=name in operations.RATIOS)
    return None


def denominator(node: Node, name: str) -> Denominator:
    """What the mean of a node that sums up rows divides by; 1 for a sum.

    Raises:
        Unreadable: Nothing is known about the node.
    """
    if is_sum(node, name):
        return 1.0
    if name in NLL:
        return _counted_targets(node)
    if name in _WITH_SIZES:
        shape = _operand_shape(node)
        rows = shape[0] if len(shape) > 1 else 1
        return float(rows if name in _PER_ROW else shape.numel())
    if name == "IndexPutBackward0" and saved(node, "accumulate"):
        return 1.0
    if name == "MeanBackward0":
        return float(saved(node, "self_sym_numel"))
    if name == "MeanBackward1":
        return _reduced_elements(node)
    if is_custom(node):
        return _declared(node, name)
    raise Unreadable(name)


def counts_nothing(node: Node, name: str) -> bool:
    """Does the node sum over no elements at all?"""
    sizes = getattr(node, "_saved_self_sym_sizes", None) if name.startswith(("Sum", "Mean")) else None
    if name in NLL:
        return float(_counted_targets(node)) == 0
    return sizes is not None and 0 in tuple(sizes)


def _operand_shape(node: Node) -> torch.Size:
    """The shape of the first operand; the operand itself may not have been kept."""
    below, output = node.next_functions[0]
    if below is not None and not is_custom(below):
        return torch.Size(below._input_metadata[output].shape)
    operand: torch.Tensor = saved(node, "self")
    return operand.shape


def _counted_targets(node: Node) -> Denominator:
    """The targets that are not ignored, or the sum of their weights.

    `_saved_total_weight` has the dtype of the input, in which 1001 may read 1000: it is not used.
    """
    target: torch.Tensor = saved(node, "target")
    ignored = _signed(saved(node, "ignore_index"))
    weight: torch.Tensor | None = saved(node, "weight")
    counted = target != ignored
    if weight is None:
        return counted.sum()
    return weight.double()[target[counted]].sum()


def _signed(value: int) -> int:
    """Node attributes are unsigned: -100 reads 2**64 - 100."""
    return value - 2**64 if value >= 2**63 else value


def _reduced_elements(node: Node) -> float:
    sizes = tuple(saved(node, "self_sym_sizes"))
    dims = [_signed(dim) for dim in saved(node, "dim")] or range(len(sizes))
    count = 1
    for dim in dims:
        count *= sizes[dim]
    return float(count)


def _declared(node: Node, name: str) -> Denominator:
    reader = _readers.get(name)
    declared = reader(node) if reader else getattr(node, DENOMINATOR_ATTRIBUTE, None)
    if declared is None:
        raise Unreadable(name)
    return declared


def outside_modes() -> AbstractContextManager[Any]:
    """A context without the user's dispatch modes, in which saved numbers can't be read (torch 2.13)."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


def saved(node: Node, attribute: str):  # type: ignore[no-untyped-def]  # tensors, numbers, lists, None
    """A saved operand of the node.

    Raises:
        Unreadable: It was changed in place or freed meanwhile, or this node does not save it.
    """
    try:
        return getattr(node, f"_saved_{attribute}")
    except (AttributeError, RuntimeError) as error:
        raise Unreadable(f"{node.name()} ({error})") from error


def is_sum(node: Node, name: str) -> bool:
    """Does the node sum rows up without dividing?"""
    if name in LOSSES:
        return bool(saved(node, "reduction") == _SUM)
    return name in operations.CONTRACTIONS or name.startswith(("SumBackward", "NansumBackward"))
