"""Fresh gradients, then commit: a call accumulates beside the gradients that were there before.

Each leaf's `.grad` is set aside (a reference, no copy) as soon as the call may reach the leaf. What the
pieces accumulate is rescaled, shown to the leaf's hooks once, and added at the end; or dropped, and all is
as it was. Where gradients were None nothing is kept.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from anybatch.errors import LossError
from anybatch.fit.commit import prepare, run_after_hooks, write_all
from anybatch.fit.leaf import Leaf
from anybatch.fit.looks import Looks
from anybatch.fit.sums import is_low


class Gradients:
    """The gradients of every leaf that a call reaches.

    Attributes:
        is_committed: Has what was accumulated been added for good?
    """

    def __init__(self) -> None:
        self.is_committed = False
        self._leaves: dict[int, Leaf] = {}
        self._lasting: list[tuple[Leaf, Tensor]] = []
        self._looks: Looks | None = None
        self._has_low = False

    def watch(self, leaves: Iterable[tuple[str, Tensor]], *, lasts: bool = False) -> bool:
        """Sets the gradients and hooks of some named leaves aside; to be called before they get gradients.

        Args:
            leaves: Names and leaves.
            lasts: Do they stay alive as long as the call, so that they may be held?

        Returns:
            Was there a leaf that was not known?
        """
        count = len(self._leaves)
        for name, tensor in leaves:
            known = self._leaves.get(id(tensor))
            is_known = known is not None and known.reference() is tensor
            if not is_known and tensor.requires_grad and tensor.is_leaf:
                # Known first: whatever fails from here on, its hooks are given back.
                leaf = self._leaves[id(tensor)] = Leaf.of(tensor, name)
                leaf.cover()
                if lasts:
                    self._lasting.append((leaf, tensor))
                self._has_low = self._has_low or is_low(tensor.dtype)
        return len(self._leaves) > count

    def check_untouched(self, function: str) -> None:
        """Raises if the user's function changed a gradient: it ran backward, or zeroed them, itself.

        Raises:
            LossError: Names the leaf.
        """
        changed = None if self._looks is None else self._looks.touched()
        if changed is None:
            others = (leaf for leaf in self._leaves.values() if not leaf.is_looked_at)
            changed = next((leaf for leaf in others if leaf.was_touched()), None)
        if changed is not None:
            raise LossError(touched(function, changed.name))

    def explain(self, error: BaseException) -> bool:
        """Is the error torch's refusal to accumulate into a placeholder?"""
        has_placeholder = any(leaf.before is not None and not leaf.is_fresh for leaf in self._leaves.values())
        # torch has no error class of its own for this (2.13).
        return has_placeholder and "more than one element of the written-to tensor" in str(error)

    def make_fresh(self) -> None:
        """Lets newly watched leaves accumulate from nothing."""
        stale = [leaf for leaf in self._leaves.values() if not leaf.is_fresh]
        if stale:
            self._look_at_each()
        for leaf in stale:
            leaf.is_fresh = True
            leaf.put(None)

    def look(self) -> None:
        """Remembers how gradients look after a backward, for the next `check_untouched`."""
        if self._looks is not None and self._looks.has_same_gradients():
            self._looks.refresh()
        else:
            self._look_at_each()
            for leaf, _ in self._lasting:
                leaf.look_after_backward()
            # A sparse gradient grows in place, and is to be added up after each piece.
            dense = [(leaf, tensor) for leaf, tensor in self._lasting if not _is_sparse(tensor.grad)]
            self._looks = Looks([leaf for leaf, _ in dense], [tensor for _, tensor in dense])
        for leaf in self._leaves.values():
            if not leaf.is_looked_at:
                leaf.look_after_backward()

    def _look_at_each(self) -> None:
        """Lets each leaf remember its own gradient again, from now on."""
        if self._looks is not None:
            self._looks.give_back()
            self._looks = None

    def gather(self, share: float = 1.0, *, takes_all: bool = False) -> None:
        """Takes what a backward accumulated to where it is added up: of few digits, or all.

        Args:
            share: What gradients are still to be multiplied with; 1 unless all are taken.
            takes_all: Are gradients of all dtypes taken?
        """
        if takes_all or self._has_low:
            self._look_at_each()
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

        A hook that raises leaves it to `roll_back` to put all gradients and hooks back as they were.
        """
        sums = prepare([leaf for leaf in self._leaves.values() if leaf.reference() is not None])
        try:
            write_all(sums)
        except BaseException:
            self.is_committed = True  # it has been written to the end
            raise
        run_after_hooks(sums)
        self.is_committed = True

    def roll_back(self) -> None:
        """Drops what was accumulated. It takes no memory, and may be done again where it was cut short."""
        for leaf in self._leaves.values():
            leaf.give_hooks_back()
            leaf.roll_back()


def _is_sparse(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.layout is not torch.strided


def touched(function: str, leaf: str) -> str:
    return (
        "`apply`: the function returns the loss, and the call runs backward. "
        f"Got {function}, which changed the gradient of {leaf} itself. "
        "Take `.backward()` and `zero_grad()` out of it."
    )
