"""The end of a call: what each leaf accumulated is added to what was there, to all leaves or to none.

First the leaves' hooks see the gradients, and every sum is computed beside what was there: all that can fail
for want of memory. Then the sums are written where the gradients were, which takes no memory and can be
repeated. At last post-accumulate hooks run, with every gradient in place, as in plain PyTorch.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from anybatch.fit.guard import irrevocable, is_out_of_memory
from anybatch.fit.leaf import Hook, Leaf, shares_memory, write

# What torch answers where it refuses to write, as elements lie on each other; 2 is that it can't tell (2.13).
_OVERLAPS = 1


@final
@dataclass(frozen=True, eq=False)
class Sum:
    """What is to be written.

    Attributes:
        leaf: Whose gradient it is.
        value: The values that its gradient is to have; None where it is to be as it was.
        target: Where they are written; None where `value` itself becomes the gradient.
        after: The leaf's post-accumulate hooks.
    """

    leaf: Leaf
    value: Tensor | None
    target: Tensor | None
    after: list[Callable[[Tensor], None]]

    def write(self) -> None:
        if self.value is not None and self.target is not None:
            write(self.target, self.value)
        self.leaf.put(self.value if self.target is None else self.target)


def prepare(leaves: Sequence[Leaf]) -> list[Sum]:
    """Runs each leaf's hooks once, and computes what it accumulated plus what was there before.

    Whatever fails leaves what was there before untouched.
    """
    with torch.no_grad():
        taken = [(leaf, list(leaf.hooks.values()), list(leaf.after_hooks.values())) for leaf in leaves]
        # First, so that a hook that removes itself is gone.
        for leaf in leaves:
            leaf.give_hooks_back()
        found = [(leaf, _hooked(leaf, own), bool(own), after) for leaf, own, after in taken]
        if any(after for _, gradient, _, after in found if gradient is not None):
            _save([leaf for leaf, gradient, _, _ in found if gradient is not None])
        return [_sum(leaf, gradient, after, is_shown) for leaf, gradient, is_shown, after in found]


def write_all(sums: Iterable[Sum]) -> None:
    """Writes all sums; where that is cut short, to the end nevertheless: half of them would be wrong.

    Raises:
        BaseException: An interruption, when all is written.
    """
    with torch.no_grad():
        try:
            for one in sums:
                one.write()
        except BaseException as error:
            for one in sums:
                one.write()
            if not is_out_of_memory(error):
                raise


def run_after_hooks(sums: Iterable[Sum]) -> None:
    """Runs the post-accumulate hooks; they find every gradient in place.

    Raises:
        Exception: That of a hook. No further attempt may follow it, for such hooks may have made a step.
    """
    with torch.no_grad(), irrevocable():
        for one in sums:
            tensor = one.leaf.reference()
            if one.value is not None and tensor is not None:
                for hook in one.after:
                    hook(tensor)


def _hooked(leaf: Leaf, own: Iterable[Hook]) -> Tensor | None:
    """The accumulated gradient as the leaf's own hooks leave it."""
    gradient = leaf.gradient() if leaf.is_fresh else None
    if gradient is None:
        return None
    for hook in own:
        replaced = hook(gradient)
        gradient = gradient if replaced is None else _checked(replaced, gradient, leaf.name)
    return gradient


def _checked(replaced: Tensor, gradient: Tensor, name: str) -> Tensor:
    """What a hook returned: it must be like the gradient, as plain PyTorch wants it."""
    for trait in ("shape", "dtype", "device", "layout"):
        got, wanted = getattr(replaced, trait), getattr(gradient, trait)
        if got != wanted:
            raise RuntimeError(
                f"`apply`: a hook returns a gradient of the {trait} that it was given. "
                f"Got {got} for {wanted} of {name}. Mend the hook."
            )
    return replaced


def _save(leaves: Iterable[Leaf]) -> None:
    """Copies what will be written over, where a hook may still fail afterwards."""
    for leaf in leaves:
        if leaf.before is not None:
            leaf.saved = leaf.before.detach().clone()


def _sum(leaf: Leaf, gradient: Tensor | None, after: list[Callable[[Tensor], None]], is_shown: bool) -> Sum:
    """The sum of a gradient and what was there: in the gradient's own memory, if nobody else may hold it."""
    before = leaf.before
    if gradient is None:
        return Sum(leaf, None, before, after)
    if before is None:
        return Sum(leaf, gradient.clone() if shares_memory(gradient) else gradient, None, after)
    if before.layout != gradient.layout:
        mixed = before + gradient if before.layout == torch.strided else gradient + before
        return Sum(leaf, mixed, before if mixed.layout == before.layout else None, after)
    if not _can_be_written(before):
        return Sum(leaf, before + gradient, None, after)
    is_alike = before.dtype == gradient.dtype and before.device == gradient.device
    is_ours = is_alike and before.layout == torch.strided and not (is_shown or shares_memory(gradient))
    return Sum(leaf, gradient.add_(before) if is_ours else before + gradient, before, after)


def _can_be_written(tensor: Tensor) -> bool:
    """Will torch write to it? Asked before anything is written."""
    if tensor.layout == torch.strided and torch._debug_has_internal_overlap(tensor) == _OVERLAPS:
        return False
    return not tensor.is_inference()
