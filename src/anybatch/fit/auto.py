"""Sizes of micro-batches that nobody has to choose."""

from typing import final

from torch.optim import Optimizer

from anybatch.fit.budget import Amount, check_amount

_PREFER = ("fastest", "largest")


@final
class Auto:
    """Finds the largest number of rows in a micro-batch from the memory that there is.

    Args:
        budget: What this process may use on the device: bytes, `"6GiB"` or a fraction of the device's limit;
            None for what the device has left.
        prefer: `"fastest"` takes the size with the most rows per second of those that fit, `"largest"` the
            largest.
        margin: What is left free: bytes, `"64MiB"` or a fraction of the budget; None for a margin that
            follows how well the need is known.
        optimizer: What steps with the gradients. Its step is then fitted exactly; without it, as Adam's
            until it has been seen.
        largest: The largest number of rows ever tried; None for no bound.

    Raises:
        ValueError: An option is out of its range.
    """

    def __init__(
        self,
        budget: Amount | None = None,
        prefer: str = "fastest",
        margin: Amount | None = None,
        optimizer: Optimizer | None = None,
        largest: int | None = None,
    ) -> None:
        for name, amount in (("budget", budget), ("margin", margin)):
            if amount is not None:
                check_amount(amount, name)
        if prefer not in _PREFER:
            raise ValueError(f'`Auto`: `prefer` is one of {_PREFER}. Got {prefer!r}. Pass "fastest".')
        if largest is not None and (isinstance(largest, bool) or largest < 1):
            raise ValueError(
                f"`Auto`: `largest` is a number of rows, at least 1. Got {largest!r}. Pass None."
            )
        self.budget = budget
        self.prefer = prefer
        self.margin = margin
        self.optimizer = optimizer
        self.largest = largest
