"""The networks of the paper at small images, with random weights."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification

CLASSES = 10
CHANNELS = 3


def train_fn(net: nn.Module, x: Tensor, label: Tensor) -> Tensor:
    """The user's function: a mean over rows, or over the pixels of all rows."""
    return F.cross_entropy(net(x), label)


class ResNet(nn.Module):
    """ResNet-50 or ResNet-101, by the number of blocks of each stage; BatchNorm."""

    def __init__(self, depths: list[int]) -> None:
        super().__init__()
        self.net = ResNetForImageClassification(ResNetConfig(depths=depths, num_labels=CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).logits


def vgg16() -> nn.Module:
    """Thirteen convolutions and three linear layers; no BatchNorm, as in the original."""
    layers: list[nn.Module] = []
    channels = CHANNELS
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(512, 512), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(512, 512), nn.ReLU(inplace=True), nn.Linear(512, CLASSES))


class UNet(nn.Module):
    """Four levels, convolutions with BatchNorm, and a label for each pixel."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.down = nn.ModuleList(map(_double, [CHANNELS, *widths[:-1]], widths))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(high, low, 2, stride=2)
            for low, high in zip(widths[-2::-1], widths[:0:-1], strict=True)
        )
        self.joined = nn.ModuleList(_double(2 * low, low) for low in widths[-2::-1])
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            kept.append(x)
        for up, block, skipped in zip(self.up, self.joined, kept[-2::-1], strict=True):
            x = block(torch.cat([up(x), skipped], 1))
        return self.head(x)


def _double(channels: int, width: int) -> nn.Module:
    layers: list[nn.Module] = []
    for source in (channels, width):
        layers += [nn.Conv2d(source, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers)


@dataclass(frozen=True)
class Published:
    """A network of the paper.

    Attributes:
        make: Builds it.
        rows: What the budget is to hold: rows of one piece.
        side: Width and height of an image.
        has_masks: Is there a label for each pixel?
        compared_multiple: The mini-batch whose gradient is compared with that of the whole, in `rows`.
    """

    make: Callable[[], nn.Module]
    rows: int
    side: int = 32
    has_masks: bool = False
    compared_multiple: int = 16

    def batch(self, rows: int) -> tuple[Tensor, Tensor]:
        """Random images and labels."""
        image = (self.side, self.side)
        label_shape = (rows, *image) if self.has_masks else (rows,)
        return torch.randn(rows, CHANNELS, *image), torch.randint(CLASSES, label_shape)


NETS = {
    "ResNet-50": Published(lambda: ResNet([3, 4, 6, 3]), 16),
    "ResNet-101": Published(lambda: ResNet([3, 4, 23, 3]), 8),
    "VGG-16": Published(vgg16, 16, compared_multiple=8),
    "U-Net": Published(UNet, 4, side=128, has_masks=True, compared_multiple=16),
}
