"""A monitor's findings as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from anybatch._monitor.findings import Findings
from anybatch.memory.phases import Phase
from anybatch.memory.reading import in_words
from anybatch.memory.recording import PeakHolders

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

__all__ = ["explained", "report_of"]

_MOST_MODULES = 15
_OTHER_OF = {
    "counters": "Other holds activations, inputs and outputs, and what the program and its libraries need.",
    "tracked": "Other holds what is only needed for a moment, and what the program made elsewhere.",
}


def report_of(findings: Findings) -> RenderableType:
    """The findings as tables."""
    from rich.console import Group

    parts: list[RenderableType] = [_figures(findings), _phases(findings)]
    if findings.at_peak is not None:
        parts += [_holders(findings.at_peak), _OTHER_OF[findings.kind]]
        if findings.at_peak.modules:
            parts.append(_modules(findings.at_peak.modules))
    return Group(*parts)


def explained(findings: Findings, phase: Phase, now: PeakHolders) -> str:
    """What is said of an error that memory ran out."""
    limit = findings.memory.limit
    of_limit = "" if limit.amount_bytes is None else f" of {in_words(limit.amount_bytes)} ({limit.source})"
    held = ", ".join(f"{holder.value} {in_words(amount)}" for holder, amount in now.holders.items() if amount)
    return (
        f"`MemoryMonitor`: memory ran out in phase {phase.value!r} of step {findings.steps_done}. "
        f"{in_words(now.peak_bytes)}{of_limit} in use on {findings.memory.device}: {held}. "
        f"Before the monitor there were {in_words(findings.begin_bytes)}; the peak so far is "
        f"{in_words(findings.peak_bytes)}."
    )


def _figures(findings: Findings) -> Table:
    limit = findings.memory.limit
    title = f"Memory on {findings.memory.device}: {findings.steps_done} steps, {findings.source}"
    table = _titled(title, "what", "figure", "source")
    table.add_row("in use at the begin", in_words(findings.begin_bytes), findings.source)
    table.add_row("in use now", in_words(findings.live_bytes), findings.source)
    table.add_row("most in use", in_words(findings.peak_bytes), findings.source)
    table.add_row(
        "limit", "none" if limit.amount_bytes is None else in_words(limit.amount_bytes), limit.source
    )
    return table


def _phases(findings: Findings) -> Table:
    table = _titled("Phases, over all steps", "phase", "most in use", "known by", "time")
    for phase in Phase:
        if phase in findings.phases:
            peak = findings.phases[phase]
            known_by = "count" if peak.is_exact else "samples"
            table.add_row(phase.value, in_words(peak.peak_bytes), known_by, f"{peak.duration_s:.2f} s")
    return table


def _holders(peak: PeakHolders) -> Table:
    title = f"Who held the peak, in phase {peak.phase.value!r} of step {peak.step}"
    table = _titled(title, "holder", "bytes", "share")
    for holder, amount_bytes in peak.holders.items():
        table.add_row(holder.value, in_words(amount_bytes), f"{amount_bytes / max(peak.peak_bytes, 1):.0%}")
    return table


def _modules(modules: Mapping[str, int]) -> Table:
    table = _titled("Activations at the peak, by the module that made them", "module", "bytes")
    largest = sorted(modules.items(), key=lambda item: -item[1])
    for name, amount_bytes in largest[:_MOST_MODULES]:
        table.add_row(name, in_words(amount_bytes))
    if len(largest) > _MOST_MODULES:
        rest = sum(amount for _, amount in largest[_MOST_MODULES:])
        table.add_row(f"{len(largest) - _MOST_MODULES} more", in_words(rest))
    return table


def _titled(title: str, first: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", min_width=len(title))
    table.add_column(first, overflow="fold")
    for column in columns:
        is_text = column in ("source", "known by")
        table.add_column(column, justify="left" if is_text else "right", overflow="fold")
    return table
