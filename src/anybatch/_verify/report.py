"""What `verify` found, and how it is printed."""

import math
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from anybatch.errors import InexactError

_WIDTH = 79


@dataclass(frozen=True)
class Verification:
    """A call in micro-batches against the call whole.

    Attributes:
        function: The name of the function.
        is_exact: Is the largest difference allowed, and was no loss refused?
        rows: Of the mini-batch.
        sizes: Rows of each micro-batch.
        loss_whole: The loss of the call whole; by name where the function returns a dict of losses.
        loss_in_pieces: The loss of the call in micro-batches; nan where it could not be run.
        loss_error_ratio: The largest difference of a loss, relative to the loss or to the largest gradient,
            whichever is larger.
        largest_error_ratio: The largest difference of a gradient, relative to the largest gradient; infinite
            where only one of the two calls gives a gradient, or a finite one.
        parameter: The parameter, or batch entry, in whose gradient that is; None where all are the same.
        allowed_ratio: The largest difference that counts as equal.
        allowed_because: Why so much.
        causes: What makes the difference, by name, and what to do; empty for an exact call.
        switched_off: The causes that could be switched off.
        remaining_error_ratio: The largest difference that is left with these switched off; None where there
            are none.
        is_explained: Is nothing left then but what is allowed? True for an exact call.
        notes: What else there is to know.
    """

    function: str
    is_exact: bool
    rows: int
    sizes: tuple[int, ...]
    loss_whole: float | Mapping[str, float]
    loss_in_pieces: float | Mapping[str, float]
    loss_error_ratio: float
    largest_error_ratio: float
    parameter: str | None
    allowed_ratio: float
    allowed_because: str
    causes: tuple[str, ...] = ()
    switched_off: tuple[str, ...] = ()
    remaining_error_ratio: float | None = None
    is_explained: bool = True
    notes: tuple[str, ...] = ()

    def raise_if_inexact(self) -> None:
        """Does nothing for an exact call.

        Raises:
            InexactError: The call is not exact. It has the causes.
        """
        if not self.is_exact:
            raise InexactError(
                "`verify`: micro-batches give the gradients of the whole mini-batch. Got from "
                f"{self.function}: gradients {_found(self)}. {' '.join(self.causes)}",
                self.causes,
            )

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(found: Verification) -> Iterator[str]:
    yield f"{found.function}: {'exact' if found.is_exact else 'not exact'}"
    rows = list(_rows(found))
    width = max(len(label) for label, _ in rows) + 2
    for label, text in rows:
        yield _filled(f"  {label:<{width}}{text}", indent=width + 2)
    if found.causes:
        yield ""
        yield "Why:" if len(found.causes) == 1 else f"Why, {len(found.causes)} causes:"
    for cause in found.causes:
        yield _filled(f"- {cause}", indent=2)
    if found.remaining_error_ratio is not None:
        yield ""
        yield _filled(_remaining(found, found.remaining_error_ratio))
    for note in found.notes:
        yield ""
        yield _filled(note)


def _filled(text: str, indent: int = 0) -> str:
    # What is in brackets begins on the line of the word that it belongs to.
    bound = text.replace(" (", "\0(")
    filled = textwrap.fill(bound, _WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)
    return filled.replace("\0", " ")


def _rows(found: Verification) -> Iterator[tuple[str, str]]:
    yield "mini-batch", f"{_count(found.rows, 'row')}, in {_sizes(found.sizes)}"
    for name, whole, pieces in _losses(found):
        yield f"loss {name}".strip(), f"{whole:.10g} whole, {pieces:.10g} in pieces"
    yield "gradients", _found(found)
    yield "allowed", f"{found.allowed_ratio:.2g}: {found.allowed_because}"


def _losses(found: Verification) -> Iterator[tuple[str, float, float]]:
    whole, pieces = found.loss_whole, found.loss_in_pieces
    if not isinstance(whole, Mapping):
        yield "", whole, math.nan if isinstance(pieces, Mapping) else pieces
        return
    for name, value in whole.items():
        yield name, value, pieces[name] if isinstance(pieces, Mapping) else math.nan


def _found(found: Verification) -> str:
    if not found.largest_error_ratio:
        return "are the same"
    where = f", in {found.parameter}" if found.parameter else ""
    if math.isinf(found.largest_error_ratio):
        return f"are missing, or not finite, on one side only{where}"
    return f"differ by at most {_figure(found.largest_error_ratio)} of the largest one{where}"


def _remaining(found: Verification, ratio: float) -> str:
    *first, last = found.switched_off
    what = f"{', '.join(first)} and {last}" if first else last
    difference = f"{_figure(ratio)}: exact" if found.is_explained else f"still {_figure(ratio)}"
    return f"Without {what} the difference is {difference}."


def _figure(ratio: float) -> str:
    return f"{ratio:.1e}" if ratio < 1e-3 else f"{ratio:.2g}"


def _sizes(sizes: tuple[int, ...]) -> str:
    (pieces, rows), *others = [(sizes.count(rows), rows) for rows in dict.fromkeys(sizes)]
    further = [f" and {pieces} of {rows}" for pieces, rows in others]
    return f"{_count(pieces, 'piece')} of {rows}{''.join(further)}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
