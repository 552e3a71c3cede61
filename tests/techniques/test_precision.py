"""Precision: autocast around forward, with a scaler where one is needed."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

import anybatch
from anybatch.errors import TechniqueError
from anybatch.techniques import Checkpointing, Precision, Setting, precision

from .catalogue import network
from .training import Losses, assert_close, assert_equal, saved_bytes, two_steps

# Half the distance from 1 to the next number.
ROUNDING = {torch.bfloat16: 2**-9, torch.float16: 2**-12}


def data(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, 6), torch.randn(rows, 3)


def tanhs() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def cast(dtype: torch.dtype) -> Losses:
    """The loss with forward under the technique."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with Precision(dtype).forward(Setting.of(model)):
            output = model(x)
        return ((output.float() - y) ** 2).mean()

    return loss


def autocast(dtype: torch.dtype) -> Losses:
    """The same in plain PyTorch."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            output = model(x)
        return ((output.float() - y) ** 2).mean()

    return loss


@pytest.mark.parametrize("dtype", ROUNDING)
def test_two_steps_are_bit_for_bit_those_of_autocast(dtype: torch.dtype) -> None:
    """The technique is `torch.autocast` around forward, and nothing else."""
    x, y = data(7)
    gradients, end = two_steps(tanhs(), x, y, loss=autocast(dtype))
    ours, our_end = two_steps(tanhs(), x, y, loss=cast(dtype))
    assert_equal(gradients, ours)
    assert_equal(end, our_end)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("ub_size", [None, 1, 3])
def test_gradients_are_within_the_stated_bound(dtype: torch.dtype, ub_size: int | None) -> None:
    """Whole and in uneven pieces, gradients are within a few roundings of those in float64."""
    x, y = data(7)
    exact, _ = two_steps(tanhs().double(), x.double(), y.double())
    ours, _ = two_steps(tanhs(), x, y, ub_size=ub_size, loss=cast(dtype))
    assert_close(exact, [each.double() for each in ours], 4 * ROUNDING[dtype])


def test_weights_of_the_last_step_are_not_used_again() -> None:
    """Copies of weights die with each forward, so that losses move from step to step as they should."""
    x, y = data(8)
    results = []
    for loss in (autocast(torch.bfloat16), cast(torch.bfloat16)):
        model = tanhs()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            with torch.no_grad():
                loss(model, x, y)
            value = anybatch.apply(["x", "y"], ub_size=3)(loss)(model, x=x, y=y)
            optimizer.step()
            losses.append(float(value))
        assert len(set(losses)) == 4
        results.append([torch.tensor(losses)])
    assert_equal(*results)
    assert not torch.is_autocast_enabled("cpu")


def test_half_the_bytes_are_saved() -> None:
    """What matrix products save takes two bytes per value in place of four."""
    rows = 64
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    x = torch.randn(rows, 8)
    _, plain = saved_bytes(model, lambda: model(x).sum())
    setting = Setting.of(model)

    def run() -> Tensor:
        with Precision().forward(setting):
            return model(x).sum()

    _, ours = saved_bytes(model, run)
    assert plain == 3 * rows * 8 * 4
    # Besides, copies of the three weights that a gradient passes through.
    assert ours == 3 * rows * 8 * 2 + 3 * 8 * 8 * 2


def test_with_checkpointing_forward_runs_again_in_the_same_precision() -> None:
    """Blocks that run again in backward, outside of autocast, run as they did."""
    x, y = data(7)
    results = []
    for technique in (None, Checkpointing("0.*")):
        model = network().float()
        torch.manual_seed(3)
        entered = None if technique is None else technique.applied(Setting.of(model))
        gradients, end = two_steps(model, x, y, entered, loss=cast(torch.bfloat16))
        results.append([*gradients, *end])
    assert_equal(*results)


def test_float16_has_a_scaler_and_small_gradients_survive() -> None:
    """Without a scaler gradients under 2^-24 are zero in float16; with it they are right."""
    x, y = data(7)
    model, small = tanhs(), 1e-7
    setting = Setting.of(model)
    scaler = Precision("float16").scaler(setting)
    assert scaler is not None

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with Precision("float16").forward(setting):
            return model(x).float().sum() * small

    double = tanhs().double()
    exact = list(torch.autograd.grad(double(x.double()).sum() * small, list(double.parameters())))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler.scale(loss(model, x, y)).backward()
    scaler.unscale_(optimizer)
    got = [each.grad.double() for each in model.parameters() if each.grad is not None]
    assert_close(exact, got, 4 * ROUNDING[torch.float16])


@pytest.mark.parametrize("ub_size", [2, 3])
def test_the_scaler_goes_with_apply(ub_size: int) -> None:
    """A call in uneven pieces scales each loss; unscaled, the gradient is within the bound."""
    x, y = data(7)
    exact, _ = two_steps(tanhs().double(), x.double(), y.double())
    model = tanhs()
    scaler = Precision("float16").scaler(Setting.of(model))
    step = anybatch.apply(["x", "y"], ub_size=ub_size, scaler=scaler)(cast(torch.float16))
    step(model, x=x, y=y)
    assert scaler is not None
    scaler.unscale_(torch.optim.SGD(model.parameters()))
    got = [each.grad.double() for each in model.parameters() if each.grad is not None]
    assert_close(exact, got, 4 * ROUNDING[torch.float16])


def test_bfloat16_needs_no_scaler() -> None:
    """It has the range of float32."""
    assert Precision(torch.bfloat16).scaler(Setting.of(tanhs())) is None


@pytest.mark.parametrize("kind", ["cuda", "mps", "cpu"])
def test_the_scaler_is_the_devices(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of device has a scaler of its own."""
    made = Mock()
    monkeypatch.setattr(precision, "GradScaler", made)
    scaler = Precision("float16").scaler(Setting(nn.Identity(), None, torch.device(kind)))
    made.assert_called_once_with(kind)
    assert scaler is made.return_value


def test_it_is_the_same_by_name() -> None:
    """A dtype and its name are one option."""
    assert Precision("bfloat16") == Precision(torch.bfloat16) == Precision()


@pytest.mark.parametrize(
    ("model", "device", "message"),
    [
        (
            tanhs().double(),
            "mps",
            r"float64 parameters and mps, which has no float64\. Call `model\.float\(\)`",
        ),
        (tanhs().double(), "cpu", "parameters in float64, which autocast leaves as they are"),
        (tanhs().bfloat16(), "cpu", "parameters in bfloat16, which autocast leaves as they are"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half()), "cpu", "float16, whose gradients can't be"),
        (tanhs(), "meta", "meta, which has no autocast"),
    ],
)
def test_where_it_can_not_work_it_says_so(model: nn.Module, device: str, message: str) -> None:
    """What autocast would pass over in silence is refused with a hint (Rule 8)."""
    with pytest.raises(TechniqueError, match=message):
        Precision("float16").check(Setting(model, None, torch.device(device)))


@pytest.mark.parametrize("error", [RuntimeError, UserWarning])
def test_what_torch_says_of_a_device_is_passed_on(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where torch would warn and go on without autocast, the technique refuses, in torch's words."""

    def fail(*_: object) -> None:
        raise error("Current device does not support bfloat16. Disabling autocast.")

    monkeypatch.setattr(torch, "autocast", fail)
    with pytest.raises(
        TechniqueError, match="cpu and bfloat16, of which torch says: Current device does not"
    ):
        Precision().check(Setting.of(tanhs()))


def test_autocast_that_is_held_already_is_refused() -> None:
    """Inside of another autocast, copies of weights would outlive the piece."""
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(TechniqueError, match="on already"),
        Precision().forward(Setting.of(tanhs())),
    ):
        pass


def test_autocast_ends_with_a_forward_that_fails() -> None:
    """After an error, autocast is off as it was."""
    with pytest.raises(KeyError), Precision().forward(Setting.of(tanhs())):
        raise KeyError
    assert not torch.is_autocast_enabled("cpu")
