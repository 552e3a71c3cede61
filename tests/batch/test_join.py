"""Outputs of the pieces come back in row order, without graphs, in the containers that they came in."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from anybatch.batch import detach, join

from .kinds import MAPPINGS, RECORDS, Pair, Sample

SIZES = (4, 3, 3)
ROWS = 10


def _split(value: Any) -> list[Any]:
    return [value[0:4], value[4:7], value[7:10]]


def test_rows_are_concatenated_in_order() -> None:
    """Tensors with the pieces' rows become one with the mini-batch's."""
    whole = torch.randn(ROWS, 3)
    assert torch.equal(join(_split(whole), SIZES, None), whole)


def test_arrays_are_concatenated_in_order() -> None:
    """numpy arrays are joined like tensors."""
    whole = np.arange(ROWS * 2).reshape(ROWS, 2)
    joined = join(_split(whole), SIZES, None)
    assert isinstance(joined, np.ndarray)
    assert np.array_equal(joined, whole)
    assert join([np.array(1.0), np.array(2.0), np.array(3.0)], SIZES, None).tolist() == [1, 2, 3]


def test_scalars_are_stacked() -> None:
    """0-dim tensors become one tensor with an entry per piece."""
    joined = join([torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)], SIZES, None)
    assert torch.equal(joined, torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.parametrize(
    "outputs",
    [
        ["a", "b", "c"],
        [1, 2, 3],
        [0.5, None, 1.5],
        [np.float64(1), np.float64(2), np.float64(3)],
        [torch.ones(4, 2), torch.ones(4, 2), torch.ones(4, 2)],
        [torch.ones(4, 2), torch.ones(3, 2), torch.ones(3, 5)],
        [torch.ones(4), torch.ones(3), torch.ones(3).double()],
        [torch.ones(4), torch.tensor(1.0), torch.ones(3)],
        [torch.ones(4), None, torch.ones(3)],
        [torch.ones(4), torch.ones(3), np.ones(3)],
        [(1, 2), (1, 2), (1, 2, 3)],
        [{"a": 1}, {"a": 1}, {"b": 1}],
        [{"a": 1}, {"a": 1}, [1]],
        [["a"], ["b", "c"], []],
        [{1, 2}, {3}, set()],
    ],
)
def test_anything_else_is_a_list_with_one_entry_per_piece(outputs: list[Any]) -> None:
    """Where the pieces' outputs don't fit together they come back one by one, unchanged."""
    joined = join(outputs, SIZES, None)
    assert type(joined) is list
    assert len(joined) == len(SIZES)
    for after, before in zip(joined, outputs, strict=True):
        assert type(after) is type(before)
        if isinstance(before, torch.Tensor | np.ndarray):
            assert (after.shape, after.dtype) == (before.shape, before.dtype)
            assert (after == before).all()
        else:
            assert after == before


def test_tensor_as_long_as_the_first_piece_is_no_row_output() -> None:
    """A matrix with as many rows as one piece by accident is not taken apart: all pieces must agree."""
    weight = torch.randn(4, 3)
    assert [torch.equal(entry, weight) for entry in join([weight] * 3, SIZES, None)] == [True] * 3


@pytest.mark.parametrize("make", MAPPINGS.values(), ids=list(MAPPINGS))
def test_mappings_keep_their_structure(make: Callable[[dict[str, Any]], Any]) -> None:
    """Each entry of a mapping is joined by itself."""
    whole = torch.randn(ROWS, 2)
    outputs = [make({"y": y, "loss": torch.tensor(1.0), "n": len(y), "none": None}) for y in _split(whole)]
    joined = join(outputs, SIZES, None)
    assert type(joined) is type(outputs[0])
    assert torch.equal(joined["y"], whole)
    assert joined["loss"].tolist() == [1, 1, 1]
    assert joined["n"] == [4, 3, 3]
    assert joined["none"] is None


@pytest.mark.parametrize("make", RECORDS.values(), ids=list(RECORDS))
def test_records_keep_their_structure(make: Callable[..., Any]) -> None:
    """Each field of a named tuple or dataclass is joined by itself; one that is always None stays None."""
    whole = torch.randn(ROWS, 2)
    outputs = [make(y, second=None) for y in _split(whole)]
    joined = join(outputs, SIZES, None)
    assert type(joined) is type(outputs[0])
    assert torch.equal(joined.first, whole)
    assert joined.second is None


def test_nested_structures_are_joined_at_every_depth() -> None:
    """A tuple of dicts of lists comes back as one."""
    whole = torch.randn(ROWS)
    outputs = [({"states": [y, y * 2]}, Pair(y.sum(), "s")) for y in _split(whole)]
    joined = join(outputs, SIZES, None)
    assert type(joined) is tuple
    assert torch.equal(joined[0]["states"][1], whole * 2)
    assert joined[1].first.tolist() == [y.sum() for y in _split(whole)]
    assert joined[1].second == ["s"] * 3


def test_model_output_keeps_its_structure() -> None:
    """transformers' outputs come back as themselves, with absent fields absent."""
    from transformers.modeling_outputs import CausalLMOutput

    whole = torch.randn(ROWS, 5)
    outputs = [CausalLMOutput(loss=None, logits=y, hidden_states=(y, y + 1)) for y in _split(whole)]
    joined = join(outputs, SIZES, None)
    assert type(joined) is CausalLMOutput
    assert list(joined) == ["logits", "hidden_states"]
    assert torch.equal(joined.logits, whole)
    assert torch.equal(joined.hidden_states[1], whole + 1)
    assert joined.loss is None


@pytest.mark.parametrize("sizes", [SIZES, (5, 5), (10,), (1,) * 10])
def test_lists_of_rows_are_joined_in_order(sizes: tuple[int, ...]) -> None:
    """A list with one element per row comes back as one list, whatever the cut."""
    names = [f"s{i}" for i in range(ROWS)]
    found = [{"boxes": torch.ones(i, 4), "name": f"s{i}"} for i in range(ROWS)]
    images = [torch.ones(11, i + 1) for i in range(ROWS)]
    for whole in (names, found, images):
        rest = iter(whole)
        pieces = [[next(rest) for _ in range(rows)] for rows in sizes]
        joined = join(pieces, sizes, None)
        assert type(joined) is list
        assert len(joined) == ROWS
        assert all(str(after) == str(before) for after, before in zip(joined, whole, strict=True))


@pytest.mark.parametrize("length", [2, 4, 5])
def test_list_of_tensors_is_a_container_at_any_length(length: int) -> None:
    """A list of outputs keeps its length, also where that is the pieces' number of rows."""
    outputs = [[torch.randn(4, 2) for _ in range(length)] for _ in range(2)]
    joined = join(outputs, (4, 4), None)
    assert [tuple(entry.shape) for entry in joined] == [(8, 2)] * length
    losses = join([[torch.tensor(float(i)) for i in range(length)]] * 2, (4, 4), None)
    assert [entry.tolist() for entry in losses] == [[i, i] for i in range(length)]


def test_list_of_scalars_per_row_is_joined_where_the_cut_is_uneven() -> None:
    """0-dim tensors, one per row, in pieces of different sizes can only be rows."""
    whole = [torch.tensor(float(i)) for i in range(ROWS)]
    assert [t.item() for t in join(_split(whole), SIZES, None)] == list(range(ROWS))


def test_one_piece_is_joined_by_the_same_rules() -> None:
    """A mini-batch in one piece gives outputs of the same form as one in many."""
    y = torch.randn(3, 2, requires_grad=True)
    joined = join([(y * 2, y.sum(), "text", torch.ones(5), None, [1.5])], [3], None)
    assert torch.equal(joined[0], y.detach() * 2)
    assert joined[1].shape == (1,)
    assert joined[2] == ["text"]
    assert [entry.shape for entry in joined[3]] == [(5,)]
    assert joined[4] is None
    assert joined[5] == [[1.5]]
    assert not joined[0].requires_grad
    assert not joined[1].requires_grad


def test_joined_outputs_go_to_the_device() -> None:
    """Tensors are joined where they are wanted, wherever the pieces were computed."""
    outputs = [{"y": y, "s": y.sum(), "odd": [torch.ones(7)]} for y in _split(torch.randn(ROWS))]
    joined = join(outputs, SIZES, torch.device("meta"))
    assert {joined["y"].device.type, joined["s"].device.type, joined["odd"][0][0].device.type} == {"meta"}
    mixed = [torch.ones(4, device="meta"), torch.ones(3), torch.ones(3, device="meta")]
    assert join(mixed, SIZES, None).device.type == "meta"


def test_joined_outputs_have_no_graph() -> None:
    """No joined tensor requires grad, at any depth and in any form."""
    x = torch.randn(ROWS, requires_grad=True)
    outputs = [[y * 2, {"s": y.sum()}, [(y[:2] * 2)], Sample(torch.ones(7) * y[0])] for y in _split(x)]
    joined = join(outputs, SIZES, None)
    tensors = [joined[0], joined[1]["s"], *joined[2][0], *joined[3].first]
    assert len(tensors) == 2 + 3 + 3
    assert not any(tensor.requires_grad for tensor in tensors)


def test_outputs_without_rows_come_back_one_by_one() -> None:
    """Tensors that are neither dense nor of a kind that can be cut are not joined."""
    outputs = [torch.ones(rows, 2).to_mkldnn() for rows in SIZES]
    assert [entry.layout for entry in join(outputs, SIZES, None)] == [torch._mkldnn] * 3


def test_outputs_cut_as_one_with_other_rows_come_back_one_by_one() -> None:
    """A sparse output that hasn't the piece's rows is not joined, nor one beside outputs of other kinds."""
    others = [torch.ones(rows + 1, 2).to_sparse() for rows in SIZES]
    mixed = [torch.ones(rows, 2) for rows in SIZES[:-1]] + [torch.ones(SIZES[-1], 2).to_sparse()]
    for outputs in (others, mixed):
        joined = join(outputs, SIZES, None)
        assert isinstance(joined, list)
        assert [entry.layout for entry in joined] == [output.layout for output in outputs]


def test_detach_lets_the_graph_die() -> None:
    """After `detach` nothing of the piece's graph is alive."""
    x = torch.randn(4, 3, requires_grad=True)
    saved: list[weakref.ref[Any]] = []

    def watch(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(weakref.ref(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda t: watch(t.clone()), lambda t: t):
        output = {"y": x.sin().square(), "deep": [(x.exp().sum(),)]}
    assert any(ref() is not None for ref in saved)
    output = detach(output, None)
    assert len(saved) > 0
    assert all(ref() is None for ref in saved)
    assert torch.equal(output["y"], x.detach().sin().square())


def test_detach_keeps_no_storage_larger_than_the_output() -> None:
    """A slice of a large activation does not keep the activation alive."""
    x = torch.randn(4, 1000, requires_grad=True)
    kept = detach({"first": (x * 2)[:, 0], "transposed": (x * 2).t()[:5]}, None)
    assert kept["first"].untyped_storage().nbytes() == 4 * 4
    assert kept["transposed"].untyped_storage().nbytes() == 5 * 4 * 4


def test_detach_copies_what_others_may_write_to() -> None:
    """A buffer, an input or a parameter that is returned keeps the value that it had in its piece."""
    buffer, weight = torch.zeros(()), torch.nn.Parameter(torch.zeros(2))
    kept = []
    for _ in range(3):
        buffer += 1
        kept.append(detach((buffer, weight, weight.view(2, 1)), None))
    with torch.no_grad():
        weight += 1
    counts, weights, views = join(kept, SIZES, None)
    assert counts.tolist() == [1, 2, 3]
    assert [w.tolist() for w in weights] == [[0, 0]] * 3
    assert [v.tolist() for v in views] == [[[0], [0]]] * 3


def test_detach_does_not_copy_a_fresh_output() -> None:
    """The result of a computation is detached in place, without a copy."""
    y = torch.randn(4, 3, requires_grad=True) * 2
    assert detach(y, None).data_ptr() == y.data_ptr()


def test_detach_moves_tensors_and_keeps_the_rest() -> None:
    """Tensors go to the device at any depth; strings, numbers and unknown objects stay the same."""
    odd = object()
    output = detach({"y": [torch.ones(2)], "s": "text", "odd": odd}, torch.device("meta"))
    assert output["y"][0].device.type == "meta"
    assert (output["s"], output["odd"]) == ("text", odd)


def test_object_that_holds_tensors_in_attributes_keeps_no_graph() -> None:
    """A distribution that a function returns comes back without its graph, as an object of its own kind."""
    location = torch.zeros(3, requires_grad=True) * 2
    made = torch.distributions.Normal(location, 1.0)
    settled = detach({"policy": made}, None)["policy"]
    assert type(settled) is torch.distributions.Normal
    assert not settled.loc.requires_grad
    assert made.loc is location


def test_object_that_holds_itself_is_settled_once() -> None:
    """An object in a cycle does not send `detach` round for ever."""

    class Cache:
        pass

    cache = Cache()
    cache.self, cache.keys = cache, torch.zeros(2, requires_grad=True) * 1  # type: ignore[attr-defined]
    assert not detach(cache, None).keys.requires_grad
