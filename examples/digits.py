"""Handwritten digits with a convolutional network: mini-batches of 500 images, 32 of them in memory at once.

Shows the plain case: one decorator, your own loop. The last mini-batch of an epoch is short and trains like
any other. GroupNorm stands where BatchNorm would be: it looks at one image at a time, so micro-batches
change nothing.

    python examples/digits.py
"""

import argparse
from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

import anybatch
from anybatch import Verification


def network() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 4, 10)),
    )


@anybatch.apply(["image", "label"], ub_size=32)
def train_step(model: nn.Module, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    output = model(image)
    return F.cross_entropy(output, label), output.argmax(1)


def main(argv: Sequence[str] | None = None) -> tuple[list[float], Verification]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images).float().view(-1, 1, 8, 8) / 16, torch.tensor(labels))
    training, testing = random_split(data, [1437, 360])
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    losses: list[float] = []
    print("epoch  loss of its last mini-batch  test accuracy")
    for epoch in range(options.epochs):
        for image, label in DataLoader(training, batch_size=500, shuffle=True):
            optimizer.zero_grad()
            loss, _ = train_step(model, image, label)
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad():  # the same function evaluates, in the same pieces
            image, label = testing[:]
            _, found = train_step(model, image, label)
        print(f"{epoch:5}  {losses[-1]:27.3f}  {(found == label).float().mean():13.1%}")

    report = anybatch.verify(train_step, model, *training[:200], double=True)
    print(report)
    return losses, report


if __name__ == "__main__":
    main()
