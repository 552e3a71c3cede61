"""The caller's word on how pieces weigh: which rules there are, what they say, and which are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from anybatch.errors import WeightError
from anybatch.exact.law import Law
from anybatch.exact.weights import BatchWeights, Given, Weight, Weights

LABELS = torch.tensor([0, -100, 1, -100, -100])


def _cut(start: int, stop: int) -> dict[str, Any]:
    return {"x": torch.zeros(5)[start:stop], "label": LABELS[start:stop]}


def _counted(label: torch.Tensor) -> torch.Tensor:
    return (label != -100).sum()


def _bound(weight: Weight) -> BatchWeights:
    return BatchWeights(Weights(weight, ["x", "label"]), _cut)


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        ("auto", None),
        ("rows", Given(Law.ROWS)),
        ("sum", Given(Law.SUM)),
        (_counted, Given(Law.GIVEN, 2.0)),
        (lambda x, label: len(x) + (label == 1).sum(), Given(Law.GIVEN, 4.0)),
        (lambda **batch: len(batch["x"]), Given(Law.GIVEN, 3.0)),
        (lambda label, scale=0.5: scale * len(label), Given(Law.GIVEN, 1.5)),
    ],
)
def test_given_is_what_the_rule_says_of_the_rows(weight: Weight, said: Given | None) -> None:
    """Of the first three rows, of which two are labelled; a function takes the arguments that it names."""
    assert _bound(weight).given((None,), 0, 3) == [said]


def test_given_of_a_dict_is_by_name() -> None:
    """Each loss of a dict has the rule of its name, in the order of the losses."""
    bound = _bound({"mean": "rows", "total": "sum", "read": "auto"})
    assert bound.given(("read", "total", "mean"), 0, 3) == [None, Given(Law.SUM), Given(Law.ROWS)]


def test_one_rule_holds_for_all_losses_of_a_dict() -> None:
    """A rule that is no mapping holds for each loss."""
    assert _bound("sum").given(("a", "b"), 0, 3) == [Given(Law.SUM)] * 2


@pytest.mark.parametrize("names", [("a",), ("a", "b", "c"), (None,)])
def test_given_of_other_losses_than_named_is_refused(names: tuple[str | None, ...]) -> None:
    """A mapping names exactly the losses that the function returns."""
    with pytest.raises(WeightError, match=r"entries \['a', 'b'\]"):
        _bound({"a": "rows", "b": "sum"}).given(names, 0, 3)


def test_function_is_asked_once_for_the_same_rows() -> None:
    """What a function said is kept for the call."""
    asked: list[int] = []

    def rule(x: torch.Tensor) -> int:
        asked.append(len(x))
        return len(x)

    bound = _bound(rule)
    assert bound.given((None,), 0, 3) == bound.given((None,), 0, 3)
    bound.given((None,), 1, 3)
    assert asked == [3, 2]


@pytest.mark.parametrize(
    ("weight", "reads"),
    [
        ("auto", True),
        ("rows", False),
        (_counted, False),
        ({"a": "auto", "b": "sum"}, True),
        ({"a": "sum"}, False),
    ],
)
def test_reads_graph_only_where_a_rule_is_auto(weight: Weight, reads: bool) -> None:
    """With a rule for every loss no graph is read."""
    assert Weights(weight, ["label"]).reads_graph is reads


@pytest.mark.parametrize(
    "weight", ["mean", None, 3, {"a": "rows", "b": "half"}, lambda other: 1.0, lambda x, missing: 1.0]
)
def test_what_is_no_rule_is_refused_at_once(weight: Any) -> None:
    """Another word, another type, or a function of what is no batch argument."""
    with pytest.raises(WeightError, match="`weight`: "):
        Weights(weight, ["x", "label"])


@pytest.mark.parametrize(
    "value",
    [
        None,
        "2",
        True,
        torch.ones(2),
        torch.ones(2).numpy(),
        torch.tensor(True),
        float("nan"),
        float("inf"),
        -1.0,
        1j,
    ],
)
def test_what_is_no_weight_is_refused(value: Any) -> None:
    """A weight is one number, finite and not negative."""
    with pytest.raises(WeightError, match="`weight`: "):
        _bound(lambda x: value).given((None,), 0, 3)


@pytest.mark.parametrize("rule", [_counted, lambda x: len(x), lambda x: 0.1 * len(x), lambda x: 0])
def test_counts_add_up_over_pieces(rule: Callable[..., Any]) -> None:
    """Counts, their multiples, and nothing at all add up."""
    _bound(rule).check_adds_up((2, 2, 1))


@pytest.mark.parametrize("rule", [lambda x: 1.0, lambda x: len(x) ** 0.5, lambda label: label.double().std()])
def test_weights_that_do_not_add_up_are_refused(rule: Callable[..., Any]) -> None:
    """A constant, a root or a statistic of the rows is no count."""
    with pytest.raises(WeightError, match="add up over rows"):
        _bound(rule).check_adds_up((2, 3))


def test_words_have_nothing_to_add_up() -> None:
    """Rules that are no functions are not evaluated."""
    _bound({"a": "rows", "b": "sum", "c": "auto"}).check_adds_up((2, 3))
