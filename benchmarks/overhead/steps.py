"""One training step in the same micro-batches: by hand, with `anybatch.apply`, with `mbp.apply`."""

import importlib.util
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch

CLASSES = 10

Step = Callable[[], Tensor]


def train_fn(model: nn.Module, x: Tensor, label: Tensor) -> Tensor:
    """The user's function: a mean over rows."""
    return F.cross_entropy(model(x), label)


class Transformer(nn.Module):
    """Four layers, 228 autograd nodes: many small operations, as in a language model."""

    row_shape = (16, 64)

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


class Convolutional(nn.Sequential):
    """Five convolutions with GroupNorm: few large operations."""

    row_shape = (3, 16, 16)

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        channels = 3
        for width in (16, 32, 32, 64, 64):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU()]
            channels = width
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


NETS: dict[str, type[Transformer] | type[Convolutional]] = {
    "transformer": Transformer,
    "convolutional": Convolutional,
}


@dataclass(frozen=True, eq=False)
class SetUp:
    """A net, a mini-batch, and the number of pieces that it is cut into.

    Attributes:
        net_name: One of `NETS`.
        ub_size: Rows of a piece.
        pieces: All have the same size, for mbp cuts no others exactly.
    """

    net_name: str
    net: nn.Module
    x: Tensor
    label: Tensor
    ub_size: int
    pieces: int

    @property
    def rows(self) -> int:
        return self.ub_size * self.pieces

    def facts(self) -> dict[str, str | int]:
        return {"net": self.net_name, "rows": self.rows, "ub_size": self.ub_size, "pieces": self.pieces}

    def by_hand(self) -> Tensor:
        """The exact loop: each piece's mean weighted by its share of the rows."""
        total = torch.zeros(())
        for x, label in zip(self.x.split(self.ub_size), self.label.split(self.ub_size), strict=True):
            loss = train_fn(self.net, x, label) * (len(x) / self.rows)
            loss.backward()
            total += loss.detach()
        return total

    def with_anybatch(self) -> Step:
        """A function that was never called before."""
        decorated = anybatch.apply(["x", "label"], ub_size=self.ub_size)(train_fn)
        return lambda: decorated(self.net, x=self.x, label=self.label)

    def contenders(self) -> dict[str, Step]:
        """The loop, anybatch, and mbp-pytorch where it is installed."""
        steps: dict[str, Step] = {"loop": self.by_hand, "anybatch": self.with_anybatch()}
        mbp = import_quietly("mbp")
        if mbp is not None:
            decorated = mbp.apply(["x", "label"], ub_size=self.ub_size)(train_fn)
            steps["mbp"] = lambda: decorated(self.net, x=self.x, label=self.label)
        return steps


def set_up(net_name: str, piece_s: float, pieces: int) -> SetUp:
    """A set-up whose pieces take about `piece_s` in the loop by hand."""
    return random_set_up(net_name, _rows_in(NETS[net_name](), piece_s), pieces)


def random_set_up(net_name: str, ub_size: int, pieces: int) -> SetUp:
    """A net with a mini-batch of random rows."""
    torch.manual_seed(0)
    net = NETS[net_name]()
    x = torch.randn(ub_size * pieces, *net.row_shape)
    return SetUp(net_name, net, x, torch.randint(CLASSES, (len(x),)), ub_size, pieces)


def _rows_in(net: Transformer | Convolutional, piece_s: float) -> int:
    """Rows with which a forward and a backward take about `piece_s`, by a linear guess made better."""
    rows = 16
    for _ in range(4):
        rows = max(1, round(rows * piece_s / _piece_s(net, rows)))
    return rows


def _piece_s(net: Transformer | Convolutional, rows: int) -> float:
    x, label = torch.randn(rows, *net.row_shape), torch.zeros(rows, dtype=torch.long)
    taken = []
    for _ in range(7):
        start = time.perf_counter()
        train_fn(net, x, label).backward()
        taken.append(time.perf_counter() - start)
    return min(taken)


def import_quietly(name: str) -> ModuleType | None:
    """Imports a module that configures the root logger, and puts the root logger back."""
    if importlib.util.find_spec(name) is None:
        return None
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    module = importlib.import_module(name)
    root.handlers[:] = handlers
    root.setLevel(level)
    return module
