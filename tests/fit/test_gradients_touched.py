"""A function that changes gradients itself is told so, and everything is as it was (Rule 3)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from anybatch.errors import LossError

from .whole import ROWS, UB_SIZE, assert_same_gradients, batch, clear, gradients, net

Touch = Callable[[nn.Module, Tensor], None]


def _change_in_place(change: Callable[[Tensor], object]) -> Touch:
    def touch(model: nn.Module, loss: Tensor) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                change(parameter.grad)

    return touch


def _replace(model: nn.Module, loss: Tensor) -> None:
    model[2].bias.grad = torch.ones_like(model[2].bias)


TOUCHES: dict[str, Touch] = {
    "backward": lambda model, loss: loss.backward(retain_graph=True),
    "backward of another loss": lambda model, loss: model(torch.ones(1, 3).double()).sum().backward(),
    "zero_grad": lambda model, loss: model.zero_grad(),
    "zero_grad in place": lambda model, loss: model.zero_grad(set_to_none=False),
    "clipping": lambda model, loss: nn.utils.clip_grad_norm_(model.parameters(), 1e-6),
    "scaling in place": _change_in_place(lambda gradient: gradient.mul_(2)),
    "filling": _change_in_place(lambda gradient: gradient.fill_(2)),
    "replacing": _replace,
}
# With no gradient yet, in a mini-batch of one piece, these do nothing.
HARMLESS_ALONE = {"zero_grad", "zero_grad in place", "clipping", "scaling in place", "filling"}


def _give_gradients(model: nn.Module) -> list[Tensor | None]:
    for index, parameter in enumerate(model.parameters()):
        if index != 1:
            parameter.grad = torch.full_like(parameter, 1.0 + index)
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("ub_size", [UB_SIZE, ROWS])
@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("name", TOUCHES)
def test_touching_gradients_is_an_error(name: str, has_gradients: bool, ub_size: int) -> None:
    """Whatever changes a gradient in the function raises; gradients stay the tensors that they were."""
    model = net()
    tensors = _give_gradients(model) if has_gradients else [None] * 4
    values = gradients(model.parameters())

    def function(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        TOUCHES[name](model, loss)
        return loss

    call = anybatch.apply(["x", "y"], ub_size)(function)
    if name in HARMLESS_ALONE and not has_gradients and ub_size == ROWS:
        call(**batch())
        return
    with pytest.raises(LossError, match=r"changed the gradient of"):
        call(**batch())
    assert all(one.grad is tensor for one, tensor in zip(model.parameters(), tensors, strict=True))
    assert_same_gradients(values, gradients(model.parameters()))


@pytest.mark.parametrize("ub_size", [UB_SIZE, ROWS])
def test_harmless_zero_grad_changes_nothing(ub_size: int) -> None:
    """Zeroing what has no gradients, in a mini-batch of one piece, leaves the result exact."""
    model = net()
    F.cross_entropy(model(batch()["x"]), batch()["y"]).backward()
    expected = gradients(model.parameters())
    clear(model.parameters())

    def function(x: Tensor, y: Tensor) -> Tensor:
        if ub_size == ROWS:
            model.zero_grad()
        return F.cross_entropy(model(x), y)

    anybatch.apply(["x", "y"], ub_size)(function)(**batch())
    assert_same_gradients(expected, gradients(model.parameters()))


@pytest.mark.parametrize("has_gradient", [False, True])
def test_touching_a_leaf_outside_of_modules(has_gradient: bool) -> None:
    """The same holds for tensors that belong to no module."""
    weight = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    before = torch.ones_like(weight) if has_gradient else None
    weight.grad = before

    def function(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(x @ weight, y)
        loss.backward(retain_graph=True)
        return loss

    with pytest.raises(LossError, match="changed the gradient of"):
        anybatch.apply(["x", "y"], UB_SIZE)(function)(**batch())
    assert weight.grad is before
    assert before is None or bool((before == 1).all())


def test_touching_in_a_later_piece() -> None:
    """A function that zeroes gradients only now and then is told so, too."""
    model, rows = net(), batch()
    runs = iter(range(100))

    def function(x: Tensor, y: Tensor) -> Tensor:
        if bool((x[0] == rows["x"][7]).all()):
            model.zero_grad()
        next(runs)
        return F.cross_entropy(model(x), y)

    with pytest.raises(LossError, match="changed the gradient of Linear"):
        anybatch.apply(["x", "y"], UB_SIZE)(function)(**rows)
    assert gradients(model.parameters()) == [None] * 4


def test_touching_with_gradients_disabled() -> None:
    """An evaluation may not change gradients either."""
    model = net()
    tensors = _give_gradients(model)

    def function(x: Tensor, y: Tensor) -> Tensor:
        model.zero_grad()
        return F.cross_entropy(model(x), y)

    with torch.no_grad(), pytest.raises(LossError, match="changed the gradient of"):
        anybatch.apply(["x", "y"], UB_SIZE)(function)(**batch())
    assert all(one.grad is tensor for one, tensor in zip(model.parameters(), tensors, strict=True))


def test_users_own_error_about_shared_memory_passes() -> None:
    """An error of the user's own, in the words that torch has for shared memory, is not taken for this."""
    model = net()

    def function(x: Tensor, y: Tensor) -> Tensor:
        torch.ones(()).expand(3).add_(torch.ones(3))
        return F.cross_entropy(model(x), y)

    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor") as caught:
        anybatch.apply(["x", "y"], UB_SIZE)(function)(**batch())
    assert not isinstance(caught.value, LossError)
