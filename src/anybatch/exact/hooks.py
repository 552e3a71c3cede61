"""The hooks of leaves, set aside while something else than the user's own backward computes gradients."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


def take(hooks: Any) -> dict[int, Any]:
    """Empties the dictionary that autograd calls hooks from, and returns what was in it."""
    taken = dict(hooks or {})
    if hooks:
        hooks.clear()
    return taken


def give_back(hooks: Any, taken: dict[int, Any]) -> None:
    """Puts hooks back before those that were added meanwhile."""
    if taken:
        added_meanwhile = dict(hooks)
        hooks.clear()
        hooks.update({**taken, **added_meanwhile})


@contextmanager
def aside(leaves: Iterable[Tensor]) -> Iterator[None]:
    """A context in which the leaves' hooks don't run."""
    taken = [(leaf, take(leaf._backward_hooks)) for leaf in leaves]
    try:
        yield
    finally:
        for leaf, hooks in taken:
            give_back(leaf._backward_hooks, hooks)
