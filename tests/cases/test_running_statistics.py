"""Running statistics of BatchNorm, updated once per call or frozen (pytorch/pytorch#46516)."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import anybatch
from anybatch.errors import InexactWarning

from .whole import assert_whole

CUTS = [(16, 4), (14, 10), (10, 9), (15, 12), (8, 3)]


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if buffer.numel()}


def trained(
    model: nn.Module, batch: dict[str, Tensor], ub_size: int, mode: str, steps: int = 1
) -> dict[str, Tensor]:
    """The statistics after some calls, of which the first warns that gradients are those of pieces."""
    step = anybatch.apply(["x", "y"], ub_size=ub_size, batch_norm=mode)(lambda x, y: F.mse_loss(model(x), y))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(**batch)
    assert any("each micro-batch" in str(one.message) for one in caught)
    for _ in range(steps - 1):
        step(**batch)
    return statistics(model)


def assert_updated_once(model: nn.Module, x: Tensor, ub_size: int, steps: int = 1) -> None:
    """The statistics become what they become on the whole mini-batch."""
    whole = copy.deepcopy(model)
    for _ in range(steps):
        y = whole(x)
    got = trained(model, {"x": x, "y": torch.zeros_like(y)}, ub_size, "deferred", steps)
    torch.testing.assert_close(got, statistics(whole), rtol=1e-10, atol=1e-10)


def test_running_statistics_of_a_known_program() -> None:
    """One update with the pooled mean and variance, where pieces by themselves make four."""
    x, y = torch.randn(16, 4) * 3 + 5, torch.randn(16, 1)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    trained(model, {"x": x, "y": y}, 4, "deferred")
    assert model[0].num_batches_tracked.item() == 1
    expected = torch.tensor([0.325657, 0.515858, 0.485029, 0.503002])
    torch.testing.assert_close(model[0].running_mean, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
@pytest.mark.parametrize("momentum", [0.1, 0.7, 1.0, 0.0, None])
def test_statistics_of_any_cut(rows: int, ub_size: int, momentum: float | None) -> None:
    """Three calls leave what three whole mini-batches leave, with any momentum, cumulative averages too."""
    model = nn.Sequential(nn.BatchNorm1d(4, momentum=momentum), nn.Linear(4, 1))
    assert_updated_once(model, torch.randn(rows, 4) * 3 + 5, ub_size, steps=3)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(3), (3,)),
    "1d over time": (lambda: nn.BatchNorm1d(3), (3, 5)),
    "2d": (lambda: nn.BatchNorm2d(3), (3, 2, 2)),
    "3d": (lambda: nn.BatchNorm3d(3), (3, 2, 1, 2)),
    "no affine": (lambda: nn.BatchNorm1d(3, affine=False), (3,)),
    "synchronised": (lambda: nn.SyncBatchNorm(3), (3, 2)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_statistics_of_any_layer(kind: str) -> None:
    """Every layer of torch's, its values counted per channel."""
    make, shape = LAYERS[kind]
    model = nn.Sequential(make(), nn.Flatten(), nn.LazyLinear(2))
    x = torch.randn(10, *shape) + 2
    model(x)
    assert_updated_once(model, x, 4)


def test_single_rows_with_many_values() -> None:
    """A piece of one row has statistics where a row has several values per channel."""
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 1))
    assert_updated_once(model, torch.randn(5, 3, 2, 2), 1)


class Twice(nn.Module):
    """A layer that runs twice, the second time on other values."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4, momentum=momentum), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.norm(x), self.norm(input=3 * x + 1)
        return self.head(first + second)


@pytest.mark.parametrize("momentum", [0.3, None])
def test_layer_used_twice(momentum: float | None) -> None:
    """A layer that runs twice is updated twice, in the same order as on the whole mini-batch."""
    assert_updated_once(Twice(momentum), torch.randn(11, 4), 4, steps=2)


class Recomputed(nn.Module):
    """A layer that backward runs again."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.norm, self.head, self.use_reentrant = nn.BatchNorm1d(4), nn.Linear(4, 1), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.norm, x.requires_grad_(), use_reentrant=self.use_reentrant)
        return self.head(hidden)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_layer_counts_once(use_reentrant: bool) -> None:
    """What a checkpoint computes again for backward is no second update."""
    assert_updated_once(Recomputed(use_reentrant), torch.randn(10, 4), 4)


class Activated(nn.BatchNorm1d):
    """A layer with a forward of its own that writes its statistics as torch does."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class Reversed(nn.BatchNorm1d):
    """A layer whose momentum is the share of the old statistics."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.running_mean.mul_(self.momentum).add_((1 - self.momentum) * input.mean(0))
        kept = self.running_mean.clone(), self.running_var.clone()
        return F.batch_norm(input, *kept, self.weight, self.bias, self.training)


def test_layer_with_its_own_forward() -> None:
    """A subclass that keeps statistics as torch does is deferred; one that does not is refused by name."""
    assert_updated_once(nn.Sequential(Activated(4), nn.Linear(4, 1)), torch.randn(10, 4) + 1, 4)
    other = nn.Sequential(Reversed(4), nn.Linear(4, 1))
    step = anybatch.apply(["x"], ub_size=4, batch_norm="deferred")(lambda x: other(x).square().mean())
    with pytest.raises(anybatch.errors.InexactError, match="Reversed"):
        step(x=torch.randn(10, 4) + 1)
    assert other[0].running_mean.abs().max() == 0
    assert other[0].momentum == 0.1


def test_gradients_are_those_of_micro() -> None:
    """Deferring changes statistics only: gradients and loss are bit-identical to `"micro"`."""
    results = []
    for mode in ("micro", "deferred"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
        batch = {"x": torch.randn(10, 4), "y": torch.randn(10, 1)}
        step = anybatch.apply(["x", "y"], ub_size=4, batch_norm=mode, on_inexact="ignore")
        loss = step(lambda x, y, model=model: F.mse_loss(model(x), y))(**batch)
        results.append([loss, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_evaluation_updates_once_too() -> None:
    """With gradients disabled a layer in training mode learns the statistics of the mini-batch, once."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    whole, x = copy.deepcopy(model), torch.randn(10, 4)
    whole(x)
    step = anybatch.apply(["x"], ub_size=4, batch_norm="deferred")(lambda x: model(x).square().mean())
    with torch.no_grad(), pytest.warns(InexactWarning):
        step(x=x)
    torch.testing.assert_close(statistics(model), statistics(whole), rtol=1e-10, atol=1e-10)


def test_counting_pass_does_not_count() -> None:
    """Pieces that run twice, because their denominators are counted first, give one update."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    whole, x = copy.deepcopy(model), torch.randn(10, 4)
    mask = torch.tensor([1.0, 0, 1, 1, 0, 0, 1, 1, 1, 0])
    whole(x)

    def loss(x: Tensor, mask: Tensor) -> Tensor:
        y = model(x)[:, 0]
        return (y**2 * mask).sum() / mask.sum() + y.mean()

    with pytest.warns(InexactWarning):
        anybatch.apply(["x", "mask"], ub_size=4, batch_norm="deferred")(loss)(x=x, mask=mask)
    torch.testing.assert_close(statistics(model), statistics(whole), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", ["deferred", "frozen"])
@pytest.mark.parametrize("ub_size", [4, 20])
def test_failure_leaves_layers_as_they_were(mode: str, ub_size: int) -> None:
    """An error in the last piece, before or after the layer, leaves statistics, momentum, mode and hooks."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    before, calls = copy.deepcopy(model.state_dict()), []

    def step(x: Tensor) -> Tensor:
        calls.append(len(x))
        loss = model(x).square().mean()
        if len(calls) == fails_at:
            model(x[:, :2])
        return loss

    for fails_at in (1, 5, 6):
        calls.clear()
        call = anybatch.apply(["x"], ub_size=ub_size, batch_norm=mode, on_inexact="ignore")(step)
        if ub_size == 20 and fails_at > 1:
            continue
        fails_at = min(fails_at, 3)
        with pytest.raises(RuntimeError):
            call(x=torch.randn(12, 4))
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        layer = model[0]
        assert layer.training
        assert layer.momentum == 0.1
        assert not layer._forward_hooks
        assert not layer._forward_pre_hooks


@pytest.mark.parametrize(("rows", "ub_size"), [*CUTS, (5, 1), (3, 8)])
def test_frozen_layers_are_exact(rows: int, ub_size: int) -> None:
    """Frozen layers give the gradients of the model in eval mode, learn scale and shift, and stay put."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))
    batch = {"x": torch.randn(rows, 4), "y": torch.randn(rows, 1)}
    for _ in range(3):
        model(torch.randn(9, 4) * 2 + 1)
    before = copy.deepcopy(model.state_dict())

    def step(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x), y)

    model.eval()
    expected = step(**batch)
    expected.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.train().zero_grad()
    loss = anybatch.apply(["x", "y"], ub_size=ub_size, batch_norm="frozen")(step)(**batch)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-10)
    got = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(got, gradients, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert all(module.training for module in model.modules())


def test_frozen_within_a_function_that_sets_modes() -> None:
    """A function that calls `train()` itself leaves that mode, and its layers are frozen all the same."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)).eval()
    x = torch.randn(10, 4) + 3
    expected = model(x).square().mean()

    def step(x: Tensor) -> Tensor:
        model.train()
        return model(x).square().mean()

    loss = anybatch.apply(["x"], ub_size=4, batch_norm="frozen")(step)(x=x)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-10)
    assert model[0].training
    assert model[0].num_batches_tracked.item() == 0


@pytest.mark.parametrize("mode", ["deferred", "frozen"])
def test_layer_in_eval_mode_is_left_alone(mode: str) -> None:
    """Layers that the user froze are exact, silent and untouched."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)).eval()
    before = copy.deepcopy(model.state_dict())
    batch = {"x": torch.randn(10, 4) + 3}
    assert_whole(lambda x: model(x).square().mean(), batch, model, 4, batch_norm=mode)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not model[0].training


@pytest.mark.parametrize(
    ("mode", "words"),
    [("deferred", "of each micro-batch"), ("frozen", "can't be frozen"), ("micro", "over each")],
)
def test_layer_without_running_statistics_is_named(mode: str, words: str) -> None:
    """A layer that has no running statistics takes the piece's in any mode, and the warning names it."""
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 1))
    step = anybatch.apply(["x"], ub_size=4, batch_norm=mode)(lambda x: model(x).square().mean())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(x=torch.randn(10, 4))
    assert any(re.search(rf"{words}.*: 1 \(BatchNorm1d\)\.", str(one.message)) for one in caught)


@pytest.mark.parametrize("mode", ["micro", "deferred"])
def test_layers_are_named_by_their_paths(mode: str) -> None:
    """The warning says where in the model the layers are, six of them, and how many more there are."""
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(8)]
    model = nn.ModuleDict({"body": nn.Sequential(*blocks), "head": nn.Linear(4, 1)})
    step = anybatch.apply(["x"], ub_size=4, batch_norm=mode)(
        lambda x: model["head"](model["body"](x)).square().mean()
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(x=torch.randn(10, 4))
    paths = ", ".join(f"body.{place}.1 (BatchNorm1d)" for place in range(6))
    assert [f": {paths} and 2 more." in str(one.message) for one in caught] == [True]


@pytest.mark.parametrize("mode", ["deferred", "frozen"])
def test_layer_that_is_found_when_it_runs(mode: str) -> None:
    """A layer in a container too large to be looked through is deferred, or frozen, like others."""
    bank = [nn.BatchNorm1d(4) for _ in range(70)]
    head, x, whole = nn.Linear(4, 1), torch.randn(10, 4) + 1, copy.deepcopy(bank[3])
    (whole if mode == "deferred" else whole.eval())(x)
    step = anybatch.apply(["x"], ub_size=4, batch_norm=mode)(lambda x: head(bank[3](x)).square().mean())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(x=x)
    assert ["out of reach" in str(one.message) for one in caught].count(True) == 0
    torch.testing.assert_close(statistics(bank[3]), statistics(whole), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("attribute", ["tracked", "switched off"])
def test_layer_that_tracks_only_partly(attribute: str) -> None:
    """Layers from old checkpoints, or with tracking switched off, do what they do on the whole mini-batch."""
    norm = nn.BatchNorm1d(4)
    if attribute == "tracked":
        norm.num_batches_tracked = None
    else:
        norm.track_running_stats = False
    assert_updated_once(nn.Sequential(norm, nn.Linear(4, 1)), torch.randn(10, 4) + 2, 4)


def test_user_hooks_see_the_layer_as_it_was() -> None:
    """A forward hook of the user's own sees the old statistics and the momentum of the layer."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    seen: list[tuple[float | None, float]] = []

    def look(layer: Any, _inputs: Any, _output: Any) -> None:
        seen.append((layer.momentum, float(layer.running_mean.abs().max())))

    model[0].register_forward_hook(look)
    trained(model, {"x": torch.randn(10, 4) + 1, "y": torch.zeros(10, 1)}, 4, "deferred")
    assert set(seen) == {(0.1, 0.0)}


@pytest.mark.parametrize("mode", ["deferred", "frozen"])
def test_verify_knows_the_mode(mode: str) -> None:
    """`verify` compares frozen layers with frozen ones; deferred ones differ from the whole by name."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    before = copy.deepcopy(model.state_dict())
    step = anybatch.apply(["x"], ub_size=4, batch_norm=mode)(lambda x: model(x).square().mean())
    found = anybatch.verify(step, x=torch.randn(10, 4))
    assert found.is_exact == (mode == "frozen")
    assert ("1 (BatchNorm1d)" in str(found)) == (mode == "deferred")
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not model[1]._forward_hooks


@pytest.mark.parametrize("mode", ["micro", "deferred", "frozen"])
@pytest.mark.parametrize("what", ["model", "function", "part"])
def test_compiled_layers(mode: str, what: str) -> None:
    """Compiled layers are frozen as others, and not deferred, which is said; two sizes are two graphs."""
    graphs: list[Any] = []

    def backend(module: Any, _inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    x = torch.randn(14, 4) + 3
    expected = model.eval()(x).square().mean()
    model.train()
    used = {
        "model": torch.compile(model, backend=backend),
        "part": nn.Sequential(torch.compile(model[0], backend=backend), model[1]),
    }.get(what, model)

    def loss(x: Tensor) -> Tensor:
        return used(x).square().mean()

    function = torch.compile(loss, backend=backend) if what == "function" else loss
    step = anybatch.apply(["x"], ub_size=10, batch_norm=mode)(function)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [step(x=x) for _ in range(3)]
    assert len(graphs) <= 2
    assert any("BatchNorm in compiled code" in str(one.message) for one in caught) == (mode == "deferred")
    assert model[0].training
    if mode == "frozen":
        torch.testing.assert_close(found, [expected.detach()] * 3, rtol=1e-10, atol=1e-10)
        assert model[0].num_batches_tracked.item() == 0
