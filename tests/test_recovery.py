"""An out-of-memory at every operator of a call: survived bit by bit, or all is as it was (Rule 3)."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from anybatch._foresee import Task
from anybatch.errors import InexactWarning
from anybatch.fit.auto import Auto
from anybatch.fit.optimizers import Optimizers
from anybatch.memory.shadow import OptimizerCost
from anybatch.testing import Fault, fail_at

ROWS = 8
NEVER = 1 << 40


class Convolutional(nn.Module):
    """A convolution, BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.norm(self.convolution(x)).relu().flatten(1)))


class Transformer(nn.Module):
    """A sparse embedding, one block and a head; labels that are ignored make pieces count differently."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, sparse=True)
        self.query, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm, self.head, self.drop = nn.LayerNorm(8), nn.Linear(8, 11), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        query, key, value = self.query(x).chunk(3, dim=-1)
        x = self.norm(x + self.out(F.scaled_dot_product_attention(query, key, value)))
        return self.head(self.drop(x))


class Perceptron(nn.Module):
    """Little enough for a sweep through its probe."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.first(x)))


@dataclass(eq=False)
class Scene:
    """A network, a mini-batch and a function, always the same; and which sizes the function saw."""

    model: nn.Module
    batch: dict[str, Tensor]
    has_gradients: bool = False
    has_scaler: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sizes: list[int] = []
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if self.has_scaler else None
        if self.has_gradients:
            for parameter in self.model.parameters():
                parameter.grad = torch.randn_like(parameter)
            if isinstance(self.model, Transformer):
                sparse = self.model.embedding.weight.grad[:3].clone()
                rows = torch.tensor([[1, 4, 9]])
                self.model.embedding.weight.grad = torch.sparse_coo_tensor(
                    rows, sparse, (11, 8), check_invariants=True
                )
        self.gradients = [parameter.grad for parameter in self.model.parameters()]
        torch.manual_seed(6)
        random.seed(6)
        np.random.seed(6)

    def call(self, ub_size: int | Auto) -> Any:
        model, sizes = self.model, self.sizes

        def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            sizes.append(len(x))
            outputs = model(x)
            return F.cross_entropy(outputs.flatten(0, -2), y.flatten()), outputs.argmax(-1)

        options = {"scaler": self.scaler, **self.options}
        return anybatch.apply(["x", "y"], ub_size=ub_size, **options)(function)(**self.batch)

    def last_cut(self) -> list[int]:
        """The sizes of the pieces of the attempt that went through."""
        cut: list[int] = []
        while sum(cut) < ROWS:
            cut.insert(0, self.sizes[len(self.sizes) - len(cut) - 1])
        return cut

    def state(self) -> list[Any]:
        """All that a call may change, copied."""
        parameters = list(self.model.parameters())
        return [
            *(p.detach().clone() for p in parameters),
            *(None if p.grad is None else p.grad.to_dense().clone() for p in parameters),
            *(None if p.grad is None else str(p.grad.layout) for p in parameters),
            *(buffer.clone() for buffer in self.model.buffers()),
            [part.training for part in self.model.modules()],
            [p.requires_grad for p in parameters],
            torch.get_rng_state(),
            str(np.random.get_state()),
            random.getstate(),
            None if self.scaler is None else (self.scaler.state_dict(), self.scaler._scale),
        ]

    def assert_gradients_kept_their_tensors(self) -> None:
        """Where there was a gradient there is the same tensor, which others may hold."""
        for parameter, gradient in zip(self.model.parameters(), self.gradients, strict=True):
            assert gradient is None or parameter.grad is gradient


def convolutional(**settings: Any) -> Scene:
    torch.manual_seed(1)
    batch = {"x": torch.randn(ROWS, 2, 6, 6), "y": torch.arange(ROWS) % 3}
    return Scene(Convolutional(), batch, **settings)


def transformer(**settings: Any) -> Scene:
    torch.manual_seed(1)
    tokens = torch.randint(0, 11, (ROWS, 5))
    labels = tokens.roll(1, 1).clone()
    labels[:, 0] = labels[:3, 1] = -100
    return Scene(Transformer(), {"x": tokens, "y": labels}, **settings)


def perceptron(**settings: Any) -> Scene:
    torch.manual_seed(1)
    return Scene(Perceptron(), {"x": torch.randn(ROWS, 3), "y": torch.arange(ROWS) % 4}, **settings)


def in_bfloat16(**settings: Any) -> Scene:
    torch.manual_seed(1)
    batch = {"x": torch.randn(ROWS, 2, 6, 6).bfloat16(), "y": torch.arange(ROWS) % 3}
    return Scene(Convolutional().bfloat16(), batch, **settings)


@pytest.fixture(autouse=True, scope="module")
def little_garbage() -> Iterator[None]:
    """What a process of many tests holds is not looked through for garbage after each failure."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def unforeseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls begin with their pieces: what these would take has no part in how a failure is survived."""
    monkeypatch.setattr(Task, "can_be_foreseen", False)
    monkeypatch.setattr(Optimizers, "cost", lambda self, parameters: OptimizerCost(0, 0))


@pytest.fixture(autouse=True)
def quiet_about_batch_norm() -> Iterator[None]:
    """That BatchNorm takes its statistics over pieces, and that a probe had no room, is known here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=InexactWarning)
        yield


def assert_same(one: Any, other: Any) -> None:
    """Equal to the bit."""
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, (list, tuple)):
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert one == other


def sweep(run: Callable[[int], Fault]) -> int:
    """Runs with every operator failing once.

    Returns:
        How many there were.
    """
    n = 0
    while run(n).failed_at is not None:
        n += 1
    return n


def assert_survives(make: Callable[[], Scene], where: str = "any", largest: int | None = None) -> int:
    """Each failure is survived, and leaves what the undisturbed call leaves that had the last cut at once.

    Returns:
        The operators that failed, one in each call.
    """
    expected: dict[int, tuple[Any, list[Any]]] = {}

    def undisturbed(ub_size: int) -> tuple[Any, list[Any]]:
        if ub_size not in expected:
            scene = make()
            expected[ub_size] = scene.call(ub_size), scene.state()
            assert max(scene.last_cut()) == ub_size
        return expected[ub_size]

    def run(n: int) -> Fault:
        scene = make()
        with fail_at(n, where) as fault:
            result = scene.call(Auto(largest=largest, prefer="largest"))
        assert_same((result, scene.state()), undisturbed(max(scene.last_cut())))
        scene.assert_gradients_kept_their_tensors()
        return fault

    return sweep(run)


SCENES: dict[str, tuple[Callable[..., Scene], dict[str, Any]]] = {
    "conv": (convolutional, {}),
    "conv, gradients": (convolutional, {"has_gradients": True}),
    "conv, deferred": (convolutional, {"has_gradients": True, "options": {"batch_norm": "deferred"}}),
    "conv, scaler": (convolutional, {"has_gradients": True, "has_scaler": True}),
    "conv, bfloat16": (in_bfloat16, {"has_gradients": True}),
    "transformer": (transformer, {"options": {"on_inexact": "ignore"}}),
    "transformer, gradients": (transformer, {"has_gradients": True}),
}


@pytest.mark.parametrize("scene", SCENES)
def test_failure_at_any_operator_is_survived(scene: str) -> None:
    """A whole mini-batch that fails at any operator, forward, backward or at commit, is cut and goes on."""
    make, settings = SCENES[scene]
    assert 40 <= assert_survives(lambda: make(**settings)) <= 300


def test_failure_at_any_operator_of_pieces_and_their_probe_is_survived() -> None:
    """A call in pieces that fails at any operator, also of the probe before them, ends as it would have."""
    assert assert_survives(lambda: perceptron(has_gradients=True), largest=4) > 300


def test_failure_at_any_copy_is_survived() -> None:
    """A piece that fails where it is copied is cut smaller, and none of its rows are lost."""

    def make() -> Scene:
        scene = perceptron(has_gradients=True)
        scene.model.double()
        scene.gradients = [None] * 4
        for parameter in scene.model.parameters():
            parameter.grad = None
        forward = scene.model.forward
        scene.model.forward = lambda x: forward(x.to(torch.float64))  # type: ignore[method-assign]
        return scene

    assert assert_survives(make, "copy", largest=4) > 10


@pytest.mark.parametrize("scene", SCENES)
def test_failure_at_any_operator_leaves_all_as_it_was(scene: str) -> None:
    """With a size of the caller's, the error comes through, all is as before, and the next call is exact."""
    make, settings = SCENES[scene]
    undisturbed = make(**settings)
    with fail_at(NEVER) as counter:
        result = undisturbed.call(ROWS)
    expected, operators = (result, undisturbed.state()), counter.seen
    undone: list[int] = []

    def run(n: int) -> Fault:
        scene = make(**settings)
        before = scene.state()
        with fail_at(n) as fault:
            try:
                result = scene.call(ROWS)
            except RuntimeError:
                assert_same(before, scene.state())
                scene.assert_gradients_kept_their_tensors()
                result = scene.call(ROWS)
                undone.append(n)
        assert_same((result, scene.state()), expected)
        return fault

    assert 40 <= sweep(run) == operators <= 300
    # At the end, when all sums are known, writing goes on.
    writes = sum(
        gradient is not None and gradient.layout == torch.strided for gradient in undisturbed.gradients
    )
    assert undone == list(range(operators - writes))


LIMITED = """
import warnings
import torch
import torch._dynamo  # which the first optimizer would load
import torch.nn.functional as F
from torch import nn
import anybatch
from anybatch._foresee import Task
from anybatch.testing import memory_limit

torch.set_num_threads(1)
warnings.simplefilter("ignore")
Task.can_be_foreseen = False

def run(ub_size, growth_bytes):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Dropout(0.2), nn.Linear(1024, 8))
    x, y, sizes = torch.randn(4096, 256), torch.arange(4096) % 8, []

    def function(x, y):
        sizes.append(len(x))
        return F.cross_entropy(net(x), y)

    call = anybatch.apply(["x", "y"], ub_size=ub_size)(function)
    with memory_limit(growth_bytes, malloc=1 << 16):
        call(x=x, y=y)
    return sizes, [parameter.grad for parameter in net.parameters()], torch.get_rng_state()

sizes, gradients, state = run(anybatch.Auto(prefer="largest", budget=1 << 40), 24 << 20)
_, expected, other = run(sizes[-1], 1 << 34)
print(sizes.count(4096), sizes[-1] < 4096)
print(torch.equal(state, other) and all(map(torch.equal, gradients, expected)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux holds a process to a limit on its memory")
def test_real_limit_is_survived() -> None:
    """Where one activation of all rows takes 16 MiB, 24 MiB that are all there is are enough."""
    result = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True)
    count, is_cut, is_same = result.stdout.split()
    assert (int(count) >= 1, is_cut, is_same) == (True, "True", "True")
