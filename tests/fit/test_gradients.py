"""Gradients accumulate beside what was there, and are added to it at the end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch

from .whole import UB_SIZE, assert_same_gradients, batch, clear, gradients, net

Loss = Callable[..., Tensor]


def in_pieces(function: Loss, *names: str) -> Loss:
    return anybatch.apply(names or ("x", "y"), ub_size=UB_SIZE)(function)


@pytest.mark.parametrize("ignores", [False, True])
def test_gradients_add_up_over_calls(ignores: bool) -> None:
    """Calls without `zero_grad` between them accumulate, also where a call rescales its own gradients."""
    model, rows = net(), batch(ignores=ignores)
    leaves = list(model.parameters())
    other = {"x": rows["x"].flip(0) * 2, "y": rows["y"]}

    def function(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    for one in (rows, other, rows):
        function(**one).backward()
    expected = gradients(leaves)
    clear(leaves)
    call = in_pieces(function)
    for one in (rows, other, rows):
        call(**one)
    assert_same_gradients(expected, gradients(leaves))


def test_gradients_are_added_in_place() -> None:
    """A gradient that was there stays the same tensor, as in plain PyTorch."""
    model, rows = net(), batch()
    call = in_pieces(lambda x, y: F.cross_entropy(model(x), y))
    call(**rows)
    before = [leaf.grad for leaf in model.parameters()]
    call(**rows)
    assert all(leaf.grad is grad for leaf, grad in zip(model.parameters(), before, strict=True))


def test_unused_parameters_keep_what_they_had() -> None:
    """A parameter that the loss does not depend on keeps None, or its earlier gradient, untouched."""
    model, head, rows = net(), nn.Linear(2, 2).double(), batch()
    earlier = torch.ones(2, dtype=torch.float64)
    head.bias.grad = earlier

    def function(x: Tensor, y: Tensor) -> Tensor:
        outputs = model(x)
        head(outputs)
        return F.cross_entropy(outputs, y)

    in_pieces(function)(**rows)
    assert head.weight.grad is None
    assert head.bias.grad is earlier
    assert earlier.tolist() == [1, 1]


def test_frozen_parameters_get_nothing() -> None:
    """A parameter that does not require grad gets none, the others the whole gradient."""
    model, rows = net(), batch()
    model[0].requires_grad_(False)
    function: Loss = lambda x, y: F.cross_entropy(model(x), y)  # noqa: E731
    function(**rows).backward()
    expected = gradients(model.parameters())
    clear(model.parameters())
    in_pieces(function)(**rows)
    assert [one is None for one in expected] == [True, True, False, False]
    assert_same_gradients(expected, gradients(model.parameters()))


def test_tied_weights() -> None:
    """A weight that two modules share gets the sum of both uses, once."""
    rows = batch()
    encoder, decoder = nn.Linear(3, 2, bias=False).double(), nn.Linear(3, 2).double()
    decoder.weight = encoder.weight

    def function(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(encoder(x) + decoder(x.tanh()), y)

    leaves = [encoder.weight, decoder.bias]
    function(**rows).backward()
    expected = gradients(leaves)
    clear(leaves)
    in_pieces(function)(**rows)
    assert_same_gradients(expected, gradients(leaves))


@pytest.mark.parametrize("earlier", ["none", "sparse", "dense"])
def test_sparse_gradients(earlier: str) -> None:
    """Sparse gradients stay sparse, and add to sparse and to dense ones."""
    torch.manual_seed(0)
    embedding, rows = nn.Embedding(20, 3, sparse=True).double(), batch()
    model = net()
    leaves = [embedding.weight, *model.parameters()]
    tokens = torch.tensor([1, 3, 3, 7, 1, 19, 0, 7, 7, 2])

    def function(tokens: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(embedding(tokens)), y)

    def prepare() -> None:
        clear(leaves)
        if earlier == "sparse":
            embedding(torch.tensor([3, 4])).sum().backward()
        if earlier == "dense":
            embedding.weight.grad = torch.ones_like(embedding.weight)

    prepare()
    function(tokens, rows["y"]).backward()
    expected, layout = gradients(leaves), embedding.weight.grad.layout
    prepare()
    in_pieces(function, "tokens", "y")(tokens=tokens, y=rows["y"])
    assert embedding.weight.grad.layout == layout
    assert_same_gradients(expected, gradients(leaves))


def test_leaves_outside_of_modules() -> None:
    """Tensors that require grad and belong to no module get the whole gradient, whichever piece uses them."""
    rows = batch()
    rows["x"][:4, 0], rows["x"][4:, 0] = rows["x"][:4, 0].abs(), -rows["x"][4:, 0].abs()
    leaves = [torch.randn(3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    class Holder:
        first, second = leaves

    def function(x: Tensor, y: Tensor) -> Tensor:
        is_positive = x[:, :1] > 0
        outputs = x.new_zeros(len(x), 2)
        if is_positive.any():
            outputs = outputs + (x * is_positive) @ Holder.first
        if not is_positive.all():
            outputs = outputs + (x * ~is_positive) @ Holder.second
        return F.cross_entropy(outputs, y)

    function(**rows).backward()
    expected = gradients(leaves)
    clear(leaves)
    in_pieces(function)(**rows)
    assert_same_gradients(expected, gradients(leaves))


def test_gradient_penalty() -> None:
    """A function that differentiates by a leaf of its own gives the whole gradient."""
    model, rows = net(), batch()

    def function(x: Tensor) -> Tensor:
        x = x.detach().clone().requires_grad_()
        outputs = model(x).sum(1)
        (gradient,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        return ((gradient.norm(dim=1) - 1) ** 2).mean() + outputs.mean()

    function(rows["x"]).backward()
    expected = gradients(model.parameters())
    clear(model.parameters())
    in_pieces(function, "x")(x=rows["x"])
    assert_same_gradients(expected, gradients(model.parameters()))


def _gan_steps(generator: nn.Module, critic: nn.Module, cut: Callable[[Loss], Loss]) -> list[Tensor]:
    """Three steps of a generator and a critic that share a graph, each with its own optimizer."""
    optimizers = [torch.optim.Adam(part.parameters(), lr=0.05) for part in (critic, generator)]

    def critic_loss(x: Tensor, z: Tensor) -> Tensor:
        return F.softplus(-critic(x)).mean() + F.softplus(critic(generator(z).detach())).mean()

    def generator_loss(x: Tensor, z: Tensor) -> Tensor:
        return F.softplus(-critic(generator(z))).mean()

    torch.manual_seed(5)
    for _ in range(3):
        x, z = (torch.randn(10, 3, dtype=torch.float64) for _ in range(2))
        for loss, optimizer in zip((cut(critic_loss), cut(generator_loss)), optimizers, strict=True):
            optimizer.zero_grad()
            value = loss(x=x, z=z)
            if value.requires_grad:
                value.backward()
            optimizer.step()
    return [parameter.detach() for part in (generator, critic) for parameter in part.parameters()]


def test_two_losses_with_shared_parameters() -> None:
    """Two losses with an optimizer each, trained in turns as in a GAN, move as they do whole."""

    def parts() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(3)
        return nn.Linear(3, 3).double(), nn.Linear(3, 1).double()

    expected = _gan_steps(*parts(), cut=lambda loss: loss)
    got = _gan_steps(*parts(), cut=lambda loss: in_pieces(loss, "x", "z"))
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def test_two_calls_into_one_trunk() -> None:
    """Two losses on one trunk, in two calls without `zero_grad` between, leave the sum of both gradients."""
    rows, trunk = batch(), nn.Linear(3, 4).double()
    heads = [nn.Linear(4, 2).double() for _ in range(2)]
    leaves = [*trunk.parameters(), *(p for head in heads for p in head.parameters())]
    first: Loss = lambda x, y: F.cross_entropy(heads[0](trunk(x)), y)  # noqa: E731
    second: Loss = lambda x, y: heads[1](trunk(x)).square().sum(1).mean()  # noqa: E731
    (first(**rows) + second(**rows)).backward()
    expected = gradients(leaves)
    clear(leaves)
    in_pieces(first)(**rows)
    in_pieces(second)(**rows)
    assert_same_gradients(expected, gradients(leaves))


def test_evaluation_leaves_gradients_alone() -> None:
    """With gradients disabled, `.grad` stays the same tensor with the same values."""
    model, rows = net(), batch()
    earlier = [torch.full_like(leaf, 2.0) for leaf in model.parameters()]
    for leaf, gradient in zip(model.parameters(), earlier, strict=True):
        leaf.grad = gradient
    with torch.no_grad():
        in_pieces(lambda x, y: F.cross_entropy(model(x), y))(**rows)
    assert all(leaf.grad is gradient for leaf, gradient in zip(model.parameters(), earlier, strict=True))
    assert all(bool((gradient == 2.0).all()) for gradient in earlier)


def test_gradients_that_share_memory_in_a_later_piece() -> None:
    """Leaves under views whose first gradient comes in a later piece accumulate each their own (Rule 1)."""
    a = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    b = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    c = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    x = torch.randn(12, 6, dtype=torch.float64)
    late = torch.arange(12) >= 4

    def loss(x: Tensor, late: Tensor) -> Tensor:
        row = c * 1.0
        if bool(late.all()):
            row = row + a.view(-1) + b.view(6)
        return ((x + row) ** 2).sum()

    def whole() -> Tensor:
        return loss(x[:4], late[:4]) + loss(x[4:], late[4:])

    expected = torch.autograd.grad(whole(), [a, b, c])
    anybatch.apply(["x", "late"], ub_size=4, weight="sum")(loss)(x, late)
    for leaf, gradient in zip((a, b, c), expected, strict=True):
        torch.testing.assert_close(leaf.grad, gradient)
