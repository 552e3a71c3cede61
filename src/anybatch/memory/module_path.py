"""Which module of a model runs now, by its path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from torch.nn import Module
from torch.utils.hooks import RemovableHandle

__all__ = ["ModulePath"]


@final
class ModulePath:
    """Follows the modules of some models by hooks on each.

    Attributes:
        current: Path of the module that runs now, the innermost; empty where none does.
    """

    def __init__(self) -> None:
        self.current = ""
        self._outer: list[str] = []
        self._handles: list[RemovableHandle] = []

    def install(self, models: Sequence[Module]) -> None:
        """Begins to follow."""
        for position, model in enumerate(models):
            root = type(model).__name__ if len(models) == 1 else f"{position}:{type(model).__name__}"
            for name, module in model.named_modules():
                enter = self._entering(f"{root}.{name}" if name else root)
                self._handles.append(module.register_forward_pre_hook(enter))
                self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def remove(self) -> None:
        """Stops following; no hook stays."""
        while self._handles:
            self._handles.pop().remove()

    def _entering(self, path: str) -> Callable[..., None]:
        def enter(module: Module, args: Any) -> None:
            self._outer.append(self.current)
            self.current = path

        return enter

    def _leave(self, module: Module, args: Any, outputs: Any) -> None:
        if self._outer:
            self.current = self._outer.pop()
