"""A monitor's findings as a picture: what was in use over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from anybatch._monitor.findings import Findings
from anybatch.memory.phases import Phase
from anybatch.memory.reading import in_words
from anybatch.memory.timeline import Sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
_COLOURS = {
    Phase.FORWARD: "#56B4E9",
    Phase.BACKWARD: "#E69F00",
    Phase.OPTIMIZER: "#009E73",
    Phase.OTHER: "#BBBBBB",
}
_PEAK_COLOUR, _LIMIT_COLOUR, _LINE_COLOUR = "#D55E00", "#CC79A7", "#000000"
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
# A limit far above the peak would press the curve flat: it is named beside it instead.
_FAR_RATIO = 2.0


def draw(findings: Findings, path: Path) -> None:
    """Writes the picture; the ending of the path says its format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    unit_bytes, unit = next((size, name) for size, name in _UNITS if findings.peak_bytes >= size or size == 1)
    _draw_phases(axes, findings.samples, unit_bytes)
    top = _draw_levels(axes, findings, unit_bytes)
    axes.set_title(f"Memory on {findings.memory.device} over {findings.steps_done} steps")
    axes.set_xlabel("time [s]")
    axes.set_ylabel(f"in use, {findings.source} [{unit}]")
    axes.set_ylim(0, top)
    axes.margins(x=0)
    figure.legend(loc="outside lower center", ncols=7, frameon=False)
    figure.savefig(path, dpi=150)


def _draw_phases(axes: Axes, samples: Sequence[Sample], unit_bytes: int) -> None:
    """The curve, and below it an area in the colour of the phase."""
    samples = list(_without_gaps(samples))
    times = [sample.time_s for sample in samples]
    amounts = [sample.live_bytes / unit_bytes for sample in samples]
    for phase in Phase:
        is_phase = [sample.phase is phase for sample in samples]
        if any(is_phase):
            axes.fill_between(
                times, amounts, where=is_phase, color=_COLOURS[phase], linewidth=0, label=phase.value
            )
    axes.plot(times, amounts, color=_LINE_COLOUR, linewidth=0.8, label="in use")


def _without_gaps(samples: Sequence[Sample]) -> Iterator[Sample]:
    """The samples, and where the phase changes the last one of the old phase in the new one as well."""
    before: Sample | None = None
    for sample in samples:
        if before is not None and before.phase is not sample.phase:
            yield before._replace(phase=sample.phase)
        yield sample
        before = sample


def _draw_levels(axes: Axes, findings: Findings, unit_bytes: int) -> float:
    """The peak and the limit as lines; returns where the picture is to end above."""
    peak = findings.peak_bytes / unit_bytes
    words = f"peak {in_words(findings.peak_bytes)}"
    axes.axhline(peak, color=_PEAK_COLOUR, linestyle="--", linewidth=1.5, label=words)
    if findings.limit_bytes is None:
        return peak * 1.1
    limit = findings.limit_bytes / unit_bytes
    words = f"limit {in_words(findings.limit_bytes)}"
    if limit > peak * _FAR_RATIO:
        axes.plot([], [], color=_LIMIT_COLOUR, linestyle=":", linewidth=2, label=f"{words}, far above")
        return peak * 1.1
    axes.axhline(limit, color=_LIMIT_COLOUR, linestyle=":", linewidth=2, label=words)
    return max(limit, peak) * 1.05
