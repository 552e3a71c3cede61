"""The size of pieces: what anybatch finds, what others find, and the true largest, under a real limit.

Without options one family and budget; `--full` measures all and writes `figures.json`.
"""

import argparse
import itertools
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from children import MALLOC, ChildDied, in_child, limited
from nets import FAMILIES
from pace import ratio, rows_per_s
from rich.console import Console
from rich.table import Table
from truth import true_largest
from ways import ways

sys.path.append(str(Path(__file__).parents[1] / "overhead"))
from where import machine

BUDGETS_MIB = (80, 200, 400)
TRUTH = "true largest"
BAR_RATIO = 0.95

Cell = dict[str, Any]


def main() -> None:
    """Measures, prints, and writes the figures where asked to."""
    options = _options()
    if not os.environ.keys() >= MALLOC.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC})
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(f"{machine()}; {MALLOC}")
    names, budgets_mib = (list(FAMILIES), BUDGETS_MIB) if options.full else (["MLP"], (80,))
    cells = []
    known = known_cells(options.out) if options.renew else {}
    for family, budget_mib in itertools.product(options.family or names, options.budget or budgets_mib):
        cells.append(measure(family, budget_mib << 20, known.get((family, budget_mib << 20)), options.renew))
        console.print(_table(cells[-1]))
        if options.full:
            write(options.out, cells[-1])
    console.print(ratios(cells))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="all families and budgets; writes the figures")
    parser.add_argument("--family", action="append", choices=list(FAMILIES), help="only this one")
    parser.add_argument("--budget", action="append", type=int, help="only this one, in MiB")
    parser.add_argument(
        "--renew", help="only ways that begin so; keeps the true size and other ways' figures"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("figures.json"))
    return parser.parse_args()


def measure(family: str, budget_bytes: int, known: Cell | None = None, renew: str | None = None) -> Cell:
    """The true largest size, what each way finds, and how fast these sizes are.

    Args:
        family: One of `FAMILIES`.
        budget_bytes: What the process may hold beyond what it holds when it begins.
        known: An older cell, whose true size and ways are kept.
        renew: How the names of the ways begin that are measured all the same.
    """
    true_rows = known["true_rows"] if known else true_largest(family, budget_bytes)
    # A power of two, so that what halves is neither lucky nor unlucky, of at least two of the largest pieces.
    rows = 1 << (2 * true_rows - 1).bit_length()
    found = dict(known["found"]) if known else {}
    for name, way in ways().items():
        if known is None or name.startswith(renew or ""):
            found[name] = _found(way, budget_bytes, family, rows)
    sizes = {name: facts["size_rows"] for name, facts in found.items() if facts.get("size_rows")}
    return {
        "family": family,
        "budget_bytes": budget_bytes,
        "rows": rows,
        "true_rows": true_rows,
        "found": found,
        "rows_per_s": in_child(rows_per_s, family, rows, {TRUTH: true_rows, **sizes}),
    }


def known_cells(path: Path) -> dict[tuple[str, int], Cell]:
    """The cells in the file, by family and budget."""
    cells = json.loads(path.read_text())["cells"] if path.exists() else []
    return {(cell["family"], cell["budget_bytes"]): cell for cell in cells}


def _found(way: Any, budget_bytes: int, family: str, rows: int) -> dict[str, Any]:
    try:
        return dict(limited(way, budget_bytes, family, rows))
    except ChildDied as error:
        return {"error": str(error)}


def write(path: Path, cell: Cell) -> None:
    """Adds a cell to the figures in the file, in place of an older one."""
    figures = json.loads(path.read_text()) if path.exists() else {"cells": []}
    figures["machine"] = asdict(machine())
    figures["malloc"] = MALLOC
    key = (cell["family"], cell["budget_bytes"])
    others = [one for one in figures["cells"] if (one["family"], one["budget_bytes"]) != key]
    order = list(FAMILIES)
    figures["cells"] = sorted(
        [*others, cell], key=lambda one: (order.index(one["family"]), one["budget_bytes"])
    )
    path.write_text(json.dumps(figures, indent=1) + "\n")


def _table(cell: Cell) -> Table:
    title = f"{cell['family']}, {cell['budget_bytes'] >> 20} MiB, mini-batch of {cell['rows']} rows"
    table = Table("way", title=f"{title}; true largest piece: {cell['true_rows']} rows")
    for name in ("size", "of the true", "ceiling", "of the true", "out of memory", "steps thrown away"):
        table.add_column(name, justify="right")
    for name in ("first step [s]", "mini-batch kept", "rows/s of the true"):
        table.add_column(name, justify="right")
    for name, facts in cell["found"].items():
        table.add_row(name, *_columns(cell, name, facts))
    return table


def _columns(cell: Cell, name: str, facts: dict[str, Any]) -> list[str]:
    if "size_rows" not in facts:
        return [facts["error"]]
    true_rows, ceiling = cell["true_rows"], facts.get("ceiling_rows")
    return [
        str(facts["size_rows"]),
        f"{facts['size_rows'] / true_rows:.3f}",
        str(ceiling or ""),
        f"{ceiling / true_rows:.3f}" if ceiling else "",
        str(facts["out_of_memory"]),
        str(facts["steps_thrown_away"]),
        "never" if facts.get("error") else f"{facts['first_step_s']:.1f}",
        facts["keeps_mini_batch"],
        f"{ratio(cell['rows_per_s'], name, TRUTH):.2f}" if name in cell["rows_per_s"] else "",
    ]


def ratios(cells: list[Cell]) -> Table:
    """The ceiling that anybatch finds over the true largest size, by family and budget."""
    budgets = sorted({cell["budget_bytes"] for cell in cells})
    table = Table("family", title=f"Ceiling over true largest (bar: {BAR_RATIO})")
    for budget_bytes in budgets:
        table.add_column(f"{budget_bytes >> 20} MiB", justify="right")
    for family in dict.fromkeys(cell["family"] for cell in cells):
        of_budget = {cell["budget_bytes"]: cell for cell in cells if cell["family"] == family}
        table.add_row(family, *(_ratio(of_budget.get(budget_bytes)) for budget_bytes in budgets))
    return table


def _ratio(cell: Cell | None) -> str:
    facts = cell["found"]["anybatch, largest"] if cell else {}
    if cell is None or "ceiling_rows" not in facts:
        return "-"
    found = facts["ceiling_rows"] / cell["true_rows"]
    errors = f", {facts['out_of_memory']} out of memory" if facts["out_of_memory"] else ""
    text = f"{found:.3f} ({facts['ceiling_rows']}/{cell['true_rows']}{errors})"
    return f"[green]{text}[/]" if BAR_RATIO <= found <= 1 and not errors else f"[red]{text}[/]"


if __name__ == "__main__":
    main()
