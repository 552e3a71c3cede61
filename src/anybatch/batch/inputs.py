"""Entries that require grad: each piece gets a leaf of its own; their gradients are put together at the end.

The graph above such an entry belongs to the caller and is shared by all pieces. A piece's backward stops at
its leaf, so that graph is traversed once, with the gradient of the whole entry::

    source ── rows 0..3 ──> leaf ──> loss of piece 0        leaf.grad ──┐
           ── rows 4..6 ──> leaf ──> loss of piece 1        leaf.grad ──┴──> gradient of source
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from anybatch.memory.device import widest_float


class InputGradient(NamedTuple):
    """What one piece adds to the gradient of one entry; all that has to be kept of a piece's leaf.

    Attributes:
        source: The caller's tensor.
        grad: The piece's gradient, on the source's device; None where the piece's loss does not depend on it.
        dim: Where the source's rows are; None for a source that each piece got whole.
        start: The source's row at which the gradient begins; 0 for a source that each piece got whole.
    """

    source: Tensor
    grad: Tensor | None
    dim: int | None
    start: int


@dataclass(frozen=True, eq=False)
class InputLeaf:
    """The leaf that stands for rows of a tensor that requires grad, in one piece.

    Attributes:
        source: The caller's tensor.
        leaf: What the piece holds instead: detached, on the piece's device, requiring grad.
        dim: Where the source's rows are; None for a source that each piece gets whole.
        start: The source's row at which the leaf begins; 0 for a source that each piece gets whole.
    """

    source: Tensor
    leaf: Tensor
    dim: int | None
    start: int

    def gradient(self, share: float = 1.0) -> InputGradient:
        """A share of the leaf's gradient, on the source's device, so that the leaf can be dropped."""
        grad = self.leaf.grad
        if grad is not None:
            grad = grad.to(self.source.device) if share == 1.0 else grad.to(self.source.device) * share
        return InputGradient(self.source, grad, self.dim, self.start)


def input_gradients(collected: Iterable[InputGradient]) -> list[tuple[Tensor, Tensor]]:
    """Put the pieces' gradients together.

    A source that was entered several times (under two names, say) gets the sum over its entries. Rows whose
    piece has no gradient get zeros; a source without any gradient is left out.

    Args:
        collected: What `InputLeaf.gradient` gave, for all pieces, in any order.

    Returns:
        `(source, gradient)` for each source once; the gradient has the source's shape, type and device.
    """
    totals: dict[int, tuple[Tensor, Tensor]] = {}
    for source, grad, dim, start in collected:
        if grad is None:
            continue
        if id(source) not in totals:
            wide = source.dtype
            if dim is None:  # each piece adds a little to all of it
                wide = torch.promote_types(wide, widest_float(source.device))
            totals[id(source)] = source, torch.zeros_like(source, dtype=wide, requires_grad=False)
        total = totals[id(source)][1]
        place = total if dim is None else total.narrow(dim, start, grad.shape[dim])
        place.add_(grad.detach())
    return [(source, total.to(source.dtype)) for source, total in totals.values()]
