"""What each term of a loss is worth: the values of small intermediate results, by their autograd node.

Autograd nodes don't hold what they gave forward. A dispatch mode sees every result; once autograd has
attached the node, which it does after the mode has returned, the value is filed under it.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node
from torch.utils._python_dispatch import TorchDispatchMode

from anybatch.exact.clamps import WATCHED, Clamps
from anybatch.exact.graph import LEAF
from anybatch.exact.reading import Reading
from anybatch.exact.terms import Term

_LARGEST_ELEMENTS = 4096

Parts = tuple[float | None, ...]
"""What each term of some losses adds to its loss; None where the recorded values don't tell."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its modes untyped
    """Records the results of at most 4096 elements that require grad, while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values: dict[Node, torch.Tensor] = {}
        self.clamps = Clamps()
        self._pending: list[torch.Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """The default imports torch._dynamo, for seconds (torch 2.13)."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._file_pending()
        result = func(*args, **(kwargs or {}))
        if func in WATCHED:
            self.clamps.see(func, args, result)
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        self._pending += [out for out in outputs if isinstance(out, torch.Tensor) and _is_small(out)]
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._file_pending()

    def _file_pending(self) -> None:
        for tensor in self._pending:
            if tensor.grad_fn is not None:
                self.values[tensor.grad_fn] = tensor.detach().clone()
        self._pending.clear()


class _UncompiledRecorder(Recorder):  # type: ignore[no-untyped-call]  # torch leaves its modes untyped
    """One that torch.compile leaves alone: it would compile what the recorder does, once per operation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs)


def recorder() -> Recorder:
    """A recorder for a run that may be compiled."""
    return _UncompiledRecorder() if "torch._dynamo" in sys.modules else Recorder()


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.numel() <= _LARGEST_ELEMENTS


def must_be_recorded(terms: Sequence[Term]) -> bool:
    """Do losses tell the values of these terms only together with results on the way to them?"""
    roots = [term.root for term in terms]
    return len(set(roots)) < len(roots) or any(map(_has_constant_added, terms))


def parts(
    losses: Sequence[torch.Tensor],
    values: Mapping[Node, torch.Tensor],
    terms: Sequence[Term],
    readings: Sequence[Reading],
) -> Parts:
    """What each term adds to its loss.

    Args:
        losses: The losses of a piece, with their graphs, which are kept.
        values: What a `Recorder` saw of the run.
        terms: The terms of the losses.
        readings: What the piece says of each term.

    Returns:
        One number per term; None where the recorded values don't tell.
    """
    found: list[float | None] = [None] * len(terms)
    for root, loss in enumerate(losses):
        mine = [place for place, term in enumerate(terms) if term.root == root]
        tops = _measured([terms[place] for place in mine], [readings[place] for place in mine], values)
        own = _contributions(loss, tops, values)
        for place, value in zip(mine, own, strict=True):
            found[place] = value
        if len(mine) == 1 and own[0] is None:
            found[mine[0]] = float(loss.detach().double())
    return tuple(found)


def _measured(
    terms: Sequence[Term], readings: Sequence[Reading], values: Mapping[Node, torch.Tensor]
) -> list[Node]:
    """Where each term of a loss is measured: at its top, or its end where a constant is added above."""
    ends = [reading.end for reading in readings]
    meet = len(set(ends)) < len(ends)
    return [
        reading.end if _has_constant_added(term) and reading.end in values and not meet else reading.top
        for term, reading in zip(terms, readings, strict=True)
    ]


def _has_constant_added(term: Term) -> bool:
    """Is a constant added to the term by a step that belongs to it alone?"""
    return any(
        step.name.startswith(("Add", "Sub", "Rsub")) and sum(step.inputs) == 1
        for step in term.path[term.branch :]
    )


def _contributions(
    root: torch.Tensor, tops: Sequence[Node], values: Mapping[Node, torch.Tensor]
) -> list[float | None]:
    """What each node adds to the root, given that the root is linear in them.

    The gradient of the root with respect to a node's result, times that result. The backward pass behind
    it walks through the tail of the graph only.

    Returns:
        One number per node, None where its value was not recorded.
    """
    known = [top for top in dict.fromkeys(tops) if top in values and top.name() != LEAF]
    if not known:
        return [None] * len(tops)
    edges = [GradientEdge(top, 0) for top in known]
    gradients = torch.autograd.grad(root, edges, retain_graph=True, allow_unused=True)
    added = {
        top: 0.0 if gradient is None else _inner(gradient, values[top])
        for top, gradient in zip(known, gradients, strict=True)
    }
    return [added.get(top) for top in tops]


def _inner(gradient: torch.Tensor, value: torch.Tensor) -> float:
    return float((gradient.double() * value.double()).sum())
