"""Fresh gradients, then commit: a call accumulates beside the gradients that were there before.

Each leaf's `.grad` is set aside (a reference, no copy) as soon as the call may reach the leaf. What the
pieces accumulate is rescaled, shown to the leaf's hooks once, and added at the end; or dropped, and all is
as it was. Where gradients were None nothing is kept.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from anybatch.errors import LossError
from anybatch.exact import hooks
from anybatch.fit.sums import is_low, plus

Hook = Callable[[Tensor], Tensor | None]


@dataclass(eq=False, slots=True)
class _Leaf:
    """A leaf, what it had before the call, and how its gradient looked when the call last touched it.

    The leaf is held weakly: one that the function makes for itself dies with its piece (Rule 4). `total` has
    what was taken out of its gradient so far, to be added up with more digits or in blocks.
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

    def put(self, gradient: Tensor | None) -> None:
        tensor = self.reference()
        if tensor is not None:
            tensor.grad = gradient
        self.look()

    def look(self) -> None:
        tensor = self.reference()
        grad = self.seen = None if tensor is None else tensor.grad
        if grad is not None:
            self.seen_version = _version(grad)

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

    def coalesce(self) -> None:
        """Adds up what a sparse gradient holds of one row: it would grow with the mini-batch (Rule 4)."""
        tensor = self.reference()
        if tensor is not None and tensor.grad is not None:
            tensor.grad = tensor.grad.coalesce()
            self.look()

    def gradient(self) -> Tensor | None:
        tensor = self.reference()
        return None if tensor is None else tensor.grad

    def was_touched(self) -> bool:
        tensor = self.reference()
        if tensor is None:
            return False
        grad = tensor.grad
        return grad is not self.seen or (grad is not None and _version(grad) != self.seen_version)


def _version(gradient: Tensor) -> int:
    return -1 if gradient.is_inference() else gradient._version


class Gradients:
    """The gradients of every leaf that a call reaches."""

    def __init__(self) -> None:
        self._leaves: dict[int, _Leaf] = {}
        self._has_low = False

    def watch(self, leaves: Iterable[tuple[str, Tensor]]) -> bool:
        """Sets the gradients and hooks of some named leaves aside; to be called before they get gradients.

        Returns:
            Was there a leaf that was not known?
        """
        count = len(self._leaves)
        for name, tensor in leaves:
            known = self._leaves.get(id(tensor))
            is_known = known is not None and known.reference() is tensor
            if not is_known and tensor.requires_grad and tensor.is_leaf:
                leaf = _Leaf(
                    weakref.ref(tensor),
                    name,
                    tensor.grad,
                    hooks.take(tensor._backward_hooks),
                    hooks.take(tensor._post_accumulate_grad_hooks),
                )
                leaf.put(None if leaf.before is None else _placeholder(leaf.before))
                self._leaves[id(tensor)] = leaf
                self._has_low = self._has_low or is_low(tensor.dtype)
        return len(self._leaves) > count

    def check_untouched(self, function: str) -> None:
        """Raises if the user's function changed a gradient: it ran backward, or zeroed them, itself.

        Raises:
            LossError: Names the leaf.
        """
        for leaf in self._leaves.values():
            if leaf.was_touched():
                raise LossError(touched(function, leaf.name))

    def explain(self, error: BaseException) -> bool:
        """Is the error torch's refusal to accumulate into a placeholder?"""
        has_placeholder = any(leaf.before is not None and not leaf.is_fresh for leaf in self._leaves.values())
        # torch has no error class of its own for this (2.13).
        return has_placeholder and "more than one element of the written-to tensor" in str(error)

    def make_fresh(self) -> None:
        """Lets newly watched leaves accumulate from nothing."""
        for leaf in self._leaves.values():
            if not leaf.is_fresh:
                leaf.is_fresh = True
                leaf.put(None)

    def look(self) -> None:
        """Remembers how gradients look after a backward, for the next `check_untouched`."""
        for leaf in self._leaves.values():
            leaf.look()
            if leaf.seen is not None and leaf.seen.layout is torch.sparse_coo:
                leaf.coalesce()

    def gather(self, share: float = 1.0, *, takes_all: bool = False) -> None:
        """Takes what a backward accumulated to where it is added up: of few digits, or all.

        Args:
            share: What gradients are still to be multiplied with; 1 unless all are taken.
            takes_all: Are gradients of all dtypes taken?
        """
        if takes_all or self._has_low:
            with torch.no_grad():
                for leaf in self._leaves.values():
                    leaf.gather(share, takes_all=takes_all)

    def settle(self, ratio: float) -> None:
        """Puts all that was added up where gradients are, times a ratio."""
        with torch.no_grad():
            for leaf in self._leaves.values():
                leaf.settle(ratio)

    def commit(self) -> None:
        """Runs each leaf's hooks once, and adds what was accumulated to what was there before.

        A hook that raises leaves all gradients as they were: the hooks run before anything is added in
        place, and post-accumulate hooks see sums that are no one else's.
        """
        with torch.no_grad():
            taken = [
                (leaf, list(leaf.hooks.values()), list(leaf.after_hooks.values())) for leaf in self._alive()
            ]
            # First, so that a hook that removes itself is gone.
            self._give_hooks_back()
            found = [(leaf, _hooked(leaf, own), after) for leaf, own, after in taken]
            is_in_place = not any(after for _, gradient, after in found if gradient is not None)
            for leaf, gradient, _ in found:
                leaf.put(leaf.before if gradient is None else _sum(leaf.before, gradient, is_in_place))
            for leaf, gradient, after in found:
                tensor = leaf.reference()
                if gradient is not None and tensor is not None:
                    for hook in after:
                        hook(tensor)

    def _alive(self) -> list[_Leaf]:
        return [leaf for leaf in self._leaves.values() if leaf.reference() is not None]

    def roll_back(self) -> None:
        """Drops what was accumulated."""
        self._give_hooks_back()
        for leaf in self._leaves.values():
            leaf.total = None
            leaf.put(leaf.before)

    def _give_hooks_back(self) -> None:
        for leaf in self._leaves.values():
            tensor = leaf.reference()
            if tensor is not None:
                hooks.give_back(tensor._backward_hooks, leaf.hooks)
                hooks.give_back(tensor._post_accumulate_grad_hooks, leaf.after_hooks)
            leaf.hooks, leaf.after_hooks = {}, {}


def _scaled(gradient: Tensor, ratio: float) -> Tensor:
    """The gradient, multiplied in place; by its values where it is sparse, for `mul_` undoes `coalesce`."""
    if ratio != 1.0:
        (gradient._values() if gradient.layout == torch.sparse_coo else gradient).mul_(ratio)
    return gradient


def _placeholder(gradient: Tensor) -> Tensor:
    """Stands for a gradient while the user's function runs: it shows a `zero_grad`, and takes no memory.

    As all its elements are one, torch refuses to accumulate into it.
    """
    with torch.inference_mode(False):
        return torch.zeros((), dtype=gradient.dtype, device=gradient.device).expand(gradient.shape)


def touched(function: str, leaf: str) -> str:
    return (
        "`apply`: the function returns the loss, and the call runs backward. "
        f"Got {function}, which changed the gradient of {leaf} itself. "
        "Take `.backward()` and `zero_grad()` out of it."
    )


def _hooked(leaf: _Leaf, own: Iterable[Hook]) -> Tensor | None:
    """The accumulated gradient as the leaf's own hooks leave it."""
    gradient = leaf.gradient() if leaf.is_fresh else None
    if gradient is None:
        return None
    for hook in own:
        replaced = hook(gradient)
        gradient = gradient if replaced is None else replaced
    return gradient


def _sum(before: Tensor | None, gradient: Tensor, is_in_place: bool) -> Tensor:
    if before is None:
        return gradient
    if before.layout != gradient.layout:
        return before + gradient if before.layout == torch.strided else gradient + before
    return before.add_(gradient) if is_in_place else before + gradient
