"""Freezing: parameters that are not trained need no gradient, no optimizer state, and save less."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anybatch.errors import TechniqueError
from anybatch.techniques.blocks import matches
from anybatch.techniques.technique import Setting, Technique

_MOST_NAMES = 6


@final
@dataclass(frozen=True)
class Freeze(Technique):
    """Takes parameters out of training for the length of a run.

    They get no gradient, and an optimizer passes them over, also its weight decay. Gradients that they have
    are put aside and are there again afterwards. Buffers are no parameters: BatchNorm in training mode still
    moves its statistics, so put frozen layers into eval mode where that is not wanted.

    Error: exact for the parameters that are trained; the others get no gradient.

    Source: Howard and Ruder, "Universal language model fine-tuning for text classification", 2018.

    Attributes:
        names: Names of parameters, or of modules for all that is in them; a `*` stands for anything between
            two dots. One name, or a sequence.

    Raises:
        TechniqueError: It is neither.

    >>> Freeze("encoder.layers.*.attention")
    Freeze(names=('encoder.layers.*.attention',))
    """

    recommendation: ClassVar[int | None] = 4
    source: ClassVar[str] = "Howard and Ruder, Universal language model fine-tuning, 2018"
    exactness: ClassVar[str] = "Exact for the parameters that are trained; frozen ones get no gradient."

    names: str | Sequence[str]

    def __post_init__(self) -> None:
        names = (self.names,) if isinstance(self.names, str) else self.names
        is_right = isinstance(names, (list, tuple)) and names and all(map(_is_name, names))
        if not is_right:
            raise TechniqueError(
                f"`Freeze`: `names` is the name of a module or parameter, or several. Got {self.names!r}. "
                'Write Freeze("encoder"), for example.'
            )
        object.__setattr__(self, "names", tuple(names))

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters that are frozen, by name.

        Raises:
            TechniqueError: A name tells none, or only one of several names of a parameter is told.
        """
        all_names = _names(model)
        for wanted in self.names:
            if not any(_is_meant(name, wanted) for names in all_names.values() for name in names):
                raise TechniqueError(_unknown(model, wanted))
        found = {}
        for parameter, names in all_names.items():
            told = [name for name in names if any(_is_meant(name, wanted) for wanted in self.names)]
            if told and len(told) < len(names):
                others = " and ".join(name for name in names if name not in told)
                raise TechniqueError(
                    f"`Freeze`: a parameter is frozen under all its names. Got {told[0]}, which is tied to "
                    f"{others}. Name both or neither."
                )
            if told:
                found[told[0]] = parameter
        return found

    def check(self, setting: Setting) -> None:
        if isinstance(setting.model, DistributedDataParallel):
            raise TechniqueError(
                "`Freeze`: DistributedDataParallel waits for the gradients of all parameters that it was "
                "given. Got a model that is wrapped already. Freeze before wrapping it."
            )
        frozen = self.parameters(setting.model)
        trained = {each for each in setting.model.parameters() if each.requires_grad}
        told = {each for each in frozen.values() if each.requires_grad}
        if not told:
            raise TechniqueError(
                f"`Freeze`: it takes something out of training. Got {', '.join(self.names)}, where nothing "
                "is trained. Name what is trained."
            )
        if told == trained:
            raise TechniqueError(
                f"`Freeze`: something must be left to train. Got {', '.join(self.names)}, which is all "
                "that is trained. Name less."
            )

    @contextmanager
    def applied(self, setting: Setting) -> Iterator[None]:
        self.check(setting)
        kept = [(each, each.grad) for each in self.parameters(setting.model).values() if each.requires_grad]
        try:
            for parameter, _ in kept:
                parameter.requires_grad_(False)
                parameter.grad = None
            yield
        finally:
            for parameter, gradient in kept:
                parameter.requires_grad_(True)
                parameter.grad = gradient


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Each parameter with all its names."""
    found: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[parameter].append(name)
    return found


def _is_meant(name: str, wanted: str) -> bool:
    """Is it the parameter that is wanted, or in a module that is?"""
    parts = name.split(".")
    return any(matches(".".join(parts[:length]), wanted) for length in range(1, len(parts) + 1))


def _unknown(model: nn.Module, wanted: str) -> str:
    names = list(dict.fromkeys(name.rpartition(".")[0] or name for name, _ in model.named_parameters()))
    shown = ", ".join(names[:_MOST_NAMES]) + (" and so on" if len(names) > _MOST_NAMES else "")
    return (
        f"`Freeze`: every name must tell parameters of {type(model).__name__}. Got {wanted!r}, which tells "
        f"none. It has {shown or 'no parameters'}."
    )
