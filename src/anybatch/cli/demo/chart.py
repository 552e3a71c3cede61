"""The demo's chart: memory against the cap, and the gradient error of each way to accumulate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

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


def draw(settings: Settings, outcome: Outcome, file: Path) -> None:
    """Draws the chart as a PNG file."""
    # Loaded here, where it is used, and without pyplot, which would look for a screen.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), dpi=150, layout="constrained")
    memory, errors = figure.subplots(1, 2, width_ratios=(1, 1.25))
    _draw_memory(memory, settings, outcome)
    _draw_errors(errors, outcome)
    figure.savefig(file)


def _draw_memory(axes: Axes, settings: Settings, outcome: Outcome) -> None:
    names = ["whole,\nplain PyTorch", f"micro-batches of {settings.ub_size},\nanybatch"]
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
