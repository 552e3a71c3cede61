"""Device memory is flat in the mini-batch: nothing of a piece outlives it but its outputs (Rule 4)."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import anybatch

ROWS, UB_SIZE, PIECES = 44, 8, 6
FEATURES, HIDDEN, CLASSES = 5, 64, 3
IGNORED = -100


@pytest.fixture(autouse=True)
def no_cycle_collector() -> Iterator[None]:
    """What is to die has to die by its reference count."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Token:
    """Lives as long as the graph that holds it."""


class Marked(torch.autograd.Function):
    """The identity, whose node in the graph holds a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, traces: Traces) -> Tensor:
        ctx.token = Token()
        traces.objects.append(weakref.ref(ctx.token))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.clone(), None


class Traces:
    """Weak references to what one run of the function makes."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.objects: list[weakref.ref[Any]] = []
        self.storages: list[tuple[str, StorageWeakRef]] = []

    def keep(self, **tensors: Tensor) -> None:
        """Follows tensors, and where they hold more than one number their memory."""
        self.objects += map(weakref.ref, tensors.values())
        self.storages += [
            (name, StorageWeakRef(t.untyped_storage())) for name, t in tensors.items() if t.numel() > 1
        ]

    @property
    def alive(self) -> list[str]:
        """What is still there."""
        objects = [type(found).__name__ for ref in self.objects if (found := ref()) is not None]
        return objects + self.memory_alive

    @property
    def memory_alive(self) -> list[str]:
        return [name for name, storage in self.storages if not storage.expired()]


Loss = Callable[[Tensor, Tensor, Tensor], Any]


class Watched(nn.Module):
    """A user's function that looks, whenever it runs and in backward, for what earlier runs left behind."""

    def __init__(self, loss: Loss, normalizer: nn.Module | None = None, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, hidden), nn.Linear(hidden, CLASSES)
        self.normalizer = normalizer or nn.Identity()
        self.loss = loss
        self.fails_at: int | None = None
        self.forget()

    def forget(self) -> None:
        """Starts a new record."""
        self.runs: list[Traces] = []
        self.left_behind: list[str] = []
        self.most_rows_alive = 0

    def forward(self, x: Tensor, y: Tensor) -> Any:
        traces = Traces(len(x))
        self.look(traces)
        copied = x.clone()
        hidden = Marked.apply(self.normalizer(self.first(copied)).tanh(), traces)
        if len(self.runs) == self.fails_at:
            raise KeyboardInterrupt
        outputs = self.second(hidden)
        loss = self.loss(outputs, y, copied)
        traces.keep(x=copied, hidden=hidden)
        traces.objects += [weakref.ref(one) for one in (x, y, outputs, loss) if isinstance(one, Tensor)]
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.look(traces, gradient))
        return loss, outputs

    def look(self, traces: Traces, gradient: Tensor | None = None) -> None:
        others = [run for run in self.runs if run is not traces]
        self.left_behind += [name for run in others for name in run.alive]
        rows_alive = sum(run.rows for run in others if run.memory_alive) + traces.rows
        self.most_rows_alive = max(self.most_rows_alive, rows_alive)
        if gradient is None:
            self.runs.append(traces)
        else:
            traces.keep(gradient=gradient)

    def left_at_end(self) -> list[str]:
        return [name for run in self.runs for name in run.alive]


def _mean(outputs: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y)


def _two_groups(outputs: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y) + 0.1 * F.mse_loss(outputs, x[:, :CLASSES])


def _sum(outputs: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y, reduction="sum") / 100


def _losses(outputs: Tensor, y: Tensor, x: Tensor) -> dict[str, Tensor]:
    return {"label": F.cross_entropy(outputs, y), "size": outputs.square().mean()}


def _with_decay(outputs: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y) + outputs.new_ones(()).requires_grad_() * 0.1


LOSSES: dict[str, Loss] = {
    "mean": _mean,
    "two groups": _two_groups,
    "sum": _sum,
    "dict": _losses,
    "parameters": _with_decay,
}
CONTEXTS = {"training": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def _batch(rows: int = ROWS) -> dict[str, Tensor]:
    labels = torch.arange(rows) % CLASSES
    return {"x": torch.randn(rows, FEATURES), "y": torch.where(torch.arange(rows) % 5 < 2, IGNORED, labels)}


def _apply(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return anybatch.apply(["x", "y"], ub_size=UB_SIZE, **options)(function)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", LOSSES)
def test_nothing_is_left_when_the_next_piece_runs(name: str, context: str) -> None:
    """From the second call on nothing of an earlier piece is alive while another runs, or afterwards."""
    watched = Watched(LOSSES[name])
    call = _apply(watched)
    with CONTEXTS[context]():
        call(**_batch())
        watched.forget()
        call(**_batch())
    assert len(watched.runs) in (PIECES, 2 * PIECES)
    assert watched.left_behind == []
    assert watched.left_at_end() == []


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", LOSSES)
def test_first_call_holds_no_more_than_two_pieces(name: str, context: str) -> None:
    """The probe never has more rows alive than the piece under way and the next, and leaves nothing."""
    watched = Watched(LOSSES[name])
    with CONTEXTS[context]():
        _apply(watched)(**_batch())
    assert len(watched.runs) > PIECES
    assert watched.most_rows_alive <= 2 * UB_SIZE
    assert watched.left_at_end() == []


@pytest.mark.parametrize("weight", ["rows", "sum", lambda y: (y != IGNORED).sum()])
def test_weights_by_hand_leave_nothing(weight: Any) -> None:
    """The same holds where the caller says how pieces weigh."""
    watched = Watched(_mean)
    call = _apply(watched, weight=weight, on_inexact="ignore")
    call(**_batch())
    assert len(watched.runs) == PIECES
    assert watched.left_behind == []
    assert watched.left_at_end() == []


@pytest.mark.parametrize("context", ["training", "no_grad"])
def test_one_piece_leaves_nothing(context: str) -> None:
    """A mini-batch that fits in one piece leaves nothing either."""
    watched = Watched(_mean)
    with CONTEXTS[context]():
        _apply(watched)(**_batch(UB_SIZE))
    assert len(watched.runs) == 1
    assert watched.left_at_end() == []


def test_leaf_made_by_the_function_dies_with_its_piece() -> None:
    """A leaf that the function makes for itself, as for a gradient penalty, and its gradient die."""
    model, alive = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)), []
    seen: list[int] = []

    def penalty(x: Tensor) -> Tensor:
        seen.append(sum(not one.expired() for one in alive))
        x = x.detach().clone().requires_grad_()
        alive.append(StorageWeakRef(x.untyped_storage()))
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return ((gradient.norm(dim=1) - 1) ** 2).mean()

    call = anybatch.apply(["x"], ub_size=UB_SIZE)(penalty)
    call(x=torch.randn(ROWS, FEATURES))
    alive.clear()
    seen.clear()
    call(x=torch.randn(ROWS, FEATURES))
    assert seen == [0] * PIECES
    assert all(one.expired() for one in alive)


def test_inputs_that_require_grad_leave_their_gradient_only() -> None:
    """The leaves that stand for rows of an entry that requires grad die with their pieces."""
    watched = Watched(_mean)
    call = _apply(watched)
    call(**_batch())
    watched.forget()
    rows = _batch()
    rows["x"].requires_grad_()
    call(**rows)
    watched.forget()
    call(**rows)
    assert len(watched.runs) == PIECES
    assert watched.left_behind == []
    assert watched.left_at_end() == []


@pytest.mark.parametrize("fails_at", [1, 2, 4, 6, 9])
def test_nothing_is_left_after_an_exception(fails_at: int) -> None:
    """An exception of the user's own, once it is handled, keeps nothing alive: in the probe or in a piece."""
    watched = Watched(_two_groups)
    watched.fails_at = fails_at
    with pytest.raises(KeyboardInterrupt) as caught:
        _apply(watched)(**_batch())
    assert len(watched.runs) == fails_at
    caught.value.__traceback__ = None
    del caught
    assert watched.left_at_end() == []


def test_exception_that_is_kept_holds_its_own_piece_only() -> None:
    """An exception that the caller keeps holds the piece that failed, as its traceback must, and no other."""
    watched = Watched(_mean)
    call = _apply(watched)
    call(**_batch())
    watched.forget()
    watched.fails_at = 4
    try:
        call(**_batch())
    except KeyboardInterrupt as error:
        kept = error
    assert kept.__traceback__ is not None
    assert [bool(run.alive) for run in watched.runs[:-1]] == [False] * 3


def test_refusal_leaves_nothing() -> None:
    """A loss that is refused leaves nothing of the runs that refuted it."""

    def coupled(outputs: Tensor, y: Tensor, x: Tensor) -> Tensor:
        return (outputs - outputs.mean(0)).square().mean()

    watched = Watched(coupled)
    with pytest.raises(anybatch.errors.InexactError) as caught:
        _apply(watched)(**_batch())
    caught.value.__traceback__ = caught.value.__context__ = None
    del caught
    assert watched.runs
    assert watched.left_at_end() == []


class Answer(dict[str, Any]):
    """A container like those in which models return their outputs."""


@pytest.mark.parametrize("context", CONTEXTS)
def test_outputs_hold_no_graph(context: str) -> None:
    """Every tensor that comes back, at any depth, is detached and has memory of its own."""
    model = nn.Linear(FEATURES, CLASSES)
    alive: list[StorageWeakRef] = []

    def function(x: Tensor, y: Tensor) -> tuple[Any, ...]:
        wide = model(torch.cat([x, x, x]))
        alive.append(StorageWeakRef(wide.untyped_storage()))
        outputs = wide[: len(x)]
        loss = F.cross_entropy(outputs, y)
        return loss, outputs, {"logits": outputs[:, 0], "more": [outputs.T, Answer(a=loss)]}, loss

    with CONTEXTS[context]():
        loss, outputs, nested, losses = _apply(function)(**_batch())
    tensors = [loss, outputs, nested["logits"], *nested["more"][0], *nested["more"][1].values(), losses]
    flat = list(itertools.chain.from_iterable(one if isinstance(one, list) else [one] for one in tensors))
    assert len(flat) >= 6
    assert not any(tensor.requires_grad or tensor.grad_fn is not None for tensor in flat)
    assert outputs.shape == (ROWS, CLASSES)
    assert all(one.expired() for one in alive)


class LiveBytes(TorchDispatchMode):
    """The most bytes alive at once of the tensors that are made while it is entered."""

    def __init__(self, *existing: Tensor) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in existing}
        self.live_bytes = self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._known:
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        self._known.add(storage._cdata)
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._release, storage._cdata, storage.nbytes())

    def _release(self, key: int, size_bytes: int) -> None:
        self._known.discard(key)
        self.live_bytes -= size_bytes


def peak_bytes(call: Callable[..., Any], model: nn.Module, rows: dict[str, Tensor]) -> int:
    model.zero_grad()
    with LiveBytes(*rows.values(), *model.parameters(), *model.buffers()) as live:
        call(**rows)
    return live.peak_bytes


@pytest.mark.parametrize("context", ["training", "no_grad"])
@pytest.mark.parametrize("name", LOSSES)
def test_peak_does_not_grow_with_the_number_of_pieces(name: str, context: str) -> None:
    """Sixteen times as many pieces add to the peak no more than a few numbers per piece.

    Beyond sixteen pieces gradients in float32 are added up in blocks, which takes one copy of them once.
    """
    model = Watched(LOSSES[name])

    def function(x: Tensor, y: Tensor) -> Any:
        return model(x, y)[0]

    call = _apply(function)
    with CONTEXTS[context]():
        call(**_batch(4 * UB_SIZE))
        few, many = (peak_bytes(call, model, _batch(pieces * UB_SIZE)) for pieces in (20, 320))
    numbers_bytes = 7 * 4
    assert few > UB_SIZE * HIDDEN * 4
    assert many - few <= 300 * numbers_bytes


WIDE = 4096
NORMALIZERS: dict[str, Callable[[], nn.Module]] = {
    "plain": nn.Identity,
    "dropout": lambda: nn.Dropout(0.2),
    "layer norm": lambda: nn.LayerNorm(WIDE),
}


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("name", LOSSES)
def test_first_call_needs_hardly_more_memory(name: str, normalizer: str) -> None:
    """The probe's peak is at most half a piece above that of a later call, so it fits where pieces fit."""
    model = Watched(LOSSES[name], NORMALIZERS[normalizer](), WIDE)

    def function(x: Tensor, y: Tensor) -> Any:
        return model(x, y)[0]

    call = _apply(function)
    first = peak_bytes(call, model, _batch())
    later = peak_bytes(call, model, _batch())
    assert first <= 1.5 * later


def test_light_graphs_die() -> None:
    """Evaluating again and again leaves no graph behind: none can be collected later, so none may be left."""
    watched = Watched(_mean)
    call = _apply(watched)
    with torch.no_grad():
        for _ in range(3):
            call(**_batch())
    gc.collect()
    assert len(watched.runs) > 3 * PIECES
    assert watched.left_at_end() == []
