"""`verify`: what it says of calls that are exact, how it measures those that are not, and what it refuses."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from anybatch.errors import BatchError, LossError


def _network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def _batch(dtype: torch.dtype = torch.float64, rows: int = 10) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 6, dtype=dtype), "y": torch.randint(0, 3, (rows,))}


def _step(model: nn.Module, ub_size: int = 4, **options: Any) -> Any:
    @anybatch.apply(["x", "y"], ub_size=ub_size, **options)
    def step(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    return step


@pytest.mark.parametrize("ub_size", [1, 3, 4, 9])
def test_exact_call_in_float64(ub_size: int) -> None:
    """An exact call is found exact, with the loss of plain PyTorch and the sizes of its pieces."""
    model, batch = _network(), _batch()
    found = anybatch.verify(_step(model, ub_size), **batch)
    assert found.is_exact
    assert found.largest_error_ratio < 1e-14
    assert found.loss_error_ratio < 1e-14
    assert found.allowed_ratio == 1e-10
    assert found.causes == ()
    assert found.notes == ()
    assert found.remaining_error_ratio is None
    assert found.rows == sum(found.sizes) == 10
    assert max(found.sizes) <= ub_size
    expected = F.cross_entropy(model(batch["x"]), batch["y"]).item()
    assert found.loss_whole == expected
    assert found.loss_in_pieces == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("seed", range(8))
def test_exact_call_in_float32(seed: int) -> None:
    """In float32 what rounding makes is allowed: twice the whole's own error, two roundings at least."""
    torch.manual_seed(seed)
    model, batch = _network(torch.float32), _batch(torch.float32, rows=23)
    found = anybatch.verify(_step(model, 4), **batch)
    assert found.is_exact, found
    assert 2 * torch.finfo(torch.float32).eps <= found.allowed_ratio < 1e-5


def test_whole_that_is_hardly_rounded_by_chance() -> None:
    """One run of the whole may hit the true gradient by chance: its own error is the largest of several."""
    weight, x = nn.Parameter(torch.tensor(2.0)), torch.ones(10)

    def rounded(gradient: Tensor) -> Tensor:
        is_exact = gradient.dtype == torch.float64 or gradient.tolist() == [1.0] * 10
        return gradient if is_exact else gradient * (1 + 5 * torch.finfo(torch.float32).eps)

    @anybatch.apply(["x"], ub_size=4, on_inexact="ignore", weight="sum")
    def step(x: Tensor) -> Tensor:
        output = weight * x
        output.register_hook(rounded)
        return output.sum()

    found = anybatch.verify(step, x=x)
    eps = torch.finfo(torch.float32).eps
    assert found.largest_error_ratio == pytest.approx(5 * eps, abs=eps)
    assert found.allowed_ratio == pytest.approx(10 * eps, abs=2 * eps)
    assert found.is_exact, found


def _ratio_of_rows(model: nn.Module, batch: dict[str, Tensor], sizes: tuple[int, ...]) -> tuple[float, str]:
    """How far a mean over rows of the pieces' root losses lies from that of the whole, in plain PyTorch."""
    parameters = dict(model.named_parameters())

    def gradients(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        loss = F.cross_entropy(model(x), y).sqrt()
        return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))

    whole = gradients(**batch)
    mixed = {name: torch.zeros_like(gradient) for name, gradient in whole.items()}
    for x, y in zip(batch["x"].split(sizes), batch["y"].split(sizes), strict=True):
        for name, gradient in gradients(x, y).items():
            mixed[name] += gradient * len(x) / len(batch["x"])
    apart = {name: float((whole[name] - mixed[name]).abs().max()) for name in whole}
    where = max(apart, key=lambda name: apart[name])
    return apart[where] / max(float(gradient.abs().max()) for gradient in whole.values()), where


@pytest.mark.parametrize("on_inexact", ["raise", "warn"])
def test_figures_of_an_inexact_call(on_inexact: str) -> None:
    """The largest difference is that of plain PyTorch, in the parameter where plain PyTorch has it."""
    model, batch = _network(), _batch()

    @anybatch.apply(["x", "y"], ub_size=4, on_inexact=on_inexact)
    def step(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y).sqrt()

    found = anybatch.verify(step, **batch)
    ratio, where = _ratio_of_rows(model, batch, (4, 3, 3))
    assert not found.is_exact
    assert found.largest_error_ratio == pytest.approx(ratio, rel=1e-10)
    assert found.parameter == where
    assert found.loss_error_ratio > 1e-4


def test_losses_by_name_and_outputs() -> None:
    """A dict of losses is compared entry by entry; outputs beside the loss do not disturb."""
    model, batch = _network(), _batch()

    @anybatch.apply(["x", "y"], ub_size=4)
    def step(x: Tensor, y: Tensor) -> Any:
        logits = model(x)
        return {"match": F.cross_entropy(logits, y), "size": logits.square().sum()}, logits

    found = anybatch.verify(step, **batch)
    logits = model(batch["x"])
    expected = {"match": F.cross_entropy(logits, batch["y"]).item(), "size": logits.square().sum().item()}
    assert found.is_exact
    assert found.loss_whole == expected
    assert found.loss_in_pieces == pytest.approx(expected, rel=1e-13)


def test_leaves_outside_of_modules_are_compared() -> None:
    """A tensor that the function names, and a batch entry that requires grad, are called by their names."""
    weight = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    batch = _batch()
    batch["x"] = (100 * batch["x"]).requires_grad_()

    @anybatch.apply(["x", "y"], ub_size=4, on_inexact="ignore", weight="sum")
    def step(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x @ weight, y) / 1000

    assert anybatch.verify(step, **batch).parameter == "weight"
    weight.requires_grad_(False)
    assert anybatch.verify(step, **batch).parameter == "x"
    assert batch["x"].grad is None


def test_graph_above_an_entry_survives() -> None:
    """An entry that is the result of the caller's graph is compared, and the graph can still run backward."""
    encoder, model = nn.Linear(6, 6).double(), _network()
    batch = _batch()
    encoded = encoder(batch["x"]).tanh()
    found = anybatch.verify(_step(model), encoded, batch["y"])
    assert found.is_exact
    encoded.sum().backward()
    assert encoder.weight.grad is not None


def test_method_of_an_object() -> None:
    """A decorated method is verified on its object, whose attributes are left alone."""

    class Trainer:
        def __init__(self) -> None:
            self.model = _network()
            self.steps = 0

        @anybatch.apply(["x", "y"], ub_size=4)
        def step(self, x: Tensor, y: Tensor) -> Tensor:
            self.steps += 1
            return F.cross_entropy(self.model(x), y)

    trainer = Trainer()
    assert anybatch.verify(trainer.step, **_batch()).is_exact
    assert trainer.steps == 0


def test_model_as_argument_and_further_keywords() -> None:
    """Arguments that are not cut pass as they are, also those in `**kwargs`."""
    model, batch = _network(), _batch()

    @anybatch.apply(["x", "y"], ub_size=4)
    def step(model: nn.Module, criterion: Any, /, **kwargs: Any) -> Tensor:
        return kwargs["scale"] * criterion(model(kwargs["x"]), kwargs["y"])

    found = anybatch.verify(step, model, nn.CrossEntropyLoss(), scale=3.0, **batch)
    assert found.is_exact
    assert found.loss_whole == pytest.approx(3 * F.cross_entropy(model(batch["x"]), batch["y"]).item())


def test_module_as_function() -> None:
    """A decorated module is called by the parameters of its `forward`, with their defaults."""

    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = _network()

        def forward(self, x: Tensor, y: Tensor = torch.arange(10) % 3) -> Tensor:  # noqa: B008
            return F.cross_entropy(self.model(x), y)

    trained, x = Trained(), _batch()["x"]
    found = anybatch.verify(anybatch.apply(["x", "y"], ub_size=4)(trained), x)
    assert found.is_exact
    assert found.loss_whole == trained(x).item()
    assert found.function == "Trained"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_are_compared_where_they_are_disabled(mode: Any) -> None:
    """`verify` compares gradients also where the caller has them disabled, and leaves them disabled."""
    model = _network()
    with mode():
        batch = _batch()
        found = anybatch.verify(_step(model, on_inexact="ignore", weight="sum"), **batch)
        assert not torch.is_grad_enabled()
    assert not found.is_exact
    assert found.parameter is not None


def test_compiled_function() -> None:
    """`apply` around a compiled function is verified like any other."""
    model = _network()
    compiled = torch.compile(lambda x, y: F.cross_entropy(model(x), y), backend="eager")
    assert anybatch.verify(anybatch.apply(["x", "y"], ub_size=4)(compiled), **_batch()).is_exact


@pytest.mark.parametrize("rows", [1, 3])
def test_mini_batch_in_one_piece(rows: int) -> None:
    """What fits in one piece is not cut: it is the same, and the report says why."""
    found = anybatch.verify(_step(_network(), 4), **_batch(rows=rows))
    assert found.is_exact
    assert found.sizes == (rows,)
    assert found.largest_error_ratio == found.loss_error_ratio == 0
    assert found.parameter is None
    assert len(found.notes) == 1
    assert "fits in one piece" in found.notes[0]


def test_nan_on_both_sides_is_the_same() -> None:
    """A loss that is nan either way is no difference."""
    model, batch = _network(), _batch()
    batch["x"][3] = torch.nan
    assert anybatch.verify(_step(model), **batch).largest_error_ratio == 0


def test_parameter_with_a_gradient_on_one_side_only() -> None:
    """A parameter that gets a gradient only when the mini-batch is cut differs infinitely."""
    model, extra = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()

    @anybatch.apply(["x", "y"], ub_size=4, on_inexact="ignore", weight="rows")
    def step(x: Tensor, y: Tensor) -> Tensor:
        logits = model(x) if len(x) > 4 else model(x) + extra(x)
        return F.cross_entropy(logits, y)

    found = anybatch.verify(step, **_batch())
    assert not found.is_exact
    assert found.largest_error_ratio == float("inf")
    assert found.parameter in ("extra.weight", "extra.bias")


# Doubled.


def test_double_of_a_float32_call() -> None:
    """With `double` a float32 call is compared in float64, and its dtypes come back."""
    model, batch = _network(torch.float32), _batch(torch.float32)
    found = anybatch.verify(_step(model), double=True, **batch)
    assert found.is_exact
    assert found.allowed_ratio == 1e-10
    assert found.largest_error_ratio < 1e-14
    wide = _network()
    wide.load_state_dict(model.state_dict())
    expected = F.cross_entropy(wide(batch["x"].double()), batch["y"]).item()
    assert found.loss_whole == pytest.approx(expected, rel=1e-14)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert batch["x"].dtype == torch.float32


def test_double_reaches_what_is_made_on_the_way() -> None:
    """Casts to fewer digits, new tensors, arrays, leaves and models out of reach are float64, too."""
    holder = {"weight": torch.randn(6, 3, requires_grad=True)}

    class Hidden:
        model = nn.Linear(3, 3)
        dtypes: ClassVar[set[torch.dtype]] = set()

    @anybatch.apply(["x", "y"], ub_size=4)
    def step(x: Any, y: Any) -> Tensor:
        thirds = (torch.as_tensor(x) / 3).float().half().to(dtype=torch.bfloat16).to(torch.float32)
        hidden = thirds @ holder["weight"] + torch.ones(3).bfloat16()
        logits = Hidden.model(hidden.type(torch.float32))
        Hidden.dtypes.update((hidden.dtype, logits.dtype))
        return F.cross_entropy(logits, torch.as_tensor(y))

    x, y = torch.randn(10, 6).numpy(), np.arange(10) % 3
    found = anybatch.verify(step, x, y, double=True)
    assert found.is_exact
    assert found.allowed_ratio == 1e-10
    assert found.largest_error_ratio < 1e-13
    thirds = torch.from_numpy(x).double() / 3
    logits = Hidden.model.double()(thirds @ holder["weight"].double() + 1)
    Hidden.model.float()
    assert found.loss_whole == pytest.approx(F.cross_entropy(logits, torch.from_numpy(y)).item(), rel=1e-14)
    assert torch.float64 in Hidden.dtypes
    assert holder["weight"].dtype == Hidden.model.weight.dtype == torch.float32
    assert x.dtype == np.float32


def test_function_that_can_not_run_in_float64() -> None:
    """Where the whole can't run in float64 a stated tolerance takes the place of its own error."""
    model, batch = _network(torch.float32), _batch(torch.float32)

    @anybatch.apply(["x", "y"], ub_size=4, on_inexact="ignore", weight="rows")
    def step(x: Tensor, y: Tensor) -> Tensor:
        assert x.dtype == torch.float32
        return F.cross_entropy(model(x), y) * (1 + 1e-6 * (len(x) == 4))

    found = anybatch.verify(step, **batch)
    assert 2 * torch.finfo(torch.float32).eps < found.largest_error_ratio
    assert found.allowed_ratio == 64 * torch.finfo(torch.float32).eps
    assert found.is_exact


# Refused.


def test_function_that_is_not_decorated() -> None:
    """A function that is not decorated with `apply` is refused by name."""
    with pytest.raises(TypeError, match="cross_entropy, which is not"):
        anybatch.verify(F.cross_entropy, torch.randn(3, 2), torch.tensor([0, 1, 0]))


def test_call_that_is_none() -> None:
    """Arguments that the call would refuse are refused alike."""
    step, batch = _step(_network()), _batch()
    with pytest.raises(TypeError, match="missing a required argument: 'y'"):
        anybatch.verify(step, batch["x"])
    with pytest.raises(BatchError, match="rows"):
        anybatch.verify(step, batch["x"], batch["y"][:7])


def test_lazy_module_that_has_not_run() -> None:
    """A lazy module, whose first run can't be undone, is refused and still lazy; idle ones do not disturb."""
    model, lazy = _network(), nn.LazyLinear(3).double()

    @anybatch.apply(["x", "y"], ub_size=4)
    def step(x: Tensor, y: Tensor, is_lazy: bool) -> Tensor:
        return F.cross_entropy((lazy if is_lazy else model)(x), y)

    assert anybatch.verify(step, is_lazy=False, **_batch()).is_exact
    with pytest.raises(ValueError, match="LazyLinear, whose weight and bias has no shape yet"):
        anybatch.verify(step, is_lazy=True, **_batch())
    assert isinstance(lazy, nn.LazyLinear)
    assert lazy(torch.zeros(2, 6).double()).shape == (2, 3)


def test_function_that_returns_no_loss() -> None:
    """A function without a loss gets the error that the call gives."""
    with pytest.raises(LossError, match="nothing"):
        anybatch.verify(anybatch.apply(["x"], 2)(lambda x: None), torch.randn(4, 2))


def test_function_that_runs_backward() -> None:
    """A function that runs backward itself is refused, and leaves no gradient."""
    model, batch = _network(), _batch()

    @anybatch.apply(["x", "y"], ub_size=4)
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    with pytest.raises(LossError, match="changed gradients itself"):
        anybatch.verify(step, **batch)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_failure_of_an_experiment_tells_what_was_found() -> None:
    """An exception that comes only while causes are looked for carries what was known before."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()

    @anybatch.apply(["x", "y"], ub_size=4, on_inexact="ignore")
    def step(x: Tensor, y: Tensor) -> Tensor:
        assert model[1].training
        return F.cross_entropy(model(x), y)

    with pytest.raises(AssertionError) as caught:
        anybatch.verify(step, **_batch())
    assert "step: not exact\n  mini-batch  10 rows" in caught.value.__notes__[0]


def test_out_of_memory_is_explained() -> None:
    """Running out of memory passes as it is, with a hint that the mini-batch has to fit whole."""
    model = _network()

    @anybatch.apply(["x", "y"], ub_size=4)
    def step(x: Tensor, y: Tensor) -> Tensor:
        if len(x) == 10:
            raise torch.OutOfMemoryError("mine")
        return F.cross_entropy(model(x), y)

    with pytest.raises(torch.OutOfMemoryError, match="mine") as caught:
        anybatch.verify(step, **_batch())
    assert ["runs the mini-batch whole" in note for note in caught.value.__notes__] == [True]
