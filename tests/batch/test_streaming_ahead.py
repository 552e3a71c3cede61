"""The next piece is copied while the current one computes, and nothing is read before its copy is there."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import anybatch
from anybatch.batch import Layout, balanced, feed, lay_out
from anybatch.batch.kinds import Slicer
from anybatch.batch.parts import CutAsOne

ROWS, SIZES = 10, balanced(10, 4)
DEVICE = torch.device("cpu")


class StandInStream:
    """A copy stream that is as late as it may be: a copy is made when another stream waits for it.

    Until then what it sent is nan, so that reading too early shows.
    """

    def __init__(self, on_device: Tensor | None = None) -> None:
        self.log: list[str] = []
        self.handed_over: set[int] = set()
        self._on_device = on_device
        self._due: list[tuple[Tensor, Tensor]] = []

    @contextmanager
    def entered(self) -> Iterator[None]:
        self.log.append("enter")
        yield

    @contextmanager
    def left(self) -> Iterator[None]:
        self.log.append("compute")
        yield

    def can_send(self, source: Tensor) -> bool:
        return self._on_device is None or source.data_ptr() != self._on_device.data_ptr()

    def send(self, source: Tensor) -> Tensor:
        self.log.append(f"send {len(source)} rows")
        sent = torch.full_like(source, float("nan"), requires_grad=False)
        self._due.append((sent, source.detach().clone()))
        return sent

    def mark(self) -> int:
        return len(self._due)

    def hand_over(self, mark: int, tensors: list[Tensor]) -> None:
        self.log.append("hand over")
        self.handed_over |= {id(tensor) for tensor in tensors}
        with torch.no_grad():
            for sent, value in self._due[:mark]:
                sent.copy_(value)
        self._due[:mark] = [(torch.empty(0), torch.empty(0))] * mark


def _with(monkeypatch: pytest.MonkeyPatch, stream: StandInStream) -> StandInStream:
    monkeypatch.setattr(importlib.import_module("anybatch.batch.feed"), "copy_stream", lambda _: stream)
    return stream


def test_each_piece_is_sent_before_the_one_in_front_is_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a piece computes, the next one is on its way; none after the last."""
    stream = _with(monkeypatch, StandInStream())
    for piece in feed(lay_out({"x": torch.ones(ROWS, 3)}), SIZES, DEVICE):
        stream.log.append(f"use {piece.index}")
    first = ["enter", "send 4 rows", "enter", "send 3 rows", "hand over", "use 0"]
    assert stream.log == [*first, "enter", "send 3 rows", "hand over", "use 1", "hand over", "use 2"]


def test_rows_are_there_when_a_piece_is_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row comes once, in order, also from lists and beside what all pieces share (Rule 2)."""
    _with(monkeypatch, StandInStream())
    x, table = torch.arange(ROWS * 3.0).view(ROWS, 3), torch.randn(ROWS + 1, 2)
    boxes = [torch.full((i % 3, 4), float(i)) for i in range(ROWS)]
    layout = lay_out({"x": x, "boxes": boxes, "table": table}, {"table": None})
    seen = []
    for piece in feed(layout, SIZES, DEVICE):
        seen.append(piece.arguments["x"])
        assert torch.equal(piece.arguments["table"], table)
        for place, box in enumerate(piece.arguments["boxes"]):
            assert torch.equal(box, boxes[piece.start + place])
    assert torch.equal(torch.cat(seen), x)


def test_every_tensor_of_a_piece_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device keeps the memory of each tensor until the work on it is done: leaves and shared ones too."""
    stream = _with(monkeypatch, StandInStream())
    layout = lay_out({"x": torch.ones(4, 3, requires_grad=True), "scale": torch.ones(1)})
    for piece in feed(layout, (2, 2), DEVICE):
        assert {id(tensor) for tensor in piece.arguments.values()} <= stream.handed_over


def test_what_is_on_the_device_is_read_where_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that can't be sent off is taken in the order of the device's own work."""
    x = torch.arange(4.0)
    stream = _with(monkeypatch, StandInStream(on_device=x[:2]))
    pieces = [piece.arguments["x"] for piece in feed(lay_out({"x": x}), (2, 2), DEVICE, copies=True)]
    assert torch.equal(torch.cat(pieces), x)
    assert stream.log == ["enter", "compute", "enter", "send 2 rows", "hand over", "hand over"]


def test_no_piece_outlives_its_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a consumer is done with is gone before it asks for more (Rule 4)."""
    _with(monkeypatch, StandInStream())
    alive: list[weakref.ref[Tensor]] = []
    for piece in feed(lay_out({"x": torch.ones(12, 3)}), (2,) * 6, DEVICE):
        alive.append(weakref.ref(piece.arguments["x"]))
        del piece
        assert sum(reference() is not None for reference in alive) == 0


def test_a_consumer_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was sent ahead is dropped with the feed."""
    stream = _with(monkeypatch, StandInStream())
    pieces = feed(lay_out({"x": torch.ones(12, 3)}), (2,) * 6, DEVICE)
    next(pieces)
    ahead = weakref.ref(stream._due[-1][0])
    stream._due.clear()
    del pieces
    assert ahead() is None


@pytest.mark.parametrize(("rows", "ub_size"), [(10, 4), (9, 1), (12, 3)])
def test_training_is_exact(monkeypatch: pytest.MonkeyPatch, rows: int, ub_size: int) -> None:
    """Gradients and loss are those of the whole mini-batch, with ignored labels and inputs that need grad."""
    torch.manual_seed(0)
    _with(monkeypatch, StandInStream())
    net = torch.nn.Linear(5, 3).double()
    x = torch.randn(rows, 5, dtype=torch.float64, requires_grad=True)
    label = torch.randint(3, (rows,))
    label[1::3] = -100

    def train_fn(x: Tensor, label: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(net(x), label.long())

    expected = train_fn(x, label)
    expected.backward()
    wanted = [x.grad, *(parameter.grad for parameter in net.parameters())]
    x.grad = None
    net.zero_grad()
    loss = anybatch.apply(["x", "label"], ub_size=ub_size)(train_fn)(x=x, label=label.double())
    found = [x.grad, *(parameter.grad for parameter in net.parameters())]
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def _train(x: Any, label: Any, net: Any) -> Tensor:
    return torch.nn.functional.cross_entropy(net(x), label)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("is_pinned", [False, True])
def test_copies_are_never_read_late_on_a_cuda_device(is_pinned: bool) -> None:
    """Many small pieces, whose memory is soon given to the next ones, train as the whole does."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Tanh(), torch.nn.Linear(512, 3))
    net = net.double().cuda()
    x, label = torch.randn(999, 512, dtype=torch.float64), torch.randint(3, (999,))
    if is_pinned:
        x, label = x.pin_memory(), label.pin_memory()
    _train(x.cuda(), label.cuda(), net).backward()
    wanted = [parameter.grad for parameter in net.parameters()]
    step = anybatch.apply(["x", "label"], ub_size=7)(_train)
    for _ in range(5):
        net.zero_grad()
        step(x=x, label=label, net=net)
        found = [parameter.grad for parameter in net.parameters()]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_what_is_cut_as_one_is_cut_where_the_device_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that may live on the device is cut in the order of the device's own work."""
    stream = _with(monkeypatch, StandInStream())

    def cut(value: Tensor, _dim: int, start: int, stop: int) -> Tensor:
        stream.log.append("cut")
        return value[start:stop]

    part = CutAsOne(torch.ones(4, 3), Slicer(lambda *_: 4, cut), 0)
    for piece in feed(Layout(4, {"x": part}), (2, 2), DEVICE):
        assert torch.equal(piece.arguments["x"], torch.ones(2, 3))
    first = ["enter", "compute", "cut", "send 2 rows"]
    assert stream.log == [*first, *first, "hand over", "hand over"]
