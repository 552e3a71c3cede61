"""Paired rounds: each contender once per round, in turning order, and ratios taken within the round."""

import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from steps import SetUp, Step


@dataclass(frozen=True)
class Taken:
    """What one step took: seconds by the wall, and seconds of processor time over all threads."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class Spread:
    """A median, the quartiles around it, and the standard error of the median."""

    median: float
    low: float
    high: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        low, median, high = statistics.quantiles(values, n=4)
        # The median of n normal values varies by 1.253 sigma / sqrt(n); sigma is 0.741 times high - low.
        return cls(median, low, high, 0.93 * (high - low) / len(values) ** 0.5)

    def __str__(self) -> str:
        return f"{self.median:.3f} ± {self.error:.3f}"


@dataclass(frozen=True)
class Rounds:
    """Every step, by contender; the n-th entries belong to the same round."""

    pieces: int
    taken: dict[str, list[Taken]]

    @property
    def piece_s(self) -> float:
        return statistics.median(one.wall_s for one in self.taken["loop"]) / self.pieces

    def ratio(self, name: str, clock: str = "wall_s") -> Spread | None:
        """The contender's time over that of the loop by hand in the same round; None where it did not run."""
        if name not in self.taken:
            return None
        pairs = zip(self.taken[name], self.taken["loop"], strict=True)
        return Spread.of([getattr(one, clock) / getattr(loop, clock) for one, loop in pairs])

    def facts(self) -> dict[str, Any]:
        contenders = [name for name in self.taken if name != "loop"]
        return {
            "piece_s": self.piece_s,
            "wall_ratio": {name: vars(self.ratio(name)) for name in contenders},
            "cpu_ratio": {name: vars(self.ratio(name, "cpu_s")) for name in contenders},
            "wall_s": {name: [one.wall_s for one in steps] for name, steps in self.taken.items()},
            "cpu_s": {name: [one.cpu_s for one in steps] for name, steps in self.taken.items()},
        }


def paired_rounds(setting: SetUp, rounds: int) -> Rounds:
    """Times every contender from its second call on, after checking that they do the same work."""
    steps = setting.contenders()
    check_same_gradients(setting, steps)
    taken: dict[str, list[Taken]] = {name: [] for name in steps}
    names = list(steps)
    for place in range(rounds):
        gc.collect()
        turn = place % len(names)
        for name in names[turn:] + names[:turn]:
            taken[name].append(time_of(setting, steps[name]))
    return Rounds(setting.pieces, taken)


def time_of(setting: SetUp, step: Step) -> Taken:
    """What one step takes, from no gradients on."""
    setting.net.zero_grad()
    start = Taken(time.perf_counter(), time.process_time())
    step()
    return Taken(time.perf_counter() - start.wall_s, time.process_time() - start.cpu_s)


def check_same_gradients(setting: SetUp, steps: dict[str, Step]) -> None:
    """Runs every contender once; what gives another gradient is not worth timing."""
    found = {}
    for name, step in steps.items():
        setting.net.zero_grad()
        step()
        found[name] = torch.cat([p.grad.flatten() for p in setting.net.parameters() if p.grad is not None])
    largest = float(found["loop"].abs().max())
    for gradient in found.values():
        torch.testing.assert_close(gradient, found["loop"], rtol=0, atol=1e-4 * largest)


@dataclass(frozen=True)
class FirstCalls:
    """First and second calls of functions that were never called before.

    Attributes:
        piece_s: Seconds of one piece, from the second calls.
        first_s: Seconds of first calls, in a process in which other functions were called before.
        second_s: Seconds of second calls.
        in_new_process_s: Seconds of the first and of the second call in a process that has trained, but never
            called anybatch.
    """

    piece_s: float
    first_s: list[float]
    second_s: list[float]
    in_new_process_s: tuple[float, float]

    @property
    def extra_pieces(self) -> float:
        """What a first call takes beyond the second, in pieces: the median over functions."""
        extra_s = [first - second for first, second in zip(self.first_s, self.second_s, strict=True)]
        return statistics.median(extra_s) / self.piece_s

    @property
    def extra_in_new_process_s(self) -> float:
        first_s, second_s = self.in_new_process_s
        return first_s - second_s

    def facts(self) -> dict[str, Any]:
        return {
            "first_call_extra_pieces": self.extra_pieces,
            "first_s": self.first_s,
            "second_s": self.second_s,
            "in_new_process_s": self.in_new_process_s,
        }


def first_calls(setting: SetUp, functions: int) -> FirstCalls:
    """Times the first and the second call of newly decorated functions."""
    first_s, second_s = [], []
    for _ in range(functions):
        step = setting.with_anybatch()
        first_s.append(time_of(setting, step).wall_s)
        second_s.append(time_of(setting, step).wall_s)
    piece_s = statistics.median(second_s) / setting.pieces
    return FirstCalls(piece_s, first_s, second_s, _in_new_process(setting))


def _in_new_process(setting: SetUp) -> tuple[float, float]:
    sizes = [setting.ub_size, setting.pieces, torch.get_num_threads()]
    command = [sys.executable, str(Path(__file__).with_name("first.py")), setting.net_name, *map(str, sizes)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    first_s, second_s = map(float, printed.split())
    return first_s, second_s
