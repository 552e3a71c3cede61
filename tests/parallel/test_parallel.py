"""`device_ids`: a model in `nn.DataParallel`, every row used (mbp-pytorch 0.2.6 drops rows)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch.errors import InexactError, InexactWarning

from .host import HostParallel, put_devices_on_the_host

Step = Callable[[nn.Module, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def three_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three devices, all of them the host."""
    put_devices_on_the_host(monkeypatch, 3)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def _batch(rows: int) -> dict[str, Tensor]:
    labels = torch.randint(4, (rows,))
    labels[1::3] = -100
    return {"x": torch.randn(rows, 3, dtype=torch.float64), "label": labels}


def _cross_entropy(model: nn.Module, x: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(model(x), label)


def _sum(model: nn.Module, x: Tensor, label: Tensor) -> Tensor:
    return (model(x).square().sum(1) * (label != -100)).sum()


def _weighted(model: nn.Module, x: Tensor, label: Tensor) -> Tensor:
    weights = torch.tensor([0.1, 1.0, 5.0, 20.0], dtype=torch.float64)
    return F.cross_entropy(model(x), label, weight=weights) + 0.01 * model(x).square().mean()


def _assert_whole(step: Step, rows: int, ub_size: int, device_ids: list[int]) -> HostParallel:
    net, batch = _net(), _batch(rows)
    expected_loss = step(net, **batch)
    expected = torch.autograd.grad(expected_loss, list(net.parameters()))
    model = HostParallel(net, device_ids)
    call = anybatch.apply(["x", "label"], ub_size, device_ids=device_ids)(step)
    loss = call(model, **batch)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-10, atol=1e-10)
    largest = max(float(gradient.abs().max()) for gradient in expected)
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert float((parameter.grad - gradient).abs().max()) <= 1e-10 * largest
    return model


@pytest.mark.parametrize("step", [_cross_entropy, _sum, _weighted], ids=["tokens", "sum", "two terms"])
@pytest.mark.parametrize(
    ("rows", "ub_size", "device_ids"),
    [(10, 4, [0, 1]), (10, 2, [0, 1]), (9, 1, [0, 1]), (12, 3, [1, 2]), (17, 2, [0, 1, 2]), (10, 4, [0])],
)
def test_devices_together_give_the_whole_gradient(
    step: Step, rows: int, ub_size: int, device_ids: list[int]
) -> None:
    """Any cut over any number of devices gives the loss and gradient of the whole mini-batch (Rule 1)."""
    _assert_whole(step, rows, ub_size, device_ids)


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_fewer_rows_than_the_devices_take(rows: int) -> None:
    """A mini-batch that leaves devices without rows, or is a single piece, is trained like any other."""
    _assert_whole(_sum, rows, 1, [0, 1, 2])
    _assert_whole(_sum, rows, 4, [0, 1, 2])


@pytest.mark.parametrize(("rows", "ub_size"), [(10, 4), (9, 1), (21, 3), (16, 4)])
def test_no_device_gets_more_rows_than_ub_size(rows: int, ub_size: int) -> None:
    """Each device gets `ub_size` rows at most, and together they get every row once (Rule 2)."""
    model = HostParallel(_net(), [0, 1])
    batch = _batch(rows)
    seen: list[Tensor] = []

    def step(model: nn.Module, x: Tensor, label: Tensor) -> Tensor:
        seen.append(x)
        return model(x).sum()

    call = anybatch.apply(["x", "label"], ub_size, device_ids=[0, 1], on_inexact="ignore")(step)
    call(model, **batch)
    assert len(model.rows) == -(-rows // (2 * ub_size))
    assert max(map(max, model.rows)) <= ub_size
    assert sum(map(sum, model.rows)) == rows
    assert torch.equal(torch.cat(seen), batch["x"])


def test_frozen_layers_are_shared_out_too() -> None:
    """Layers that don't learn are copied to the devices with the others, and couple no rows."""
    net, batch = _net(), _batch(10)
    net[0].requires_grad_(False)
    expected = torch.autograd.grad(_cross_entropy(net, **batch), net[2].weight)[0]
    call = anybatch.apply(["x", "label"], 2, device_ids=[0, 1])(_cross_entropy)
    call(HostParallel(net, [0, 1]), **batch)
    torch.testing.assert_close(net[2].weight.grad, expected, rtol=1e-10, atol=1e-10)
    assert net[0].weight.grad is None


def test_outputs_of_all_devices_are_joined_in_row_order() -> None:
    """Outputs come back as one tensor with a row per row of the mini-batch."""
    net, batch = _net(), _batch(11)

    @anybatch.apply(["x", "label"], 2, device_ids=[0, 1])
    def step(model: nn.Module, x: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        output = model(x)
        return F.cross_entropy(output, label), output

    expected = net(batch["x"])
    _, output = step(HostParallel(net, [0, 1]), **batch)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        _, output = step(HostParallel(net, [0, 1]), **batch)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rows", [8, 10])
def test_losses_computed_on_the_devices_are_exact_or_refused(rows: int) -> None:
    """A mean over the devices' own means is exact where it adds up, else refused (Rule 1)."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()

        def forward(self, x: Tensor, label: Tensor) -> Tensor:
            return F.cross_entropy(self.net(x), label)

    module, batch = WithLoss().double(), _batch(rows)
    model = HostParallel(module, [0, 1])
    expected = torch.autograd.grad(model(**batch).mean(), list(module.parameters()))
    call = anybatch.apply(["x", "label"], 2, device_ids=[0, 1])(
        lambda model, x, label: model(x=x, label=label).mean()
    )
    try:
        call(model, **batch)
    except InexactError:
        assert all(parameter.grad is None for parameter in module.parameters())
        return
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-10)


def test_buffers_and_random_state_are_as_found_after_a_failure() -> None:
    """What the replica on the first device writes into the model's buffers is taken back (Rule 3)."""
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout()).double()
    model, batch = HostParallel(net, [0, 1]), _batch(12)
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    random_state = torch.get_rng_state()
    calls = 0

    def step(model: nn.Module, x: Tensor, label: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        loss = model(x).square().mean()
        if calls == 2:
            raise KeyError("in the second piece")
        return loss

    with pytest.raises(KeyError, match="second piece"):
        anybatch.apply(["x", "label"], 2, device_ids=[0, 1], on_inexact="ignore")(step)(model, **batch)
    assert torch.equal(torch.get_rng_state(), random_state)
    for name, buffer in net.named_buffers():
        assert torch.equal(buffer, before[name]), name
    assert all(parameter.grad is None for parameter in net.parameters())


@pytest.mark.parametrize(("rows", "ub_size", "devices"), [(24, 4, 3), (16, 3, 2), (8, 2, 2), (30, 5, 3)])
def test_batch_norm_on_several_devices(rows: int, ub_size: int, devices: int) -> None:
    """A look at fewer rows, of which a device may get a single one, fails for BatchNorm and not for the call.

    What is trained is what the same pieces give in plain PyTorch, each of which weighs the same here.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    model, batch = HostParallel(net, list(range(devices))), _batch(rows)
    batch["label"].clamp_(min=0)
    pieces = -(-rows // (ub_size * devices))
    for x, label in zip(*(value.tensor_split(pieces) for value in batch.values()), strict=True):
        (_cross_entropy(model, x, label) * len(x) / rows).backward()
    expected = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    call = anybatch.apply(["x", "label"], ub_size, device_ids=list(range(devices)))(_cross_entropy)
    with pytest.warns(InexactWarning, match=r"BatchNorm .* module.1"):
        call(model, **batch)
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-10)


def test_frozen_batch_norm_on_several_devices_is_exact() -> None:
    """Layers of all replicas normalise with the running statistics, and leave them alone."""
    net, batch = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double(), _batch(17)
    expected = torch.autograd.grad(_cross_entropy(net.eval(), **batch), list(net.parameters()))
    net.train()
    call = anybatch.apply(["x", "label"], 5, device_ids=[0, 1], batch_norm="frozen")(_cross_entropy)
    call(HostParallel(net, [0, 1]), **batch)
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-10)
    assert int(net[1].num_batches_tracked) == 0
    assert net[1].training


def test_deferred_statistics_on_several_devices_are_said_to_be_out_of_reach() -> None:
    """Replicas track statistics of their own, which can't be pooled: said, with the layer's name (Rule 8)."""
    net, batch = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double(), _batch(16)
    call = anybatch.apply(["x", "label"], 4, device_ids=[0, 1], batch_norm="deferred")(_cross_entropy)
    with pytest.warns(InexactWarning, match=r"replicas is out of reach .* module.1"):
        call(HostParallel(net, [0, 1]), **batch)


def test_verify_sees_the_cut_of_all_devices() -> None:
    """`verify` compares the pieces that the devices share with the whole, and finds them equal."""
    call = anybatch.apply(["x", "label"], 2, device_ids=[0, 1])(_cross_entropy)
    report = anybatch.verify(call, HostParallel(_net(), [0, 1]), **_batch(10))
    report.raise_if_inexact()
    assert report.sizes == (4, 3, 3)


@pytest.mark.parametrize(
    "device_ids", [[], (), [0, 0], [-1], [0, 3], ["cuda:0"], [True], [0.0], 0, 2, "01", {0, 1}], ids=str
)
def test_bad_device_ids_are_refused_at_decoration(device_ids: Any) -> None:
    """What is no list of distinct accelerators of this machine is a `ValueError` that quotes it."""
    with pytest.raises(ValueError, match=r"`apply`: `device_ids` .* Got .* Leave it out"):
        anybatch.apply(["x"], device_ids=device_ids)


def test_device_that_does_not_exist_is_refused_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without accelerators every index is refused, and the error says that there is none."""
    monkeypatch.setattr("anybatch.memory.device.accelerators", lambda: ())
    with pytest.raises(ValueError, match=r"Got \[0, 1\].*no accelerator"):
        anybatch.apply(["x"], device_ids=[0, 1])


@pytest.mark.parametrize(
    ("model", "fact"),
    [
        (_net(), "none that the function names"),
        (nn.Sequential(_net()), "none that the function names"),
        (HostParallel(_net(), [0]), r"one on \[0\]"),
        (HostParallel(_net(), [0, 1, 2]), r"one on \[0, 1, 2\]"),
    ],
    ids=["plain", "nested", "one device", "three devices"],
)
def test_model_that_is_not_on_these_devices_is_refused(model: nn.Module, fact: str) -> None:
    """A model that would put more than `ub_size` rows on a device is refused before it runs."""
    call = anybatch.apply(["x", "label"], 2, device_ids=[0, 1])(_sum)
    with pytest.raises(ValueError, match=fact):
        call(model, **_batch(10))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_parallel_part_of_a_model_is_found() -> None:
    """The `nn.DataParallel` may be a part of the model, or named by the function's closure."""
    inner = HostParallel(_net(), [1, 0])
    model = nn.Sequential(inner, nn.Linear(4, 4).double())
    batch = _batch(9)
    expected = torch.autograd.grad(F.cross_entropy(model(batch["x"]), batch["label"]), model[1].weight)[0]
    call = anybatch.apply(["x", "label"], 2, device_ids=[0, 1])(
        lambda x, label: F.cross_entropy(model(x), label)
    )
    call(**batch)
    torch.testing.assert_close(model[1].weight.grad, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(("rows", "ub_size"), [(10, 4), (9, 1), (12, 3)])
def test_cuda_devices_give_the_whole_gradient(
    rows: int, ub_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real `nn.DataParallel` on two devices gives the gradient of the whole mini-batch on one."""
    monkeypatch.undo()
    net, batch = _net().cuda(0), _batch(rows)
    on_device = {name: value.cuda(0) for name, value in batch.items()}
    expected_loss = _cross_entropy(net, **on_device)
    expected = torch.autograd.grad(expected_loss, list(net.parameters()))
    model = nn.DataParallel(net, device_ids=[0, 1])
    loss = anybatch.apply(["x", "label"], ub_size, device_ids=[0, 1])(_cross_entropy)(model, **batch)
    torch.testing.assert_close(loss.cpu(), expected_loss.detach().cpu(), rtol=1e-10, atol=1e-10)
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-10)
