"""Two techniques at once do what each of them does alone."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext
from itertools import combinations
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from anybatch.techniques import Checkpointing, Freeze, Offload, Precision, Setting, Technique

from .catalogue import network
from .training import assert_equal, two_steps

KINDS = (Checkpointing, Offload, Precision, Freeze)


def make(kind: type[Technique], folder: Path) -> Technique:
    if kind is Checkpointing:
        return Checkpointing("0.*")
    if kind is Offload:
        return Offload(1, folder)
    return Precision() if kind is Precision else Freeze("0.0")


@contextmanager
def entered(techniques: list[Technique], hook: str, setting: Setting) -> Any:
    with ExitStack() as stack:
        for each in techniques:
            stack.enter_context(getattr(each, hook)(setting))
        yield


@pytest.mark.parametrize("kinds", [*combinations(KINDS, 2), *combinations(reversed(KINDS), 2), KINDS])
def test_two_steps_are_bit_for_bit_those_of_plain_torch(
    kinds: tuple[type[Technique], ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In either order, and all together: autocast and frozen weights by hand give the same bits."""
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [])
    torch.manual_seed(1)
    x, y = torch.randn(7, 6), torch.randn(7, 3)

    def plain_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if Precision in kinds else nullcontext():
            output = model(x)
        return ((output.float() - y) ** 2).mean()

    plain, model = network().float(), network().float()
    if Freeze in kinds:
        plain[0][0].requires_grad_(False)
    techniques = [make(kind, tmp_path) for kind in kinds]
    setting = Setting.of(model)
    assert not any(a.conflicts_with(b) for a in techniques for b in techniques)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with entered(techniques, "forward", setting):
            output = model(x)
        return ((output.float() - y) ** 2).mean()

    torch.manual_seed(5)
    gradients, end = two_steps(plain, x, y, loss=plain_loss)
    torch.manual_seed(5)
    with entered(techniques, "applied", setting):
        ours, our_end = two_steps(model, x, y, loss=loss)
    assert_equal(gradients, ours)
    assert_equal(end, our_end)
    assert not list(tmp_path.iterdir())
