"""One leaf of a call: what it had before, and what it accumulates meanwhile."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from anybatch.exact import hooks
from anybatch.fit.sums import is_low, plus

Hook = Callable[[Tensor], Tensor | None]


@dataclass(eq=False, slots=True)
class Leaf:
    """A leaf, what it had before the call, and how its gradient looked when the call last touched it.

    The leaf is held weakly: one that the function makes for itself dies with its piece (Rule 4). `total` has
    what was taken out of its gradient so far, to be added up with more digits or in blocks. `saved` has the
    values that `before` had, where they were written over and may have to be put back. `is_looked_at` says
    that others remember how its gradient looked.
    """

    reference: weakref.ref[Tensor]
    name: str
    before: Tensor | None
    hooks: dict[int, Hook]
    after_hooks: dict[int, Callable[[Tensor], None]]
    is_fresh: bool = False
    seen: Tensor | None = None
    seen_version: int = -1
    total: Tensor | None = None
    dtype: torch.dtype | None = None
    saved: Tensor | None = None
    is_looked_at: bool = False

    @classmethod
    def of(cls, tensor: Tensor, name: str) -> Leaf:
        """Takes the hooks of a leaf aside; its gradient is left where it is."""
        return cls(
            weakref.ref(tensor),
            name,
            tensor.grad,
            hooks.take(tensor._backward_hooks),
            hooks.take(tensor._post_accumulate_grad_hooks),
        )

    def cover(self) -> None:
        """Puts a placeholder where there is a gradient: it shows a `zero_grad`, and takes no memory.

        As all its elements are one, torch refuses to accumulate into it.
        """
        self.put(None if self.before is None else _placeholder(self.before))

    def put(self, gradient: Tensor | None) -> None:
        tensor = self.reference()
        if tensor is not None:
            tensor.grad = gradient
        self.look()

    def look(self) -> None:
        tensor = self.reference()
        grad = self.seen = None if tensor is None else tensor.grad
        if grad is not None:
            self.seen_version = version(grad)

    def look_after_backward(self) -> None:
        """Gives a new gradient memory of its own, and adds up what a sparse one holds of one row.

        torch accumulates in place. It lets the gradients of two leaves share memory where a view is between
        them and their sum: each would get what both accumulate (torch 2.13). A sparse gradient would grow
        with the mini-batch (Rule 4).
        """
        tensor = self.reference()
        gradient = None if tensor is None else tensor.grad
        if tensor is not None and gradient is not None:
            if self.seen is None and shares_memory(gradient):
                tensor.grad = gradient.clone()
            elif gradient.layout is torch.sparse_coo:
                tensor.grad = gradient.coalesce()
        self.look()

    def gather(self, share: float, *, takes_all: bool) -> None:
        """Takes a share of the gradient into the total, where it has few digits or all are to be taken."""
        tensor = self.reference()
        gradient = None if tensor is None else tensor.grad
        if tensor is not None and gradient is not None and (takes_all or is_low(gradient.dtype)):
            self.total, self.dtype = plus(self.total, gradient, share), gradient.dtype
            tensor.grad = self.seen = None

    def settle(self, ratio: float) -> None:
        """Puts the total times a ratio where gradients are."""
        gradient = self.gradient()
        if self.total is not None:
            total = self.total if gradient is None else plus(self.total, gradient, 1.0)
            self.total = None
            self.put(_scaled(total, ratio).to(self.dtype))
        elif gradient is not None:
            _scaled(gradient, ratio)

    def gradient(self) -> Tensor | None:
        tensor = self.reference()
        return None if tensor is None else tensor.grad

    def was_touched(self) -> bool:
        tensor = self.reference()
        if tensor is None:
            return False
        grad = tensor.grad
        return grad is not self.seen or (grad is not None and version(grad) != self.seen_version)

    def give_hooks_back(self) -> None:
        """Also those that have removed themselves since the call took them."""
        tensor = self.reference()
        if tensor is not None:
            hooks.give_back(tensor._backward_hooks, self.hooks)
            hooks.give_back(tensor._post_accumulate_grad_hooks, self.after_hooks)

    def roll_back(self) -> None:
        """Puts back what there was. It takes no memory, and may be done again where it was cut short."""
        self.total = None
        if self.before is not None and self.saved is not None:
            write(self.before, self.saved)
        self.put(self.before)


def write(target: Tensor, value: Tensor) -> None:
    """Writes a value into a tensor, which stays the same object; without memory of its own."""
    if target.layout == torch.strided:
        target.copy_(value)
    else:
        target.data = value


def shares_memory(gradient: Tensor) -> bool:
    """Does another tensor use the gradient's memory? Of tensors of a kind of their own nothing is known."""
    if type(gradient) is not Tensor or gradient.layout != torch.strided or gradient.is_nested:
        return False
    # The only way to ask (torch 2.13). Of the users one is the gradient, and one asks here.
    return int(torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)) > 2


def version(gradient: Tensor) -> int:
    """How often a gradient was written to."""
    return -1 if gradient.is_inference() else gradient._version


def _scaled(gradient: Tensor, ratio: float) -> Tensor:
    """The gradient, multiplied in place; by its values where it is sparse, for `mul_` undoes `coalesce`."""
    if ratio != 1.0:
        (gradient._values() if gradient.layout == torch.sparse_coo else gradient).mul_(ratio)
    return gradient


def _placeholder(gradient: Tensor) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros((), dtype=gradient.dtype, device=gradient.device).expand(gradient.shape)
