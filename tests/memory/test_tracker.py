"""Bytes of live storages, operator by operator, against sizes worked out by hand."""

from __future__ import annotations

import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from anybatch.memory.tracker import Tracker

CPU = torch.device("cpu")


def test_chain_of_operators_counts_inputs_and_output_together() -> None:
    """`(x + 1) * 2` on 4 float64: 32 bytes, then 64 while both results are there, and 32 at the end."""
    x = torch.ones(4, dtype=torch.float64)
    with Tracker() as tracker:
        y = (x + 1) * 2
    assert tracker.trace().live_bytes.tolist() == [0, 32, 64]
    assert (tracker.peak_bytes, tracker.live_bytes) == (64, 32)
    del y
    assert tracker.live_bytes == 0


def test_views_and_ties_count_once() -> None:
    """A storage counts once, whatever views it, and dies with its last view."""
    with Tracker() as tracker:
        x = torch.zeros(10, 10)
        views = [x.t(), x[2:], x.view(100), x.detach()]
        del x
        assert tracker.live_bytes == 400
        views.clear()
        assert tracker.live_bytes == 0
    weight = torch.nn.Parameter(torch.zeros(3))
    tracker = Tracker()
    tracker.hold([weight, weight, weight.detach()])
    assert tracker.live_bytes == 12


def test_what_was_there_before_counts_only_when_held() -> None:
    """Tensors of before, their views and what is written into them do not count; held ones do."""
    x = torch.zeros(100)
    with Tracker() as tracker:
        x.add_(1)
        x[3:].mul_(2)
        torch.from_numpy(x.numpy()).add_(1)
        assert tracker.live_bytes == 0
    tracker = Tracker()
    tracker.hold([x], "inputs")
    with tracker:
        y = x + 1
    trace = tracker.trace()
    assert trace.begin_bytes == 400
    assert trace.peak_bytes == 800
    assert trace.holders(1) == {"inputs": 400, "forward": 400}
    del y


def test_freed_between_operators_is_gone_at_the_next() -> None:
    """What dies between two operators does not count at the second one."""
    with Tracker() as tracker:
        x = torch.zeros(8)
        del x
        torch.zeros(2)
    assert tracker.trace().live_bytes.tolist() == [0, 32, 8]
    assert tracker.trace().end_bytes == 0


@pytest.mark.parametrize("is_fake", [False, True], ids=["real", "fake"])
def test_resized_storages_are_followed(is_fake: bool) -> None:
    """A storage that is resized to nothing and back counts with its size of the moment."""
    mode = FakeTensorMode() if is_fake else torch.no_grad()
    with mode, Tracker() as tracker:
        x = torch.zeros(100)
        x.untyped_storage().resize_(0)
        assert tracker.live_bytes == 0
        x.untyped_storage().resize_(400)
        assert tracker.live_bytes == 400
        x.resize_(200)
        assert tracker.live_bytes == 800
    assert tracker.trace().live_bytes.tolist() == [0, 400, 0, 400, 800]


def test_resizing_is_torchs_own_again_afterwards() -> None:
    """Once no tracker is left, storages are resized by torch's own method, also after an error."""
    before = torch.UntypedStorage.resize_
    with pytest.raises(ZeroDivisionError), Tracker(), Tracker():
        raise ZeroDivisionError
    assert torch.UntypedStorage.resize_ is before


def test_views_and_work_in_place_give_no_events() -> None:
    """Only operators that make something are events."""
    x = torch.zeros(4, 4)
    with Tracker() as tracker:
        x.t().add_(1)[2:].view(2, 4).mul_(2)
        y = x + 1
        float(y.sum())
    assert tracker.trace().operators == ("begin", "aten::add.Tensor", "aten::sum")


def test_out_argument_that_grows() -> None:
    """An empty `out=` that an operator resizes counts with its new size."""
    x = torch.ones(50)
    with Tracker() as tracker:
        out = torch.empty(0)
        torch.add(x, x, out=out)
    assert tracker.live_bytes == 200


def test_lists_tuples_and_sparse_outputs() -> None:
    """Every part of an output counts: several results, lists of results, values and indices."""
    x = torch.arange(6.0)
    with Tracker() as tracker:
        largest = torch.topk(x, 2)
        assert tracker.live_bytes == 2 * 4 + 2 * 8
        summed = torch._foreach_add([x, x], 1)
        assert tracker.live_bytes == 24 + 48
        del largest, summed
        sparse = torch.eye(2).to_sparse()
    assert tracker.live_bytes == 4 * 8 + 2 * 4
    del sparse


def test_backward_is_told_from_forward() -> None:
    """Events say the phase that was set, `backward` in backward, and the label of the moment."""
    weight = torch.ones(3, requires_grad=True)
    tracker = Tracker(label=lambda: "here")
    with tracker:
        loss = (weight * weight).sum()
        loss.backward()
        tracker.phase = "step"
        with torch.no_grad():
            weight -= 0.1 * weight.grad
    trace = tracker.trace()
    assert trace.phases[:3] == ("begin", "forward", "forward")
    assert "backward" in trace.phases
    assert trace.phases[-1] == "step"
    assert set(trace.labels[1:]) == {"here"}
    assert trace.describe(1) == "aten::mul.Tensor in here (forward)"


def test_real_and_fake_runs_have_the_same_events() -> None:
    """A network under fake tensors gives the operators and bytes that it gives on real ones."""

    def run() -> Tracker:
        net = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
        tracker = Tracker()
        tracker.hold(net.parameters())
        with tracker:
            net(torch.ones(11, 7)).sum().backward()
        return tracker

    real = run()
    with FakeTensorMode():
        fake = run()
    assert real.trace().operators == fake.trace().operators
    assert real.trace().live_bytes.tolist() == fake.trace().live_bytes.tolist()


def test_devices_are_counted_apart() -> None:
    """A trace can be that of one device only."""
    with Tracker() as tracker:
        here, nowhere = torch.zeros(2), torch.zeros(30, device="meta")
    assert tracker.devices == (CPU, torch.device("meta"))
    assert tracker.trace(CPU).peak_bytes == 8
    assert tracker.trace(torch.device("meta")).peak_bytes == 120
    assert tracker.trace().peak_bytes == 128
    del here, nowhere


def test_cycles_live_until_they_are_collected() -> None:
    """A tensor in a cycle of references counts until the garbage collector has been there."""
    gc.disable()
    try:
        with Tracker() as tracker:
            cycle = [torch.zeros(5)]
            cycle.append(cycle)  # type: ignore[arg-type]
            del cycle
            assert tracker.live_bytes == 20
            gc.collect()
            assert tracker.live_bytes == 0
    finally:
        gc.enable()


def test_living_storages_are_described() -> None:
    """What is alive is named by its size and the operator that made it."""
    with Tracker() as tracker:
        kept = torch.zeros(3)
    assert tracker.living_tensors() == ("12 bytes, made by aten::zeros",)
    del kept
    assert tracker.living_tensors() == ()
