"""What each term adds to its loss, from the values of small results."""

import torch
from torch import Tensor

from anybatch.exact import graph, values
from anybatch.exact.reading import follow
from anybatch.exact.terms import Kind, Step, Term

_ADD, _MUL = "AddBackward0", "MulBackward0"


def _leaf(*elements: float) -> Tensor:
    return torch.tensor(elements, dtype=torch.float64, requires_grad=True)


def _term(end: str, *path: Step, root: int = 0) -> Term:
    return Term(root, path, end, Kind.ROWS, branch=len(path))


def _parts(losses: list[Tensor], terms: list[Term], recorder: values.Recorder) -> tuple[float | None, ...]:
    tops = [graph.node_of(loss) for loss in losses]
    return values.parts(losses, recorder.values, terms, [follow(term, tops[term.root]) for term in terms])


def test_recorder_keeps_the_value_of_each_node() -> None:
    """Under its node stands what an operation gave, the last one included."""
    leaf = _leaf(1, 2, 3)
    with values.Recorder() as recorder:
        doubled = leaf * 2
        total = doubled.sum()
    assert recorder.values[graph.node_of(doubled)].tolist() == [2, 4, 6]
    assert recorder.values[graph.node_of(total)].item() == 12


def test_recorder_keeps_values_from_before_a_change_in_place() -> None:
    """A copy is kept, detached, so later changes of the result are none of its."""
    with values.Recorder() as recorder:
        doubled = _leaf(1, 2) * 2
        node = graph.node_of(doubled)
        _ = doubled.sum()
    doubled.detach().zero_()
    assert recorder.values[node].tolist() == [2, 4]
    assert not recorder.values[node].requires_grad


def test_recorder_keeps_no_large_results() -> None:
    """Up to 4096 elements are small; one more is passed over."""
    for elements, is_kept in ((4096, True), (4097, False)):
        leaf = torch.ones(elements, requires_grad=True)
        with values.Recorder() as recorder:
            result = leaf.exp()
        assert (graph.node_of(result) in recorder.values) is is_kept


def test_recorder_keeps_nothing_without_a_graph() -> None:
    """What does not require grad belongs to no node."""
    with values.Recorder() as recorder:
        _ = torch.ones(3).sum()
    assert recorder.values == {}


def test_parts_are_what_each_term_adds() -> None:
    """In `0.5 * sum + mean` of 1, 2, 3 the terms add 3 and 2."""
    leaf = _leaf(1, 2, 3)
    with values.Recorder() as recorder:
        loss = 0.5 * leaf.sum() + leaf.mean()
    both = (True, True)
    terms = [
        _term("SumBackward0", Step(_ADD, both, 0), Step(_MUL, (True, False), 0)),
        _term("MeanBackward0", Step(_ADD, both, 1)),
    ]
    assert _parts([loss], terms, recorder) == (3.0, 2.0)


def test_parts_leave_the_graph_for_backward() -> None:
    """Reading values frees nothing and leaves no gradient."""
    leaf = _leaf(1, 2, 3)
    with values.Recorder() as recorder:
        loss = leaf.square().sum() + 1
    _parts([loss], [_term("SumBackward0", Step(_ADD, (True, False), 0))], recorder)
    assert leaf.grad is None
    loss.backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2, 4, 6]


def test_part_of_a_single_unrecorded_term_is_the_loss() -> None:
    """A loss of one term needs no record."""
    loss = _leaf(1, 2, 3).sum()
    assert _parts([loss], [_term("SumBackward0")], values.Recorder()) == (6.0,)


def test_parts_of_two_unrecorded_terms_are_unknown() -> None:
    """What two terms add can't be told from their sum."""
    leaf = _leaf(1, 2, 3)
    loss = leaf.sum() + leaf.mean()
    both = (True, True)
    terms = [_term("SumBackward0", Step(_ADD, both, 0)), _term("MeanBackward0", Step(_ADD, both, 1))]
    assert _parts([loss], terms, values.Recorder()) == (None, None)


def test_parts_of_two_losses_are_kept_apart() -> None:
    """Each term counts in the loss that it belongs to."""
    leaf = _leaf(1, 2, 3)
    with values.Recorder() as recorder:
        losses = [leaf.mean(), leaf.sum()]
    terms = [_term("SumBackward0", root=1), _term("MeanBackward0", root=0)]
    assert _parts(losses, terms, recorder) == (6.0, 2.0)


def test_part_leaves_out_a_constant_that_was_added() -> None:
    """In `(sum + 5) / 2` of 1, 2, 3 the term adds 3; the constant is none of it."""
    leaf = _leaf(1, 2, 3)
    with values.Recorder() as recorder:
        loss = (leaf.sum() + 5) / 2
    only = (True, False)
    term = Term(0, (Step("DivBackward0", only, 0), Step(_ADD, only, 0)), "SumBackward0", Kind.ROWS)
    assert _parts([loss], [term], recorder) == (3.0,)


def test_parts_of_terms_that_meet_in_one_sum_are_kept_apart() -> None:
    """In `2 * s + 3 * s` with the sum s = 6 the terms add 12 and 18."""
    leaf = _leaf(1, 2, 3)
    with values.Recorder() as recorder:
        total = leaf.sum()
        loss = 2 * total + 3 * total
    terms = [
        Term(
            0,
            (Step(_ADD, (True, True), edge), Step(_MUL, (True, False), 0)),
            "SumBackward0",
            Kind.ROWS,
            branch=1,
        )
        for edge in (0, 1)
    ]
    assert _parts([loss], terms, recorder) == (12.0, 18.0)
