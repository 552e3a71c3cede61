"""The demo's text."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from anybatch.cli.demo.page import introduction, report
from anybatch.cli.demo.promises import promises
from anybatch.cli.demo.settings import Settings
from anybatch.cli.demo.stage import Outcome


def printed(content: RenderableType, width: int = 100) -> str:
    """The content as it stands on a terminal of this width; no line is wider."""
    console = Console(file=io.StringIO(), width=width)
    console.print(content)
    text = console.file.getvalue()
    assert all(len(line) <= width for line in text.splitlines())
    return text


@pytest.mark.parametrize("width", [80, 100])
def test_report_shows_every_figure(width: int, settings: Settings, outcome: Outcome) -> None:
    """Peaks, scores and errors stand in the tables, in one line each."""
    text = printed(report(settings, outcome, promises(settings, outcome)), width)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "One mini-batch of 1,437 images, 45 micro-batches" in lines
    assert "under 64.0 MiB out of memory trained, 40 steps" in lines
    assert "peak memory 362.0 MiB without cap 37.0 MiB" in lines
    assert "gradient error - 3.0e-15" in lines
    assert "test accuracy - 98.9%" in lines
    assert "test macro f1 - 98.6%" in lines
    assert "loop: loss / pieces 6.3e-01" in lines
    assert "anybatch 7.0e-16" in lines
    assert "other not installed" in lines


def test_report_marks_a_broken_promise(settings: Settings, outcome: Outcome) -> None:
    """Each promise is a line that says whether it was kept."""
    bad = replace(outcome, comparison=replace(outcome.comparison, loss_error=0.5))
    lines = printed(report(settings, bad, promises(settings, bad))).splitlines()
    assert sum(line.startswith("kept") for line in lines) == 5
    assert [line.split()[-1] for line in lines if line.startswith("broken")] == ["5.0e-01"]


def test_report_without_a_peak(settings: Settings, outcome: Outcome) -> None:
    """Micro-batches that ran out of memory have no peak and no scores."""
    pieces = replace(outcome.pieces, out_of_memory="no", peak_bytes=None, scores={})
    text = printed(report(settings, replace(outcome, pieces=pieces), ()))
    assert "test accuracy" not in text
    assert text.count("out of memory") == 2


def test_report_of_a_cap_that_is_not_enforced(settings: Settings, outcome: Outcome) -> None:
    """A system that ignores the cap is named, and the table claims no cap."""
    free = replace(
        outcome, whole=replace(outcome.whole, cap_in_force=False, out_of_memory=None, steps_done=1)
    )
    text = printed(report(settings, free, ()))
    assert "does not enforce it" in text
    assert "without a cap" in text
    assert "under 64.0 MiB" not in text


def test_introduction_names_the_cap_and_the_allocator(settings: Settings) -> None:
    """What decides about memory is said before anything runs: the cap, its means, and glibc's setting."""
    text = printed(introduction(settings), 80)
    assert "64.0 MiB" in text
    assert "RLIMIT_DATA" in text
    assert "MALLOC_MMAP_THRESHOLD_=65536" in text


def test_introduction_without_a_cap(settings: Settings) -> None:
    """A system without such a limit says so."""
    assert "no cap: only Linux has a limit" in printed(introduction(replace(settings, cap_bytes=None)))
