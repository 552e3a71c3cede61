"""Sizes of micro-batches that nobody has to choose."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch
from torch.optim import Optimizer

from anybatch.fit.budget import Amount, bytes_of, check_amount
from anybatch.fit.explanation import explained
from anybatch.fit.optimizers import Optimizers
from anybatch.fit.record import Record
from anybatch.fit.saved import loaded, saved
from anybatch.memory.malloc import malloc_setting, set_mmap_threshold
from anybatch.memory.state import MemoryState
from anybatch.memory.watch import MemoryWatch

__all__ = ["Auto"]

_VERSION = 1
_PREFER = ("fastest", "largest")
# Rows that hold less than others, but not much less, share their size: they need no more memory.
_SHARED_RATIO = 1.25


@final
class Auto:
    """Finds the size of micro-batches from the memory that there is.

    The first call of each kind and shape runs the function symbolically, which takes no memory, at two and
    three rows and at the size that follows. Its pieces are part of the mini-batch like any other: no step is
    thrown away. What they really took corrects the size of later calls. Where memory runs out nevertheless,
    the call is rolled back and made again with smaller pieces.

    One object may serve several functions; what it knows of them is kept apart.

    Args:
        budget: What this process may use on the device: bytes, `"6GiB"` or a fraction of the device's limit;
            None for what the device has left.
        prefer: `"fastest"` takes the size with the most rows per second of those that fit, found out over the
            first calls by halving; `"largest"` the largest. A mini-batch that fits whole is not cut.
        margin: What is left free: bytes, `"64MiB"` or a fraction of the budget; None for 0.5 % of what
            is left and 0.5 MiB, and for 5 % where all that limits this process is the machine's memory.
        optimizer: What steps with the gradients. The state that its first step makes is then known exactly;
            without it, it is taken for Adam's until a step has been seen.
        largest: The largest number of rows of a piece; None for no bound.
        malloc: From which size on glibc gives memory back as soon as it is freed: bytes or `"64KiB"`.
            Larger micro-batches then fit on a CPU; small tensors get slower where it is below them. It holds
            for the whole process from now on. None leaves malloc alone.

    Raises:
        ValueError: An option is out of its range, or `malloc` is given where memory does not come from glibc.

    Source:
        Micro-batches of a size that is searched for: Piao et al., IEEE Access 2023, leave it to the user.

    Example:
        >>> import torch, anybatch
        >>> model = torch.nn.Linear(3, 2)
        >>> auto = anybatch.Auto(budget="64GiB", prefer="largest")
        >>> @anybatch.apply(["x"], ub_size=auto)
        ... def train_fn(x):
        ...     return model(x).square().mean()
        >>> loss = train_fn(x=torch.randn(10, 3))
        >>> "train_fn" in str(auto)
        True
    """

    def __init__(
        self,
        budget: Amount | None = None,
        prefer: str = "fastest",
        margin: Amount | None = None,
        optimizer: Optimizer | None = None,
        largest: int | None = None,
        malloc: Amount | None = None,
    ) -> None:
        for name, amount in (("budget", budget), ("margin", margin)):
            if amount is not None:
                check_amount(amount, name)
        if prefer not in _PREFER:
            raise ValueError(f'`Auto`: `prefer` is one of {_PREFER}. Got {prefer!r}. Pass "fastest".')
        if not (largest is None or (type(largest) is int and largest >= 1)):
            raise ValueError(
                f"`Auto`: `largest` is a number of rows, at least 1. Got {largest!r}. Pass None."
            )
        if not (optimizer is None or isinstance(optimizer, Optimizer)):
            raise ValueError(
                "`Auto`: `optimizer` is a `torch.optim.Optimizer`. "
                f"Got {type(optimizer).__name__}. Pass one, or None."
            )
        if malloc is not None:
            _set_malloc(malloc)
        self.budget = budget
        self.prefer = prefer
        self.margin = margin
        self.largest = largest
        self.optimizers = Optimizers(optimizer)
        self._records: dict[str, list[Record]] = {}
        self._watches: dict[torch.device, MemoryWatch] = {}

    def memory(self, device: torch.device) -> MemoryState:
        """The memory of a device now."""
        if device not in self._watches:
            self._watches[device] = MemoryWatch(device)
        return self._watches[device].read()

    def record(
        self, kind: str, extent: tuple[int, ...], look: Callable[[], Record], *, keeps: bool = True
    ) -> Record:
        """What is known of calls of one kind with rows of one shape, or of one that holds a little more.

        Args:
            kind: What the calls have in common beside the shape.
            extent: The shape of a row.
            look: Finds out about a shape that is not known.
            keeps: Is what it finds to be kept for later calls?
        """
        known = self._records.setdefault(kind, [])
        for record in known:
            if record.extent == extent:
                return record
        sharing = [record for record in known if _covers(record.extent, extent)]
        if sharing:
            return min(sharing, key=lambda record: record.extent)
        found = look()
        if keeps:
            known.append(found)
        return found

    def state_dict(self) -> dict[str, Any]:
        """What is known, as plain data: a run that goes on with it chooses as this one would.

        Returns:
            Numbers, strings, lists and dicts only; `torch.save` and `json.dump` take it.
        """
        # What no call has measured yet is found out anew.
        kinds = {
            kind: [saved(record) for record in records if record.is_measured]
            for kind, records in self._records.items()
        }
        return {"version": _VERSION, "kinds": kinds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what another run knew, in place of what is known here.

        Raises:
            ValueError: It comes from another version of the library.
        """
        if state.get("version") != _VERSION:
            raise ValueError(
                f"`Auto`: a state is loaded by the version that saved it, {_VERSION} here. "
                f"Got {state.get('version')!r}. Let it find the sizes anew."
            )
        self._records = {kind: list(map(loaded, records)) for kind, records in state["kinds"].items()}

    def explain(self) -> None:
        """Prints what is known of each kind of call: need, room, ceiling, choice and why."""
        print(self)

    def __str__(self) -> str:
        known = [explained(record) for record in self]
        return "\n".join(known) if known else "Auto: no call was made yet"

    def __iter__(self) -> Iterator[Record]:
        """What is known, record by record."""
        for records in self._records.values():
            yield from records


def _set_malloc(threshold: Amount) -> None:
    threshold_bytes = bytes_of(threshold, None, "malloc")
    if not (threshold_bytes and set_mmap_threshold(threshold_bytes)):
        raise ValueError(
            "`Auto`: `malloc` is bytes, at least 1, from which on glibc maps memory by itself. "
            f"Got {threshold!r}, and glibc's malloc {'is' if malloc_setting() else 'is not'} in use. "
            'Pass "64KiB", or None.'
        )


def _covers(large: tuple[int, ...], small: tuple[int, ...]) -> bool:
    """Does a row of the first shape need as much as one of the second, and not much more?"""
    pairs = list(zip(large, small, strict=True))
    return all(small <= large <= _SHARED_RATIO * small for large, small in pairs)
