"""How a verification prints, and when it raises."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace

import pytest

import anybatch
from anybatch.errors import InexactError

EXACT = anybatch.Verification(
    function="train_fn",
    is_exact=True,
    rows=10,
    sizes=(4, 3, 3),
    loss_whole=2.302585092994046,
    loss_in_pieces=2.3025850929940455,
    loss_error_ratio=1.9e-16,
    largest_error_ratio=1.2345e-16,
    parameter="fc.weight",
    allowed_ratio=1e-10,
    allowed_because="all is float64",
)
INEXACT = replace(
    EXACT,
    is_exact=False,
    sizes=(1,) * 10,
    loss_whole={"match": 1.0, "reconstruction": 0.25},
    loss_in_pieces={"match": 1.5, "reconstruction": 0.25},
    largest_error_ratio=0.119,
    causes=(
        "BatchNorm in training mode takes its statistics over each micro-batch, not over the mini-batch: "
        "backbone.layer1.0.bn1 (BatchNorm2d), backbone.layer1.0.bn2 (BatchNorm2d). Use GroupNorm, or put "
        "these layers in eval mode. Alone it makes a difference of 0.11.",
        "Dropout draws other masks.",
        "The function keeps state.",
    ),
    switched_off=("BatchNorm", "dropout", "kept state"),
    remaining_error_ratio=3.2e-16,
    notes=("The function changes its arguments in place: x.",),
)

PRINTED_EXACT = """\
train_fn: exact
  mini-batch  10 rows, in 1 piece of 4 and 2 of 3
  loss        2.302585093 whole, 2.302585093 in pieces
  gradients   differ by at most 1.2e-16 of the largest one, in fc.weight
  allowed     1e-10: all is float64"""

PRINTED_INEXACT = """\
train_fn: not exact
  mini-batch           10 rows, in 10 pieces of 1
  loss match           1 whole, 1.5 in pieces
  loss reconstruction  0.25 whole, 0.25 in pieces
  gradients            differ by at most 0.12 of the largest one, in fc.weight
  allowed              1e-10: all is float64

Why, 3 causes:
- BatchNorm in training mode takes its statistics over each micro-batch, not
  over the mini-batch: backbone.layer1.0.bn1 (BatchNorm2d),
  backbone.layer1.0.bn2 (BatchNorm2d). Use GroupNorm, or put these layers in
  eval mode. Alone it makes a difference of 0.11.
- Dropout draws other masks.
- The function keeps state.

Without BatchNorm, dropout and kept state the difference is 3.2e-16: exact.

The function changes its arguments in place: x."""


def test_printed_report_of_an_exact_call() -> None:
    """An exact call prints five lines."""
    assert str(EXACT) == PRINTED_EXACT


def test_printed_report_of_an_inexact_call() -> None:
    """An inexact call prints its causes, what is left without them, and notes."""
    assert str(INEXACT) == PRINTED_INEXACT


def test_report_fits_a_terminal() -> None:
    """No line is longer than 79 characters, whatever the names."""
    long = replace(INEXACT, parameter="model.decoder.layers.11.encoder_attn.k_proj.weight")
    assert max(map(len, str(long).splitlines())) <= 79


def test_printed_difference_that_is_left() -> None:
    """Where a cause can't be switched off, the difference that is left is said to be still there."""
    left = replace(INEXACT, remaining_error_ratio=0.0123, is_explained=False, switched_off=("dropout",))
    assert "\n\nWithout dropout the difference is still 0.012.\n" in str(left)


def test_printed_figures_that_are_none() -> None:
    """No difference, an infinite one, and a call that could not be run are said in words."""
    assert "gradients   are the same\n" in str(replace(EXACT, largest_error_ratio=0.0, parameter=None))
    one_sided = replace(EXACT, largest_error_ratio=math.inf)
    assert "gradients   are missing, or not finite, on one side only, in fc.weight" in str(one_sided)
    failed = replace(INEXACT, loss_in_pieces=math.nan)
    assert "loss reconstruction  0.25 whole, nan in pieces" in str(failed)


def test_raise_if_inexact() -> None:
    """An inexact call raises with its causes, and an exact one does not."""
    EXACT.raise_if_inexact()
    with pytest.raises(InexactError, match=r"train_fn: gradients differ by at most 0.12") as caught:
        INEXACT.raise_if_inexact()
    assert caught.value.causes == INEXACT.causes
    assert all(cause in str(caught.value) for cause in INEXACT.causes)


def test_verification_is_a_value() -> None:
    """A verification can't be changed, and equal ones are equal."""
    assert replace(EXACT) == EXACT
    with pytest.raises(FrozenInstanceError):
        EXACT.rows = 3  # type: ignore[misc]
