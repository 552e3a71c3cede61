"""The demo's promises."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from anybatch.cli.demo.messages import Comparison, Training
from anybatch.cli.demo.promises import promises
from anybatch.cli.demo.settings import Settings
from anybatch.cli.demo.stage import Outcome


def broken(settings: Settings, outcome: Outcome) -> list[str]:
    """The promises that were not kept."""
    return [each.text for each in promises(settings, outcome) if not each.kept]


def test_every_promise_is_kept(settings: Settings, outcome: Outcome) -> None:
    """A run that came out as it should keeps six promises and breaks none."""
    made = promises(settings, outcome)
    assert len(made) == 6
    assert all(each.kept for each in made)


def test_whole_mini_batch_that_trains_breaks_a_promise(settings: Settings, outcome: Outcome) -> None:
    """A cap that the whole mini-batch fits shows nothing."""
    trained = replace(outcome.whole, out_of_memory=None, steps_done=1)
    assert broken(settings, replace(outcome, whole=trained)) == [
        "the whole mini-batch runs out of memory under the cap"
    ]


def test_pieces_out_of_memory_break_two_promises(settings: Settings, outcome: Outcome) -> None:
    """Micro-batches that run out of memory neither train nor reach an accuracy."""
    dead = Training(True, 3, "can't allocate memory", 0, None, {})
    assert broken(settings, replace(outcome, pieces=dead)) == [
        "the micro-batches train within the cap",
        "the test accuracy is at least 97%",
    ]


@pytest.mark.parametrize(("accuracy", "kept"), [(0.97, True), (0.9699, False)])
def test_accuracy_bound(accuracy: float, kept: bool, settings: Settings, outcome: Outcome) -> None:
    """97 % is enough, less is not."""
    pieces = replace(outcome.pieces, scores={"accuracy": accuracy})
    assert broken(settings, replace(outcome, pieces=pieces)) == (
        [] if kept else ["the test accuracy is at least 97%"]
    )


def test_quick_run_promises_no_accuracy(settings: Settings, outcome: Outcome) -> None:
    """A run that trains briefly makes every promise but that of an accuracy."""
    pieces = replace(outcome.pieces, scores={"accuracy": 0.11})
    quick = replace(settings, least_accuracy=None)
    assert len(promises(quick, outcome)) == 5
    assert broken(quick, replace(outcome, pieces=pieces)) == []


@pytest.mark.parametrize("error", [1.1e-10, 0.5, math.nan, math.inf])
@pytest.mark.parametrize("which", ["loss_error", "gradient_error", "uneven_errors"])
def test_inexact_gradient_breaks_its_promise(
    which: str, error: float, settings: Settings, outcome: Outcome
) -> None:
    """An error above 1e-10, or one that is no number, breaks exactly the promise it belongs to."""
    value = {"loop": 0.0, "anybatch": error} if which == "uneven_errors" else error
    comparison: Comparison = replace(outcome.comparison, **{which: value})
    subject = {
        "loss_error": "the loss",
        "gradient_error": "the gradients",
        "uneven_errors": "on the uneven cut",
    }[which]
    (text,) = broken(settings, replace(outcome, comparison=comparison))
    assert text.startswith(subject)


def test_error_of_another_way_is_no_promise(settings: Settings, outcome: Outcome) -> None:
    """How far other ways are from the whole is shown, not promised."""
    comparison = replace(outcome.comparison, uneven_errors={"loop": 0.0, "anybatch": 0.0})
    assert broken(settings, replace(outcome, comparison=comparison)) == []


def test_without_a_cap_nothing_is_promised_about_it(settings: Settings, outcome: Outcome) -> None:
    """Where no cap is in force the whole mini-batch may train."""
    free = replace(
        outcome,
        whole=replace(outcome.whole, cap_in_force=False, out_of_memory=None),
        pieces=replace(outcome.pieces, cap_in_force=False),
    )
    made = promises(settings, free)
    assert all(each.kept for each in made)
    assert not any("cap" in each.text for each in made)
