"""The demo's chart: memory against the cap, and the gradient error of each way to accumulate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from anybatch.cli.demo.messages import Found
from anybatch.cli.demo.settings import MIB, UNEVEN_CASE, Settings
from anybatch.cli.demo.stage import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

# Okabe and Ito's palette, told apart by colour-blind readers.
_OTHERS = "#D55E00"
_OURS = "#0072B2"
_CAP = "#000000"
_ROUNDING = 2.0**-52
_AXIS_START = 1e-17
_AXIS_END = 1e2
# How far beyond the ceiling the curve is drawn.
_SHOWN_TIMES = 1.6


def draw(settings: Settings, outcome: Outcome, file: Path) -> None:
    """Draws the chart as a PNG file."""
    # Loaded here, where it is used, and without pyplot, which would look for a screen.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.2), dpi=130, layout="constrained")
    memory, curve, errors = figure.subplots(1, 3, width_ratios=(1, 1.1, 1.25))
    _draw_memory(memory, settings, outcome)
    if outcome.pieces.found is None:
        curve.set_axis_off()
    else:
        _draw_curve(curve, outcome.pieces.found)
    _draw_errors(errors, outcome)
    figure.savefig(file)


def _draw_memory(axes: Axes, settings: Settings, outcome: Outcome) -> None:
    found = outcome.pieces.found
    size = "" if found is None else f" of {found.rows}"
    names = ["whole,\nplain PyTorch", f"micro-batches{size},\nanybatch"]
    peaks_mib = [each / MIB for each in (outcome.comparison.whole_peak_bytes, outcome.pieces.peak_bytes or 0)]
    bars = axes.bar(names, peaks_mib, color=[_OTHERS, _OURS], width=0.6)
    axes.bar_label(bars, fmt="%.0f MiB", label_type="center", color="white", weight="bold")
    if outcome.pieces.cap_in_force and settings.cap_bytes is not None:
        cap_mib = settings.cap_bytes / MIB
        axes.axhline(cap_mib, color=_CAP, linestyle="--", label=f"cap, {cap_mib:.0f} MiB")
        axes.legend(loc="upper right", frameon=False)
    axes.set_title(f"Peak memory of training\nmini-batch of {outcome.rows:,} images")
    axes.set_ylabel("MiB on top of Python, torch and the data")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_curve(axes: Axes, found: Found) -> None:
    """What micro-batches need by their rows, what there is for them, and what was chosen."""
    need_mib = {int(rows): amount / MIB for rows, amount in found.curve_bytes.items()}
    shown = {rows: amount for rows, amount in need_mib.items() if rows <= _SHOWN_TIMES * found.ceiling_rows}
    axes.plot(list(shown), list(shown.values()), color=_OURS, label="needed")
    if found.available_bytes is not None:
        there_mib = found.available_bytes / MIB
        axes.axhline(there_mib, color=_CAP, linestyle="--", label=f"to be had, {there_mib:.0f} MiB")
    axes.axvline(
        found.ceiling_rows, color=_OTHERS, linestyle=":", label=f"ceiling, {found.ceiling_rows} rows"
    )
    nearest = min(need_mib, key=lambda rows: abs(rows - found.rows))
    axes.plot([found.rows], [need_mib[nearest]], "o", color=_OURS, label=f"chosen, {found.rows} rows")
    axes.set_title("Memory of a micro-batch\nforeseen, then measured")
    axes.set_xlabel("rows in a micro-batch")
    axes.set_ylabel("MiB beyond what is in use")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_errors(axes: Axes, outcome: Outcome) -> None:
    names, errors = zip(*outcome.comparison.uneven_errors.items(), strict=True)
    bars = axes.barh(
        names,
        # An error of exactly 0 has no place on a logarithmic axis: it is drawn at float64's rounding.
        [max(error, _ROUNDING) for error in errors],
        left=_AXIS_START,
        color=[_OURS if name == "anybatch" else _OTHERS for name in names],
    )
    axes.bar_label(bars, [f"{error:.2g}" for error in errors], padding=4)
    axes.set_xscale("log")
    axes.set_xlim(_AXIS_START, _AXIS_END)
    axes.invert_yaxis()
    axes.set_title(f"Gradient error\n{UNEVEN_CASE}")
    axes.set_xlabel("largest difference / largest gradient (float64)")
    axes.spines[["top", "right"]].set_visible(False)
