"""Gradients and losses of few digits: adding up in them loses small pieces (deepspeedai/DeepSpeed#2768)."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch


@pytest.fixture(autouse=True)
def single_precision() -> None:
    """float64 needs none of this."""
    torch.set_default_dtype(torch.float32)


DTYPES = [torch.bfloat16, torch.float16, torch.float32]
Function = Callable[[nn.Module, Tensor, Tensor], Tensor]


def relative_error(got: nn.Module, exact: nn.Module) -> float:
    """The largest difference of gradients, relative to the largest gradient."""
    pairs = [
        (one.grad.double().to_dense(), other.grad.to_dense())
        for one, other in zip(got.parameters(), exact.parameters(), strict=True)
    ]
    largest = max(float(expected.abs().max()) for _, expected in pairs)
    return max(float((grad - expected).abs().max()) for grad, expected in pairs) / largest


def errors(model: nn.Module, loss: Function, x: Tensor, y: Tensor, ub_size: int) -> tuple[float, float]:
    """The rounding errors against float64: of the pieces and of the whole mini-batch."""
    exact = copy.deepcopy(model).double()
    loss(exact, x.double() if x.is_floating_point() else x, y).backward()
    whole, pieces = copy.deepcopy(model), copy.deepcopy(model)
    loss(whole, x, y).backward()
    anybatch.apply(["x", "y"], ub_size=ub_size)(lambda x, y: loss(pieces, x, y))(x=x, y=y)
    assert [p.grad.dtype for p in pieces.parameters()] == [p.dtype for p in pieces.parameters()]
    return relative_error(pieces, exact), relative_error(whole, exact)


@pytest.mark.parametrize("pieces", [16, 256, 2048])
def test_many_pieces_in_bfloat16(pieces: int) -> None:
    """The error of a bfloat16 gradient is at most 0.005 and does not grow with the number of pieces."""
    torch.manual_seed(0)
    x = torch.randn(2048, 16).bfloat16()
    y = (x.float() @ torch.randn(16, 1) + 3).bfloat16()
    torch.manual_seed(1)
    model = nn.Linear(16, 1).bfloat16()
    exact = copy.deepcopy(model).double()
    F.mse_loss(exact(x.double()), y.double()).backward()
    step = anybatch.apply(["x", "y"], ub_size=2048 // pieces)(lambda x, y: F.mse_loss(model(x), y))
    step(x=x, y=y)
    expected = torch.cat([parameter.grad.flatten() for parameter in exact.parameters()])
    got = torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])
    assert float((got - expected).norm() / expected.norm()) <= 0.005


LOSSES: dict[str, Function] = {
    "mean": lambda model, x, y: F.cross_entropy(model(x), y),
    "sum": lambda model, x, y: F.cross_entropy(model(x), y, reduction="sum") / 512,
    "two means": lambda model, x, y: F.cross_entropy(model(x), y) + model(x).square().mean(),
    "in float32": lambda model, x, y: F.cross_entropy(model(x).float(), y),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ub_size", [1, 7])
@pytest.mark.parametrize("kind", LOSSES)
def test_error_is_that_of_the_whole(dtype: torch.dtype, ub_size: int, kind: str) -> None:
    """In single rows and uneven pieces, the rounding error is at most twice that of the whole mini-batch."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 10)).to(dtype)
    x, y = torch.randn(512, 16).to(dtype), torch.randint(10, (512,))
    y[torch.rand(512) < 0.4] = -100
    got, whole = errors(model, LOSSES[kind], x, y, ub_size)
    assert got <= 2 * whole


@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32], ids=str)
def test_loss_of_few_digits_weighs_exactly(parameters: torch.dtype) -> None:
    """A piece of 333 rows of 1001 weighs 333 / 1001, which bfloat16 can't hold.

    The first 256 rows of each piece give a gradient of exactly 1, whatever they are scaled with.
    """
    model = nn.Linear(1, 1, bias=False).to(parameters)
    x = torch.ones(1001, 1, dtype=parameters)
    step = anybatch.apply(["x"], ub_size=334, weight="rows", on_inexact="ignore")
    step(lambda x: model(x)[:256].bfloat16().sum() / 256)(x=x)
    assert model.weight.grad.item() == pytest.approx(1.0, rel=1e-6)


def test_sparse_gradients_of_few_digits() -> None:
    """Sparse gradients in bfloat16 stay sparse and coalesced, and as exact as the whole mini-batch's."""
    model = nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Flatten(), nn.Linear(24, 1)).bfloat16()
    x, y = torch.randint(20, (256, 3)), torch.zeros(256)
    got, whole = errors(model, lambda model, x, y: model(x).float().square().mean(), x, y, 1)
    assert got <= 2 * whole
    step = anybatch.apply(["x"], ub_size=5)(lambda x: model(x).float().square().mean())
    step(x=x)
    assert model[0].weight.grad.is_sparse
    assert model[0].weight.grad.is_coalesced()


def test_calls_add_to_gradients_of_few_digits() -> None:
    """A second call adds its gradient, rounded once, to what was there; hooks see it in its dtype."""
    model = nn.Linear(3, 1, bias=False).bfloat16()
    x = torch.randn(40, 3).bfloat16()
    seen: list[Tensor] = []
    model.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    step = anybatch.apply(["x"], ub_size=3)(lambda x: model(x).float().square().mean())
    step(x=x)
    first = model.weight.grad.clone()
    step(x=x)
    assert [gradient.dtype for gradient in seen] == [torch.bfloat16] * 2
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(model.weight.grad, first + first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_failure_after_a_block_leaves_gradients(dtype: torch.dtype) -> None:
    """An error in a late piece leaves the gradient of before: the same tensor with the same values."""
    model = nn.Linear(3, 1, bias=False).to(dtype)
    x = torch.randn(101, 3).to(dtype)
    model(x).sum().backward()
    kept, values = model.weight.grad, model.weight.grad.clone()

    def step(x: Tensor) -> Tensor:
        if torch.equal(x[0], last):
            raise KeyError
        return model(x).float().square().mean()

    last = x[-1]
    with pytest.raises(KeyError):
        anybatch.apply(["x"], ub_size=1, on_inexact="ignore")(step)(x=x)
    assert model.weight.grad is kept
    assert torch.equal(kept, values)


@pytest.mark.parametrize(("dtype", "copies"), [(torch.float32, 1), (torch.float64, 0), (torch.bfloat16, 0)])
def test_blocks_take_one_more_copy_where_digits_count(dtype: torch.dtype, copies: int) -> None:
    """Between pieces a float32 gradient has one more copy; in float64 or under autocast it has none."""
    model = nn.Linear(300, 2, bias=False).to(torch.float64 if dtype == torch.float64 else torch.float32)
    x = torch.randn(40, 300, dtype=model.weight.dtype)
    found: list[int] = []

    def step(x: Tensor) -> Tensor:
        alive = (one for one in gc.get_objects() if type(one) is Tensor and one.shape == model.weight.shape)
        found.append(sum(one is not model.weight.grad for one in alive))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            return model(x).double().square().mean()

    anybatch.apply(["x"], ub_size=1, on_inexact="ignore")(step)(x=x)
    assert max(found) - found[0] == copies


@pytest.mark.parametrize("is_shared", [False, True])
def test_gradients_of_entries_of_few_digits(is_shared: bool) -> None:
    """Entries in bfloat16 that require grad get gradients as exact as those of the whole mini-batch."""
    x = torch.randn(300, 4).bfloat16()
    scale = torch.ones(4).bfloat16().requires_grad_() if is_shared else None
    entry = x.clone().requires_grad_(not is_shared)
    model = nn.Linear(4, 1).bfloat16()

    def loss(x: Tensor, scale: Tensor | None) -> Tensor:
        return model(x if scale is None else x * scale).square().mean()

    leaf = entry if scale is None else scale
    exact_leaf = leaf.detach().double().requires_grad_()
    double = copy.deepcopy(model).double()
    inputs = exact_leaf if scale is None else x.double() * exact_leaf
    double(inputs).square().mean().backward()
    anybatch.apply(["x", "scale"], ub_size=1, batch_dim={"scale": None})(loss)(x=entry, scale=scale)
    error = (leaf.grad.double() - exact_leaf.grad).abs().max() / exact_leaf.grad.abs().max()
    assert leaf.grad.dtype == torch.bfloat16
    assert float(error) <= 0.01
