"""A Wasserstein critic with gradient penalty: the loss holds a gradient, and backward goes through it.

Shows double backward. The penalty is a mean over rows like the rest of the loss, so it adds up. Where
between real and fake each row is looked at is drawn for the whole mini-batch and passed in.

    python examples/gradient_penalty.py
"""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import anybatch
from anybatch import Verification


def slopes(critic: nn.Module, point: Tensor) -> Tensor:
    """How steep the critic is at each point."""
    point = point.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(critic(point).sum(), point, create_graph=True)
    return gradient.norm(dim=1)


@anybatch.apply(["real", "fake", "where"], ub_size=64)
def critic_step(critic: nn.Module, real: Tensor, fake: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    distance = critic(real).mean() - critic(fake).mean()
    steepness = slopes(critic, where * real + (1 - where) * fake)
    return 10 * (steepness - 1).square().mean() - distance, steepness


def main(argv: Sequence[str] | None = None) -> tuple[list[float], Verification]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    real, fake = torch.randn(250, 2) * 0.1 + 1.0, torch.randn(250, 2) * 0.1 - 1.0

    losses: list[float] = []
    print("step     loss  mean slope")
    for step in range(options.steps):
        optimizer.zero_grad()
        loss, steepness = critic_step(critic, real=real, fake=fake, where=torch.rand(250, 1))
        optimizer.step()
        losses.append(loss.item())
        if step % 40 == 0 or step == options.steps - 1:
            print(f"{step:4}  {loss:7.3f}  {steepness.mean():10.3f}")

    where = torch.rand(250, 1)
    report = anybatch.verify(critic_step, critic, real=real, fake=fake, where=where, double=True)
    print(report)
    return losses, report


if __name__ == "__main__":
    main()
