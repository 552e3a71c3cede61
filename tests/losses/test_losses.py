"""Every loss of the table against the whole mini-batch in plain PyTorch: exact or said, never silent."""

from __future__ import annotations

import itertools

import pytest
import torch

from .catalogue import CATALOGUE
from .comparison import (
    Result,
    allowed_error,
    case_of,
    error,
    in_pieces,
    whole,
)
from .table import Loss, Verdict

# Rows of the mini-batch and the limit of a piece: an even cut, 4+3+3, single rows, 3+3+3+3.
CUTS = ((8, 4), (10, 4), (9, 1), (12, 3))
SHORT_CUTS = ((10, 4), (9, 1))

pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss:UserWarning")


def _with_cuts(losses: list[Loss], cuts: tuple[tuple[int, int], ...]) -> list[object]:
    return [
        pytest.param(loss, rows, ub_size, id=f"{loss.name}-{rows}/{ub_size}")
        for loss, (rows, ub_size) in itertools.product(losses, cuts)
    ]


EXACT = [loss for loss in CATALOGUE if loss.verdict is Verdict.EXACT]
REFUSED = [loss for loss in CATALOGUE if loss.verdict is Verdict.REFUSED]
WEIGHTED = [loss for loss in CATALOGUE if loss.weight is not None]


def assert_never_silent(expected: Result, got: Result, allowed: float) -> None:
    """Rule 1: a result that differs comes with an error or a warning."""
    is_said = got.refusal is not None or got.warned
    assert is_said or error(expected, got) <= allowed, (
        f"silently different: error {error(expected, got):.2e}, allowed {allowed:.2e}, "
        f"loss {expected.loss} became {got.loss}"
    )


def assert_exact(expected: Result, got: Result, allowed: float) -> None:
    """The call went through and equals the whole mini-batch."""
    assert got.refusal is None, f"refused: {got.refusal}"
    assert error(expected, got) <= allowed, (
        f"error {error(expected, got):.2e}, allowed {allowed:.2e}, loss {expected.loss} became {got.loss}"
    )


@pytest.mark.parametrize(("loss", "rows", "ub_size"), _with_cuts(CATALOGUE, CUTS))
def test_loss_is_exact_or_said(loss: Loss, rows: int, ub_size: int) -> None:
    """Each loss is exact, refused or warned about as it should be, and a refusal leaves nothing behind."""
    case = case_of(loss, [rows])
    expected = whole(case)
    torch.manual_seed(3)
    got = in_pieces(case, ub_size)
    assert_never_silent(expected, got, allowed_error(case, expected))
    if loss.verdict is Verdict.EXACT:
        assert_exact(expected, got, allowed_error(case, expected))
        assert loss.may_warn or not got.warned, "an exact result came with a warning"
    elif loss.verdict is Verdict.REFUSED:
        assert got.refusal is not None, "not refused"
    if got.refusal is not None:
        assert set(got.gradients.values()) == {None}, "a refused call left gradients"
        assert not got.moved_random_state, "a refused call moved the random state"
        assert got.refusal.causes, "the refusal names no cause"


@pytest.mark.parametrize(("loss", "rows", "ub_size"), _with_cuts(WEIGHTED, SHORT_CUTS))
def test_loss_with_its_weight_by_hand_is_exact(loss: Loss, rows: int, ub_size: int) -> None:
    """With the weight that belongs to it, a loss is exact also where its own graph does not tell."""
    case = case_of(loss, [rows])
    expected = whole(case)
    assert_exact(expected, in_pieces(case, ub_size, weight=loss.weight), allowed_error(case, expected))


@pytest.mark.parametrize(("loss", "rows", "ub_size"), _with_cuts(EXACT, SHORT_CUTS[:1]))
def test_exact_loss_accumulates_over_calls_of_two_sizes(loss: Loss, rows: int, ub_size: int) -> None:
    """Gradients of two calls with different numbers of rows add up, under `on_inexact="warn"` too."""
    case = case_of(loss, [rows, rows - 3])
    expected = whole(case)
    assert_exact(expected, in_pieces(case, ub_size, on_inexact="warn"), allowed_error(case, expected))


@pytest.mark.parametrize(("loss", "rows", "ub_size"), _with_cuts(REFUSED, SHORT_CUTS))
def test_coupled_loss_is_warned_about_on_request(loss: Loss, rows: int, ub_size: int) -> None:
    """Under `on_inexact="warn"` a loss that would be refused goes through with a warning."""
    got = in_pieces(case_of(loss, [rows]), ub_size, on_inexact="warn")
    assert got.warned
    assert got.loss is not None


@pytest.mark.parametrize("loss", CATALOGUE, ids=[loss.name for loss in CATALOGUE])
def test_loss_in_one_piece_is_plain_pytorch(loss: Loss) -> None:
    """A mini-batch that fits in one piece gives what plain PyTorch gives, whatever the loss."""
    case = case_of(loss, [6])
    expected = whole(case)
    assert_exact(expected, in_pieces(case, 6), allowed_error(case, expected))
