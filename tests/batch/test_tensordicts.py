"""TensorDicts and tensorclasses are cut along their batch dims."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass
from torch import Tensor, nn

import anybatch
from anybatch.batch import feed, join, lay_out
from anybatch.errors import BatchError

from .exactness import CUTS, assert_exact, pieces_of


@tensorclass
class Sample:
    """A tensorclass with a text."""

    x: Tensor
    y: Tensor
    name: str


def _tensordict(rows: int) -> TensorDict:
    inner = TensorDict({"y": torch.randn(rows).double()}, batch_size=[rows])
    content = {"x": torch.randn(rows, 3).double(), "inner": inner, "name": "kept"}
    return TensorDict(content, batch_size=[rows], names=["row"])


def _sample(rows: int) -> Sample:
    return Sample(torch.randn(rows, 3).double(), torch.randn(rows).double(), "kept", batch_size=[rows])


def _stack(rows: int) -> LazyStackedTensorDict:
    return LazyStackedTensorDict(
        *(TensorDict({"x": torch.randn(row % 3 + 4, 3).double()}, batch_size=[]) for row in range(rows))
    )


def _network() -> nn.Module:
    return nn.Linear(3, 1).double()


@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_tensordict_equals_the_whole(rows: int, ub_size: int) -> None:
    """A TensorDict, nested, gives the gradient of the whole."""
    network = _network()

    def step(batch: TensorDict) -> Tensor:
        assert batch.batch_size[0] == len(batch["x"]) == len(batch["inner", "y"])
        return ((network(batch["x"])[:, 0] - batch["inner", "y"]) ** 2).mean()

    assert_exact(step, {"batch": _tensordict(rows)}, network, ub_size)


@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_tensorclass_equals_the_whole(rows: int, ub_size: int) -> None:
    """A tensorclass gives the gradient of the whole and stays of its class."""
    network = _network()

    def step(batch: Sample) -> Tensor:
        assert (type(batch), batch.name) == (Sample, "kept")
        return ((network(batch.x)[:, 0] - batch.y) ** 2).mean()

    assert_exact(step, {"batch": _sample(rows)}, network, ub_size)


@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_lazy_stack_of_uneven_rows_equals_the_whole(rows: int, ub_size: int) -> None:
    """Rows of different shapes, stacked lazily, give the gradient of the whole."""
    network = nn.Linear(3, 1, bias=False).double()

    def step(batch: LazyStackedTensorDict) -> Tensor:
        padded = batch.get("x", as_padded_tensor=True)
        return network(padded).pow(2).sum(dim=(1, 2)).mean()

    assert_exact(step, {"batch": _stack(rows)}, network, ub_size)


@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_rows_stay_in_order_along_any_batch_dim(rows: int, ub_size: int, dim: int) -> None:
    """Every row comes once and in order; names, texts and the other batch dims are kept."""
    sizes, at = ([rows, 2], 0) if dim == 0 else ([2, rows], 1)
    value = TensorDict({"x": torch.randn(*sizes, 3), "name": "kept"}, batch_size=sizes, names=["a", "b"])
    pieces = pieces_of(value, ub_size, batch_dim=dim)
    assert torch.equal(torch.cat([piece["x"] for piece in pieces], at), value["x"])
    assert all((piece["name"], piece.names) == ("kept", ["a", "b"]) for piece in pieces)
    if dim == 0:
        joined = join(pieces, [len(piece) for piece in pieces], None)
        assert type(joined) is TensorDict
        assert joined.batch_size == value.batch_size
        assert torch.equal(joined["x"], value["x"])


@pytest.mark.parametrize("make", [_tensordict, _sample, _stack])
@pytest.mark.parametrize("has_device", [True, False])
def test_pieces_move_to_the_device(make: Any, has_device: bool) -> None:
    """All tensors of a piece move, and it names the device where it named one."""
    value = make(4).to("cpu") if has_device else make(4)
    (piece,) = feed(lay_out({"batch": value}), (4,), torch.device("meta"))
    moved = piece.arguments["batch"]
    assert type(moved) is type(value)
    devices: list[str] = []
    moved.apply(lambda tensor: devices.append(tensor.device.type))
    assert set(devices) == {"meta"}
    assert str(moved.device) == ("meta" if has_device else "None")


@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_gradient_reaches_what_a_tensordict_holds(rows: int, ub_size: int) -> None:
    """Entries that require grad get their gradient through the TensorDict."""
    x, network = torch.randn(rows, 3, dtype=torch.float64, requires_grad=True), _network()

    def step(batch: TensorDict) -> Tensor:
        return network(batch["x"]).pow(2).mean()

    expected = torch.autograd.grad(step(TensorDict({"x": x * 2}, batch_size=[rows])), [x])
    anybatch.apply(["batch"], ub_size=ub_size)(step)(TensorDict({"x": x * 2}, batch_size=[rows]))
    torch.testing.assert_close(x.grad, expected[0], rtol=0, atol=1e-12)


def test_tensordict_outputs_are_joined() -> None:
    """A TensorDict output with the piece's rows comes back with all rows."""
    network, value = _network(), _tensordict(10)

    @anybatch.apply(["batch"], ub_size=4)
    def step(batch: TensorDict) -> tuple[Tensor, TensorDict]:
        batch["output"] = network(batch["x"])
        return batch["output"].pow(2).mean(), batch

    _, output = step(value)
    assert output.batch_size == (10,)
    assert not output["output"].requires_grad
    torch.testing.assert_close(output["output"], network(value["x"]).detach())
    assert "output" not in value.keys()  # noqa: SIM118  # a TensorDict is no dict


def test_missing_batch_dim_is_refused() -> None:
    """A TensorDict without a batch size has no rows of its own; the error says where to say it."""
    value = TensorDict({"x": torch.ones(4, 2)}, batch_size=[])
    with pytest.raises(BatchError, match=r"batch \(tensordict.*has no batch dim 0.*Set its `batch_size`"):
        lay_out({"batch": value})


def test_declaring_inside_is_refused() -> None:
    """A TensorDict is cut as one, so nothing can be declared of its entries."""
    with pytest.raises(BatchError, match=r"batch \(tensordict.*is cut as one. Declare nothing inside it"):
        lay_out({"batch": _tensordict(4)}, batch_dim={"batch.x": 1})
