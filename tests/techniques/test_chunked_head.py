"""The last layer and cross entropy in chunks."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from tests.techniques.training import assert_close, saved_bytes, two_steps
from torch import Tensor, nn
from torch.nn import functional

import anybatch
from anybatch.errors import TechniqueError
from anybatch.techniques import ChunkedHead, Setting

CLASSES = 40


def network(bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, CLASSES, bias=bias)).double()


def tokens(rows: int = 11) -> tuple[Tensor, Tensor]:
    """Rows of 3 tokens, some of which are ignored; of row 4 all."""
    torch.manual_seed(1)
    x = torch.randn(rows, 3, 5, dtype=torch.float64)
    y = torch.randint(CLASSES, (rows, 3))
    y[0, 1] = y[2, 2] = -100
    if rows > 4:
        y[4] = -100
    return x, y


def flat(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(model(x).view(-1, CLASSES), y.view(-1), **options)


def shifted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """As causal language models do."""
    logits = model(x).float().double()[..., :-1, :].contiguous()
    return nn.CrossEntropyLoss()(logits.reshape(-1, CLASSES), y[..., 1:].reshape(-1))


def summed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return flat(model, x, y, reduction="sum")


def weighted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return flat(model, x, y, weight=torch.linspace(0.1, 2, CLASSES, dtype=torch.float64))


def per_token(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return flat(model, x, y, reduction="none").square().mean()


LOSSES = [flat, shifted, summed, weighted, per_token]


@pytest.mark.parametrize("rows", [None, 1, 4])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_plain_pytorch(loss: Any, rows: int | None, bias: bool) -> None:
    """In chunks of any size, two steps of AdamW are those on full logits, ignored tokens included."""
    x, y = tokens()
    if loss is shifted:
        x = x.float().double()
    plain, model = network(bias), network(bias)
    expected = two_steps(plain, x, y, loss=loss)
    got = two_steps(model, x, y, ChunkedHead(rows=rows).applied(Setting.of(model)), loss=loss)
    tolerance = 1e-6 if loss is shifted else 1e-12  # logits that pass through float32 stay as they are here
    assert_close(expected[0], got[0], tolerance)
    if loss is not shifted:
        assert_close(expected[1], got[1])


@pytest.mark.parametrize("ub_size", [1, 3, 4, 11])
@pytest.mark.parametrize("loss", [flat, summed, weighted, per_token])
def test_pieces_of_a_mini_batch_add_up_exactly(loss: Any, ub_size: int) -> None:
    """Uneven pieces, one of them with ignored tokens only, give the gradient of the whole mini-batch."""
    x, y = tokens()
    plain, model = network(), network()
    expected = two_steps(plain, x, y, loss=loss)
    got = two_steps(model, x, y, ChunkedHead(rows=4).applied(Setting.of(model)), ub_size, loss)
    for a, b in zip(expected, got, strict=True):
        assert_close(a, b)


def test_all_ignored_is_as_in_plain_pytorch() -> None:
    """The mean over nothing is not a number; the sum is 0."""
    x, y = tokens()
    model = network()
    with ChunkedHead().applied(Setting.of(model)):
        assert flat(model, x, torch.full_like(y, -100)).isnan()
        assert summed(model, x, torch.full_like(y, -100)) == 0


def test_logits_are_not_kept() -> None:
    """What is saved for backward is the hidden layer and not the logits: counted in bytes."""
    x, y = tokens()
    model = network()
    tokens_in_all = y.numel()
    _, plain_bytes = saved_bytes(model, lambda: flat(model, x, y))
    with ChunkedHead().applied(Setting.of(model)):
        _, late_bytes = saved_bytes(model, lambda: flat(model, x, y))
    assert plain_bytes >= tokens_in_all * (CLASSES + 6) * 8
    # Tanh's result, which is what the head gets, and a few numbers for each token.
    assert tokens_in_all * 6 * 8 <= late_bytes <= tokens_in_all * (6 + 4) * 8


@pytest.fixture(name="seen")
def _seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each call of the chunked function got."""
    calls: list[int] = []
    plain = functional.linear_cross_entropy

    def count(hidden: Tensor, *args: Any, **options: Any) -> Tensor:
        calls.append(len(hidden))
        return plain(hidden, *args, **options)

    monkeypatch.setattr(functional, "linear_cross_entropy", count)
    return calls


def test_a_slice_of_tokens_goes_in_chunks(seen: list[int]) -> None:
    """Logits that are reshaped, sliced and cast before cross entropy are never computed as a whole."""
    x, y = tokens()
    model = network()
    with ChunkedHead().applied(Setting.of(model)), warnings.catch_warnings():
        warnings.simplefilter("error")
        shifted(model, x, y)
        functional.cross_entropy(model(x)[0], y[0])
        functional.cross_entropy(model(x)[:, 1], y[:, 1])
        functional.cross_entropy(input=model(x)[2, ..., :], target=y[2])
    assert seen == [22, 3, 11, 3]


def others(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    logits = model(x)
    picked = torch.tensor([3, 0])
    return {
        "smoothed": flat(model, x, y, label_smoothing=0.1),
        "classes": logits[..., :7].square().mean(),
        "one class": logits[0, 1, 2],
        "by numbers": logits[picked].mean(),
        "half": logits.transpose(1, 2).square().mean(),
        "spatial": functional.cross_entropy(logits.transpose(1, 2), y),
        "sum of two": (logits + logits).sum(),
        "other way": (2.0 - logits).square().sum(),
        "joined": torch.cat([logits, logits]).square().sum(),
        "likely": functional.nll_loss(logits.log_softmax(-1).view(-1, CLASSES), y.view(-1)),
        "probabilities": functional.cross_entropy(logits[0], torch.full((3, CLASSES), 1 / CLASSES).double()),
    }


@pytest.mark.parametrize("name", sorted(others(network(), *tokens())))
def test_any_other_use_gets_all_logits_and_says_so(name: str) -> None:
    """What is no cross entropy of class numbers is computed as ever, with one warning that names it."""
    x, y = tokens()
    plain, model = network(), network()
    expected = torch.autograd.grad(others(plain, x, y)[name], list(plain.parameters()))
    with (
        ChunkedHead().applied(Setting.of(model)),
        pytest.warns(UserWarning, match="asked for all logits") as told,
    ):
        got = torch.autograd.grad(others(model, x, y)[name], list(model.parameters()))
    assert len(told) == 1
    assert_close(list(expected), list(got))


def test_evaluation_gets_its_logits() -> None:
    """Without gradients logits are what they are to anybody, without a warning."""
    x, y = tokens()
    model = network()
    expected = model(x).argmax(-1)
    with ChunkedHead().applied(Setting.of(model)), torch.no_grad():
        logits = model(x)
        assert logits.shape == (11, 3, CLASSES)
        assert torch.equal(logits.argmax(-1), expected)
        assert flat(model, x, y).item() == pytest.approx(flat(network(), x, y).item(), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_not_worse_than_plain_pytorch(dtype: torch.dtype) -> None:
    """Gradients in 16 bits lie no farther from those in float64 than twice those of the full logits."""
    x, y = tokens()
    true = network()
    expected = torch.cat(
        [each.flatten() for each in torch.autograd.grad(flat(true, x, y), list(true.parameters()))]
    )
    errors = []
    for technique in (None, ChunkedHead(rows=4)):
        model = network().to(dtype)
        entered = technique.applied(Setting.of(model)) if technique else warnings.catch_warnings()
        with entered:
            loss = flat(model, x.to(dtype), y)
        assert loss.dtype == dtype
        got = torch.autograd.grad(loss, list(model.parameters()))
        errors.append(float((torch.cat([each.flatten() for each in got]).double() - expected).norm()))
    assert errors[1] <= 2 * errors[0]


def test_under_autocast_the_loss_is_as_exact_as_without_chunks() -> None:
    """Under autocast the head computes in its dtype, and gradients are within twice its error."""
    x, y = tokens()
    true = network()
    expected = torch.cat(
        [each.flatten() for each in torch.autograd.grad(flat(true, x, y), list(true.parameters()))]
    )
    errors = []
    for technique in (None, ChunkedHead(rows=4)):
        model = network().float()
        entered = technique.applied(Setting.of(model)) if technique else warnings.catch_warnings()
        with entered, torch.autocast("cpu", torch.bfloat16):
            loss = flat(model, x.float(), y)
        got = torch.autograd.grad(loss, list(model.parameters()))
        errors.append(float((torch.cat([each.flatten() for each in got]).double() - expected).norm()))
    assert errors[1] <= 2 * errors[0]


def test_a_tied_head_gets_both_gradients() -> None:
    """Weights that are also an embedding get the sum of both gradients."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding = nn.Embedding(CLASSES, 6)
            self.head = nn.Linear(6, CLASSES, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embedding(x).tanh())

    ids, y = torch.randint(CLASSES, (11, 3)), tokens()[1]
    plain, model = Tied().double(), Tied().double()
    expected = two_steps(plain, ids, y, loss=flat)
    got = two_steps(model, ids, y, ChunkedHead("head").applied(Setting.of(model)), 4, flat)
    for a, b in zip(expected, got, strict=True):
        assert_close(a, b)


def test_the_output_embeddings_are_the_head_of_a_language_model() -> None:
    """A model that names its output embeddings needs no name, wherever they stand."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.body = nn.Linear(6, CLASSES), nn.Linear(5, 6)

        def get_output_embeddings(self) -> nn.Module:
            return self.head

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    model = Named().double()
    with ChunkedHead().applied(Setting.of(model)):
        assert "forward" in vars(model.head)
        assert "forward" not in vars(model.body)
    assert "forward" not in vars(model.head)


def test_an_automatic_size() -> None:
    """Sizes of pieces are found with a chunked head as well."""
    x, y = tokens()
    plain, model = network(), network()
    expected = torch.autograd.grad(flat(plain, x, y), list(plain.parameters()))
    with ChunkedHead().applied(Setting.of(model)):
        anybatch.apply(["x", "y"], ub_size="auto", device="cpu")(flat)(model, x=x, y=y)
    assert_close(list(expected), [each.grad for each in model.parameters() if each.grad is not None])


@pytest.mark.parametrize(
    ("model", "head", "reason"),
    [
        (nn.Tanh(), "auto", "Got nothing, which the model does not have"),
        (network(), "lm_head", "Got lm_head, which the model does not have"),
        (network(), "1", "Got 1, a Tanh"),
    ],
)
def test_a_head_that_is_none_is_refused(model: nn.Module, head: str, reason: str) -> None:
    """Only a linear layer that is there can be one."""
    with pytest.raises(TechniqueError, match=reason):
        ChunkedHead(head).check(Setting.of(model))


def test_a_head_is_taken_once() -> None:
    """A second one, or a forward that somebody else has exchanged, is refused."""
    model = network()
    with (
        ChunkedHead().applied(Setting.of(model)),
        pytest.raises(TechniqueError, match="a forward of its own"),
    ):
        ChunkedHead().check(Setting.of(model))


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without the function is said, with its version."""
    monkeypatch.delattr(functional, "linear_cross_entropy")
    with pytest.raises(TechniqueError, match=f"Got torch {re.escape(torch.__version__)}"):
        ChunkedHead().check(Setting.of(network()))
