"""What a call costs over a loop written by hand, and that device memory is flat in the mini-batch.

Without options a short form that prints its tables; `--full` measures all configurations and writes
`figures.json`.
"""

import argparse
import itertools
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from live_bytes import InputBytes, measure_inputs
from rich.console import Console
from rich.progress import track
from rich.table import Table
from steps import NETS, SetUp, set_up
from timing import FirstCalls, Rounds, first_calls, paired_rounds
from where import machine


@dataclass(frozen=True)
class Plan:
    """What is measured: every combination, and how often."""

    nets: tuple[str, ...]
    pieces_s: tuple[float, ...]
    pieces: tuple[int, ...] = (4, 8)
    round_s: float = 20.0
    functions: int = 7


SHORT = Plan(nets=("transformer",), pieces_s=(0.02,))
FULL = Plan(nets=tuple(NETS), pieces_s=(0.02, 0.2), round_s=40.0, functions=9)

RATIO_BAR = 1.02
FIRST_BAR_PIECES = 1.0
FLAT_BAR_RATIO = 1.02

Measured = list[tuple[SetUp, Rounds, FirstCalls]]


STEADY_ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 30)}
"""Makes glibc keep freed memory, as the allocators of accelerators do. Else it hands memory back after each
piece and takes it again page by page, or does not, as what lies at the end of the heap will have it: 3 to 5 %
of a step, which no contender has earned."""


def main() -> None:
    """Measures, prints, and writes the figures where asked to."""
    options = _options()
    if not os.environ.keys() >= STEADY_ALLOCATOR.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **STEADY_ALLOCATOR})
    torch.set_num_threads(options.threads)
    plan = FULL if options.full else SHORT
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(f"{machine()}")
    figures: dict[str, Any] = {"machine": asdict(machine()), "time": [], "inputs": []}
    _report_time(console, figures, plan)
    _report_inputs(console, figures)
    if options.full:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")
        console.print(f"figures written to {options.out}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="all configurations; writes the figures")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("figures.json"))
    return parser.parse_args()


def _report_time(console: Console, figures: dict[str, Any], plan: Plan) -> None:
    cells = list(itertools.product(plan.nets, plan.pieces_s, plan.pieces))
    measured: Measured = []
    for net, piece_s, pieces in track(cells, "timing", console=console):
        setting = set_up(net, piece_s, pieces)
        rounds = paired_rounds(setting, round(plan.round_s / (3 * piece_s * pieces)))
        measured.append((setting, rounds, first_calls(setting, plan.functions)))
    console.print(_ratios(measured))
    console.print(_first_calls(measured))
    for setting, rounds, first in measured:
        figures["time"].append({**setting.facts(), **rounds.facts(), **first.facts()})


def _ratios(measured: Measured) -> Table:
    title = f"Time of a step over that of a loop by hand, from the second call on (bar: {RATIO_BAR})"
    table = _table(title, "rounds", "anybatch, wall", "anybatch, cpu", "mbp, wall", "mbp, cpu")
    for setting, rounds, _ in measured:
        ours, theirs = (
            [rounds.ratio(name, clock) for clock in ("wall_s", "cpu_s")] for name in ("anybatch", "mbp")
        )
        cells = [_marked(str(ratio), ratio is not None and ratio.median <= RATIO_BAR) for ratio in ours]
        cells += [str(ratio or "-") for ratio in theirs]
        table.add_row(*_cells(setting, rounds), str(len(rounds.taken["loop"])), *cells)
    return table


def _first_calls(measured: Measured) -> Table:
    title = f"What the first call of a function takes beyond the second (bar: {FIRST_BAR_PIECES:.0f} piece)"
    table = _table(title, "functions", "in pieces", "first call of a process")
    for setting, rounds, first in measured:
        table.add_row(
            *_cells(setting, rounds),
            str(len(first.first_s)),
            _marked(f"{first.extra_pieces:.2f}", first.extra_pieces <= FIRST_BAR_PIECES),
            f"{first.extra_in_new_process_s / first.piece_s:.2f}",
        )
    return table


def _cells(setting: SetUp, rounds: Rounds) -> list[str]:
    return [setting.net_name, f"{setting.pieces} x {setting.ub_size}", f"{1e3 * rounds.piece_s:.1f}"]


def _table(title: str, *columns: str) -> Table:
    table = Table("net", title=title)
    for name in ("pieces x rows", "piece [ms]", *columns):
        table.add_column(name, justify="right")
    return table


def _report_inputs(console: Console, figures: dict[str, Any]) -> None:
    measured = [measure_inputs(rows) for rows in (64, 256, 1024, 4096, 16384, 65536)]
    console.print(_inputs_table(measured))
    figures["inputs"] = [asdict(one) for one in measured]


def _inputs_table(measured: list[InputBytes]) -> Table:
    first = measured[0]
    table = Table(
        title=f"Most bytes alive at once, pieces of {first.ub_size} rows (bar: inputs flat within 2 %)"
    )
    for name in ("rows", "pieces", "mini-batch", "inputs on the device", "all else", "per piece"):
        table.add_column(name, justify="right")
    for one in measured:
        grown = (one.others_peak_bytes - first.others_peak_bytes) / max(one.pieces - first.pieces, 1)
        table.add_row(
            f"{one.rows:,}",
            f"{one.pieces:,}",
            f"{one.batch_bytes:,}",
            _flat(one.inputs_peak_bytes, first.inputs_peak_bytes),
            f"{one.others_peak_bytes:,}",
            f"{grown:.1f}",
        )
    return table


def _flat(peak_bytes: int, first_bytes: int) -> str:
    return _marked(f"{peak_bytes:,}", peak_bytes <= FLAT_BAR_RATIO * first_bytes)


def _marked(text: str, is_within: bool) -> str:
    return f"[green]{text}[/]" if is_within else f"[red]{text}[/]"


if __name__ == "__main__":
    main()
