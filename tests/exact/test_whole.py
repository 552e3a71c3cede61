"""The piece that a probe looks at: which runs it takes, what they keep, and what is left of them."""

import gc
import warnings
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import anybatch
from anybatch.errors import InexactWarning
from anybatch.exact.cuts import Cut
from anybatch.exact.law import Law
from anybatch.exact.rehearsal import NoRoom, Rehearsal
from anybatch.exact.terms import Kind
from anybatch.exact.values import Recorder
from anybatch.exact.weights import Given
from anybatch.exact.whole import Whole, own_terms, run_whole

CUT = Cut(0, 3, 5, 8)


class _Function:
    """Rehearses the mean of `tanh(rows * weight)`, and remembers what each run was to keep."""

    def __init__(self, doubt: str | None = None, most_rows: int = 8, is_checkpointed: bool = False) -> None:
        self.weight = torch.ones(2, dtype=torch.float64, requires_grad=True)
        self.doubt, self.most_rows, self.is_checkpointed = doubt, most_rows, is_checkpointed
        self.runs: list[tuple[int, int, bool]] = []

    def __call__(self, start: int, stop: int, *, keeps: bool, records: bool = True) -> Rehearsal:
        self.runs.append((start, stop, keeps))
        if stop - start > self.most_rows:
            raise NoRoom
        rows = torch.arange(16, dtype=torch.float64).reshape(8, 2)[start:stop]
        with Recorder() as recorder:
            z = rows * self.weight
            z = checkpoint(torch.tanh, z, use_reentrant=True) if self.is_checkpointed else z.tanh()
            loss = z.mean()
        return Rehearsal((loss,), recorder.values, frozenset(), self.doubt)


def _run(function: _Function, cut: Cut = CUT, given: Given | None = None) -> Whole:
    return run_whole(function, cut, lambda start, stop: [given])


def test_run_whole_reads_terms_and_gradients_of_the_piece() -> None:
    """The terms are those of the labelled graph, the gradients those of the piece in plain PyTorch."""
    function = _Function()
    whole = _run(function)
    rows = torch.arange(10, dtype=torch.float64).reshape(5, 2)
    (expected,) = torch.autograd.grad((rows * function.weight).tanh().mean(), function.weight)
    assert [(term.end, term.kind) for term in whole.terms] == [("MeanBackward0", Kind.ROWS)]
    assert whole.is_labelled
    assert whole.refusals == ()
    assert whole.leaves == [function.weight]
    torch.testing.assert_close(whole.gradients[0], expected, rtol=1e-14, atol=0)


def test_run_whole_compares_gradients_near_each_term() -> None:
    """A term deep below others has leaves of its own to compare at, besides those that see all of it."""
    weights = [torch.full((2,), 0.5, dtype=torch.float64, requires_grad=True) for _ in range(6)]
    rows = torch.arange(16, dtype=torch.float64).reshape(8, 2)

    def rehearse(start: int, stop: int, *, keeps: bool, records: bool = True) -> Rehearsal:
        near = sum((rows[start:stop] * weight for weight in weights[:5]), torch.zeros(()))
        loss = near.mean() + (rows[start:stop] * weights[5]).tanh().exp().sin().exp().mean()
        return Rehearsal((loss,), {}, frozenset(), None)

    whole = run_whole(rehearse, CUT, lambda start, stop: [None])
    compared = {id(leaf) for leaf in whole.leaves}
    assert compared == {id(weight) for weight in weights}


def test_run_whole_keeps_the_piece_alone() -> None:
    """The rows beside it are run for their graph, so nothing large of them is kept."""
    function = _Function()
    _run(function)
    assert function.runs == [(0, 3, False), (0, 5, True)]


@pytest.mark.parametrize(
    ("function", "cut"),
    [
        (_Function(doubt="random numbers"), CUT),
        (_Function(is_checkpointed=True), CUT),
        (_Function(), Cut(0, 3, 5, 8, is_wide=True)),
    ],
)
def test_run_whole_keeps_nothing_where_no_gradients_are_compared(function: _Function, cut: Cut) -> None:
    """Of noisy runs, reentrant checkpoints and many rows only values are looked at."""
    whole = _run(function, cut)
    assert [keeps for _, _, keeps in function.runs] == [False, False]
    assert whole.leaves == []
    assert whole.gradients == []


def test_run_whole_makes_do_with_the_first_half_where_rows_beside_don_t_fit() -> None:
    """A piece of two rows would be compared with three; without memory for them, with its own first row."""
    function = _Function(most_rows=2)
    whole = _run(function, Cut(0, 1, 2, 8))
    assert function.runs == [(0, 3, False), (0, 1, False), (0, 2, True)]
    assert whole.is_labelled


def test_run_whole_does_not_read_what_the_caller_weights() -> None:
    """A loss with a weight is one opaque term, whatever its graph."""
    whole = _run(_Function(), given=Given(Law.GIVEN, 2.0))
    assert [(term.path, term.end, term.kind) for term in whole.terms] == [((), "", Kind.OPAQUE)]


def test_own_terms_are_read_without_labels() -> None:
    """One run alone shows the single way down to its mean."""
    (term,) = own_terms(_Function()(0, 2, keeps=False))
    assert (term.end, term.kind) == ("MeanBackward0", Kind.ROWS)


def test_probe_of_a_noisy_function_holds_one_run_at_a_time() -> None:
    """Where nothing is compared, no large result of one look at the loss is alive in the next."""
    model = nn.Linear(3, 5000)
    results: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def step(x: Tensor) -> Tensor:
        gc.collect()
        alive.append(sum(result() is not None for result in results))
        result = (model(x) * torch.rand(())).tanh()
        results.append(weakref.ref(result))
        return result.square().mean()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InexactWarning)
        anybatch.apply(["x"], ub_size=8)(step)(x=torch.randn(32, 3))
    assert len(alive) > 4
    assert set(alive) == {0}
