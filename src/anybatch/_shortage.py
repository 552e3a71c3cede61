"""What is said where memory does not suffice: what is needed, what there is, and what would help."""

import torch

from anybatch.errors import DoesNotFitError
from anybatch.fit.explanation import GAPS
from anybatch.fit.record import Record
from anybatch.memory.reading import in_words

__all__ = ["no_piece_fits", "no_step_fits"]

# With so much more than is needed, what malloc keeps is not the reason.
_MUCH_TIMES = 16


def no_piece_fits(function: str, device: torch.device, record: Record, rows: int) -> DoesNotFitError:
    """The error where not even the smallest piece fits.

    Args:
        function: The user's function.
        device: Where it was to run.
        record: What is known of such calls.
        rows: Rows of the smallest piece.
    """
    available_bytes = None if record.room is None else record.room.available_bytes
    needed_bytes = record.need.peak_bytes(rows) + record.step.state_bytes
    shortage = _shortage(device, rows, needed_bytes, available_bytes)
    return DoesNotFitError(
        f"`{function}`: no micro-batch fits. {shortage}. {_advice(record, rows)}",
        rows=rows,
        needed_bytes=needed_bytes,
        available_bytes=available_bytes,
    )


def no_step_fits(
    function: str, device: torch.device, needed_bytes: int, available_bytes: int
) -> DoesNotFitError:
    """The error where the optimizer's step does not fit, whatever the size of pieces."""
    return DoesNotFitError(
        f"`{function}`: the optimizer's step does not fit. It needs {in_words(needed_bytes)} with its "
        f"gradients, and {device} has {in_words(available_bytes)} for it. Freeze parameters, or take an "
        "optimizer with less state.",
        rows=0,
        needed_bytes=needed_bytes,
        available_bytes=available_bytes,
    )


def _shortage(device: torch.device, rows: int, needed_bytes: int, available_bytes: int | None) -> str:
    unit = "one row" if rows == 1 else f"{rows} rows, the least that BatchNorm takes"
    if available_bytes is not None and available_bytes < needed_bytes:
        needed, there = in_words(needed_bytes), in_words(available_bytes)
        return f"{needed} are needed for {unit}, and {device} has {there} for it"
    there = "" if available_bytes is None else f", where {in_words(available_bytes)} were to be had"
    return f"Memory of {device} ran out with {unit}{there}"


def _advice(record: Record, rows: int) -> str:
    """Which techniques would help, by what needs most."""
    available_bytes = record.available_bytes
    is_short = available_bytes is not None and available_bytes < _MUCH_TIMES * record.need.peak_bytes(rows)
    if record.has_gaps and record.failures and is_short:
        return GAPS
    fixed_bytes = record.need.tensors.peak_bytes(0) + record.step.state_bytes
    if fixed_bytes > record.need.tensors.peak_bytes(rows) // 2:
        return (
            "Most of it are gradients and the optimizer's state: freeze parameters, or take an optimizer "
            "with less state."
        )
    return "Most of it are activations: try `torch.utils.checkpoint`, autocast or a smaller input."
