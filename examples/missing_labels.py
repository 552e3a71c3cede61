"""Several tasks on the same inputs, most labels missing: each task's loss is a mean over what is there.

Shows masked means with denominators that differ from task to task and from piece to piece. They are read
from the graph of each loss; a dict of losses keeps them apart, and returns each by its name.

    python examples/missing_labels.py
"""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import anybatch
from anybatch import Verification

PRESENT = {"weight": 0.7, "height": 0.4, "age": 0.15}


class SharedNetwork(nn.Module):
    """One body, one head per task."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 64), nn.Tanh())
        self.heads = nn.ModuleDict({task: nn.Linear(64, 1) for task in PRESENT})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.body(x)
        return {task: head(features).squeeze(1) for task, head in self.heads.items()}


def people(rows: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Inputs, and labels of which a part is missing (nan)."""
    x = torch.randn(rows, 10)
    labels = {task: (x @ torch.randn(10)).tanh() for task in PRESENT}
    for task, ratio in PRESENT.items():
        labels[task][torch.rand(rows) > ratio] = torch.nan
    return x, labels


def masked_mean(output: Tensor, label: Tensor) -> Tensor:
    is_there = ~label.isnan()
    errors = (output - label.nan_to_num()).square() * is_there
    return errors.sum() / is_there.sum().clamp(min=1)


@anybatch.apply(["x", "labels"], ub_size=16)
def train_step(model: SharedNetwork, x: Tensor, labels: dict[str, Tensor]) -> dict[str, Tensor]:
    outputs = model(x)
    return {task: masked_mean(outputs[task], label) for task, label in labels.items()}


def main(argv: Sequence[str] | None = None) -> tuple[list[float], Verification]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    x, labels = people(500)
    model = SharedNetwork()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses: list[float] = []
    there = {task: int((~label.isnan()).sum()) for task, label in labels.items()}
    print("step  " + "  ".join(f"{f'{task} ({count} labels)':>20}" for task, count in there.items()))
    for step in range(options.steps):
        optimizer.zero_grad()
        found = train_step(model, x=x, labels=labels)
        optimizer.step()
        losses.append(sum(loss.item() for loss in found.values()))
        if step % 10 == 0:
            print(f"{step:4}  " + "  ".join(f"{loss:20.3f}" for loss in found.values()))

    report = anybatch.verify(train_step, model, x=x, labels=labels, double=True)
    print(report)
    return losses, report


if __name__ == "__main__":
    main()
