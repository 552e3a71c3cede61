"""Calls that train where it is easy to go wrong: exact, refused or warned, and never silently different."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import anybatch
from anybatch.errors import InexactError, InexactWarning, LossError, WeightError

ROWS, UB_SIZE, TOLERANCE = 24, 4, 1e-10
IGNORED = -100

Batch = dict[str, Any]


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """Make every tensor of a test float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def net() -> nn.Module:
    """A classifier of 5 features into 4 classes."""
    return nn.Linear(5, 4)


def batch_of_labels() -> Batch:
    return {"x": torch.randn(ROWS, 5), "y": torch.randint(4, (ROWS,))}


def batch_of_targets() -> Batch:
    return {"x": torch.randn(ROWS, 5), "t": torch.randn(ROWS, 4)}


def whole(function: Callable[..., Tensor], batch: Batch, module: nn.Module) -> tuple[Tensor, list[Tensor]]:
    """The loss and the gradients of the whole mini-batch in plain PyTorch."""
    module.zero_grad()
    loss = function(**batch)
    loss.backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    return loss.detach(), gradients


def assert_trains(
    call: Callable[..., Tensor], batch: Batch, module: nn.Module, expected: tuple[Tensor, list[Tensor]]
) -> None:
    """A call gives the expected loss and gradients (Rule 1)."""
    loss, gradients = expected
    module.zero_grad()
    torch.testing.assert_close(call(**batch), loss, rtol=TOLERANCE, atol=TOLERANCE)
    largest = max(float(gradient.abs().max()) for gradient in gradients)
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        assert float((parameter.grad - gradient).abs().max()) <= TOLERANCE * largest


def assert_exact(
    function: Callable[..., Tensor], batch: Batch, module: nn.Module, ub_size: int = UB_SIZE
) -> None:
    """A function in micro-batches trains as it does on the whole mini-batch."""
    expected = whole(function, batch, module)
    assert_trains(anybatch.apply(list(batch), ub_size)(function), batch, module, expected)


@pytest.mark.parametrize("ub_size", [2, 4, 6])
@pytest.mark.parametrize("signs", ["negative in later pieces", "mixed"])
def test_weights_with_signs(net: nn.Module, signs: str, ub_size: int) -> None:
    """A weighted mean is exact where the weights of a piece add up to a negative number."""
    w = torch.cat([torch.rand(12), -0.3 * torch.rand(12)]) if signs != "mixed" else torch.randn(ROWS) + 0.6

    def function(x: Tensor, t: Tensor, w: Tensor) -> Tensor:
        return ((net(x) - t).square().mean(1) * w).sum() / w.sum()

    assert_exact(function, {**batch_of_targets(), "w": w}, net, ub_size)


@pytest.mark.parametrize("order", [("mean", "sum"), ("sum", "mean")])
def test_another_criterion_in_the_next_call(net: nn.Module, order: tuple[str, str]) -> None:
    """A mean and a sum that one decorated function is called with are each taken for what they are."""
    batch = batch_of_labels()

    def function(criterion: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return criterion(net(x), y)

    call = anybatch.apply(["x", "y"], UB_SIZE)(function)
    for reduction in order:
        arguments = {**batch, "criterion": nn.CrossEntropyLoss(reduction=reduction)}
        assert_trains(call, arguments, net, whole(function, arguments, net))


@pytest.mark.parametrize("divisors", [(None, 100), (100, None)])
def test_another_divisor_in_the_next_call(net: nn.Module, divisors: tuple[int | None, int | None]) -> None:
    """A sum over the rows and the same sum over a number are told apart from call to call."""
    batch = batch_of_targets()

    def function(x: Tensor, t: Tensor, divisor: int | None) -> Tensor:
        return F.mse_loss(net(x), t, reduction="sum") / (divisor or len(x))

    call = anybatch.apply(["x", "t"], UB_SIZE)(function)
    for divisor in divisors:
        arguments = {**batch, "divisor": divisor}
        assert_trains(call, arguments, net, whole(function, arguments, net))


def test_method_of_two_objects(net: nn.Module) -> None:
    """Two objects that share a decorated method keep their own reductions."""
    batch = batch_of_labels()

    class Trainer:
        def __init__(self, reduction: str) -> None:
            self.reduction = reduction

        @anybatch.apply(["x", "y"], UB_SIZE)
        def step(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(net(x), y, reduction=self.reduction)

    for reduction in ("mean", "sum"):
        expected = whole(lambda x, y, r=reduction: F.cross_entropy(net(x), y, reduction=r), batch, net)
        assert_trains(Trainer(reduction).step, batch, net, expected)


def test_flag_argument_that_couples_rows(net: nn.Module) -> None:
    """A flag that normalises over the batch is refused also after a call without it was exact."""
    batch = batch_of_targets()

    def function(x: Tensor, t: Tensor, normalises: bool = False) -> Tensor:
        return (net(x) * ((t - t.mean()) / t.std() if normalises else t / 2)).mean()

    call = anybatch.apply(["x", "t"], UB_SIZE)(function)
    assert_trains(call, batch, net, whole(function, batch, net))
    with pytest.raises(InexactError, match="function"):
        call(**batch, normalises=True)


def test_flag_in_the_closure_that_couples_rows(net: nn.Module) -> None:
    """Class weights of the batch that a variable switches on are refused also after an exact call."""
    batch, state = batch_of_labels(), {"balances": False}

    def function(x: Tensor, y: Tensor) -> Tensor:
        counts = torch.bincount(y, minlength=4).double().clamp(min=1)
        return F.cross_entropy(net(x), y, weight=1 / counts if state["balances"] else torch.ones(4))

    call = anybatch.apply(["x", "y"], UB_SIZE)(function)
    assert_trains(call, batch, net, whole(function, batch, net))
    state["balances"] = True
    with pytest.raises(InexactError, match="function"):
        call(**batch)


@pytest.mark.parametrize("ub_size", [4, 6, 8, 12])
def test_normalised_advantages_of_an_actor(ub_size: int) -> None:
    """Advantages normalised over the batch are refused though only the deeper of two networks shows them."""

    def network(outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, outputs))

    actor, critic = network(4), network(1)
    x, action, advantage, value = (
        torch.randn(24, 5),
        torch.randint(4, (24,)),
        torch.randn(24),
        torch.randn(24),
    )
    with torch.no_grad():
        old = actor(x).log_softmax(-1).gather(1, action[:, None])[:, 0]

    def ppo(x: Tensor, action: Tensor, old: Tensor, advantage: Tensor, value: Tensor) -> Tensor:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy = torch.distributions.Categorical(logits=actor(x))
        ratio = (policy.log_prob(action) - old).exp()
        surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        return 0.5 * F.mse_loss(critic(x)[:, 0], value) - surrogate - 0.01 * policy.entropy().mean()

    batch = {"x": x, "action": action, "old": old, "advantage": advantage, "value": value}
    with pytest.raises(InexactError, match="ppo: the gradient depends on which rows are together"):
        anybatch.apply(list(batch), ub_size)(ppo)(**batch)


@pytest.mark.parametrize(
    "divisor",
    [
        lambda t: t.var() * t.numel(),
        lambda t: t.std() * t.numel(),
        lambda t: t.abs().max() * t.numel(),
        lambda t: (len(t) * (len(t) - 1)) ** 0.5,
    ],
    ids=["variance", "deviation", "largest", "root"],
)
def test_divisors_that_add_up_nearly(net: nn.Module, divisor: Callable[[Tensor], Any]) -> None:
    """Divisors that add up over large pieces to within a thousandth are refused as over small ones."""
    x, t = torch.randn(4096, 5), 2 * torch.randn(4096, 4) + 1
    for ub_size in (8, 1024, 2048):
        call = anybatch.apply(["x", "t"], ub_size)(lambda x, t: (net(x) - t).square().sum() / divisor(t))
        with pytest.raises(InexactError, match="add"):
            call(x, t)


GENERATOR, NUMPY_GENERATOR = torch.Generator(), np.random.default_rng(0)


@pytest.mark.parametrize(
    "draw",
    [
        lambda rows: torch.randn(rows, 5),
        lambda rows: torch.as_tensor(np.random.randn(rows, 5)),
        lambda rows: torch.as_tensor(NUMPY_GENERATOR.standard_normal((rows, 5))),
        lambda rows: torch.tensor([[random.gauss(0, 1)] * 5 for _ in range(rows)]),
        lambda rows: torch.randn(rows, 5, generator=GENERATOR),
    ],
    ids=["torch", "numpy", "numpy generator", "python", "torch generator"],
)
def test_random_numbers_of_every_source(net: nn.Module, draw: Callable[[int], Tensor]) -> None:
    """Noise is no coupling, whoever draws it: the call warns, and is exact for the numbers that it drew."""
    batch, drawn = batch_of_labels(), []

    def noisy(x: Tensor, y: Tensor) -> Tensor:
        drawn.append(draw(len(x)))
        return F.cross_entropy(net(x + 0.1 * drawn[-1]), y)

    with pytest.warns(InexactWarning, match="random numbers"):
        loss = anybatch.apply(["x", "y"], UB_SIZE)(noisy)(**batch)
    gradient = net.weight.grad
    noise = torch.cat(drawn)[-ROWS:]
    expected = whole(lambda x, y: F.cross_entropy(net(x + 0.1 * noise), y), batch, net)
    torch.testing.assert_close((loss, gradient), (expected[0], expected[1][0]), rtol=0, atol=TOLERANCE)


class Heads(nn.Module):
    """Has a second head in training mode alone, and drops with random numbers that no module draws."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.extra = nn.Linear(5, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.drawn: list[Tensor] = []

    def forward(self, x: Tensor, y: Tensor, keep: Tensor | None = None) -> Tensor:
        hidden = self.body(x)
        if self.training:
            self.drawn.append(torch.rand(hidden.shape) > 0.1)
            hidden = hidden * (self.drawn[-1] if keep is None else keep)
        loss = F.cross_entropy(self.head(hidden), y)
        return loss + 0.4 * F.cross_entropy(self.extra(hidden), y) if self.training else loss


def test_heads_of_training_mode_beside_random_numbers() -> None:
    """A head that only training mode has, in a model that draws, is trained exactly, with a warning."""
    model, batch = Heads(), batch_of_labels()
    with pytest.warns(InexactWarning, match="draws random numbers"):
        loss = anybatch.apply(["x", "y"], UB_SIZE)(model)(**batch)
    gradient, keep = model.extra.weight.grad, torch.cat(model.drawn)[-ROWS:]
    expected, gradients = whole(model, {**batch, "keep": keep}, model)
    torch.testing.assert_close((loss, gradient), (expected, gradients[4]), rtol=0, atol=TOLERANCE)


def test_batch_scaled_in_place(net: nn.Module) -> None:
    """A function that divides its images in place does so once per row, as on the whole mini-batch."""
    images, y = 255 * torch.rand(ROWS, 5), torch.randint(4, (ROWS,))

    def function(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net(x.div_(255)), y)

    expected = whole(function, {"x": images.clone(), "y": y}, net)
    x = images.clone()
    assert_trains(anybatch.apply(["x", "y"], UB_SIZE)(function), {"x": x, "y": y}, net, expected)
    assert torch.equal(x, images / 255)


def test_labels_shifted_in_place(net: nn.Module) -> None:
    """A function that counts labels from 1 in place shifts them once."""
    x, y = torch.randn(ROWS, 5), torch.randint(1, 5, (ROWS,))

    def function(x: Tensor, y: Tensor) -> Tensor:
        y -= 1
        return F.cross_entropy(net(x), y)

    expected = whole(function, {"x": x, "y": y.clone()}, net)
    assert_trains(anybatch.apply(["x", "y"], UB_SIZE)(function), {"x": x, "y": y.clone()}, net, expected)


def test_entries_popped_from_targets(net: nn.Module) -> None:
    """A function that pops an entry of each row's dict finds it there, and the dicts are empty afterwards."""
    x, y = torch.randn(ROWS, 5), torch.randint(4, (ROWS,))

    def function(x: Tensor, target: list[dict[str, Tensor]]) -> Tensor:
        return F.cross_entropy(net(x), torch.stack([row.pop("label") for row in target]))

    expected = whole(function, {"x": x, "target": [{"label": label} for label in y]}, net)
    batch = {"x": x, "target": [{"label": label} for label in y]}
    assert_trains(anybatch.apply(["x", "target"], UB_SIZE)(function), batch, net, expected)
    assert batch["target"] == [{}] * ROWS


def _penalty(net: nn.Module, x: Tensor, z: Tensor) -> Tensor:
    middle = (0.3 * x + 0.7 * z).requires_grad_()
    (gradient,) = torch.autograd.grad(net(middle).sum(), middle, create_graph=True)
    return net(z).mean() - net(x).mean() + ((gradient.norm(dim=1) - 1) ** 2).mean()


def _attack(net: nn.Module, x: Tensor, z: Tensor) -> Tensor:
    start = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(net(start).square().sum(), start)
    return (net(x + 0.1 * gradient.sign()) - net(z)).square().mean()


def _jacobian(net: nn.Module, x: Tensor, z: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.jacrev(net))(x).square().sum((1, 2)).mean() + net(z).square().mean()


@pytest.mark.parametrize("loss", [_penalty, _attack, _jacobian])
def test_gradients_inside_the_function(loss: Callable[..., Tensor]) -> None:
    """A function that takes gradients of its own is exact, with more than 4,096 hidden values, too."""
    net = nn.Sequential(nn.Linear(3, 2000), nn.Tanh(), nn.Linear(2000, 1))
    batch = {"x": torch.randn(10, 3), "z": torch.randn(10, 3)}
    assert_exact(lambda x, z: loss(net, x, z), batch, net)


def test_hook_that_runs_once(net: nn.Module) -> None:
    """A hook that removes itself runs in the first call alone, and not in its probe."""
    seen: list[Tensor] = []

    def hook(gradient: Tensor) -> None:
        seen.append(gradient.clone())
        handle.remove()

    batch = batch_of_labels()
    expected = whole(lambda x, y: F.cross_entropy(net(x), y), batch, net)[1][0]
    handle = net.weight.register_hook(hook)
    call = anybatch.apply(["x", "y"], UB_SIZE)(lambda x, y: F.cross_entropy(net(x), y))
    for _ in range(3):
        call(**batch)
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], expected, rtol=0, atol=TOLERANCE)


class Step:
    """A callable object that owns its model."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def __call__(self, x: Tensor) -> Tensor:
        return _fail(self.net)


def _fail(net: nn.Module) -> Tensor:
    net.eval()
    raise KeyboardInterrupt


def _keyword_default(net: nn.Module) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor, *, model: nn.Module = net) -> Tensor:
        return _fail(model)

    return function


def _other_function(net: nn.Module) -> Callable[[Tensor], Tensor]:
    def inner() -> Tensor:
        return _fail(net)

    return lambda x: inner()


@pytest.mark.parametrize("owner", [Step, _keyword_default, _other_function])
def test_model_that_is_reached_indirectly(net: nn.Module, owner: Callable[..., Any]) -> None:
    """A failed call gives a model its mode back, by whatever way the function comes to it (Rule 3)."""
    with pytest.raises(KeyboardInterrupt):
        anybatch.apply(["x"], UB_SIZE)(owner(net))(torch.randn(8, 5))
    assert net.training


def test_own_error_about_memory_that_overlaps(net: nn.Module) -> None:
    """An error of torch in the user's own code passes unchanged where no gradient is concerned."""

    def function(x: Tensor) -> Tensor:
        torch.ones(()).expand(3).add_(torch.ones(3))
        return net(x).mean()

    with pytest.raises(RuntimeError, match="single memory location") as caught:
        anybatch.apply(["x"], UB_SIZE)(function)(torch.randn(8, 5))
    assert not isinstance(caught.value, LossError)


@pytest.mark.parametrize("owner", ["rows", "parameters"])
def test_under_a_dispatch_mode(net: nn.Module, owner: str) -> None:
    """A call under a dispatch mode of the user's is exact, with Python numbers in its loss."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        outputs = net(x)
        penalty = outputs.square().mean() if owner == "rows" else net.weight.square().sum()
        return F.cross_entropy(outputs, y) + 0.1 * penalty

    with FlopCounterMode(display=False) as counter:
        assert_exact(function, batch_of_labels(), net)
    assert counter.get_total_flops() > 0


@pytest.mark.parametrize(
    ("weight", "error", "words"),
    [
        (lambda y: y.double().mean(), WeightError, "add up over rows"),
        (lambda y: y, WeightError, "one number"),
        (lambda y: 1 / 0, ZeroDivisionError, "division"),
    ],
    ids=["mean", "vector", "raises"],
)
def test_weights_before_anything_runs(
    net: nn.Module, weight: Callable[[Tensor], Any], error: type[Exception], words: str
) -> None:
    """A weight that does not add up, is no number or raises is met before the function runs."""
    runs: list[int] = []

    def function(x: Tensor, y: Tensor) -> Tensor:
        runs.append(len(x))
        return F.cross_entropy(net(x), y)

    with pytest.raises(error, match=words):
        anybatch.apply(["x", "y"], UB_SIZE, weight=weight)(function)(torch.randn(8, 5), torch.arange(8) % 4)
    assert runs == []


def test_model_output_for_a_loss(net: nn.Module) -> None:
    """A function that returns a model's output whole is told to return its loss first."""
    from transformers.modeling_outputs import SequenceClassifierOutput

    def function(x: Tensor, y: Tensor) -> Any:
        return SequenceClassifierOutput(loss=F.cross_entropy(net(x), y), logits=net(x))

    with pytest.raises(LossError, match=r"of a model output return `\.loss` first"):
        anybatch.apply(["x", "y"], UB_SIZE)(function)(**batch_of_labels())


class Classifier(nn.Module):
    """A module that returns its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, 4)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.cross_entropy(self.net(x), y)


@pytest.mark.parametrize("names", [["x", "y"], ["x", "y", "mask"]], ids=["all given", "one left out"])
def test_module_by_position(names: list[str]) -> None:
    """A module takes its batches by position, and one that defaults to None may be left out."""
    model, batch = Classifier(), batch_of_labels()
    expected = whole(model, batch, model)
    call = anybatch.apply(names, UB_SIZE)(model)
    assert_trains(lambda x, y: call(x, y), batch, model, expected)


def test_size_from_numpy(net: nn.Module) -> None:
    """A size that numpy computed is a number of rows: no piece has more."""
    sizes: list[int] = []

    def function(x: Tensor, y: Tensor) -> Tensor:
        sizes.append(len(x))
        return F.cross_entropy(net(x), y)

    anybatch.apply(["x", "y"], np.int64(4), on_inexact="ignore")(function)(**batch_of_labels())
    assert sizes == [4] * 6


def test_crop_to_the_longest_row(net: nn.Module) -> None:
    """A mean over sequences cropped to the longest of a piece is refused where pieces differ in it."""
    length = torch.tensor([6] * 8 + [3] * 16)

    def crop(x: Tensor, length: Tensor) -> Tensor:
        return net(x[:, : int(length.max())]).square().mean()

    with pytest.raises(InexactError, match="crop"):
        anybatch.apply(["x", "length"], UB_SIZE)(crop)(torch.randn(ROWS, 6, 5), length)


@pytest.mark.parametrize("ub_size", [1, 4, 8])
def test_clamp_of_a_piece_that_counts_nothing(net: nn.Module, ub_size: int) -> None:
    """A divisor that may be a clamp is named in a warning, and the weight that it asks for is exact."""
    mask = torch.ones(ROWS, 4)
    mask[8:16] = mask[3] = mask[0, 1] = 0

    def function(x: Tensor, t: Tensor, mask: Tensor) -> Tensor:
        return F.mse_loss(net(x) * mask, t * mask, reduction="sum") / max(1.0, mask.sum())

    batch = {**batch_of_targets(), "mask": mask}
    with pytest.warns(InexactWarning, match="divides its loss by exactly 1"):
        anybatch.apply(list(batch), ub_size)(function)(**batch)
    expected = whole(function, batch, net)
    said = anybatch.apply(list(batch), ub_size, weight=lambda mask: mask.sum())(function)
    assert_trains(said, batch, net, expected)


def test_buffers_that_change_are_named() -> None:
    """A normalisation of one's own that changes its buffers once per piece is named in a warning."""

    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(5, 4)
            self.register_buffer("mean", torch.zeros(5))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            if self.training:
                self.mean.lerp_(x.mean(0), 0.1)
            return F.cross_entropy(self.net(x - self.mean), y)

    with pytest.warns(InexactWarning, match=r"buffers change once per micro-batch \(Running.mean\)"):
        anybatch.apply(["x", "y"], UB_SIZE)(Running())(**batch_of_labels())


def test_parameters_that_change_are_named(net: nn.Module) -> None:
    """A teacher that follows the model inside the function is named in a warning."""
    teacher = nn.Linear(5, 4).requires_grad_(False)

    def function(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            teacher.weight.lerp_(net.weight, 0.1)
        return F.cross_entropy(net(x), y)

    with pytest.warns(InexactWarning, match=r"changes parameters \(Linear.weight\)"):
        anybatch.apply(["x", "y"], UB_SIZE)(function)(**batch_of_labels())


@pytest.mark.parametrize("ub_size", [1, 2, 4])
def test_learned_coefficient_over_two_denominators(net: nn.Module, ub_size: int) -> None:
    """A learned coefficient of terms with different denominators is refused, with the way out."""
    scale = nn.Parameter(torch.tensor(0.3))
    y = torch.tensor([0, IGNORED, 3, 3, 1, IGNORED, IGNORED, IGNORED, 2])

    def function(x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        return scale.exp() * (F.mse_loss(net(x), t) + F.cross_entropy(net(x), y)) - scale

    with pytest.raises(InexactError, match=r"learned coefficient .* return the terms as a dict") as refused:
        anybatch.apply(["x", "t", "y"], ub_size)(function)(torch.randn(9, 5), torch.randn(9, 4), y)
    assert "weight=" not in str(refused.value), "one `weight` for all terms is no way out"


@pytest.mark.parametrize("ub_size", [1, 2, 4])
def test_learned_coefficient_over_ignored_pieces(ub_size: int) -> None:
    """A learned coefficient gets the gradient of the whole where a piece holds ignored labels alone."""
    model = nn.ModuleDict({"net": nn.Linear(5, 4), "scale": nn.Linear(1, 1, bias=False)})
    y = torch.tensor([0, IGNORED, 3, 3, 1, IGNORED, IGNORED, IGNORED, 2])

    def function(x: Tensor, y: Tensor) -> Tensor:
        scale = model["scale"].weight.squeeze()
        return (-scale).exp() * F.cross_entropy(model["net"](x), y) + scale

    assert_exact(function, {"x": torch.randn(9, 5), "y": y}, model, ub_size)


def test_call_that_trains_inside_of_another_is_refused() -> None:
    """It would run backward once per piece of the outer call: an error, and nothing has changed."""
    model, other = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()

    @anybatch.apply(["x"], ub_size=2)
    def inner(x: Tensor) -> Tensor:
        return other(x).square().mean()

    @anybatch.apply(["x"], ub_size=4)
    def outer(x: Tensor) -> Tensor:
        inner(x)
        return model(x).square().mean()

    x = torch.randn(10, 3, dtype=torch.float64)
    with pytest.raises(LossError, match=r"inner inside of .*outer"):
        outer(x)
    assert all(leaf.grad is None for module in (model, other) for leaf in module.parameters())
    inner(x)
    expected = torch.autograd.grad(other(x).square().mean(), other.weight)[0]
    torch.testing.assert_close(other.weight.grad, expected)


def test_evaluation_inside_of_a_call_stays_exact() -> None:
    """With gradients disabled nothing is trained: a teacher may be asked in pieces of its own."""
    model, teacher = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()

    @anybatch.apply(["x"], ub_size=2)
    def ask(x: Tensor) -> tuple[Tensor, Tensor]:
        output = teacher(x)
        return output.square().mean(), output

    @anybatch.apply(["x"], ub_size=4)
    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            _, target = ask(x)
        return (model(x) - target).square().mean()

    x = torch.randn(10, 3, dtype=torch.float64)
    step(x)
    expected = torch.autograd.grad((model(x) - teacher(x).detach()).square().mean(), model.weight)[0]
    torch.testing.assert_close(model.weight.grad, expected)
