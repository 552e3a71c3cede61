"""Sparse gradients of embeddings, and complex parameters: whole, and of the kind that plain torch gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch.errors import InexactError

from .whole import assert_whole, clear, gradient_error, gradients, whole

CUTS = [(10, 4), (9, 1), (12, 3), (10, 9)]
EMBEDDINGS: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: nn.Embedding(20, 3, sparse=True),
    "bag": lambda: nn.EmbeddingBag(20, 3, sparse=True, mode="sum"),
    "mean of a bag": lambda: nn.EmbeddingBag(20, 3, sparse=True, mode="mean"),
}
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "counted": lambda z, label: F.cross_entropy(z, label),
    "sum": lambda z, label: F.cross_entropy(z, label, reduction="sum"),
    "two denominators": lambda z, label: F.cross_entropy(z, label) + z.square().mean(),
}


def _tokens(rows: int) -> dict[str, Tensor]:
    label = torch.randint(4, (rows,))
    label[1::3] = -100
    return {"token": torch.randint(20, (rows, 5)), "label": label}


def _dense(values: list[Tensor | None]) -> list[Tensor | None]:
    return [value.to_dense() if value is not None and value.is_sparse else value for value in values]


@pytest.mark.parametrize("kind", EMBEDDINGS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_sparse_gradients_are_whole_and_stay_sparse(kind: str, loss: str, rows: int, ub_size: int) -> None:
    """The gradient of a sparse embedding is sparse and coalesced, and that of the whole mini-batch."""
    embedding, head = EMBEDDINGS[kind](), nn.Linear(3, 4)
    parameters = [*embedding.parameters(), *head.parameters()]

    def step(token: Tensor, label: Tensor) -> Tensor:
        found = embedding(token)
        return LOSSES[loss](head(found if found.ndim == 2 else found.mean(1)), label)

    batch = _tokens(rows)
    _, expected = whole(step, batch, parameters)
    anybatch.apply(["token", "label"], ub_size)(step)(**batch)
    sparse = parameters[0].grad
    assert sparse is not None
    assert sparse.is_sparse
    assert sparse.is_coalesced()
    assert sparse._nnz() == len(batch["token"].unique())
    assert gradient_error(_dense(expected), _dense(gradients(parameters))) <= 1e-10


def test_sparse_gradients_add_up_over_calls() -> None:
    """A second call adds to the sparse gradient of the first, as backward does in plain torch."""
    embedding = nn.Embedding(20, 3, sparse=True)
    call = anybatch.apply(["token"], 4)(lambda token: embedding(token).square().mean())
    batches = [_tokens(10)["token"], _tokens(7)["token"]]
    for token in batches:
        embedding(token).square().mean().backward()
    expected = gradients(embedding.parameters())
    clear(embedding.parameters())
    for token in batches:
        call(token=token)
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.is_sparse
    assert gradient_error(_dense(expected), _dense(gradients(embedding.parameters()))) <= 1e-10


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_gradient_scaled_by_frequencies_is_refused(kind: type[nn.Module], rows: int, ub_size: int) -> None:
    """How often an entry comes is another number in a piece: refused, also where no piece shows it."""
    embedding = kind(1000, 3, scale_grad_by_freq=True)
    token = torch.randperm(1000)[: rows * 5].view(rows, 5)
    token[-1, 0] = token[0, 0]
    call = anybatch.apply(["token"], ub_size)(lambda token: embedding(token).square().mean())
    with pytest.raises(InexactError, match="scale_grad_by_freq"):
        call(token=token)
    assert embedding.weight.grad is None


class _ComplexNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5, dtype=torch.complex128)
        self.second = nn.Parameter(torch.randn(5, 4, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) @ self.second


COMPLEX: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "magnitude": lambda z, label: F.cross_entropy(z.abs(), label),
    "square": lambda z, label: (z * z.conj()).real.sum(1).mean(),
    "both parts": lambda z, label: F.cross_entropy(z.real, label) + z.imag.square().mean(),
    "as real": lambda z, label: torch.view_as_real(z).square().sum(),
    "spectrum": lambda z, label: torch.fft.fft(z).abs().mean(),
    "angle": lambda z, label: z.angle().cos().mean(),
}


@pytest.mark.parametrize("loss", COMPLEX)
@pytest.mark.parametrize("is_complex", [True, False], ids=["complex rows", "real rows"])
@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_complex_parameters(loss: str, is_complex: bool, rows: int, ub_size: int) -> None:
    """Complex parameters get the gradient of the whole mini-batch, for complex and for real rows."""
    net = _ComplexNet()
    x = torch.randn(rows, 3, dtype=torch.complex128 if is_complex else torch.float64)
    batch = {"x": x, "label": _tokens(rows)["label"]}
    assert_whole(lambda x, label: COMPLEX[loss](net(x.to(torch.complex128)), label), batch, net, ub_size)
