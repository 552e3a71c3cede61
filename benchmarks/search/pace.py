"""Rows per second of processor time, size beside size: each once a round, in turning order."""

import statistics
import time
from collections.abc import Callable, Mapping

from nets import Problem, train_fn

import anybatch

LEAST_ROUNDS = 3
MOST_S = 12.0


def rows_per_s(family: str, rows: int, sizes: Mapping[str, int]) -> dict[str, list[float]]:
    """Steps of one process with each size, round by round; names that begin with "anybatch" use it.

    Nothing limits this process: what is timed is the size. Time is that of the processor, for other
    programs may run beside it.
    """
    problem = Problem(family, rows)
    steps = {name: _step(problem, name, size) for name, size in sizes.items()}
    for step in steps.values():
        step()
    found: dict[str, list[float]] = {name: [] for name in sizes}
    begin_s = time.perf_counter()
    names = list(sizes)
    while len(found[names[-1]]) < LEAST_ROUNDS or time.perf_counter() - begin_s < MOST_S / 2:
        for name in names:
            start_s = time.process_time()
            steps[name]()
            found[name].append(rows / (time.process_time() - start_s))
        names = names[1:] + names[:1]
        if time.perf_counter() - begin_s > MOST_S:
            break
    return found


def _step(problem: Problem, name: str, size: int) -> Callable[[], None]:
    if not name.startswith("anybatch"):
        return lambda: problem.step(size)
    train = anybatch.apply(["x", "label"], ub_size=size)(train_fn)

    def step() -> None:
        problem.optimizer.zero_grad()
        train(problem.net, x=problem.x, label=problem.label)
        problem.optimizer.step()

    return step


def ratio(found: Mapping[str, list[float]], name: str, base: str) -> float:
    """The median over rounds of the rate of one size over that of another in the same round."""
    return statistics.median(one / other for one, other in zip(found[name], found[base], strict=False))
