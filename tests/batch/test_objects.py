"""Objects that can be sent to a device, and mappings of further libraries, keep their type and the rest."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BatchEncoding, BatchFeature

import anybatch
from anybatch.batch import feed, lay_out, register
from anybatch.batch.containers import _container_for, _registered, container_of
from anybatch.errors import BatchError

from .exactness import CUTS, assert_exact, pieces_of


class Sample:
    """A batch as many data sets make them: attributes, `.to()`, and more."""

    def __init__(self, x: Tensor, y: Tensor, split: str) -> None:
        self.x, self.y, self.split = x, y, split
        self.made = True

    def to(self, device: Any) -> Sample:
        raise AssertionError("pieces are moved tensor by tensor")

    @cached_property
    def total(self) -> Tensor:
        return self.y.sum()


class Features(UserDict[str, Any]):
    """A mapping that is no dict, with `.to()` and a further attribute."""

    origin = ""

    def to(self, device: Any) -> Features:
        raise AssertionError("pieces are moved tensor by tensor")


def _x(rows: int) -> Tensor:
    return torch.randn(rows, 3, dtype=torch.float64)


def _features(rows: int) -> Features:
    features = Features(x=_x(rows), y=torch.randn(rows).double())
    features.origin = "kept"
    return features


MAKERS = {
    "object": lambda rows: Sample(_x(rows), torch.randn(rows).double(), "train"),
    "namespace": lambda rows: SimpleNamespace(x=_x(rows), y=torch.randn(rows).double()),
    "user dict": _features,
    "encoding": lambda rows: BatchEncoding({"x": _x(rows), "y": torch.randn(rows).double()}),
    "feature": lambda rows: BatchFeature({"x": _x(rows), "y": torch.randn(rows).double()}),
}


def _get(batch: Any, name: str) -> Any:
    return batch[name] if isinstance(batch, UserDict) else getattr(batch, name)


@pytest.mark.parametrize("make", MAKERS.values(), ids=list(MAKERS))
@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_batch_equals_the_whole_and_keeps_its_type(rows: int, ub_size: int, make: Any) -> None:
    """Each kind is cut entry by entry, and the function gets its type."""
    network, batch = nn.Linear(3, 1).double(), make(rows)

    def step(batch: Any) -> Tensor:
        assert type(batch) is kind
        return ((network(_get(batch, "x"))[:, 0] - _get(batch, "y")) ** 2).mean()

    kind = type(batch)
    assert_exact(step, {"batch": batch}, network, ub_size)


@pytest.mark.parametrize("make", MAKERS.values(), ids=list(MAKERS))
def test_pieces_move_to_the_device(make: Any) -> None:
    """Every tensor of a piece moves; the mini-batch stays where it is."""
    batch = make(4)
    (piece,) = feed(lay_out({"batch": batch}), (4,), torch.device("meta"))
    assert {_get(piece.arguments["batch"], name).device.type for name in ("x", "y")} == {"meta"}
    assert {_get(batch, name).device.type for name in ("x", "y")} == {"cpu"}


def test_further_attributes_are_kept() -> None:
    """Attributes without rows pass whole; a cached property is worked out again."""
    batch = MAKERS["object"](6)
    assert batch.total.ndim == 0
    pieces = pieces_of(batch, 2)
    assert [(piece.split, piece.made) for piece in pieces] == [("train", True)] * 3
    torch.testing.assert_close(sum(piece.total for piece in pieces), batch.total)
    assert [piece.origin for piece in pieces_of(_features(6), 2)] == ["kept"] * 3


def test_row_objects_in_a_list_move() -> None:
    """Objects that are rows themselves are moved with their piece."""
    rows = [Sample(torch.ones(row + 1, 4), torch.ones(()), "train") for row in range(3)]
    (piece,) = feed(lay_out({"rows": rows}), (3,), torch.device("meta"))
    assert [row.x.device.type for row in piece.arguments["rows"]] == ["meta"] * 3


@pytest.mark.parametrize("make", MAKERS.values(), ids=list(MAKERS))
def test_outputs_are_joined(make: Any) -> None:
    """A batch that the function returns comes back whole, of its type."""
    network, batch = nn.Linear(3, 1).double(), make(10)

    @anybatch.apply(["batch"], ub_size=4)
    def step(batch: Any) -> tuple[Tensor, Any]:
        return network(_get(batch, "x")).pow(2).mean(), batch

    _, output = step(batch)
    assert type(output) is type(batch)
    assert torch.equal(_get(output, "x"), _get(batch, "x"))


class Handle:
    """Something that can be sent to a device and shows no tensor."""

    def __init__(self) -> None:
        self.handle = object()

    def to(self, device: Any) -> Handle:
        return self


def test_object_that_shows_no_rows_is_refused() -> None:
    """An object without tensors would pass whole to every piece, so it is refused with both ways out."""
    arguments = {"graph": Handle(), "label": torch.ones(4)}
    with pytest.raises(BatchError, match=r"graph is of a kind that can't be cut.*register.*'graph': None"):
        lay_out(arguments)
    assert lay_out(arguments, batch_dim={"graph": None}).rows == 4


class Transform(Sample):
    """A function that can be sent to a device."""

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.x


@pytest.mark.parametrize(
    "value",
    [
        nn.Linear(2, 2),
        torch.ones(2),
        torch.device("cpu"),
        Sample,
        Transform(torch.ones(3), torch.ones(3), ""),
    ],
)
def test_modules_tensors_and_classes_are_no_objects_with_entries(value: Any) -> None:
    """What has `.to()` and is no batch is not opened."""
    assert container_of(value) is None


@pytest.fixture
def registry() -> Iterator[None]:
    """Forget afterwards what a test registers."""
    before = dict(_registered)
    yield
    _registered.clear()
    _registered.update(before)
    _container_for.cache_clear()


class Sets:
    """Sets of points, one after another: a kind that is cut as one."""

    def __init__(self, points: Tensor, counts: list[int]) -> None:
        self.points, self.counts = points, counts

    def cut(self, start: int, stop: int) -> Sets:
        first, last = sum(self.counts[:start]), sum(self.counts[:stop])
        return Sets(self.points[first:last], self.counts[start:stop])


def _register_sets(**further: Any) -> None:
    register(
        Sets,
        children=lambda sets: [("points", sets.points)],
        rebuild=lambda sets, children: Sets(*children, sets.counts),
        rows=lambda sets: len(sets.counts),
        cut=Sets.cut,
        **further,
    )


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("options", [{}, {"batch_dim": {"sets": "balanced"}}], ids=["rows", "balanced"])
@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_registered_kind_is_cut_as_one(rows: int, ub_size: int, options: dict[str, Any]) -> None:
    """A registered cut is used, also for gradients of what the batch holds and for balanced pieces."""
    _register_sets(sizes=lambda sets: sets.counts)
    counts, network = [(3 * row) % 4 + 1 for row in range(rows)], nn.Linear(3, 1).double()
    points = torch.randn(sum(counts), 3, dtype=torch.float64, requires_grad=True)

    def step(sets: Sets) -> Tensor:
        assert len(sets.points) == sum(sets.counts)
        return network(sets.points).pow(2).mean()

    batch = {"sets": Sets(points, counts)}
    assert_exact(step, batch, [points, *network.parameters()], ub_size, **options)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("joins", [True, False])
def test_registered_kind_is_joined_where_it_says_how(joins: bool) -> None:
    """Outputs of a registered kind are joined by its own function, or come as a list."""

    def join(sets: list[Sets]) -> Sets:
        return Sets(torch.cat([one.points for one in sets]), [count for one in sets for count in one.counts])

    _register_sets(**({"join": join} if joins else {}))
    network, sets = nn.Linear(3, 1).double(), Sets(_x(20), [2] * 10)

    @anybatch.apply(["sets"], ub_size=4)
    def step(sets: Sets) -> tuple[Tensor, Sets]:
        return network(sets.points).pow(2).mean(), sets

    _, output = step(sets)
    found = output if joins else join(output)
    assert len(output.counts if joins else output) == (10 if joins else 3)
    assert torch.equal(found.points, sets.points)


@pytest.mark.parametrize("given", [{"rows": len}, {"cut": lambda *_: None}, {"join": list}, {"sizes": list}])
def test_half_a_registration_is_refused(given: dict[str, Any]) -> None:
    """What is cut as one needs both its rows and its cut."""
    with pytest.raises(TypeError, match="has `rows` and `cut`"):
        register(Sets, lambda sets: [], lambda sets, _: sets, **given)


@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_complex_batch_equals_the_whole(rows: int, ub_size: int) -> None:
    """Complex inputs and parameters give the gradient of the whole."""
    weight = nn.Parameter(torch.randn(3, 2, dtype=torch.complex128))
    x = torch.randn(rows, 3, dtype=torch.complex128, requires_grad=True)

    def step(x: Tensor, y: Tensor) -> Tensor:
        return ((x @ weight).abs().pow(2).sum(dim=1) - y).pow(2).mean()

    assert_exact(step, {"x": x, "y": torch.randn(rows).double()}, [weight, x], ub_size)
