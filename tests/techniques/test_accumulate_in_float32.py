"""Gradients of low precision, added up in float32."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tests.techniques.training import assert_equal, squares, two_steps
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import anybatch
from anybatch.errors import TechniqueError
from anybatch.techniques import AccumulateInFloat32, Setting

# bfloat16 has 8 significant bits and float16 11: half a unit in the last place, relative to the value.
_ROUNDING = {torch.bfloat16: 2.0**-9 * 2, torch.float16: 2.0**-12 * 2}


def model_and_rows(dtype: torch.dtype, rows: int = 512) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(rows, 16).to(dtype)
    y = (x.float() @ torch.randn(16, 1) + 3).to(dtype)
    return nn.Linear(16, 1).to(dtype), x, y


def gradients(model: nn.Module) -> list[Tensor]:
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def piece_gradients(model: nn.Module, x: Tensor, y: Tensor, pieces: int) -> list[list[Tensor]]:
    """The gradient of each piece by itself, from plain PyTorch."""
    found = []
    for a, b in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
        model.zero_grad()
        (squares(model, a, b) / pieces).backward()
        found.append(gradients(model))
    model.zero_grad()
    return found


@pytest.mark.parametrize("dtype", list(_ROUNDING))
@pytest.mark.parametrize("pieces", [1, 16, 512])
def test_a_plain_loop_rounds_once(dtype: torch.dtype, pieces: int) -> None:
    """After any number of backward runs `.grad` is their sum in float64, rounded to its dtype."""
    model, x, y = model_and_rows(dtype)
    exact = [
        torch.stack(each).double().sum(0) for each in zip(*piece_gradients(model, x, y, pieces), strict=True)
    ]
    with AccumulateInFloat32().applied(Setting.of(model)):
        for a, b in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
            (squares(model, a, b) / pieces).backward()
    for expected, got in zip(exact, gradients(model), strict=True):
        assert got.dtype == dtype
        assert float((got.double() - expected).abs().max() / expected.abs().max()) <= _ROUNDING[dtype]


def test_without_it_small_gradients_are_lost() -> None:
    """2048 pieces in plain bfloat16 are ten times farther off than with sums in float32."""
    model, x, y = model_and_rows(torch.bfloat16, 2048)
    exact = [
        torch.stack(each).double().sum(0) for each in zip(*piece_gradients(model, x, y, 2048), strict=True)
    ]
    errors = []
    for entered in (torch.enable_grad(), AccumulateInFloat32().applied(Setting.of(model))):
        model.zero_grad()
        with entered:
            for a, b in zip(x, y, strict=True):
                (squares(model, a, b) / 2048).backward()
        errors.append(float((gradients(model)[0].double() - exact[0]).norm()))
    assert errors[1] * 10 < errors[0]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_begins_anew(set_to_none: bool) -> None:
    """After `zero_grad` of either kind the sum is that of what comes."""
    model, x, y = model_and_rows(torch.bfloat16, 8)
    squares(model, x, y).backward()
    expected = gradients(model)
    model.zero_grad()
    with AccumulateInFloat32().applied(Setting.of(model)):
        for _ in range(3):
            model.zero_grad(set_to_none)
            squares(model, x, y).backward()
    assert_equal(expected, gradients(model))


def test_what_is_written_to_gradients_counts() -> None:
    """Gradients that were there before, clipped ones and replaced ones are what is added to."""
    model, x, y = model_and_rows(torch.bfloat16, 8)
    (one,) = piece_gradients(model, x, y, 1)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    with AccumulateInFloat32().applied(Setting.of(model)):
        squares(model, x, y).backward()
        assert_equal([(2.0 + each.float()).bfloat16() for each in one], gradients(model))
        halved = [each / 2 for each in gradients(model)]
        torch._foreach_mul_([each.grad for each in model.parameters()], 0.5)
        squares(model, x, y).backward()
        assert_equal(
            [(a.float() + b.float()).bfloat16() for a, b in zip(halved, one, strict=True)], gradients(model)
        )
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        squares(model, x, y).backward()
        assert_equal(one, gradients(model))


def test_a_parameter_that_is_used_twice_is_added_up_once() -> None:
    """Tied uses in one run are one gradient."""
    model, x, y = model_and_rows(torch.bfloat16, 8)

    def twice() -> Tensor:
        return squares(model, x, y) + squares(model, 2 * x, y)

    twice().backward()
    expected = gradients(model)
    model.zero_grad()
    with AccumulateInFloat32().applied(Setting.of(model)):
        twice().backward()
    assert_equal(expected, gradients(model))


def test_sparse_gradients_stay_sparse() -> None:
    """A sparse gradient is what it is without; torch adds none of low precision to another on a CPU."""
    torch.manual_seed(0)
    model = nn.Embedding(10, 3, sparse=True).bfloat16()
    with AccumulateInFloat32().applied(Setting.of(model)):
        for row in (1, 4):
            model.zero_grad()
            model(torch.tensor([row, row])).sum().backward()
    gradient = model.weight.grad
    assert gradient is not None
    assert gradient.layout == torch.sparse_coo
    assert gradient.to_dense()[:, 0].tolist() == [0, 0, 0, 0, 2, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("ub_size", [1, 3, 8])
def test_with_apply_several_calls_are_added_up(ub_size: int) -> None:
    """Calls in pieces before one step end within the rounding of each call and of the sum."""
    model, x, y = model_and_rows(torch.bfloat16, 8)
    exact = [each[0].double() * 3 for each in zip(*piece_gradients(model, x, y, 1), strict=True)]
    with AccumulateInFloat32().applied(Setting.of(model)):
        call = anybatch.apply(["x", "y"], ub_size=ub_size)(squares)
        for _ in range(3):
            call(model, x=x, y=y)
    for expected, got in zip(exact, gradients(model), strict=True):
        assert (
            float((got.double() - expected).abs().max() / expected.abs().max())
            <= 4 * _ROUNDING[torch.bfloat16]
        )


def test_two_steps_of_adamw_with_one_run_each_are_those_of_plain_pytorch() -> None:
    """Where nothing is added up nothing changes, bit for bit; float32 parameters are left alone."""
    found = []
    for technique in (None, AccumulateInFloat32()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        model[0].bfloat16()
        x, y = torch.randn(7, 4).bfloat16(), torch.randn(7, 1)

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return ((model[1](model[0](x).float()) - y) ** 2).mean()  # type: ignore[index]

        entered = technique.applied(Setting.of(model)) if technique else None
        found.append(two_steps(model, x, y, entered, loss=loss))
    for expected, got in zip(*found, strict=True):
        assert_equal(expected, got)


def test_the_cost_is_four_bytes_an_element_and_ends_with_the_run() -> None:
    """17 parameters take 68 bytes, and the sums are gone afterwards."""
    model, x, y = model_and_rows(torch.bfloat16, 8)
    assert AccumulateInFloat32().cost_bytes(model) == 17 * 4
    before = gc.isenabled(), [each._backward_hooks for each in model.parameters()]
    with AccumulateInFloat32().applied(Setting.of(model)):
        squares(model, x, y).backward()
        assert all(each._backward_hooks for each in model.parameters())
    assert not any(each._backward_hooks for each in model.parameters())
    assert before[1] == [None, None]
    dies = weakref.ref(model)
    del model
    gc.collect()
    assert dies() is None


def test_gradients_that_are_not_accumulated_are_not_added() -> None:
    """`autograd.grad` between two runs changes nothing, before the first one as well."""
    model, x, y = model_and_rows(torch.bfloat16, 8)
    (one,) = piece_gradients(model, x, y, 1)
    with AccumulateInFloat32().applied(Setting.of(model)):
        for _ in range(2):
            torch.autograd.grad(squares(model, x, y), list(model.parameters()))
            squares(model, x, y).backward()
    assert_equal([2 * each for each in one], gradients(model))


def test_gradients_of_gradients_are_left_to_torch() -> None:
    """With `create_graph` gradients keep their graph."""
    model, x, y = model_and_rows(torch.bfloat16, 8)
    with AccumulateInFloat32().applied(Setting.of(model)):
        (gradient,) = torch.autograd.grad(squares(model, x, y), [model.weight], create_graph=True)
    assert gradient.requires_grad


@pytest.mark.parametrize("wrapped", [False, True])
def test_where_it_can_not_help_it_says_so(wrapped: bool) -> None:
    """Without parameters of low precision, and in DistributedDataParallel, it is refused (Rule 8)."""
    if wrapped:
        model: nn.Module = DistributedDataParallel.__new__(DistributedDataParallel)
        reason = "in buffers of its own"
    else:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16().requires_grad_(False))
        reason = "Sequential, which has none"
    with pytest.raises(TechniqueError, match=reason):
        AccumulateInFloat32().check(Setting(model))
