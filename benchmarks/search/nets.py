"""Six families of networks, small enough for two processors, and mini-batches of random rows for them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification

CLASSES = 10


def train_fn(net: nn.Module, x: Tensor, label: Tensor) -> Tensor:
    """The user's function: a mean over rows."""
    return F.cross_entropy(net(x), label)


class Encoder(nn.Module):
    """Four layers of a transformer encoder with dropout."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(1))


class Recurrent(nn.Module):
    """Two layers of a GRU or an LSTM."""

    def __init__(self, kind: type[nn.GRU] | type[nn.LSTM]) -> None:
        super().__init__()
        self.layers = kind(32, 128, num_layers=2, batch_first=True)
        self.head = nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0][:, -1])


class ResNet(nn.Module):
    """The ResNet of transformers, with eight basic blocks and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        config = ResNetConfig(
            embedding_size=16,
            hidden_sizes=[16, 32, 64, 128],
            depths=[2, 2, 2, 2],
            layer_type="basic",
            num_labels=CLASSES,
        )
        self.net = ResNetForImageClassification(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).logits


def _convolutional() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for width in (16, 32, 64):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU()]
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def _mlp() -> nn.Module:
    layers: list[nn.Module] = []
    width = 64
    for _ in range(4):
        layers += [nn.Linear(width, 512), nn.ReLU(), nn.Dropout(0.1)]
        width = 512
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


@dataclass(frozen=True)
class Family:
    """How to make a network, and the shape of one row for it."""

    make: Callable[[], nn.Module]
    row_shape: tuple[int, ...]


FAMILIES = {
    "conv net": Family(_convolutional, (3, 32, 32)),
    "MLP": Family(_mlp, (64,)),
    "encoder": Family(Encoder, (64, 128)),
    "GRU": Family(lambda: Recurrent(nn.GRU), (48, 32)),
    "LSTM": Family(lambda: Recurrent(nn.LSTM), (48, 32)),
    "ResNet": Family(ResNet, (3, 64, 64)),
}


class Problem:
    """A network with its optimizer, and one mini-batch; the loop over its pieces, by hand."""

    def __init__(self, family: str, rows: int) -> None:
        torch.manual_seed(0)
        self.net = FAMILIES[family].make()
        self.x = torch.randn(rows, *FAMILIES[family].row_shape)
        self.label = torch.randint(CLASSES, (rows,))
        self.rows = rows
        self.optimizer = self.new_optimizer()

    def new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-4)

    def accumulate(self, size: int) -> None:
        """Adds up the mini-batch's gradient over pieces of `size` rows."""
        for x, label in zip(self.x.split(size), self.label.split(size), strict=True):
            (train_fn(self.net, x, label) * (len(x) / self.rows)).backward()

    def step(self, size: int) -> None:
        """One step of the optimizer, with the gradient of the whole mini-batch."""
        self.optimizer.zero_grad()
        self.accumulate(size)
        self.optimizer.step()
