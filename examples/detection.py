"""Detection-like targets: images of different sizes, and a dict with any number of boxes for each.

Shows lists with one element per row, and two losses that divide by different things: one by the number of
boxes in the mini-batch, one by the number of guesses. A dict of losses keeps them apart, and `weight=` says
how many boxes rows have. Pieces without any box are fine.

    python examples/detection.py
"""

import argparse
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch import Verification

GUESSES = 3
Target = dict[str, Any]


class Detector(nn.Module):
    """Guesses a few boxes per image, each with the logit that there is something."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(0)),
        )
        self.head = nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, GUESSES * 5))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        guesses = self.head(self.features(image)).view(GUESSES, 5)
        return guesses[:, :4].sigmoid(), guesses[:, 4]


def scenes(images: int) -> tuple[list[Tensor], list[Target]]:
    """Dark images of different sizes with up to three bright boxes, the first ten without any.

    A box is its left, top, width and height, in parts of the image.
    """
    pictures, targets = [], []
    for index in range(images):
        height, width = (int(size) for size in torch.randint(20, 33, (2,)))
        count = index % (GUESSES + 1) if index >= 10 else 0
        picture, boxes = torch.zeros(1, height, width), torch.rand(count, 4) * 0.4 + 0.1
        for left, top, wide, high in boxes.tolist():
            rows = slice(int(top * height), int((top + high) * height))
            picture[0, rows, int(left * width) : int((left + wide) * width)] = 1.0
        pictures.append(picture)
        targets.append({"boxes": boxes, "name": f"scene {index}"})
    return pictures, targets


def matched(guesses: Tensor, boxes: Tensor) -> list[int]:
    """The guess for each box, such that all lie as near as they can."""
    distances = torch.cdist(guesses.detach(), boxes, p=1)
    choices = permutations(range(GUESSES), len(boxes))
    return list(min(choices, key=lambda choice: sum(distances[g, b].item() for b, g in enumerate(choice))))


def count_boxes(targets: list[Target]) -> int:
    return sum(len(target["boxes"]) for target in targets)


@anybatch.apply(["images", "targets"], ub_size=8, weight={"boxes": count_boxes, "is_there": "rows"})
def train_step(model: Detector, images: list[Tensor], targets: list[Target]) -> dict[str, Tensor]:
    distances, logits, wanted = [], [], []
    for image, target in zip(images, targets, strict=True):
        guesses, is_there = model(image)
        chosen = matched(guesses, target["boxes"])
        distances.append((guesses[chosen] - target["boxes"]).abs().sum())
        logits.append(is_there)
        wanted.append(torch.zeros_like(is_there).index_fill(0, torch.tensor(chosen, dtype=torch.long), 1.0))
    boxes = torch.stack(distances).sum() / max(count_boxes(targets), 1)
    is_there = F.binary_cross_entropy_with_logits(torch.stack(logits), torch.stack(wanted))
    return {"boxes": boxes, "is_there": is_there}


def main(argv: Sequence[str] | None = None) -> tuple[list[float], Verification]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    images, targets = scenes(60)
    model = Detector()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[float] = []
    print("step  distance per box  is there?")
    for step in range(options.steps):
        optimizer.zero_grad()
        found = train_step(model, images=images, targets=targets)
        optimizer.step()
        losses.append(sum(loss.item() for loss in found.values()))
        if step % 10 == 0:
            print(f"{step:4}  {found['boxes']:16.3f}  {found['is_there']:9.3f}")

    report = anybatch.verify(train_step, model, images=images, targets=targets, double=True)
    print(report)
    return losses, report


if __name__ == "__main__":
    main()
