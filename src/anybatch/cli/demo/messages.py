"""What a child tells the command while it works and when it is done: one line of JSON each."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import final

__all__ = ["Comparison", "Found", "Message", "Progress", "Result", "Training", "decode", "encode"]


@final
@dataclass(frozen=True)
class Progress:
    """How far an act is.

    Attributes:
        done: Parts done.
        total: Parts of the act.
        note: What was seen last, in a few words.
    """

    done: int
    total: int
    note: str


@final
@dataclass(frozen=True)
class Found:
    """How the size of the micro-batches was found.

    Attributes:
        rows: The largest micro-batch.
        ceiling_rows: The most rows that fit, as far as is known.
        failures: How often memory ran out on the way.
        available_bytes: What micro-batches of one size may take of the cap.
        curve_bytes: What they need, for some numbers of rows.
    """

    rows: int
    ceiling_rows: int
    failures: int
    available_bytes: int | None
    curve_bytes: dict[str, int]


@final
@dataclass(frozen=True)
class Training:
    """A training under the cap.

    Attributes:
        cap_in_force: Whether the operating system enforces the cap.
        steps_done: Optimizer steps taken.
        out_of_memory: The error it ended with; None where it did not run out of memory.
        held_bytes: What the process held before training.
        peak_bytes: Most bytes that training held on top of that; None where it ran out of memory.
        scores: Figures of the trained network on the test rows, by name, 0 to 1; empty where there is none.
        found: How the size of the micro-batches was found; None for the whole mini-batch.
    """

    cap_in_force: bool
    steps_done: int
    out_of_memory: str | None
    held_bytes: int
    peak_bytes: int | None
    scores: dict[str, float]
    found: Found | None = None


@final
@dataclass(frozen=True)
class Comparison:
    """What was seen without the cap.

    Attributes:
        whole_peak_bytes: Most bytes that a step on the whole mini-batch held, float32.
        loss_error: Micro-batches against the whole mini-batch, float64: difference of the loss over the loss.
        gradient_error: The same, of the gradients: largest difference over the largest gradient.
        uneven_errors: `gradient_error` of each way to accumulate, on an uneven cut with ignored labels.
        missing: Why a way was left out, by name.
    """

    whole_peak_bytes: int
    loss_error: float
    gradient_error: float
    uneven_errors: dict[str, float]
    missing: dict[str, str]


Result = Training | Comparison
Message = Progress | Result
_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in (Progress, Training, Comparison)}


def encode(message: Message) -> str:
    """The message as one line, without the line's end."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)})


def decode(line: str) -> Message:
    """The message that `encode` wrote."""
    fields = json.loads(line)
    if fields.get("found") is not None:
        fields["found"] = Found(**fields["found"])
    return _KINDS[fields.pop("kind")](**fields)
