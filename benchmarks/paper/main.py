"""128 times the rows that a budget holds, with the networks of the paper.

Without options the U-Net at 16 times its rows; `--full` all networks, and writes `figures.json`.
"""

import argparse
import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from nets import NETS, train_fn
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import anybatch
from anybatch.fit.guard import MemoryVerdict, memory_verdict
from anybatch.memory.process import data_bytes
from anybatch.testing import memory_limit

# The benchmark's own `nets` is loaded by now, and is not that of the other one.
for claim in ("overhead", "search"):
    sys.path.append(str(Path(__file__).parents[1] / claim))
import children  # noqa: E402
from children import MALLOC, ChildDied, Growth, in_child, limited  # noqa: E402
from where import machine  # noqa: E402

MULTIPLE = 128
SHORT_MULTIPLE = 16
TIMED_PIECES = 8
BUDGET_TOLERANCE_RATIO = 0.02

ENVIRONMENT = {**MALLOC, "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"}
"""oneDNN else keeps the kernels of each size of pieces for good, more than the pieces take here. Accelerators
prepare no kernels by size, or few."""

Facts = dict[str, Any]
Step = Callable[[Tensor, Tensor], None]


def main() -> None:
    """Measures, prints, and writes the figures where asked to."""
    options = _options()
    if not os.environ.keys() >= ENVIRONMENT.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})
    torch.set_num_threads(1)
    children.LONGEST_S = 1200
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(f"{machine()}; {ENVIRONMENT}")
    names = options.net or (list(NETS) if options.full else ["U-Net"])
    measured = []
    for name in names:
        measured.append(measure(name, MULTIPLE if options.full else SHORT_MULTIPLE))
        console.print(_table(measured))
        if options.full:
            write(options.out, measured[-1])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="all networks; writes the figures")
    parser.add_argument("--net", action="append", choices=list(NETS), help="only this one")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("figures.json"))
    return parser.parse_args()


def measure(name: str, multiple: int) -> Facts:
    """One network: its budget, a mini-batch in it, and the gradient against that of the whole."""
    rows = NETS[name].rows
    needed_bytes, gradient_bytes = budget_for(name), in_child(_gradient_bytes, name)
    facts: Facts = {"net": name, "held_rows": rows, "needed_bytes": needed_bytes}
    facts["budget_bytes"] = needed_bytes + gradient_bytes
    try:
        facts |= in_child(_train, name, multiple * rows, facts["budget_bytes"])
        facts |= in_child(_compare, name)
    except ChildDied as error:
        facts["error"] = str(error)
    return facts


def budget_for(name: str) -> int:
    """The smallest limit under which a plain loop takes two steps with the pieces that it is to hold.

    Error: bisected to 2 %.
    """
    low, high = 0, 1 << 24
    while not _fits(name, high):
        low, high = high, 2 * high
    while high - low > BUDGET_TOLERANCE_RATIO * high:
        middle = (low + high) // 2
        if _fits(name, middle):
            high = middle
        else:
            low = middle
    return high


def _gradient_bytes(name: str) -> int:
    """A copy of the gradients, which calls of more than 16 pieces hold: they add up in blocks."""
    net, _ = _net(name)
    return sum(parameter.numel() * parameter.element_size() for parameter in net.parameters())


def _fits(name: str, budget_bytes: int) -> bool:
    try:
        return bool(limited(_trial, budget_bytes, name))
    except ChildDied:  # what is not written to be told that there is no memory aborts
        return False


def _trial(name: str) -> Callable[[], bool]:
    net, optimizer = _net(name)
    rows = NETS[name].rows
    batch = NETS[name].batch(2 * rows)

    def run() -> bool:
        try:
            for _ in range(2):
                _loop(net, optimizer, rows, *batch)
        except Exception as error:
            if memory_verdict(error) is MemoryVerdict.NO:
                raise
            return False
        return True

    return run


def _train(name: str, rows: int, budget_bytes: int) -> Facts:
    """Two steps under a real limit, and the processor time per row beside that of the plain loop."""
    net, optimizer = _net(name)
    auto = anybatch.Auto(prefer="largest", optimizer=optimizer)
    train = anybatch.apply(["x", "label"], ub_size=auto)(train_fn)

    def step(x: Tensor, label: Tensor) -> None:
        optimizer.zero_grad()
        train(net, x=x, label=label)
        optimizer.step()

    x, label = NETS[name].batch(rows)
    few_rows = TIMED_PIECES * NETS[name].rows
    few = x[:few_rows], label[:few_rows]
    gc.collect()
    begin_bytes = data_bytes()
    with memory_limit(budget_bytes):
        step(*few)
        held_bytes = data_bytes() - begin_bytes
        with Growth() as peak:
            whole_s = _cpu_s(lambda: step(x, label))
        record = max(auto, key=lambda one: one.rows)
    pieces = -(-rows // record.rows)
    loop_rows = -(-rows // pieces)
    few = x[: loop_rows * TIMED_PIECES], label[: loop_rows * TIMED_PIECES]
    _loop(net, optimizer, loop_rows, *few)
    loop_s = [_cpu_s(lambda: _loop(net, optimizer, loop_rows, *few)) for _ in range(2)]
    return {
        "rows": rows,
        "piece_rows": record.rows,
        "ceiling_rows": record.ceiling_rows,
        "out_of_memory": record.failures,
        "growth_bytes": held_bytes + peak.growth_bytes,
        "cpu_s": whole_s,
        "loop_cpu_s": loop_s,
        "loop_rows": len(few[0]),
        "time_per_row_ratio": (whole_s / rows) / (sum(loop_s) / len(loop_s) / len(few[0])),
        "explained": str(auto),
    }


def _compare(name: str) -> Facts:
    """The gradient in pieces against that of the whole mini-batch in plain PyTorch, both in float64.

    BatchNorm layers are frozen: only then is a gradient that of independent rows.
    """
    net, _ = _net(name)
    net.double()
    rows = NETS[name].rows
    x, label = NETS[name].batch(rows * NETS[name].compared_multiple)
    x = x.double()
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    train = anybatch.apply(["x", "label"], ub_size=rows, batch_norm="frozen")(train_fn)
    train(net, x=x, label=label)
    pieces = _gradient(net)
    for norm in norms:
        norm.eval()
    train_fn(net, x, label).backward()
    whole = _gradient(net)
    return {
        "compared_rows": len(x),
        "gradient_error": float((pieces - whole).abs().max() / whole.abs().max()),
    }


def _gradient(net: nn.Module) -> Tensor:
    """All gradients in one; they are gone from the net then."""
    found = torch.cat([parameter.grad.flatten() for parameter in net.parameters()])
    net.zero_grad()
    return found


def _net(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    warnings.simplefilter("ignore")  # BatchNorm over pieces, as the paper has it too
    torch.manual_seed(0)
    net = NETS[name].make()
    return net, torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)


def _loop(net: nn.Module, optimizer: torch.optim.Optimizer, size: int, x: Tensor, label: Tensor) -> None:
    optimizer.zero_grad()
    for x_piece, label_piece in zip(x.split(size), label.split(size), strict=True):
        (train_fn(net, x_piece, label_piece) * (len(x_piece) / len(x))).backward()
    optimizer.step()


def _cpu_s(step: Callable[[], None]) -> float:
    begin_s = time.process_time()
    step()
    return time.process_time() - begin_s


def write(path: Path, facts: Facts) -> None:
    """Adds a network to the figures in the file, in place of an older one."""
    figures = json.loads(path.read_text()) if path.exists() else {"nets": []}
    figures["machine"] = asdict(machine())
    figures["environment"] = ENVIRONMENT
    others = [one for one in figures["nets"] if one["net"] != facts["net"]]
    figures["nets"] = sorted([*others, facts], key=lambda one: list(NETS).index(one["net"]))
    path.write_text(json.dumps(figures, indent=1) + "\n")


def _table(measured: list[Facts]) -> Table:
    table = Table("net", title="Mini-batches far beyond what a budget holds")
    columns = ("budget [MiB]", "holds", "rows", "multiple", "piece", "out of memory", "peak [MiB]")
    for name in (*columns, "time per row / loop", "gradient error", "at rows"):
        table.add_column(name, justify="right")
    for one in measured:
        table.add_row(one["net"], *_columns(one))
    return table


def _columns(one: Facts) -> list[str]:
    columns = [f"{one['budget_bytes'] / 2**20:.0f}", str(one["held_rows"])]
    if "rows" not in one:
        return [*columns, one["error"]]
    return [
        *columns,
        f"{one['rows']:,}",
        f"{one['rows'] / one['held_rows']:.0f}",
        str(one["piece_rows"]),
        str(one["out_of_memory"]),
        f"{one['growth_bytes'] / 2**20:.0f}",
        f"{one['time_per_row_ratio']:.3f}",
        f"{one['gradient_error']:.1e}" if "gradient_error" in one else one["error"],
        f"{one.get('compared_rows', 0):,}",
    ]


if __name__ == "__main__":
    main()
