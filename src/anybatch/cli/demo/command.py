"""`anybatch demo`: the options, the order of events, the exit code."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from anybatch.cli.demo import digits
from anybatch.cli.demo.chart import draw
from anybatch.cli.demo.page import introduction, report
from anybatch.cli.demo.process import ChildError
from anybatch.cli.demo.promises import Promise, promises
from anybatch.cli.demo.settings import DEFAULT_CAP_MIB, MIB, Settings, settings_for
from anybatch.cli.demo.stage import Outcome, perform
from anybatch.memory.limit import can_limit_growth

__all__ = ["demo"]

CHART = "demo.png"
FIGURES = "demo.json"


def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help="Train for a few steps only, and promise no accuracy.")
    ] = False,
    cap: Annotated[
        int, typer.Option("--cap", metavar="MiB", min=1, help="Memory that training may use.")
    ] = DEFAULT_CAP_MIB,
    output: Annotated[
        Path, typer.Option("--output", metavar="DIR", help="Folder for the chart and the figures.")
    ] = Path("out"),
) -> None:
    """Train on a mini-batch that does not fit, under a real memory cap, and check the gradients.

    Ends with exit code 1, and the promise that failed, if something does not come out as promised.
    """
    _check_digits()
    _check_writable(output)
    started_s = time.monotonic()
    console = Console()
    settings = settings_for(quick=quick, cap_bytes=cap * MIB if can_limit_growth() else None)
    console.print(introduction(settings))
    outcome = _perform(settings, console)
    made = promises(settings, outcome)
    console.print(report(settings, outcome, made))
    _write(settings, outcome, made, output)
    console.print(f"\n{output / CHART} and {output / FIGURES}, {time.monotonic() - started_s:.0f} s")
    _check_kept(made)


def _check_digits() -> None:
    if not digits.is_installed():
        raise _failure(
            "`demo`: the digits come with scikit-learn, which is not installed. "
            "Run: pip install 'anybatch[demo]'"
        )


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CHART).touch()
    except OSError as error:
        raise _failure(
            f"`demo`: --output must be a folder that can be written. {error}. Choose another."
        ) from None


def _perform(settings: Settings, console: Console) -> Outcome:
    try:
        return perform(settings, console)
    except ChildError as error:
        raise _failure(str(error)) from None


def _check_kept(made: tuple[Promise, ...]) -> None:
    broken = [f"\n  {each.text}: {each.seen}" for each in made if not each.kept]
    if broken:
        raise _failure(f"`demo`: every promise must be kept. Broken:{''.join(broken)}")


def _write(settings: Settings, outcome: Outcome, made: tuple[Promise, ...], folder: Path) -> None:
    draw(settings, outcome, folder / CHART)
    figures = {"settings": asdict(settings), **asdict(outcome), "promises": [asdict(each) for each in made]}
    (folder / FIGURES).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _failure(message: str) -> typer.Exit:
    Console(stderr=True).print(message, style="bold red", markup=False, highlight=False)
    return typer.Exit(1)
