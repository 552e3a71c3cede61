"""Ways to a size of pieces: anybatch, accelerate, Lightning, and a loop that halves.

Each takes a family and the rows of the mini-batch, prepares, and returns what is to run under the limit; that
returns facts: `size_rows` (what it trains with in the end), `out_of_memory` (errors met), `steps_thrown_away`
(steps of the optimizer whose result was discarded), `first_step_s` (until the first step that was kept).
"""

import importlib.util
import logging
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from nets import Problem, train_fn
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset

import anybatch
from anybatch.fit.guard import MemoryVerdict, memory_verdict

Facts = dict[str, Any]
Run = Callable[[], Facts]

CALLS = 4
MOST_CALLS = 16
MOST_S = 30.0
_BEING_MEASURED = "its speed is being measured"


def anybatch_largest(family: str, rows: int) -> Run:
    """Four calls with `Auto(prefer="largest")`."""
    problem = Problem(family, rows)
    auto = anybatch.Auto(prefer="largest")

    def run() -> Facts:
        return _with_auto(problem, auto, lambda calls, seconds, reason: calls == CALLS)

    return run


def anybatch_fastest(family: str, rows: int) -> Run:
    """Calls with `Auto()` until it no longer tries other sizes."""
    problem = Problem(family, rows)
    auto = anybatch.Auto(prefer="fastest")

    def is_done(calls: int, seconds: float, reason: str) -> bool:
        is_settled = calls >= CALLS and reason != _BEING_MEASURED
        return is_settled or calls == MOST_CALLS or seconds > MOST_S

    return lambda: _with_auto(problem, auto, is_done)


def _with_auto(problem: Problem, auto: anybatch.Auto, is_done: Callable[[int, float, str], bool]) -> Facts:
    train = anybatch.apply(["x", "label"], ub_size=auto)(train_fn)
    begin_s = time.perf_counter()
    calls: list[Facts] = []
    while not calls or not is_done(len(calls), time.perf_counter() - begin_s, calls[-1]["reason"]):
        problem.optimizer.zero_grad()
        train(problem.net, x=problem.x, label=problem.label)
        problem.optimizer.step()
        record = max(auto, key=lambda one: one.rows)
        calls.append(
            {
                "end_s": time.perf_counter() - begin_s,
                "ceiling_rows": record.ceiling_rows,
                "rows": record.rows,
                "reason": record.reason,
            }
        )
    return {
        "size_rows": calls[-1]["rows"],
        "ceiling_rows": calls[-1]["ceiling_rows"],
        "out_of_memory": record.failures,
        "steps_thrown_away": 0,
        "first_step_s": calls[0]["end_s"],
        "keeps_mini_batch": "yes",
        "how": record.how,
        "calls": calls,
        "explained": str(auto),
    }


def halving(family: str, rows: int) -> Run:
    """A loop that starts with the whole mini-batch, and halves its pieces where a step runs out of memory."""
    problem = Problem(family, rows)

    def run() -> Facts:
        begin_s = time.perf_counter()
        size, errors = rows, 0
        ends_s: list[float] = []
        while len(ends_s) < CALLS:
            try:
                problem.step(size)
            except Exception as error:
                _check_memory(error)
                size, errors = size // 2, errors + 1
            else:
                ends_s.append(time.perf_counter() - begin_s)
        return _facts(size, errors, 0, ends_s[0], "yes")

    return run


def accelerate(family: str, rows: int) -> Run:
    """`find_executable_batch_size`, around a training function that accumulates, as its guide shows."""
    from accelerate.utils import find_executable_batch_size

    problem = Problem(family, rows)
    start = {name: value.clone() for name, value in problem.net.state_dict().items()}
    sizes: list[int] = []
    steps: list[int] = []
    ends_s: list[float] = []

    def run() -> Facts:
        begin_s = time.perf_counter()

        @find_executable_batch_size(starting_batch_size=rows)
        def train(size: int) -> None:
            sizes.append(size)
            steps.append(0)
            # Training begins again, with a net and an optimizer as new ones would be.
            problem.net.load_state_dict(start)
            problem.optimizer = problem.new_optimizer()
            for _ in range(CALLS):
                problem.step(size)
                steps[-1] += 1
                ends_s.append(time.perf_counter() - begin_s)

        train()
        return _facts(sizes[-1], len(sizes) - 1, sum(steps[:-1]), ends_s[-CALLS], "by hand")

    return run


def lightning_power(family: str, rows: int) -> Run:
    """`BatchSizeFinder(mode="power")`."""
    return _lightning(family, rows, "power")


def lightning_binary(family: str, rows: int) -> Run:
    """`BatchSizeFinder(mode="binsearch")`, with its margin of 5 %."""
    return _lightning(family, rows, "binsearch")


def _lightning(family: str, rows: int, mode: str) -> Run:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import BatchSizeFinder

    problem = Problem(family, rows)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2
            self.net = problem.net

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            return train_fn(self.net, *batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return problem.new_optimizer()

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(TensorDataset(problem.x, problem.label), batch_size=self.batch_size)

    class Clock(pl.Callback):
        """Comes after the finder: tells its steps from those that stay."""

        begin_s = search_s = first_step_s = 0.0
        steps = thrown_away = 0

        def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.search_s = time.perf_counter() - self.begin_s
            self.thrown_away = self.steps

        def see_step(self, *args: Any) -> None:
            self.steps += 1
            if self.search_s and not self.first_step_s:
                self.first_step_s = time.perf_counter() - self.begin_s

    module, clock, failed = Module(), Clock(), _Failed()
    _listen(failed)
    handle = register_optimizer_step_post_hook(clock.see_step)

    def run() -> Facts:
        clock.begin_s = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            trainer = pl.Trainer(
                accelerator="cpu",
                max_steps=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=folder,
                callbacks=[BatchSizeFinder(mode, max_val=max(8192, rows)), clock],
            )
            error = None
            try:
                trainer.fit(module)
            except Exception as raised:
                _check_memory(raised)
                error = str(raised)
        handle.remove()
        facts = _facts(module.batch_size, failed.count, clock.thrown_away, clock.first_step_s, "no")
        return {**facts, "search_s": clock.search_s, "error": error}

    return run


class _Failed(logging.Handler):
    """Counts the sizes that the finder says have failed."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += " failed, trying batch size" in record.getMessage()


def _listen(handler: logging.Handler) -> None:
    for name in ("lightning", "lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).handlers.clear()
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)


def _check_memory(error: Exception) -> None:
    if memory_verdict(error) is MemoryVerdict.NO:
        raise error


def _facts(size: int, errors: int, thrown_away: int, first_step_s: float, keeps: str) -> Facts:
    return {
        "size_rows": size,
        "out_of_memory": errors,
        "steps_thrown_away": thrown_away,
        "first_step_s": first_step_s,
        "keeps_mini_batch": keeps,
    }


_ALL: dict[str, tuple[Callable[[str, int], Run], str | None]] = {
    "anybatch, largest": (anybatch_largest, None),
    "anybatch, fastest": (anybatch_fastest, None),
    "accelerate": (accelerate, "accelerate"),
    "Lightning, power": (lightning_power, "lightning"),
    "Lightning, binary": (lightning_binary, "lightning"),
    "halving loop": (halving, None),
}


def ways() -> dict[str, Callable[[str, int], Run]]:
    """The ways whose packages are installed here, imported already."""
    found = {}
    for name, (way, package) in _ALL.items():
        if package is None or importlib.util.find_spec(package) is not None:
            found[name] = way
            if package == "lightning":
                importlib.import_module("lightning.pytorch")
            elif package is not None:
                importlib.import_module(f"{package}.utils")
    return found
