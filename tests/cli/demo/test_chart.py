"""The demo's chart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest
from matplotlib.figure import Figure

import anybatch.cli.demo.chart as chart
from anybatch.cli.demo.settings import MIB, Settings
from anybatch.cli.demo.stage import Outcome


@pytest.fixture
def drawn(settings: Settings, outcome: Outcome, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Figure:
    """The chart's figure, as it was when it was saved."""
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file: figures.append(figure))
    chart.draw(settings, outcome, tmp_path / "chart.png")
    return figures[0]


def test_chart_is_a_picture(settings: Settings, outcome: Outcome, tmp_path: Path) -> None:
    """The file is a PNG with something on it."""
    chart.draw(settings, outcome, tmp_path / "chart.png")
    picture = matplotlib.image.imread(tmp_path / "chart.png")
    assert picture.shape[0] > 400
    assert picture.shape[1] > 1000
    assert picture.std() > 0.1


def test_memory_panel_shows_peaks_and_cap(drawn: Figure, outcome: Outcome) -> None:
    """The bars are as high as the peaks in MiB, and the cap's line stands at the cap."""
    memory = drawn.axes[0]
    expected = [outcome.comparison.whole_peak_bytes / MIB, 37]
    assert [bar.get_height() for bar in memory.patches] == expected
    (cap,) = memory.lines
    assert list(cap.get_ydata()) == [64, 64]
    assert [text.get_text() for text in memory.get_legend().get_texts()] == ["cap, 64 MiB"]
    assert memory.get_ylim()[1] > max(expected)


def test_error_panel_shows_each_way(drawn: Figure, outcome: Outcome) -> None:
    """Every way has its bar up to its error, named, on a logarithmic axis that holds them all."""
    errors = drawn.axes[2]
    ends = [bar.get_x() + bar.get_width() for bar in errors.patches]
    assert ends == pytest.approx(list(outcome.comparison.uneven_errors.values()), rel=0.02)
    assert [label.get_text() for label in errors.get_yticklabels()] == list(outcome.comparison.uneven_errors)
    assert errors.get_xscale() == "log"


def test_curve_panel_shows_need_room_and_choice(drawn: Figure) -> None:
    """The curve meets what is to be had at the ceiling; the choice lies on it, below."""
    curve = drawn.axes[1]
    labels = [text.get_text() for text in curve.get_legend().get_texts()]
    assert labels == ["needed", "to be had, 33 MiB", "ceiling, 90 rows", "chosen, 32 rows"]
    assert curve.get_xlabel() == "rows in a micro-batch"
    needed, _, _, chosen = curve.get_lines()
    assert (90, 33.0) in zip(needed.get_xdata(), needed.get_ydata(), strict=True)
    assert list(zip(chosen.get_xdata(), chosen.get_ydata(), strict=True)) == [(32, 17.0)]


def test_texts_do_not_overlap(drawn: Figure) -> None:
    """No two texts of the chart lie on each other, and none leaves the picture."""
    drawn.draw_without_rendering()
    texts = [
        text
        for axes in drawn.axes
        for text in (
            axes.title,
            axes.xaxis.label,
            axes.yaxis.label,
            *axes.texts,
            *axes.get_xticklabels(),
            *axes.get_yticklabels(),
        )
        if text.get_text()
    ]
    boxes = [text.get_window_extent() for text in texts]
    # Ticks beyond an axis's ends have labels that are not drawn.
    inside = [
        box for box in boxes if drawn.bbox.fully_containsx(box.x0) and drawn.bbox.fully_containsx(box.x1)
    ]
    assert len(inside) >= 12
    for first, box in enumerate(inside):
        assert not any(box.overlaps(other) for other in inside[first + 1 :])


def test_chart_of_a_failed_run(settings: Settings, outcome: Outcome, tmp_path: Path) -> None:
    """A run without a peak, or with an error of 0 or none, still has a chart."""
    failed = replace(
        outcome,
        pieces=replace(outcome.pieces, peak_bytes=None),
        comparison=replace(outcome.comparison, uneven_errors={"loop": float("nan"), "anybatch": 0.0}),
    )
    chart.draw(settings, failed, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 1000
