"""Ways to get the gradient of a mini-batch from micro-batches, and how far each is from the whole."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch

__all__ = ["Step", "Way", "gradient_error", "gradients_of", "installed_ways", "loss_of"]

Step = Callable[..., Tensor]
Way = Callable[[nn.Module, Tensor, Tensor, int], object]


def loss_of(model: nn.Module, x: Tensor, label: Tensor) -> Tensor:
    """The mean loss over the labels that are not ignored (-100)."""
    return F.cross_entropy(model(x), label)


def with_anybatch(model: nn.Module, x: Tensor, label: Tensor, ub_size: int) -> Tensor:
    """The way of this library: the same function, decorated."""
    step: Step = anybatch.apply(["x", "label"], ub_size=ub_size)(loss_of)
    return step(model, x=x, label=label)


def with_loop(model: nn.Module, x: Tensor, label: Tensor, ub_size: int) -> None:
    """The usual loop: each loss divided by the number of micro-batches."""
    pieces = list(zip(torch.split(x, ub_size), torch.split(label, ub_size), strict=True))
    for x_piece, label_piece in pieces:
        torch.autograd.backward(loss_of(model, x_piece, label_piece) / len(pieces))


def with_mbp(model: nn.Module, x: Tensor, label: Tensor, ub_size: int) -> object:
    """The way of mbp-pytorch, with the same call as anybatch."""
    # Loaded here: it configures the root logger at import.
    import mbp

    return mbp.apply(["x", "label"], ub_size=ub_size)(loss_of)(model, x=x, label=label)


def installed_ways() -> tuple[dict[str, Way], dict[str, str]]:
    """The ways that can be tried here, by name, and why others can't."""
    ways: dict[str, Way] = {"loop: loss / pieces": with_loop}
    missing: dict[str, str] = {}
    if find_spec("mbp") is None:
        missing["mbp-pytorch"] = "not installed"
    else:
        ways[f"mbp-pytorch {importlib.metadata.version('mbp-pytorch')}"] = with_mbp
    ways["anybatch"] = with_anybatch
    return ways, missing


def gradients_of(model: nn.Module, backward: Callable[[], object]) -> list[Tensor]:
    """The gradients that `backward` leaves in the parameters, which end without any."""
    model.zero_grad()
    backward()
    gradients = [
        torch.zeros_like(each) if each.grad is None else each.grad.clone() for each in model.parameters()
    ]
    model.zero_grad()
    return gradients


def gradient_error(gradients: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """The largest difference of any entry, relative to the largest entry of all the expected gradients."""
    pairs = list(zip(gradients, expected, strict=True))
    difference = torch.stack([(got - want).abs().max() for got, want in pairs]).max()
    return (difference / torch.stack([want.abs().max() for _, want in pairs]).max()).item()
