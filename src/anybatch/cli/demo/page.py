"""The demo's text: what it is about to do, and the tables of what was seen."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterable, Iterator

import torch
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from anybatch.cli.demo.messages import Comparison, Training
from anybatch.cli.demo.promises import Promise
from anybatch.cli.demo.settings import (
    MALLOC_ENVIRONMENT,
    THREADS,
    UNEVEN_CASE,
    Settings,
)
from anybatch.cli.demo.stage import Outcome
from anybatch.memory.reading import in_words

__all__ = ["introduction", "report"]


def introduction(settings: Settings) -> RenderableType:
    """What is about to happen, on what."""
    return Group(
        Text("anybatch demo: the whole training set as one mini-batch", style="bold"),
        Text(f"torch {torch.__version__}, Python {platform.python_version()} on {platform.system()}"),
        Text(f"{os.cpu_count()} cores, {THREADS} thread in each of 3 processes"),
        *(Text(line) for line in _cap_lines(settings)),
    )


def _cap_lines(settings: Settings) -> Iterator[str]:
    if settings.cap_bytes is None:
        yield "no cap: only Linux has a limit on a process's memory that counts tensors (RLIMIT_DATA)"
        return
    yield f"cap of {in_words(settings.cap_bytes)} on top of Python, torch and the data, by RLIMIT_DATA"
    for name, value in MALLOC_ENVIRONMENT.items():
        yield f"{name}={value}, so that glibc returns what is freed"


def report(settings: Settings, outcome: Outcome, made: Iterable[Promise]) -> RenderableType:
    """The tables of what was seen, and what became of the promises."""
    parts: list[RenderableType] = [
        Text(f"\n{_case(outcome)}", style="bold"),
        _training_table(settings, outcome),
        Text(f"\n{UNEVEN_CASE}", style="bold"),
        _uneven_table(outcome.comparison),
        Text("Errors: float64, largest difference from the whole over its largest gradient.\n", style="dim"),
    ]
    if settings.cap_bytes is not None and not outcome.whole.cap_in_force:
        parts.append(Text("The operating system took the cap but does not enforce it.", style="yellow"))
    return Group(*parts, _promise_table(made))


def _case(outcome: Outcome) -> str:
    found = outcome.pieces.found
    pieces = "micro-batches" if found is None else f"{math.ceil(outcome.rows / found.rows)} micro-batches"
    return f"One mini-batch of {outcome.rows:,} images, {pieces}"


def _training_table(settings: Settings, outcome: Outcome) -> Table:
    table = Table("", box=box.SIMPLE_HEAD)
    table.add_column("whole, plain PyTorch", justify="right")
    table.add_column("micro-batches, anybatch", justify="right")
    for row in _training_rows(settings, outcome):
        table.add_row(*row)
    return table


def _training_rows(settings: Settings, outcome: Outcome) -> Iterator[tuple[str, str, str]]:
    whole, pieces, comparison = outcome.whole, outcome.pieces, outcome.comparison
    peak = "-" if pieces.peak_bytes is None else in_words(pieces.peak_bytes)
    yield _cap_title(settings, whole), _ending(whole), _ending(pieces)
    yield "peak memory", f"{in_words(comparison.whole_peak_bytes)} without cap", peak
    yield from _found_rows(pieces)
    rows = "" if settings.compared_rows is None else f" ({settings.compared_rows} rows)"
    yield f"loss error{rows}", "-", f"{comparison.loss_error:.1e}"
    yield f"gradient error{rows}", "-", f"{comparison.gradient_error:.1e}"
    for name, value in pieces.scores.items():
        yield f"test {name if name == 'accuracy' else f'macro {name}'}", "-", f"{value:.1%}"


def _found_rows(pieces: Training) -> Iterator[tuple[str, str, str]]:
    if pieces.found is not None:
        yield "size found", "-", f"{pieces.found.rows} of at most {pieces.found.ceiling_rows:,} rows"
        yield "sizes that did not fit", "-", str(pieces.found.failures)


def _cap_title(settings: Settings, training: Training) -> str:
    if settings.cap_bytes is None or not training.cap_in_force:
        return "without a cap"
    return f"under {in_words(settings.cap_bytes)}"


def _ending(training: Training) -> str:
    if training.out_of_memory is not None:
        return "out of memory"
    return f"trained, {training.steps_done} {'step' if training.steps_done == 1 else 'steps'}"


def _uneven_table(comparison: Comparison) -> Table:
    table = Table("way to accumulate", box=box.SIMPLE_HEAD)
    table.add_column("gradient error", justify="right")
    for name, error in comparison.uneven_errors.items():
        table.add_row(name, f"{error:.1e}")
    for name, reason in comparison.missing.items():
        table.add_row(name, reason)
    return table


def _promise_table(made: Iterable[Promise]) -> Table:
    table = Table.grid(padding=(0, 2))
    for each in made:
        mark = Text("kept", style="green") if each.kept else Text("broken", style="bold red")
        table.add_row(mark, each.text, each.seen)
    return table
