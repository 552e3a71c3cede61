"""The networks below the losses of the table, looked up by the name a loss asks for.

A head is a small module and the column that it reads. A loss that names `z` gets `z`'s module applied to
column `x`; one that names `net` gets all modules of the problem; those in `COEFFICIENTS` are bare parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .columns import CLASSES, FEATURES, VOCABULARY

WIDTH = 6


def _perceptron(outputs: int = CLASSES) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, outputs))


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.recur = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.read = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.read(self.recur(self.embed(ids))[0])


class _Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
        self.read = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.read(self.layer(self.embed(ids)))


class _AttendingByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.read = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        query, key, value = self.project(self.embed(ids)).chunk(3, dim=-1)
        return self.read((query @ key.transpose(1, 2) / WIDTH**0.5).softmax(-1) @ value)


class _TimeMajor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.recur = nn.LSTM(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.recur(self.embed(ids.T))[0].transpose(0, 1)


class _Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.rest = (
            nn.Linear(FEATURES, WIDTH),
            nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, CLASSES)),
        )
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.rest, self.first(x), use_reentrant=self.use_reentrant)


class _Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH).requires_grad_(False)
        self.normed = nn.BatchNorm1d(WIDTH).eval()
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.normed(self.first(x)).tanh())


HEADS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "z": (_perceptron, "x"),
    "z2": (_perceptron, "x"),
    "other": (_perceptron, "x2"),
    "score": (lambda: nn.Sequential(_perceptron(1), nn.Flatten(0)), "x"),
    "tokens": (
        lambda: nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Tanh(), nn.Linear(WIDTH, VOCABULARY)),
        "ids",
    ),
    "bag": (lambda: nn.EmbeddingBag(VOCABULARY, CLASSES, mode="mean"), "ids"),
    "recurrent": (_Recurrent, "ids"),
    "time_major": (_TimeMajor, "ids"),
    "attending": (_Attending, "ids"),
    "attending_by_hand": (_AttendingByHand, "ids"),
    "layer_normed": (lambda: nn.Sequential(_perceptron(WIDTH), nn.LayerNorm(WIDTH)), "x"),
    "image": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 3, 1)
        ),
        "picture",
    ),
    "instance_normed": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.Conv2d(4, 3, 1)),
        "picture",
    ),
    "pooled": (
        lambda: nn.Sequential(nn.Conv2d(2, CLASSES, 2), nn.MaxPool2d(2), nn.Flatten()),
        "picture",
    ),
    "checkpointed": (lambda: _Checkpointed(use_reentrant=False), "x"),
    "checkpointed_reentrant": (lambda: _Checkpointed(use_reentrant=True), "x"),
    "frozen": (_Frozen, "x"),
    "weight_normed": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, CLASSES)), "x"),
}

COEFFICIENTS: dict[str, Callable[[], Tensor]] = {
    "s": lambda: torch.tensor(0.3),
    "s2": lambda: torch.tensor(-0.4),
    "alpha": lambda: torch.linspace(-1.0, 1.5, CLASSES),
    "centers": lambda: torch.linspace(-1.0, 1.0, CLASSES * CLASSES).view(CLASSES, CLASSES),
    "output": lambda: torch.linspace(-1.0, 1.0, 3 * CLASSES).view(3, CLASSES),
}


class Problem(nn.Module):
    """The heads and coefficients that one loss asks for, in float64, the same at every construction."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        torch.manual_seed(7)
        heads = [name for name in HEADS if name in names]
        self.heads = nn.ModuleDict({name: HEADS[name][0]() for name in heads}).double()
        self.coefficients = nn.ParameterDict(
            {n: COEFFICIENTS[n]().double() for n in COEFFICIENTS if n in names}
        )
        self.inputs = {name: HEADS[name][1] for name in heads}
        self.outputs = {*heads, *self.coefficients, *({"net"} & set(names))}

    def forward(self, **columns: Tensor) -> dict[str, object]:
        """Give what a loss may name: the heads' outputs, the coefficients, the columns and `net` itself."""
        given: dict[str, object] = dict(columns)
        given.update({name: head(columns[self.inputs[name]]) for name, head in self.heads.items()})
        given.update(self.coefficients.items())
        if "net" in self.outputs:
            given["net"] = self.heads
        return given
