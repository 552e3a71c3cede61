"""What the demo promises, and whether this run kept it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from anybatch.cli.demo.messages import Comparison, Training
from anybatch.cli.demo.settings import ERROR_BOUND, Settings
from anybatch.cli.demo.stage import Outcome
from anybatch.memory.reading import in_words

__all__ = ["Promise", "promises"]


@final
@dataclass(frozen=True)
class Promise:
    """Something that the demo shows, and what this run has shown.

    Attributes:
        text: The promise.
        kept: Whether it came out so.
        seen: What was seen, with its unit.
    """

    text: str
    kept: bool
    seen: str


def promises(settings: Settings, outcome: Outcome) -> tuple[Promise, ...]:
    """Every promise of a run with these settings; those about the cap only where it was in force."""
    return (
        *_memory_promises(settings, outcome.whole, outcome.pieces),
        *_accuracy_promise(settings, outcome.pieces),
        *_exactness_promises(outcome.comparison),
    )


def _memory_promises(settings: Settings, whole: Training, pieces: Training) -> Iterator[Promise]:
    if whole.cap_in_force:
        died = whole.out_of_memory is not None
        yield Promise(
            "the whole mini-batch runs out of memory under the cap", died, "it did" if died else "it trained"
        )
    trained = pieces.steps_done == settings.steps
    yield Promise("the micro-batches train" + _within_cap(pieces), trained, _training_seen(settings, pieces))


def _within_cap(pieces: Training) -> str:
    return " within the cap" if pieces.cap_in_force else ""


def _training_seen(settings: Settings, pieces: Training) -> str:
    steps = f"{pieces.steps_done} of {settings.steps} steps"
    if pieces.peak_bytes is None:
        return f"{steps}, then out of memory"
    return f"{steps}, peak {in_words(pieces.peak_bytes)}"


def _accuracy_promise(settings: Settings, pieces: Training) -> Iterator[Promise]:
    if settings.least_accuracy is None:
        return
    text = f"the test accuracy is at least {settings.least_accuracy:.0%}"
    accuracy = pieces.scores.get("accuracy")
    if accuracy is None:
        yield Promise(text, False, "no trained network")
    else:
        yield Promise(text, accuracy >= settings.least_accuracy, f"{accuracy:.1%}")


def _exactness_promises(comparison: Comparison) -> Iterator[Promise]:
    errors = {
        "the loss is the whole's": comparison.loss_error,
        "the gradients are the whole's": comparison.gradient_error,
        "on the uneven cut too": comparison.uneven_errors["anybatch"],
    }
    for text, error in errors.items():
        yield Promise(f"{text}, within {ERROR_BOUND:.0e}", error <= ERROR_BOUND, f"{error:.1e}")
