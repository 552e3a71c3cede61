"""What is known of a kind of call, in words: the need, the ceiling, the choice, and why."""

from collections.abc import Iterator

from anybatch.fit.need import Corrected, PeakOfRows
from anybatch.fit.pace import Pace
from anybatch.fit.record import Record
from anybatch.memory.curve import Curve
from anybatch.memory.reading import in_words

__all__ = ["GAPS", "explained"]

GAPS = (
    "Malloc keeps much of what is freed, so that a third or so less fits. Start with "
    'MALLOC_MMAP_THRESHOLD_=65536 in the environment, or pass `Auto(malloc="64KiB")`.'
)


def explained(record: Record) -> str:
    """A paragraph on one record."""
    return "\n".join([record.title, *(f"  {name:<9} {text}" for name, text in _lines(record))])


def _lines(record: Record) -> Iterator[tuple[str, str]]:
    yield "need", f"{_need(record.need.tensors)} ({record.how})"
    yield from _peak(record)
    yield from _measured(record)
    yield from _room(record)
    yield "ceiling", _rows(record.ceiling_rows)
    if record.has_gaps:
        yield "malloc", GAPS
    yield "choice", f"{_rows(record.rows)}: {record.reason}"
    if record.pace.rates_rows_per_s:
        yield "speed", _speeds(record.pace, record.ceiling_rows)
    if record.failures:
        yield (
            "failures",
            f"memory ran out {record.failures} times; each call was made again in smaller pieces",
        )


def _need(need: PeakOfRows) -> str:
    fixed_bytes = need.peak_bytes(0)
    ends = [(need.peak_bytes(rows) - fixed_bytes) // rows for rows in (2, 1024)]
    per_row = " to ".join(in_words(each) for each in sorted(set(ends)))
    return f"{in_words(fixed_bytes)} and {per_row} per row"


def _peak(record: Record) -> Iterator[tuple[str, str]]:
    tensors = record.need.tensors
    curve = tensors.predicted if isinstance(tensors, Corrected) else tensors
    if isinstance(curve, Curve):
        yield "peak", curve.at(max(1, record.rows))


def _measured(record: Record) -> Iterator[tuple[str, str]]:
    need = record.need
    if record.is_measured:
        hidden, kept = in_words(int(need.hidden_bytes_per_row)), in_words(need.size_bytes)
        yield "measured", f"{hidden} per row beside tensors, {kept} kept for each size of pieces"


def _room(record: Record) -> Iterator[tuple[str, str]]:
    room = record.room
    if room is None or room.available_bytes is None or room.budget_bytes is None:
        yield "room", "nothing tells how much memory there is"
        return
    yield (
        "room",
        f"{in_words(room.available_bytes)} of a budget of {in_words(room.budget_bytes)} ({room.source}), "
        f"{in_words(room.margin_bytes)} left free, "
        f"{in_words(record.step.state_bytes)} for state that the optimizer has yet to make",
    )


def _rows(rows: int) -> str:
    return "1 row" if rows == 1 else f"{rows} rows"


def _speeds(pace: Pace, ceiling_rows: int) -> str:
    tried = [(max(1, ceiling_rows // divisor), pace.best(divisor)) for divisor in pace.rates_rows_per_s]
    return ", ".join(f"{rate:.0f} rows/s in pieces of {_rows(rows)}" for rows, rate in tried if rate)
