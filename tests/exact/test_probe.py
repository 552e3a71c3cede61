"""The probe on plain functions: the laws that it learns, what it refutes, and what it can't know."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from anybatch.exact.cuts import Cut
from anybatch.exact.law import Law
from anybatch.exact.pattern import Pattern
from anybatch.exact.probe import Refuted, probe
from anybatch.exact.rehearsal import NoRoom, Rehearsal
from anybatch.exact.values import Recorder
from anybatch.exact.weights import Given

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
ROWS = 8
MASK = torch.tensor([1, 0, 1, 1, 0, 0, 1, 0], dtype=torch.float64)
MASK_BEHIND = torch.tensor([1, 1, 0, 0, 0, 0, 1, 1], dtype=torch.float64)
CUT = Cut(0, 3, 5, ROWS)


class _Function:
    """Rehearses a loss of features, targets and a mask, and counts its runs."""

    def __init__(
        self, loss: Loss, mask: Tensor = MASK, most_rows: int = ROWS, doubt: str | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self.weight = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
        self.rows = torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)
        self.targets = torch.randn(ROWS, generator=generator, dtype=torch.float64)
        self.loss, self.mask, self.most_rows, self.doubt = loss, mask, most_rows, doubt
        self.runs: list[tuple[int, int]] = []

    def __call__(self, start: int, stop: int, *, keeps: bool, records: bool = True) -> Rehearsal:
        self.runs.append((start, stop))
        if stop - start > self.most_rows:
            raise NoRoom
        rows = slice(start, stop)
        with Recorder() as recorder:
            loss = self.loss(self.rows[rows] @ self.weight, self.targets[rows], self.mask[rows])
        return Rehearsal((loss,), recorder.values, frozenset(), self.doubt)


def _unweighted(start: int, stop: int) -> Sequence[Given | None]:
    return [None]


def _probe(function: _Function, *cuts: Cut, known: Sequence[Pattern] = ()) -> list[Pattern]:
    return probe(function, cuts or (CUT,), _unweighted, known)


def _laws(loss: Loss, mask: Tensor = MASK, cuts: tuple[Cut, ...] = (CUT,)) -> list[Law]:
    (pattern,) = _probe(_Function(loss, mask), *cuts)
    return [pattern.law(term).law for term in pattern.terms]


@pytest.mark.parametrize(
    ("loss", "laws"),
    [
        (lambda z, y, m: (z - y).square().mean(), [Law.MEAN]),
        (lambda z, y, m: (z - y).square().sum() / 100, [Law.SUM]),
        (lambda z, y, m: (z * m).sum() / m.sum(), [Law.MEAN]),
        (lambda z, y, m: z.mean() + 0.1 * z.exp().sum(), [Law.MEAN, Law.SUM]),
    ],
)
def test_probe_learns_the_law_of_each_term(loss: Loss, laws: list[Law]) -> None:
    """Means, sums over a constant and masked means are told apart, term by term."""
    assert _laws(loss) == laws


def test_probe_tells_what_follows_the_rows() -> None:
    """The denominator of a mean is known from the rows, that of a masked mean is not."""
    for loss, follows in ((lambda z, y, m: z.mean(), True), (lambda z, y, m: (z * m).sum() / m.sum(), False)):
        (pattern,) = _probe(_Function(loss))
        assert pattern.law(pattern.terms[0]).follows_rows is follows
        assert pattern.is_proved


def test_probe_learns_the_epsilon() -> None:
    """The c0 of a masked mean with an epsilon is the epsilon."""
    (pattern,) = _probe(_Function(lambda z, y, m: (z * m).sum() / (m.sum() + 1e-4)))
    assert pattern.law(pattern.terms[0]).c0 == pytest.approx(1e-4, rel=1e-6)


@pytest.mark.parametrize(
    ("loss", "remainder"),
    [
        (lambda z, y, m: z.sum() + 5.0, Law.ONCE),
        (lambda z, y, m: (3 - z.sum()) / 2, Law.ONCE),
        (lambda z, y, m: z.mean() + y.sum(), Law.SUM),
        (lambda z, y, m: z.sum() + y.mean(), Law.ROWS),
        (lambda z, y, m: z.mean() + 5.0, None),
    ],
)
def test_probe_finds_what_is_left_beside_the_terms(loss: Loss, remainder: Law | None) -> None:
    """A constant in a loss counts once, summed or by rows, where the terms' own factors don't fit it."""
    (pattern,) = _probe(_Function(loss))
    assert pattern.remainders == (remainder,)
    assert pattern.uses_values is (remainder is not None)


@pytest.mark.parametrize(
    ("loss", "cause"),
    [
        (lambda z, y, m: z.square().mean().sqrt(), "Sqrt"),
        (lambda z, y, m: (z - z.mean()).square().mean(), "Sub brings Mean"),
        (lambda z, y, m: (z[:, None] - z).square().mean(), "per pair of rows"),
        (lambda z, y, m: z.sum() / len(z) ** 0.5, "does not add up over rows"),
        (lambda z, y, m: (z * (y - y.mean())).mean(), "depends on which rows are together"),
        (lambda z, y, m: (z * y.flip(0)).mean(), "depends on which rows are together"),
        (lambda z, y, m: (z * m).sum() / m.sum().sqrt(), "does not add up over rows"),
    ],
)
def test_probe_refutes_a_coupling(loss: Loss, cause: str) -> None:
    """By structure where the graph shows it, by value where it came in through constants."""
    with pytest.raises(Refuted) as refuted:
        _probe(_Function(loss))
    assert cause in refuted.value.causes[0]
    assert refuted.value.losses == 1


def test_probe_refutes_a_coupling_that_only_gradients_show() -> None:
    """A loss that is zero for any rows, with a gradient of values centred over the piece."""
    with pytest.raises(Refuted, match="the gradient depends on which rows are together"):
        _probe(_Function(lambda z, y, m: _worth_nothing(z)))


def _worth_nothing(z: Tensor) -> Tensor:
    loss = (z * (z - z.mean()).detach()).mean()
    return loss - loss.detach()


def test_probe_looks_further_where_nothing_counts() -> None:
    """A half that is masked out shows nothing of the mean; another cut does, and proves it."""
    (pattern,) = _probe(
        _Function(lambda z, y, m: (z * m).sum() / m.sum().clamp(min=1), MASK_BEHIND),
        Cut(2, 4, 6, ROWS),
        Cut(0, 1, 3, ROWS),
        Cut(5, 7, 8, ROWS),
    )
    assert pattern.law(pattern.terms[0]).law is Law.MEAN
    assert pattern.is_proved


def test_probe_proves_nothing_where_nothing_counts_anywhere() -> None:
    """With every cut masked out the pattern is the best there is, and not proved."""
    function = _Function(lambda z, y, m: (z * m).sum() / m.sum().clamp(min=1), torch.zeros(ROWS).double())
    (pattern,) = _probe(function, Cut(0, 2, 4, ROWS), Cut(4, 6, 8, ROWS))
    assert not pattern.is_proved


def test_probe_stops_at_the_first_cut_that_shows_all() -> None:
    """One cut is three runs: other rows beside it for their graph, the piece, and its halves."""
    function = _Function(lambda z, y, m: z.mean())
    _probe(function, CUT, Cut(3, 5, 8, ROWS))
    assert function.runs == [(0, 3), (0, 5), (0, 3), (3, 5)]


def test_probe_passes_over_a_cut_without_room() -> None:
    """Rows that don't fit the device are not tried again; narrower ones are."""
    function = _Function(lambda z, y, m: z.mean(), most_rows=5)
    (pattern,) = _probe(function, Cut(0, 5, 8, ROWS, is_wide=True), CUT)
    assert pattern.law(pattern.terms[0]).law is Law.MEAN


def test_probe_with_noise_compares_nothing_and_says_so() -> None:
    """Runs that can't be compared leave the law of the graph, with a warning."""
    function = _Function(lambda z, y, m: (z * torch.rand(len(z))).mean(), doubt="the function draws numbers")
    (pattern,) = _probe(function)
    assert pattern.law(pattern.terms[0]).law is Law.MEAN
    assert pattern.warnings == ("the function draws numbers, so the pieces were not compared with the whole",)


def test_probe_takes_the_callers_word_and_tests_it() -> None:
    """A weight that fits goes through; one that does not is refuted by the values."""

    def counted(start: int, stop: int) -> list[Given | None]:
        return [Given(Law.GIVEN, float(MASK[start:stop].sum()))]

    def rows(start: int, stop: int) -> list[Given | None]:
        return [Given(Law.ROWS)]

    function = _Function(lambda z, y, m: (z * m).sum() / m.sum())
    (pattern,) = probe(function, [CUT], counted)
    assert [pattern.law(term).law for term in pattern.terms] == [Law.GIVEN]
    with pytest.raises(Refuted):
        probe(function, [CUT], rows)


def test_probe_finds_two_forms_where_rows_differ() -> None:
    """Rows with a label have one term more than rows without; asked for more, the probe finds the other."""

    def loss(z: Tensor, y: Tensor, m: Tensor) -> Tensor:
        return z.mean() + (z * m).sum() if bool((m > 0).all()) else z.mean()

    function = _Function(loss, torch.tensor([1.0, 1, 1, 1, 0, 0, 0, 0], dtype=torch.float64))
    first = _probe(function, Cut(0, 2, 4, ROWS))
    second = _probe(function, Cut(4, 6, 8, ROWS), known=first)
    assert [len(pattern.terms) for pattern in (*first, *second)] == [2, 1]


class _Sum(torch.autograd.Function):
    """A sum that tells nothing of itself."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.rows = len(z)
        return z.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].expand(ctx.rows)


def test_probe_takes_an_unreadable_term_for_what_its_values_combine_like() -> None:
    """A custom sum is found to be one, with a warning that says so."""
    (pattern,) = _probe(_Function(lambda z, y, m: _Sum.apply(z)))
    assert [pattern.law(term).law for term in pattern.terms] == [Law.SUM]
    assert "combine like a sum" in pattern.warnings[0]


def test_probe_takes_zero_for_no_value_of_an_unreadable_term() -> None:
    """An unreadable term that is zero on a half may count nothing there, so the next cut is asked too."""
    function = _Function(lambda z, y, m: _Sum.apply(z * m), MASK_BEHIND)
    _probe(function, Cut(0, 2, 4, ROWS), Cut(0, 1, 2, ROWS))
    assert (0, 1) in function.runs


@pytest.mark.parametrize(
    ("loss", "is_asked"),
    [
        (lambda z, y, m: (z * m).sum() / (m.sum() + 1e-4), True),
        (lambda z, y, m: (z * m).sum() / m.sum(), True),
        (lambda z, y, m: (z * m).sum() / len(z), False),
        (lambda z, y, m: (z * m).sum() / 100, False),
    ],
)
def test_probe_confirms_counts_and_epsilons(loss: Loss, is_asked: bool) -> None:
    """What may add up by chance is confirmed on three other cuts; what follows the rows needs none."""
    function = _Function(loss)
    _probe(function, CUT, Cut(1, 4, 7, ROWS), Cut(2, 4, 7, ROWS), Cut(0, 3, 7, ROWS), Cut(2, 4, 8, ROWS))
    assert ((1, 7) in function.runs) is is_asked
    assert ((0, 7) in function.runs) is is_asked
    assert (2, 8) not in function.runs


def test_probe_with_noise_of_its_own_compares_nothing_and_says_so() -> None:
    """A function with random numbers that nobody sees gives other values for the same rows."""
    generator = torch.Generator().manual_seed(0)
    (pattern,) = _probe(_Function(lambda z, y, m: (z * torch.rand(len(z), generator=generator)).mean()))
    assert "two runs on the same rows differ" in pattern.warnings[-1]
