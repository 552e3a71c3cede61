"""How the gradients of many leaves looked when the call last touched them: all at once, for speed.

Every piece asks twice. What is asked leaf by leaf in Python costs more than all else that a call adds.
"""

from collections.abc import Sequence
from operator import attrgetter, is_
from typing import final

from torch import Tensor

from anybatch.fit.leaf import Leaf, version

_gradient = attrgetter("grad")


@final
class Looks:
    """The gradients of leaves that stay alive as long as the call, in one order."""

    def __init__(self, leaves: Sequence[Leaf], tensors: Sequence[Tensor]) -> None:
        self._leaves = leaves
        self._tensors = tensors
        for leaf in leaves:
            leaf.is_looked_at = True
        self.refresh()

    def refresh(self) -> None:
        """Takes note of how they look now."""
        self._gradients = list(map(_gradient, self._tensors))
        self._versions = _versions(self._gradients)

    def give_back(self) -> None:
        """Lets each leaf remember its own gradient again, as it looked."""
        for leaf, gradient, number in zip(self._leaves, self._gradients, self._versions, strict=True):
            leaf.is_looked_at, leaf.seen, leaf.seen_version = False, gradient, number

    def has_same_gradients(self) -> bool:
        """Is each gradient still the same tensor, whatever its values?"""
        return all(map(is_, map(_gradient, self._tensors), self._gradients))

    def touched(self) -> Leaf | None:
        """A leaf whose gradient was replaced or written to; None where there is none."""
        gradients = list(map(_gradient, self._tensors))
        if all(map(is_, gradients, self._gradients)) and _versions(gradients) == self._versions:
            return None
        pairs = zip(self._leaves, gradients, self._gradients, self._versions, strict=True)
        return next(
            leaf
            for leaf, gradient, seen, number in pairs
            if gradient is not seen or (seen is not None and version(seen) != number)
        )


def _versions(gradients: Sequence[Tensor | None]) -> list[int]:
    try:
        return [-1 if gradient is None else gradient._version for gradient in gradients]
    except RuntimeError:  # an inference tensor has none
        return [-1 if gradient is None else version(gradient) for gradient in gradients]
