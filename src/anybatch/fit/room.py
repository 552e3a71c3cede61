"""What the pieces of a call may take: the budget less what is in use and what is left free."""

from dataclasses import dataclass
from typing import final

from anybatch.fit.budget import Amount, bytes_of
from anybatch.memory.device import is_accelerator
from anybatch.memory.state import MemoryState

__all__ = ["Room", "room_in"]

_MARGIN_RATIO = 0.005
_MARGIN_BYTES = 1 << 19
# The memory of a machine is shared with whatever else runs on it.
_SHARED_MARGIN_RATIO = 0.05


@final
@dataclass(frozen=True)
class Room:
    """What there is on a device.

    Attributes:
        budget_bytes: What this process may hold at all; None where nothing can tell.
        available_bytes: What it may still take, the margin left free; None where nothing can tell.
        margin_bytes: What is left free.
        source: Where the budget comes from.
    """

    budget_bytes: int | None
    available_bytes: int | None
    margin_bytes: int
    source: str


def room_in(state: MemoryState, budget: Amount | None, margin: Amount | None) -> Room:
    """The room that a budget leaves on a device, never more than the device has left.

    Args:
        state: The device's memory now.
        budget: The caller's; a fraction is one of the device's limit.
        margin: The caller's; a fraction is one of the budget.
    """
    asked_bytes = None if budget is None else bytes_of(budget, state.limit.amount_bytes, "budget")
    found = [each for each in (asked_bytes, state.budget.amount_bytes) if each is not None]
    if not found or state.live.amount_bytes is None:
        return Room(None, None, 0, "nothing tells")
    budget_bytes = min(found)
    source = "`budget`" if budget_bytes == asked_bytes else state.limit.source
    left_bytes = max(0, budget_bytes - state.live.amount_bytes + state.reusable_bytes)
    if margin is not None:
        margin_bytes = bytes_of(margin, budget_bytes, "margin") or 0
    else:
        margin_bytes = _default_margin_bytes(state, left_bytes, is_own=budget_bytes == asked_bytes)
    return Room(budget_bytes, max(0, left_bytes - margin_bytes), margin_bytes, source)


def _default_margin_bytes(state: MemoryState, left_bytes: int, *, is_own: bool) -> int:
    is_limit = state.budget.amount_bytes == state.limit.amount_bytes or is_accelerator(state.device)
    ratio = _MARGIN_RATIO if is_own or is_limit else _SHARED_MARGIN_RATIO
    return int(left_bytes * ratio) + _MARGIN_BYTES
