"""Fresh gradients, then commit: a call accumulates beside the gradients that were there before.

Each leaf's `.grad` is set aside (a reference, no copy) as soon as the call may reach the leaf. What the
pieces accumulate is rescaled, shown to the leaf's hooks once, and added at the end; or dropped, and all is
as it was. Where gradients were None nothing is kept.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anybatch.errors import LossError

Hook = Callable[[Tensor], Tensor | None]


@dataclass(eq=False)
class _Leaf:
    """A leaf, what it had before the call, and how its gradient looked when the call last touched it."""

    tensor: Tensor
    name: str
    before: Tensor | None
    hooks: dict[int, Hook]
    after_hooks: dict[int, Callable[[Tensor], None]]
    is_fresh: bool = False
    seen: Tensor | None = None
    seen_version: int = -1

    def put(self, gradient: Tensor | None) -> None:
        self.tensor.grad = gradient
        self.look()

    def look(self) -> None:
        self.seen = self.tensor.grad
        self.seen_version = -1 if self.seen is None else self.seen._version

    def was_touched(self) -> bool:
        grad = self.tensor.grad
        return grad is not self.seen or (grad is not None and grad._version != self.seen_version)


class Gradients:
    """The gradients of every leaf that a call reaches."""

    def __init__(self) -> None:
        self._leaves: dict[int, _Leaf] = {}

    def watch(self, leaves: Iterable[tuple[str, Tensor]]) -> None:
        """Sets the gradients and hooks of some named leaves aside; to be called before they get gradients."""
        for name, tensor in leaves:
            if id(tensor) not in self._leaves and tensor.requires_grad and tensor.is_leaf:
                leaf = _Leaf(
                    tensor,
                    name,
                    tensor.grad,
                    _taken(tensor._backward_hooks),
                    _taken(tensor._post_accumulate_grad_hooks),
                )
                leaf.put(None if leaf.before is None else _placeholder(leaf.before))
                self._leaves[id(tensor)] = leaf

    def check_untouched(self, function: str) -> None:
        """Raises if the user's function changed a gradient: it ran backward, or zeroed them, itself.

        Raises:
            LossError: Names the leaf.
        """
        for leaf in self._leaves.values():
            if leaf.was_touched():
                raise LossError(_touched(function, leaf.name))

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

    def commit(self, ratio: float) -> None:
        """Scales what was accumulated, runs each leaf's hooks once, and adds it to what was there before.

        Hooks run before anything is added in place, so that one that raises leaves all gradients as they
        were.
        """
        with torch.no_grad():
            found = {leaf: _finished(leaf, ratio) for leaf in self._leaves.values()}
            self._give_hooks_back()
            for leaf, gradient in found.items():
                leaf.tensor.grad = leaf.before
                if gradient is not None and leaf.after_hooks:
                    leaf.tensor.grad = gradient if leaf.before is None else leaf.before + gradient
            for leaf, gradient in found.items():
                for hook in leaf.after_hooks.values() if gradient is not None else ():
                    hook(leaf.tensor)
            for leaf, gradient in found.items():
                if gradient is not None and not leaf.after_hooks:
                    leaf.tensor.grad = gradient if leaf.before is None else _added(leaf.before, gradient)

    def roll_back(self) -> None:
        """Drops what was accumulated."""
        self._give_hooks_back()
        for leaf in self._leaves.values():
            leaf.tensor.grad = leaf.before

    def _give_hooks_back(self) -> None:
        for leaf in self._leaves.values():
            _give_back(leaf.tensor._backward_hooks, leaf.hooks)
            _give_back(leaf.tensor._post_accumulate_grad_hooks, leaf.after_hooks)


def _placeholder(gradient: Tensor) -> Tensor:
    """Stands for a gradient while the user's function runs: it shows a `zero_grad`, and takes no memory.

    As all its elements are one, torch refuses to accumulate into it.
    """
    return torch.zeros((), dtype=gradient.dtype, device=gradient.device).expand(gradient.shape)


def explain(error: RuntimeError, function: str) -> LossError | None:
    """What torch's refusal to accumulate into a placeholder means; None where the error is another."""
    # torch has no error class of its own for this (2.13).
    if "more than one element of the written-to tensor" in str(error):
        return LossError(_touched(function, "a parameter"))
    return None


def _touched(function: str, leaf: str) -> str:
    return (
        "`apply`: the function returns the loss, and the call runs backward. "
        f"Got {function}, which changed the gradient of {leaf} itself. "
        "Take `.backward()` and `zero_grad()` out of it."
    )


def _taken(hooks: Any) -> dict[int, Any]:
    """Empties the dictionary that autograd calls hooks from, and returns what was in it."""
    taken = dict(hooks or {})
    if hooks:
        hooks.clear()
    return taken


def _give_back(hooks: Any, taken: dict[int, Any]) -> None:
    if taken:
        added_meanwhile = dict(hooks)
        hooks.clear()
        hooks.update({**taken, **added_meanwhile})


def _finished(leaf: _Leaf, ratio: float) -> Tensor | None:
    gradient = leaf.tensor.grad if leaf.is_fresh else None
    if gradient is None:
        return None
    if ratio != 1.0:
        gradient.mul_(ratio)
    for hook in leaf.hooks.values():
        replaced = hook(gradient)
        gradient = gradient if replaced is None else replaced
    return gradient


def _added(before: Tensor, gradient: Tensor) -> Tensor:
    if before.layout != gradient.layout:
        return before + gradient if before.layout == torch.strided else gradient + before
    return before.add_(gradient)
