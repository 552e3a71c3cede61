"""A GAN: two networks, two losses, two optimizers, each trained by a decorated function of its own.

Shows that each call gives gradients to what its loss reaches: the step of the generator runs through the
discriminator, whose gradients are cleared before its own step, as in any loop. Noise is drawn for the whole
mini-batch and passed in, so that every cut sees the same.

    python examples/gan.py
"""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch import Verification


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(inputs, 64), nn.LeakyReLU(0.2)),
        *(nn.Linear(64, 64), nn.LeakyReLU(0.2)),
        nn.Linear(64, outputs),
    )


def ring(rows: int) -> Tensor:
    """Points of two columns, near the circle of radius 1."""
    angles = torch.rand(rows) * 2 * torch.pi
    return torch.stack([angles.cos(), angles.sin()], 1) + 0.02 * torch.randn(rows, 2)


@anybatch.apply(["real", "noise"], ub_size=100)
def discriminator_step(generator: nn.Module, discriminator: nn.Module, real: Tensor, noise: Tensor) -> Tensor:
    on_real = discriminator(real)
    on_fake = discriminator(generator(noise).detach())
    return F.softplus(-on_real).mean() + F.softplus(on_fake).mean()


@anybatch.apply(["noise"], ub_size=100)
def generator_step(generator: nn.Module, discriminator: nn.Module, noise: Tensor) -> Tensor:
    return F.softplus(-discriminator(generator(noise))).mean()


def main(argv: Sequence[str] | None = None) -> tuple[list[float], Verification]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    generator, discriminator = network(8, 2), network(2, 1)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.99))
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.99))

    distances: list[float] = []
    print("step  loss of discriminator  of generator  distance of samples from the circle")
    for step in range(options.steps):
        discriminator_optimizer.zero_grad()
        real, noise = ring(250), torch.randn(250, 8)
        critic_loss = discriminator_step(generator, discriminator, real=real, noise=noise)
        discriminator_optimizer.step()

        generator_optimizer.zero_grad()
        generator_loss = generator_step(generator, discriminator, noise=torch.randn(250, 8))
        generator_optimizer.step()

        if step % 100 == 0 or step == options.steps - 1:
            with torch.no_grad():
                distances.append((generator(torch.randn(500, 8)).norm(dim=1) - 1).abs().mean().item())
            print(f"{step:4}  {critic_loss:21.3f}  {generator_loss:12.3f}  {distances[-1]:35.3f}")

    print(anybatch.verify(discriminator_step, generator, discriminator, real=real, noise=noise, double=True))
    report = anybatch.verify(generator_step, generator, discriminator, noise=noise, double=True)
    print(report)
    return distances, report


if __name__ == "__main__":
    main()
