"""The programs of the README of mbp-pytorch 0.2.6, with `import anybatch as mbp` and nothing else."""

from __future__ import annotations

import importlib.metadata
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .host import HostParallel, put_devices_on_the_host


def _programs() -> tuple[str, str]:
    """The two programs, as the installed package's README has them."""
    readme = importlib.metadata.metadata("mbp-pytorch").get_payload()
    assert isinstance(readme, str)
    blocks = re.findall(r"^```python\n(.*?)^```", readme, flags=re.DOTALL | re.MULTILINE)
    one, several = (block for block in blocks if "import mbp" in block)
    return one, several


def _names() -> dict[str, Any]:
    """What the programs take for granted: a model, a criterion, an optimizer, and a loader."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    data = torch.utils.data.TensorDataset(torch.randn(107, 3, dtype=torch.float64), torch.randint(4, (107,)))
    return {
        "model": model,
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        "dataloader": torch.utils.data.DataLoader(data, batch_size=50),  # 50, 50 and 7 rows
    }


def _expected() -> tuple[list[Tensor], Tensor]:
    """The weights after the same epoch on whole mini-batches in plain PyTorch, and the last output."""
    names = _names()
    for image, label in names["dataloader"]:
        names["optimizer"].zero_grad()
        output = names["model"](image)
        names["criterion"](output, label).backward()
        names["optimizer"].step()
    return list(names["model"].parameters()), output


def _run(program: str, names: dict[str, Any]) -> None:
    program = program.replace("import mbp", "import anybatch as mbp")
    program = re.sub(r'torch\.device\("cuda(:0)?"\)', 'torch.device("cpu")', program)
    exec(compile(program, "README of mbp-pytorch", "exec"), names)


def _assert_same_weights(model: nn.Module, expected: list[Tensor]) -> None:
    for got, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_program_for_one_device() -> None:
    """The README's first program trains as on whole mini-batches, and gives its outputs in row order."""
    names, (expected, output) = _names(), _expected()
    _run(_programs()[0], names)
    _assert_same_weights(names["model"], expected)
    torch.testing.assert_close(names["others"][0], output, rtol=1e-10, atol=1e-10)
    assert names["others"][1] == [
        ...
    ]  # the program returns `loss, output, ...`, and the last call is one piece


def test_program_for_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's second program trains as on whole mini-batches, every row used, on two devices.

    Its line `loss, *others = train_fn(...)` unpacks a loss that comes alone, which no library can make work.
    """
    put_devices_on_the_host(monkeypatch, 2)
    monkeypatch.setattr(nn, "DataParallel", HostParallel)
    names, (expected, _) = _names(), _expected()
    module = names["model"]
    _run(_programs()[1].replace("loss, *others = train_fn", "loss = train_fn"), names)
    assert isinstance(names["model"], HostParallel)
    _assert_same_weights(module, expected)
    assert max(map(max, names["model"].rows)) == 13  # 50 rows are pieces of 25, by 16 rows at most per device
