"""Does anything of a piece count in a term, or did a mask take all of it out?

A loss such as `(losses * mask).sum() / mask.sum().clamp(min=1)` divides a fully masked piece by one,
although it counts nothing. A zero value is no proof of that (a satisfied hinge is zero too), a mask is.
"""

import torch
from torch.autograd.graph import Node

from anybatch.exact import nodes, operations

_SELECTIONS = {"IndexBackward0", "MaskedSelectBackward0", "IndexSelectBackward0"}

# Between the sum and its mask these change neither which elements are zero nor their order.
_SAME_ELEMENTS = {"NegBackward0", "ToCopyBackward0", "CloneBackward0", "AliasBackward0"}
_JOINING = {"AddBackward0", "SubBackward0", "StackBackward0", "CatBackward0"}
_SAME_ROWS = operations.LINEAR - _SAME_ELEMENTS - _JOINING


def is_masked_out(collapse: Node) -> bool:
    """Is every element that the node sums up multiplied by zero, filled over, or not there at all?"""
    name = collapse.name()
    if nodes.counts_nothing(collapse, name):
        return True
    if name in _JOINING:
        return _is_zero(collapse, None)
    contracted = _constant_operand(collapse, name)
    if contracted is not None:
        return not bool(contracted.any())
    return name.startswith(("Sum", "Mean")) and _is_zero(_only_child(collapse), None)


def shows_what_counts(collapse: Node) -> bool:
    """Is there a mask, or a selection, between the sum and its rows, that tells whether anything counts?"""
    node: Node | None = collapse
    while node is not None:
        name = node.name()
        if name in _SELECTIONS or name in nodes.NLL or _lets_through(node, name) is not None:
            return True
        if _constant_operand(node, name) is not None:
            return True
        passes = name in operations.LINEAR or name.startswith(("Sum", "Nansum", "Mean"))
        node = _only_child(node) if passes else None
    return False


def _is_zero(node: Node | None, support: torch.Tensor | None) -> bool:
    """Is what the node gives zero wherever `support` (None: everywhere) lets it through?"""
    if node is None:
        return False
    name = node.name()
    if nodes.counts_nothing(node, name) or 0 in (node._input_metadata[0].shape or (1,)):
        return True
    if name in ("StackBackward0", "CatBackward0"):
        return all(child is None or _is_zero(child, None) for child, _ in node.next_functions)
    if name in _JOINING:
        return all(child is None or _is_zero(child, support) for child, _ in node.next_functions)
    if name in _SAME_ELEMENTS:
        return _is_zero(_only_child(node), support)
    if name in _SAME_ROWS:
        return _is_zero(_only_child(node), None)
    lets_through = _lets_through(node, name)
    if lets_through is None:
        return False
    support = lets_through if support is None else support & lets_through
    return not bool(support.any()) or _is_zero(_only_child(node), support)


def _lets_through(node: Node, name: str) -> torch.Tensor | None:
    """Where a masking node is not zero."""
    inputs = [child for child, _ in node.next_functions]
    if sum(child is not None for child in inputs) != 1:
        return None
    if name == "MulBackward0":
        operand = nodes.saved(node, "other" if inputs[0] is not None else "self")
        return torch.as_tensor(operand) != 0
    if name == "MaskedFillBackward0":
        mask: torch.Tensor = nodes.saved(node, "mask")
        return ~mask
    if name == "WhereBackward0":
        condition: torch.Tensor = nodes.saved(node, "condition")
        return condition if inputs[-2] is not None else ~condition
    return None


def _constant_operand(node: Node, name: str) -> torch.Tensor | None:
    """The operand without gradient of a product that sums rows up: `mask @ losses`."""
    if name not in operations.CONTRACTIONS or len(_needed(node)) != 1:
        return None
    operands = (getattr(node, f"_saved_{operand}", None) for operand in ("self", "tensor", "vec", "mat2"))
    return next((operand for operand in operands if isinstance(operand, torch.Tensor)), None)


def _needed(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _only_child(node: Node) -> Node | None:
    children = _needed(node)
    return children[0] if len(children) == 1 else None
