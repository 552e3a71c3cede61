"""Activation checkpointing: blocks run again in backward, so that only their inputs are kept."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import isclass
from typing import Any, ClassVar, final

import torch
from torch import nn

from anybatch.errors import TechniqueError
from anybatch.techniques.blocks import Blocks, named_blocks, repeated_blocks
from anybatch.techniques.recompute import Recomputed
from anybatch.techniques.technique import Setting, Technique

_AUTO = "auto"


@final
@dataclass(frozen=True)
class Checkpointing(Technique):
    """Keeps the inputs of blocks only, and runs their forward again in backward.

    A step then runs forward nearly twice. Running statistics and other buffers are written once, and what is
    drawn at random is drawn the same again, on every device and from generators of the block's own.

    Error: exact. A block that would do something else the second time is refused, by name.

    Source: Chen, Xu, Zhang and Guestrin, "Training deep nets with sublinear memory cost", 2016;
    `torch.utils.checkpoint`, in its non-reentrant form.

    Attributes:
        modules: `"auto"` for repeated blocks; or names of modules, with `*` for any part between two dots, or
            classes, or a sequence of these. Of nested ones the outer are taken.
        every: Take each `every`-th of the blocks, from the first on; at least 1.

    Raises:
        TechniqueError: An option is none of these.

    >>> Checkpointing("encoder.layers.*", every=2)
    Checkpointing(modules=('encoder.layers.*',), every=2)
    """

    recommendation: ClassVar[int | None] = 3
    source: ClassVar[str] = "Chen et al., Training deep nets with sublinear memory cost, 2016"
    exactness: ClassVar[str] = "Exact: the same operations run again on the same values."

    modules: str | type[nn.Module] | Sequence[str | type[nn.Module]] = _AUTO
    every: int = 1

    def __post_init__(self) -> None:
        wrong = [*_wrong_modules(self.modules), *_wrong_every(self.every)]
        if wrong:
            raise TechniqueError(
                f'`Checkpointing`: `modules` is "auto", or names or classes of modules, and `every` a whole '
                f'number of blocks. Got {" and ".join(wrong)}. Write Checkpointing("layers.*"), for example.'
            )
        if self.modules != _AUTO:
            object.__setattr__(self, "modules", _as_tuple(self.modules))

    def blocks(self, model: nn.Module) -> Blocks:
        """The modules that run again, by name.

        Raises:
            TechniqueError: There are none, or a name tells none.
        """
        found = self._found(model)
        names = list(found)[:: self.every]
        return {name: found[name] for name in names}

    def _found(self, model: nn.Module) -> Blocks:
        if self.modules != _AUTO:
            return named_blocks(model, _as_tuple(self.modules), "Checkpointing")
        blocks = repeated_blocks(model)
        if not blocks:
            raise TechniqueError(
                f'`Checkpointing`: `modules="auto"` takes blocks of one class that stand side by side. Got '
                f"{type(model).__name__}, which has none. Name the modules that are to run again."
            )
        return blocks

    def check(self, setting: Setting) -> None:
        if isinstance(setting.model, nn.DataParallel):
            raise TechniqueError(
                "`Checkpointing`: a block runs again with its own weights. Got DataParallel, whose replicas "
                "have weights of their own. Apply it without DataParallel."
            )
        for name, module in self.blocks(setting.model).items():
            _check_block(name, module)

    @contextmanager
    def applied(self, setting: Setting) -> Iterator[None]:
        self.check(setting)
        with ExitStack() as stack:
            for name, module in self.blocks(setting.model).items():
                stack.enter_context(_forward_as(module, Recomputed(name, module, "Checkpointing")))
            yield


@contextmanager
def _forward_as(module: nn.Module, forward: Recomputed) -> Iterator[None]:
    """Gives one module another forward; its hooks still run once."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def _check_block(name: str, module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        reason, advice = "a scripted module, whose forward can't be exchanged", "Script it later"
    elif isinstance(vars(module).get("forward"), Recomputed):
        reason, advice = "which runs again already", "Apply one Checkpointing at a time"
    else:
        return
    raise TechniqueError(
        f"`Checkpointing`: a block is a module of Python code. Got {name}, {reason}. {advice}."
    )


def _as_tuple(modules: Any) -> tuple[str | type[nn.Module], ...]:
    return (modules,) if _is_one(modules) else tuple(modules)


def _is_one(value: Any) -> bool:
    return isinstance(value, str) or (isclass(value) and issubclass(value, nn.Module))


def _wrong_modules(modules: Any) -> list[str]:
    if _is_one(modules):
        return [] if modules != "" else ["modules=''"]
    is_right = isinstance(modules, (list, tuple)) and modules and all(map(_is_one, modules))
    return [] if is_right and _AUTO not in modules else [f"modules={modules!r}"]


def _wrong_every(every: Any) -> list[str]:
    is_right = isinstance(every, int) and not isinstance(every, bool) and every >= 1
    return [] if is_right else [f"every={every!r}"]
