"""What is known of a kind of call as plain data, and back."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from anybatch.fit.need import Corrected, Need, PeakOfRows, Unknown
from anybatch.fit.pace import Pace
from anybatch.fit.record import Record
from anybatch.memory.curve import Curve

__all__ = ["loaded", "saved"]

_OF_RECORD = (
    "title",
    "how",
    "is_foreseen",
    "first_ratio",
    "has_gaps",
    "ceiling_rows",
    "limit_rows",
    "rows",
    "reason",
    "confirmed_rows",
    "is_measured",
    "failures",
)
_OF_NEED = ("hidden_bytes_per_row", "size_bytes", "penalty_bytes_per_row", "measured_rows")


def saved(record: Record) -> dict[str, Any]:
    """A record without what is read anew in each call, and without which sizes this process has used."""
    need = record.need
    return {
        **{name: getattr(record, name) for name in _OF_RECORD},
        **{name: getattr(need, name) for name in _OF_NEED},
        "extent": list(record.extent),
        "rates_rows_per_s": [[divisor, rates] for divisor, rates in record.pace.rates_rows_per_s.items()],
        **_saved_peaks(need.tensors),
    }


def _saved_peaks(peaks: PeakOfRows) -> dict[str, Any]:
    base, points = (peaks.predicted, peaks.points) if isinstance(peaks, Corrected) else (peaks, ())
    lines = None
    if isinstance(base, Curve):
        rows = zip(base.fixed_bytes.tolist(), base.row_bytes.tolist(), base.events, strict=True)
        lines = {"lines": [list(line) for line in rows], "is_aligned": base.is_aligned}
    return {"curve": lines, "points": [list(point) for point in points]}


def loaded(state: Mapping[str, Any]) -> Record:
    """The record that was saved."""
    need = Need(_loaded_peaks(state), **{name: state[name] for name in _OF_NEED})
    pace = Pace({divisor: list(rates) for divisor, rates in state["rates_rows_per_s"]})
    fields = {name: state[name] for name in _OF_RECORD}
    return Record(extent=tuple(state["extent"]), need=need, pace=pace, **fields)


def _loaded_peaks(state: Mapping[str, Any]) -> PeakOfRows:
    if state["curve"] is None:
        return Unknown()
    fixed_bytes, row_bytes, events = zip(*state["curve"]["lines"], strict=True)
    curve = Curve(np.array(fixed_bytes), np.array(row_bytes), events, state["curve"]["is_aligned"])
    points = tuple((rows, peak_bytes) for rows, peak_bytes in state["points"])
    return Corrected(curve, points) if points else curve
