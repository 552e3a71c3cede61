"""Runs the acts side by side, each in a child, with a progress bar for each."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from anybatch.cli.demo import messages
from anybatch.cli.demo.acts import compare_without_cap, train_in_pieces, try_whole
from anybatch.cli.demo.digits import load_digits, write_digits
from anybatch.cli.demo.messages import Comparison, Result, Training
from anybatch.cli.demo.process import Child
from anybatch.cli.demo.settings import Settings

__all__ = ["Outcome", "perform"]

_TITLES = {
    try_whole.__name__: "Whole mini-batch, capped",
    train_in_pieces.__name__: "Micro-batches, capped",
    compare_without_cap.__name__: "Both, without the cap",
}


@final
@dataclass(frozen=True)
class Outcome:
    """What the acts showed.

    Attributes:
        rows: Rows of the mini-batch, which is the whole training set.
        whole: The whole mini-batch under the cap.
        pieces: The same in micro-batches.
        comparison: What needs no cap, or more memory than it leaves.
    """

    rows: int
    whole: Training
    pieces: Training
    comparison: Comparison


def perform(settings: Settings, console: Console) -> Outcome:
    """Runs every act.

    Raises:
        ChildError: An act ended without a result.
    """
    with ExitStack() as stack:
        # Left in the reverse order: children that are killed end what the threads wait for.
        threads = stack.enter_context(ThreadPoolExecutor(len(_TITLES)))
        children = {act: stack.enter_context(Child()) for act in _TITLES}
        digits_file = Path(stack.enter_context(TemporaryDirectory(prefix="anybatch-demo-"))) / "digits.pt"
        digits = load_digits()
        write_digits(digits, digits_file)
        bars = stack.enter_context(_bars(console))
        running = [
            threads.submit(_run, child, act, digits_file, settings, bars) for act, child in children.items()
        ]
        whole, pieces, comparison = (each.result() for each in running)
    assert isinstance(whole, Training)
    assert isinstance(pieces, Training)
    assert isinstance(comparison, Comparison)
    return Outcome(len(digits.labels), whole, pieces, comparison)


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", style="dim"),
        TimeElapsedColumn(),
        console=console,
    )


def _run(child: Child, act: str, digits_file: Path, settings: Settings, bars: Progress) -> Result:
    task = bars.add_task(_TITLES[act], total=None, note="loads torch")

    def show(progress: messages.Progress) -> None:
        bars.update(task, completed=progress.done, total=progress.total, note=progress.note)

    result = child.run(act, digits_file, settings, show)
    if isinstance(result, Training) and result.out_of_memory is not None:
        bars.update(task, note="[red]out of memory[/red]")
    bars.stop_task(task)
    return result
