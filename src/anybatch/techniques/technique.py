"""What every technique has: what it costs, where it can't work, and the hooks by which a run uses it."""

from abc import ABC
from collections.abc import Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, final

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from anybatch.memory.device import device_of
from anybatch.techniques.loader_options import LoaderOptions


@final
@dataclass(frozen=True, eq=False)
class Setting:
    """What a technique is to work on.

    Attributes:
        model: The model that is trained.
        optimizer: What trains it; None where it is evaluated only.
        device: Where its forward runs.
    """

    model: nn.Module = field(repr=False)
    optimizer: Optimizer | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer | None = None) -> Self:
        """A model where it is: on the device of its first parameter, or the host where it has none."""
        return cls(model, optimizer, device_of(model.parameters()) or torch.device("cpu"))


class Technique(ABC):
    """A way to use less memory: plain data that says what it does, and undoes it.

    Every kind of technique is a final, frozen dataclass whose options are checked when it is made. What it
    needs to know of a run comes with the `Setting`, so that one technique can serve any number of runs.
    A hook that a technique does not need does nothing.

    Attributes:
        recommendation: Its number among the eleven of the guide; None where it is none of them.
        source: Where it comes from.
        exactness: What it does to the gradient, in one sentence.
    """

    recommendation: ClassVar[int | None] = None
    source: ClassVar[str]
    exactness: ClassVar[str]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        missing = [name for name in ("source", "exactness") if not getattr(cls, name, "")]
        if missing:
            raise TypeError(f"`{cls.__name__}`: a technique says its {' and its '.join(missing)}. Got none.")

    def check(self, setting: Setting) -> None:  # noqa: B027
        """Can it work here?

        Raises:
            TechniqueError: It can't, and why (Rule 8).
        """

    def conflicts_with(self, other: "Technique") -> str | None:
        """Why the two don't go together; None where they do. It is enough that one of them knows."""
        return None

    def applied(self, setting: Setting) -> AbstractContextManager[None]:
        """A context in which the model and the optimizer are changed; afterwards they are as they were.

        Raises:
            TechniqueError: It can't work here, and why; nothing is changed.
        """
        self.check(setting)
        return nullcontext()

    def forward(self, setting: Setting) -> AbstractContextManager[None]:
        """A context for the forward run of one piece, and for nothing else."""
        return nullcontext()

    def scaler(self, setting: Setting) -> GradScaler | None:
        """A new scaler for the losses of a run; None where they need none."""
        return None

    def after_step(self, setting: Setting, step: int) -> None:  # noqa: B027
        """What is done when a step of the optimizer has ended; the first one has number 1."""

    def loading(self, options: LoaderOptions, setting: Setting) -> LoaderOptions:
        """The options that the loader gets in place of these."""
        return options

    def sample(self, dataset: Sized) -> Sized:
        """The rows that are trained on: the dataset, or a part of it."""
        return dataset
