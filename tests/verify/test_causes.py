"""The causes that `verify` names: each alone, each in company, and none that is none."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from anybatch.errors import InexactError

from .ingredients import arguments, function_with, mini_batch

BEGINNINGS = {
    "BatchNorm": "BatchNorm in training mode takes its statistics over each micro-batch, not over the "
    "mini-batch: norm (BatchNorm1d).",
    "dropout": "Dropout draws other masks for micro-batches than for the mini-batch: drop (Dropout), "
    "last_drop (Dropout).",
    "inputs": "The function changes its arguments in place: scale.",
    "state": "The function keeps state from one call to the next: state.queue.",
    "loss": "The loss does not add up: Sqrt of a value over all rows of the piece is not linear in it.",
}
SWITCHED = {
    "BatchNorm": "BatchNorm",
    "dropout": "dropout",
    "state": "kept state",
    "inputs": "changed arguments",
}
MIXTURES = [mixture for count in range(6) for mixture in itertools.combinations(BEGINNINGS, count)]


def _verified(
    function: Callable[..., Any], batch: dict[str, Tensor] | None = None, **options: Any
) -> anybatch.Verification:
    batch = mini_batch() if batch is None else batch
    return anybatch.verify(anybatch.apply(["x", "y"], ub_size=4, **options)(function), **batch)


@pytest.mark.parametrize("mixture", MIXTURES, ids="+".join)
def test_each_of_several_causes_is_found(mixture: tuple[str, ...]) -> None:
    """Whatever is mixed together, each ingredient is named as a cause, and nothing else is."""
    function, _ = function_with(mixture)
    found = _verified(function, arguments())
    assert found.is_exact == (not mixture)
    assert len(found.causes) == len(mixture)
    for cause, ingredient in zip(found.causes, mixture, strict=True):
        assert cause.startswith(BEGINNINGS[ingredient])
    switched = tuple(SWITCHED[ingredient] for ingredient in mixture if ingredient in SWITCHED)
    assert found.switched_off == switched
    assert found.is_explained == ("loss" not in mixture)
    assert (found.remaining_error_ratio is None) == (not switched)
    if switched:
        assert found.remaining_error_ratio is not None
        assert (found.remaining_error_ratio < 1e-13) == found.is_explained


def test_difference_of_each_cause_alone() -> None:
    """Beside other causes, each says how much it differs alone: what it says when it is alone."""
    torch.manual_seed(3)
    function, network = function_with(["BatchNorm", "dropout"])
    batch = mini_batch()
    together = _verified(function, batch)
    network.norm.eval()
    network.norm.running_mean, network.norm.running_var = torch.zeros(8).double(), torch.ones(8).double()
    dropout_alone = _verified(function, batch)
    assert together.causes[1].endswith(f"a difference of {dropout_alone.largest_error_ratio:.2g}.")
    assert "Alone" not in dropout_alone.causes[0]


def test_layers_that_do_not_run_are_no_cause() -> None:
    """BatchNorm and dropout in a model that the function names and does not call are not mentioned."""
    function, network = function_with(["loss"])
    idle, _ = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5)).double(), network

    def step(x: Tensor, y: Tensor) -> Tensor:
        assert idle.training
        return function(x, y)

    found = _verified(step)
    assert len(found.causes) == 1
    assert "Sqrt" in found.causes[0]


def test_layers_in_eval_mode_are_no_cause() -> None:
    """A model in eval mode is exact."""
    function, network = function_with(["BatchNorm", "dropout"])
    network.eval()
    assert _verified(function).is_exact


def test_batch_norm_can_be_frozen() -> None:
    """What is said to do about BatchNorm names the option, and with it the call is exact."""
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)).double()

    def function(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    (cause,) = _verified(function).causes
    assert cause.endswith('Use GroupNorm, `batch_norm="frozen"`, or put these layers in eval mode.')
    assert _verified(function, batch_norm="frozen").is_exact


def test_batch_norm_without_running_statistics() -> None:
    """BatchNorm that keeps no statistics uses the batch's in eval mode too, and is found."""
    model = nn.Sequential(
        nn.BatchNorm1d(6, affine=False, track_running_stats=False), nn.Linear(6, 3)
    ).double()
    found = _verified(lambda x, y: F.cross_entropy(model(x), y))
    assert [cause.split(":")[1] for cause in found.causes] == [
        " 0 (BatchNorm1d). Use GroupNorm."  # they can't be frozen, and eval mode changes nothing
    ]
    assert found.is_explained
    assert model[0].running_mean is None


def test_dropout_inside_of_layers() -> None:
    """Dropout that a layer does itself (recurrent, attention) is named by the layer and put off there."""
    recurrent = nn.LSTM(6, 5, num_layers=3, dropout=0.3, batch_first=True).double()
    attention = nn.MultiheadAttention(5, 1, dropout=0.3, batch_first=True).double()

    def step(x: Tensor, y: Tensor) -> Tensor:
        assert recurrent.training, "cuDNN has no backward for it in eval mode"
        hidden, _ = recurrent(x[:, None].expand(-1, 4, -1))
        mixed, _ = attention(hidden, hidden, hidden)
        return F.cross_entropy(mixed.mean(1), y)

    found = _verified(step)
    assert len(found.causes) == 1
    assert ": recurrent (LSTM), attention (MultiheadAttention). " in found.causes[0]
    assert found.is_explained
    assert recurrent.dropout == 0.3


def test_state_beside_layers_that_are_changed_to_be_switched_off() -> None:
    """Putting state back for each call leaves the other switches off."""
    recurrent = nn.LSTM(6, 5, num_layers=3, dropout=0.3, batch_first=True).double()
    norm = nn.BatchNorm1d(5, track_running_stats=False).double()
    calls = 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        hidden, _ = recurrent(x[:, None].expand(-1, 4, -1))
        return F.cross_entropy(calls * norm(hidden[:, -1]), y)

    found = _verified(step)
    assert found.switched_off == ("BatchNorm", "dropout", "kept state")
    assert found.is_explained


def test_dropout_that_draws_in_the_order_of_rows() -> None:
    """Where micro-batches happen to draw what the mini-batch draws, the call is exact, with a note."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3)).double()
    found = _verified(lambda x, y: F.cross_entropy(model(x), y))
    assert found.is_exact
    assert len(found.notes) == 1
    assert found.notes[0].startswith("Random numbers are drawn: 1 (Dropout). They came in the order of rows")


OWN = torch.Generator().manual_seed(7)
OWN_NUMPY = np.random.default_rng(7)
NOISES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "torch": ("torch", lambda x: torch.randn_like(x).flip(0)),
    "numpy": ("numpy", lambda x: torch.from_numpy(np.random.randn(6))),
    "python": ("Python", lambda x: x * random.random()),
    "own of torch": ("OWN", lambda x: torch.randn(6, generator=OWN, dtype=x.dtype)),
    "own of numpy": ("OWN_NUMPY", lambda x: torch.from_numpy(OWN_NUMPY.standard_normal(6))),
}


@pytest.mark.parametrize("noise", NOISES)
def test_random_numbers_outside_of_modules(noise: str) -> None:
    """Random numbers that the function draws itself are a cause, with the generator; the loss is not."""
    model = nn.Linear(6, 3).double()
    name, draw = NOISES[noise]
    found = _verified(lambda x, y: F.cross_entropy(model(x + draw(x)), y))
    assert len(found.causes) == 1
    assert found.causes[0].startswith(f"The function draws random numbers ({name}), others for micro-batches")
    assert found.switched_off == ()


def test_random_numbers_from_a_seed() -> None:
    """Random numbers that the function seeds itself are the same in each call, and so others for each row."""
    model = nn.Linear(6, 3).double()

    def step(x: Tensor, y: Tensor) -> Tensor:
        torch.manual_seed(3)
        return F.cross_entropy(model(x + torch.randn_like(x)), y)

    found = _verified(step)
    assert len(found.causes) == 1
    assert found.causes[0].startswith("The function draws random numbers (torch)")


def test_random_numbers_beside_dropout_and_a_refused_loss() -> None:
    """Random numbers of the function hide neither dropout nor a loss whose graph refuses it."""
    function, _ = function_with(["dropout", "loss"])
    found = _verified(lambda x, y: function(x + torch.randn_like(x).flip(0), y))
    beginnings = [
        "Dropout draws other masks",
        "The function draws random numbers (torch)",
        "The loss does not",
    ]
    assert [cause[: len(start)] for cause, start in zip(found.causes, beginnings, strict=True)] == beginnings
    assert found.switched_off == ("dropout",)
    assert not found.is_explained


def test_random_numbers_just_before_dropout() -> None:
    """What the function draws before a module runs is not taken for the module's."""
    drop, again, model = nn.Dropout(0.3), nn.Dropout(0.3), nn.Linear(6, 3).double()

    def step(x: Tensor, y: Tensor) -> Tensor:
        noisy = x + torch.randn_like(x).flip(0)
        return F.cross_entropy(model(again(drop(noisy))), y)

    found = _verified(step)
    assert len(found.causes) == 2
    assert ": drop (Dropout), again (Dropout)." in found.causes[0]
    assert found.causes[1].startswith("The function draws random numbers (torch)")


def test_module_that_draws_in_eval_mode_too() -> None:
    """A module that draws whatever its mode is no dropout that could be switched off."""

    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5)

    model = nn.Sequential(Noise(), nn.Linear(6, 8), Noise(), nn.Linear(8, 3)).double()
    found = _verified(lambda x, y: F.cross_entropy(model(x), y))
    assert len(found.causes) == 1
    assert found.causes[0].startswith("The function draws random numbers (torch)")


def test_changed_arguments_that_do_not_matter_beside_other_causes() -> None:
    """Arguments that are changed once, to what they stay, are no cause, whatever else there is."""
    function, _ = function_with(["loss"])

    def step(x: Tensor, y: Tensor) -> Tensor:
        x.clamp_(-1, 1)
        return function(x + torch.randn_like(x).flip(0), y)

    found = _verified(step)
    beginnings = ["The function draws random numbers", "The loss does not add up"]
    assert [cause[: len(start)] for cause, start in zip(found.causes, beginnings, strict=True)] == beginnings


def test_random_numbers_that_do_not_matter() -> None:
    """Random numbers that reach no loss are no cause."""
    model = nn.Linear(6, 3).double()

    def step(x: Tensor, y: Tensor) -> Tensor:
        torch.randn(3)
        return F.cross_entropy(model(x), y)

    assert _verified(step).is_exact


CALLS = 0


def _counts(model: nn.Module) -> Callable[..., Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        return CALLS * F.cross_entropy(model(x), y)

    return step


def _counts_in_closure(model: nn.Module) -> Callable[..., Tensor]:
    calls = 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return calls * F.cross_entropy(model(x), y)

    return step


def _appends(model: nn.Module) -> Callable[..., Tensor]:
    past: list[float] = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        past.append(1.0)
        return sum(past) * F.cross_entropy(model(x), y)

    return step


def _decays(model: nn.Module) -> Callable[..., Tensor]:
    average = torch.ones(3, dtype=torch.float64)

    def step(x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        scaled = logits * average.clone()
        average.data.mul_(0.5)
        return F.cross_entropy(scaled, y)

    return step


def _counts_in_module(model: nn.Module) -> Callable[..., Tensor]:
    model.calls = 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        model.calls += 1
        return model.calls * F.cross_entropy(model(x), y)

    return step


STATES = {
    "global": (_counts, "CALLS"),
    "closure": (_counts_in_closure, "calls"),
    "list": (_appends, "past"),
    "tensor, past versions": (_decays, "average"),
    "attribute of a module": (_counts_in_module, "calls"),
}


@pytest.mark.parametrize("kind", STATES)
def test_state_outside_of_buffers(kind: str) -> None:
    """State in variables, containers and attributes is found by name."""
    make, name = STATES[kind]
    found = _verified(make(nn.Linear(6, 3).double()))
    assert len(found.causes) == 1
    assert found.causes[0].startswith(f"The function keeps state from one call to the next: {name}.")
    assert found.is_explained


def test_state_that_does_not_matter() -> None:
    """What the function only writes down is no cause."""
    model, log = nn.Linear(6, 3).double(), []

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        log.append(loss.item())
        return loss

    assert _verified(step).is_exact
    assert log == []


def test_state_out_of_reach() -> None:
    """State that can't be put back is a cause, and what the probe says meanwhile is not believed."""
    model = nn.Linear(6, 3).double()

    class Elsewhere:
        calls = 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        Elsewhere.calls += 1
        return Elsewhere.calls * F.cross_entropy(model(x), y)

    found = _verified(step)
    assert len(found.causes) == 1
    assert found.causes[0].startswith("The function gives another result each time")
    assert found.switched_off == ()


def test_changed_arguments_that_do_not_matter() -> None:
    """Rows that change in place once each are a note, not a cause."""
    model = nn.Linear(6, 3).double()
    found = _verified(lambda x, y: F.cross_entropy(model(x.mul_(0.5)), y))
    assert found.is_exact
    assert len(found.notes) == 1
    assert found.notes[0].startswith("The function changes its arguments in place: x.")


def test_container_that_is_changed() -> None:
    """A list passed beside the batch and changed is an argument that changes."""
    model, past = nn.Linear(6, 3).double(), [1.0]

    @anybatch.apply(["x", "y"], ub_size=4)
    def step(x: Tensor, y: Tensor, past: list[float]) -> Tensor:
        past.append(1.0)
        return sum(past) * F.cross_entropy(model(x), y)

    found = anybatch.verify(step, **mini_batch(), past=past)
    assert len(found.causes) == 1
    assert found.causes[0].startswith("The function changes its arguments in place: past.")
    assert past == [1.0]


@pytest.mark.parametrize("on_inexact", ["raise", "ignore"])
def test_weight_that_is_wrong(on_inexact: str) -> None:
    """A `weight=` that is not what the loss divides by is the cause, for the loss alone adds up."""
    model = nn.Linear(6, 3).double()
    found = _verified(
        lambda x, y: F.cross_entropy(model(x), y, reduction="sum"), weight="rows", on_inexact=on_inexact
    )
    assert len(found.causes) == 1
    assert found.causes[0].startswith("What `weight=` says is not what the loss is divided by")


def test_weight_that_is_right() -> None:
    """A `weight=` that is right is exact."""
    model = nn.Linear(6, 3).double()
    found = _verified(lambda x, y: F.cross_entropy(model(x), y, reduction="sum"), weight="sum")
    assert found.is_exact


def test_weight_on_a_loss_that_does_not_add_up() -> None:
    """Where no weight helps, the loss is the cause and not the weight."""
    function, _ = function_with(["loss"])
    found = _verified(function, weight="rows")
    assert len(found.causes) == 1
    assert found.causes[0].startswith("The loss does not add up")


@pytest.mark.parametrize("on_inexact", ["raise", "warn", "ignore"])
def test_loss_coupled_through_constants(on_inexact: str) -> None:
    """A loss whose rows meet in constants is the cause, also for a call that leaves the probe out."""
    model = nn.Linear(6, 3).double()

    def step(x: Tensor, y: Tensor) -> Tensor:
        return (model(x).sum(1) * (y - y.double().mean())).mean()

    found = _verified(step, on_inexact=on_inexact)
    assert len(found.causes) == 1
    assert found.causes[0].startswith("The loss does not add up: the loss depends on which rows are together")


class SumOfSquares(torch.autograd.Function):
    """A sum of squares that tells nothing of itself."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z.square().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        return 2 * gradient * z


def test_unreadable_loss_that_is_exact() -> None:
    """An unreadable loss that was found to be a sum is exact, with a note that it is not proved."""
    model = nn.Linear(6, 3).double()
    found = _verified(lambda x, y: SumOfSquares.apply(model(x)))
    assert found.is_exact
    assert len(found.notes) == 1
    assert found.notes[0].startswith("Not proved by `apply`: SumOfSquares can't be read")


def test_unreadable_loss_that_is_inexact() -> None:
    """An unreadable loss that could not be compared either, and was taken for a mean, is the cause."""

    class Watched(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 3, dtype=torch.float64)
            self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            result = super().forward(x)
            self.seen = self.seen + result.detach().sum(0)
            return result

    model = Watched()
    found = _verified(lambda x, y: SumOfSquares.apply(model(x)))
    assert found.causes
    assert found.causes[0].startswith("The loss can't be proved to add up: SumOfSquares can't be read")
    assert found.switched_off == ()


@pytest.mark.parametrize(("roundings", "is_exact"), [(3, True), (7, True), (11, False)])
def test_rounding_on_both_sides_of_the_true_result(roundings: int, is_exact: bool) -> None:
    """Micro-batches that are as near to the float64 result as the whole are exact, if far from the whole."""
    eps = torch.finfo(torch.float32).eps
    weight = torch.ones((), requires_grad=True)

    def step(x: Tensor) -> Tensor:
        error = 4 if len(x) == 10 else -roundings
        return (weight * x).sum() * (1 + (x.dtype == torch.float32) * error * eps)

    found = anybatch.verify(anybatch.apply(["x"], 5, weight="sum", on_inexact="ignore")(step), torch.ones(10))
    assert found.largest_error_ratio == pytest.approx((4 + roundings) * eps, abs=2 * eps)
    # The further runs round 4 roundings to 3.5 to 4.8.
    assert found.allowed_ratio == pytest.approx(8 * eps, abs=2 * eps)
    assert found.is_exact == is_exact
    assert [note[:22] for note in found.notes] == (["From the float64 resul"] if roundings == 7 else [])
    assert [cause[:8] for cause in found.causes] == ([] if is_exact else ["Rounding"])


def test_rounding() -> None:
    """Gradients that lose digits in single rows are told from a wrong method."""
    weight = torch.ones((), dtype=torch.bfloat16, requires_grad=True)
    # 256 + 1 is 256 in bfloat16, unless it is added up with more digits, beside the other rows.
    rows = torch.tensor([[256.0, 1.0], [-256.0, 0.0]] * 5, dtype=torch.bfloat16)
    found = anybatch.verify(anybatch.apply(["x"], ub_size=1)(lambda x: (weight * x).sum()), rows)
    assert found.largest_error_ratio == pytest.approx(1.0)
    assert len(found.causes) == 1
    assert found.causes[0].startswith("Rounding: in float64 the difference is 0")


def test_difference_that_nothing_explains() -> None:
    """Where the probe saw nothing, and nothing that can be switched off differs, the report says so."""
    model = nn.Linear(6, 3).double()

    def step(x: Tensor, y: Tensor) -> Tensor:
        scale = 1.0 if len(x) < 10 else 1.5
        return scale * F.mse_loss(model(x), F.one_hot(y, 3).double())

    found = _verified(step)
    assert not found.is_exact
    assert found.causes[0].startswith("Rows depend on each other in a way that the probe did not see")


def test_loss_that_has_another_form_in_each_call() -> None:
    """A loss whose graph is never the same twice is refused, and its figures are shown all the same."""
    model = nn.Linear(6, 3).double()

    class Elsewhere:
        calls = 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        Elsewhere.calls += 1
        loss = F.cross_entropy(model(x), y)
        for _ in range(Elsewhere.calls):
            loss = loss.neg().neg()
        return loss

    found = _verified(step)
    assert not found.is_exact
    assert found.largest_error_ratio < 1e-13
    assert len(found.causes) == 1
    assert found.causes[0].startswith("The loss does not add up: ")


def test_call_that_can_not_run_in_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is refused although a warning would do has no figures, and says why."""

    def refused(*_: Any) -> Any:
        raise InexactError("no two pieces are alike")

    monkeypatch.setattr("anybatch._verify.runs.in_pieces", refused)
    found = _verified(function_with([])[0])
    assert not found.is_exact
    assert found.largest_error_ratio == float("inf")
    assert isinstance(found.loss_in_pieces, float)
    assert found.loss_in_pieces != found.loss_in_pieces
    assert found.causes[0].startswith("The loss does not add up: no two pieces are alike.")
