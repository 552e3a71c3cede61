"""One step of the optimizer for the gradients of several calls."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch.amp import GradScaler
from torch.optim import Optimizer

from anybatch.errors import TechniqueError
from anybatch.techniques.technique import Setting, Technique
from anybatch.techniques.window import Window


@final
@dataclass(frozen=True)
class Accumulation(Technique):
    """Makes one step for every so many mini-batches, as if they were one of all their rows.

    Each counts by its rows, and a window that ends early is stepped with the rows that it has. At a given
    size of the loader's batches this lowers no peak: it is for larger batches than a loader gives. To get by
    with less memory at the same batch, cut it: `apply(..., ub_size=...)`.

    Error: exact for losses that are means over rows, up to rounding. A loss that is another mean is weighted
    by what it divides by, where that is given as its rows.

    Source: Ott et al., "Scaling neural machine translation", 2018, section 3.3.

    Attributes:
        steps: How many mini-batches make one step, at least 1.

    Raises:
        TechniqueError: `steps` is no such number.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with Accumulation(steps=4).window(optimizer) as window:
    ...     for x in torch.randn(10, 2).split(1):
    ...         with window.call(rows=1):
    ...             model(x).mean().backward()
    >>> window.steps  # of 4, 4 and 2 mini-batches
    3
    """

    recommendation: ClassVar[int | None] = 8
    source: ClassVar[str] = "Ott et al., Scaling neural machine translation, 2018"
    exactness: ClassVar[str] = "Exact for means over rows: the gradient of all rows of the window."

    steps: int

    def __post_init__(self) -> None:
        is_right = isinstance(self.steps, int) and not isinstance(self.steps, bool) and self.steps >= 1
        if not is_right:
            raise TechniqueError(
                f"`Accumulation`: `steps` is at least 1 mini-batch. Got steps={self.steps!r}. Write "
                f"Accumulation(steps=4), for example."
            )

    def check(self, setting: Setting) -> None:
        if setting.optimizer is None:
            raise TechniqueError(
                "`Accumulation`: it counts the steps of an optimizer. Got a setting without one. Give it, or "
                "leave it out of evaluation."
            )

    def window(
        self,
        optimizer: Optimizer,
        scheduler: Any = None,
        *,
        scaler: GradScaler | None = None,
        before_step: Callable[[], object] | None = None,
    ) -> Window:
        """Counts calls, and steps when there are enough of them.

        Args:
            optimizer: What is stepped. Its gradients are set to None here, and after each step.
            scheduler: Stepped once for each step of the optimizer that was made.
            scaler: What the losses are scaled by; it makes the steps, and is updated after each.
            before_step: Called when the gradients are those of the window, unscaled; for clipping.
        """
        return Window(self.steps, optimizer, scheduler, scaler, before_step)
