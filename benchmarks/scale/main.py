"""A mini-batch of any size in one budget: memory flat, time linear.

Without options up to 4,096 rows; `--full` up to 65,536, and writes `figures.json`.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import anybatch
from anybatch.testing import memory_limit

for claim in ("overhead", "search"):
    sys.path.append(str(Path(__file__).parents[1] / claim))
import children  # noqa: E402
from children import MALLOC, Growth, in_child  # noqa: E402
from where import machine  # noqa: E402

SHORT_ROWS = (64, 256, 1024, 4096)
FULL_ROWS = (*SHORT_ROWS, 16384, 65536)
BUDGET_BYTES = 48 << 20
MOST_ROWS = 32
BASE_ROWS = 1024
ROW_SHAPE = (3, 32, 32)
FLAT_RATIO = 1.02
LINEAR_RATIO = 1.05

Facts = dict[str, Any]


def main() -> None:
    """Measures, prints, and writes the figures where asked to."""
    options = _options()
    if not os.environ.keys() >= MALLOC.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC})
    torch.set_num_threads(1)
    children.LONGEST_S = 1200
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(f"{machine()}; {MALLOC}")
    sizes = options.rows or (FULL_ROWS if options.full else SHORT_ROWS)
    batch = random_batch(max(sizes))
    measured = []
    for rows in sizes:
        measured.append(in_child(measure, *(each[:rows] for each in batch)))
        console.print(_table(measured))
        if options.full:
            write(options.out, measured[-1])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="all mini-batches; writes the figures")
    parser.add_argument("--rows", action="append", type=int, help="only a mini-batch of so many rows")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("figures.json"))
    return parser.parse_args()


def random_batch(rows: int) -> tuple[Tensor, Tensor]:
    """Random images and labels."""
    torch.manual_seed(0)
    return torch.randn(rows, *ROW_SHAPE), torch.randint(10, (rows,))


def build_net() -> nn.Module:
    """Convolutions whose activations are large beside their parameters."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU()),
        *(nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )


def train_fn(net: nn.Module, x: Tensor, label: Tensor) -> Tensor:
    """The user's function: a mean over rows."""
    return F.cross_entropy(net(x), label)


def measure(x: Tensor, label: Tensor) -> Facts:
    """One mini-batch under a real limit: its peak, and its processor time beside that of a small one's.

    The small one is the same in all processes, and runs before and after: what slows a process down as a
    whole, other work on the machine, slows it down too.
    """
    step, auto = _prepare()
    rows, base = len(x), random_batch(BASE_ROWS)
    gc.collect()
    with memory_limit(BUDGET_BYTES):
        step(*base)
        base_s = [_cpu_s(step, *base)]
        with Growth() as peak:
            taken_s = [_cpu_s(step, x, label) for _ in range(max(1, BASE_ROWS // rows))]
        base_s.append(_cpu_s(step, *base))
    record = max(auto, key=lambda one: one.rows)
    return {
        "rows": rows,
        "batch_bytes": x.nbytes + label.nbytes,
        "piece_rows": record.rows,
        "ceiling_rows": record.ceiling_rows,
        "out_of_memory": record.failures,
        "growth_bytes": peak.growth_bytes,
        "cpu_s": taken_s,
        "base_cpu_s": base_s,
        "time_per_row_ratio": statistics.median(taken_s) / rows / (statistics.mean(base_s) / BASE_ROWS),
    }


def _prepare() -> tuple[Callable[[Tensor, Tensor], None], anybatch.Auto]:
    torch.manual_seed(0)
    net = build_net()
    optimizer = torch.optim.AdamW(net.parameters())
    auto = anybatch.Auto(prefer="largest", largest=MOST_ROWS)
    train = anybatch.apply(["x", "label"], ub_size=auto)(train_fn)

    def step(x: Tensor, label: Tensor) -> None:
        optimizer.zero_grad()
        train(net, x=x, label=label)
        optimizer.step()

    return step, auto


def _cpu_s(step: Callable[[Tensor, Tensor], None], x: Tensor, label: Tensor) -> float:
    begin_s = time.process_time()
    step(x, label)
    return time.process_time() - begin_s


def write(path: Path, facts: Facts) -> None:
    """Adds a mini-batch to the figures in the file, in place of an older one."""
    figures = json.loads(path.read_text()) if path.exists() else {"mini_batches": []}
    figures |= {"machine": asdict(machine()), "malloc": MALLOC, "budget_bytes": BUDGET_BYTES}
    others = [one for one in figures["mini_batches"] if one["rows"] != facts["rows"]]
    figures["mini_batches"] = sorted([*others, facts], key=lambda one: one["rows"])
    path.write_text(json.dumps(figures, indent=1) + "\n")


def _table(measured: list[Facts]) -> Table:
    first = measured[0]
    table = Table(
        title=f"Pieces of at most {MOST_ROWS} rows in {BUDGET_BYTES >> 20} MiB "
        f"(bars: peak flat within {FLAT_RATIO - 1:.0%}, time linear within {LINEAR_RATIO - 1:.0%})"
    )
    columns = ("rows", "mini-batch [MiB]", "pieces", "ceiling", "out of memory", "peak [MiB]", "of the first")
    for name in (*columns, f"time per row of that at {BASE_ROWS} rows"):
        table.add_column(name, justify="right")
    for one in measured:
        flat = one["growth_bytes"] / first["growth_bytes"]
        table.add_row(
            f"{one['rows']:,}",
            f"{one['batch_bytes'] / 2**20:.1f}",
            f"{-(-one['rows'] // one['piece_rows']):,}",
            str(one["ceiling_rows"]),
            str(one["out_of_memory"]),
            f"{one['growth_bytes'] / 2**20:.2f}",
            _marked(flat, FLAT_RATIO),
            _marked(one["time_per_row_ratio"], LINEAR_RATIO),
        )
    return table


def _marked(ratio: float, bar: float) -> str:
    return f"[green]{ratio:.3f}[/]" if 2 - bar <= ratio <= bar else f"[red]{ratio:.3f}[/]"


if __name__ == "__main__":
    main()
