"""The devices of torch, on machines with and without an accelerator."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from anybatch.memory.device import (
    MemoryKind,
    RandomState,
    accelerators,
    as_device,
    autocast_state,
    copies_asynchronously,
    device_name,
    device_of,
    is_accelerator,
    memory_kind,
    release,
)


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which torch finds no accelerator."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


class TwoDevices:
    """Stands for a machine with two accelerators: their generators, and the current index."""

    def __init__(self) -> None:
        self.states = [torch.tensor([10], dtype=torch.uint8), torch.tensor([20], dtype=torch.uint8)]
        self.current_index = 0

    def get_rng_state(self, device: torch.device) -> Tensor:
        return self.states[device.index].clone()

    def set_rng_state(self, state: Tensor, device: torch.device) -> None:
        self.states[device.index] = state.clone()


@pytest.fixture
def two_accelerators(monkeypatch: pytest.MonkeyPatch) -> TwoDevices:
    """A machine on which torch finds two accelerators of the kind xpu."""
    machine = TwoDevices()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: machine.current_index)
    monkeypatch.setattr(torch, "get_device_module", lambda device: machine)
    return machine


def test_as_device_none_stays_none() -> None:
    """Not saying a device is not the same as saying one."""
    assert as_device(None) is None


@pytest.mark.parametrize("value", ["cpu", torch.device("cpu"), "meta"])
def test_as_device_host_kinds_need_no_accelerator(value: str | torch.device, no_accelerator: None) -> None:
    """The host's devices are usable everywhere."""
    assert as_device(value) == torch.device(value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, "xpu:0"), (1, "xpu:1"), ("xpu:1", "xpu:1"), ("xpu", "xpu"), (torch.device("xpu", 0), "xpu:0")],
)
def test_as_device_with_accelerators(
    value: str | int | torch.device, expected: str, two_accelerators: TwoDevices
) -> None:
    """An int is the accelerator of that index, of whatever kind the machine has."""
    assert as_device(value) == torch.device(expected)


@pytest.mark.parametrize("value", [-1, 2, "xpu:2", "cuda", "cuda:0", torch.device("mps")])
def test_as_device_not_on_this_machine(value: str | int | torch.device, two_accelerators: TwoDevices) -> None:
    """A device that this machine lacks is refused with those it has."""
    with pytest.raises(ValueError, match=r"torch can use xpu:0, xpu:1 here"):
        as_device(value)


@pytest.mark.parametrize("value", [0, "cuda", "mps", "xpu:1"])
def test_as_device_without_accelerator(value: str | int, no_accelerator: None) -> None:
    """Without an accelerator the refusal says that there is none, and what to pass."""
    with pytest.raises(ValueError, match=r'no accelerator here\. Pass one of these, or "cpu"'):
        as_device(value)


@pytest.mark.parametrize("value", ["graphics", "", "cuda:first"])
def test_as_device_unknown_name(value: str) -> None:
    """A name that torch does not know is refused and quoted."""
    with pytest.raises(ValueError, match=f"Got '{value}'"):
        as_device(value)


@pytest.mark.parametrize("value", [True, 1.0, ["cpu"]])
def test_as_device_wrong_type(value: object) -> None:
    """Something that can't name a device is refused by its type; a bool is no index."""
    with pytest.raises(TypeError, match=type(value).__name__):
        as_device(value)  # type: ignore[arg-type]  # the wrong type is the point


def test_accelerators_lists_each_index(two_accelerators: TwoDevices) -> None:
    """Every accelerator is listed with its index."""
    assert accelerators() == (torch.device("xpu", 0), torch.device("xpu", 1))


def test_accelerators_without_any(no_accelerator: None) -> None:
    """A machine without an accelerator has an empty list."""
    assert accelerators() == ()


def test_device_of_takes_the_first() -> None:
    """The first tensor decides; no tensor gives None."""
    assert device_of([torch.empty(1, device="meta"), torch.empty(1)]) == torch.device("meta")
    assert device_of(iter(())) is None


@pytest.mark.parametrize(
    ("device", "overlaps", "apart"),
    [("cuda:0", True, True), ("xpu", True, True), ("mps", False, True), ("cpu", False, False)],
)
def test_kinds_of_device(device: str, overlaps: bool, apart: bool) -> None:
    """Copies to cuda and xpu overlap; mps, whose non-blocking copies are unsafe, and the host do not."""
    assert copies_asynchronously(torch.device(device)) is overlaps
    assert is_accelerator(torch.device(device)) is apart


def test_random_state_restores_the_draws() -> None:
    """After a restore the host's generator repeats what it drew after the capture."""
    state = RandomState.capture()
    first = torch.rand(3), torch.randperm(5)
    state.restore()
    second = torch.rand(3), torch.randperm(5)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_random_state_compares() -> None:
    """Two captures are equal until something is drawn, and again after a restore."""
    before = RandomState.capture()
    assert before == RandomState.capture()
    torch.rand(1)
    assert before != RandomState.capture()
    before.restore()
    assert before == RandomState.capture()
    assert before != SimpleNamespace(host=before.host)


def test_random_state_is_not_changed_by_later_draws(two_accelerators: TwoDevices) -> None:
    """A capture is a copy: drawing afterwards, on the host or an accelerator, does not change it."""
    device = torch.device("xpu", 1)
    state = RandomState.capture([device])
    torch.rand(1)
    two_accelerators.states[1].fill_(99)
    state.restore()
    assert two_accelerators.states[1].item() == 20
    assert state == RandomState.capture([device])


def test_random_state_covers_given_accelerators_only(two_accelerators: TwoDevices) -> None:
    """Only the accelerators given are captured; the host always is, whether given or not."""
    state = RandomState.capture([torch.device("cpu"), torch.device("xpu", 0), torch.device("meta")])
    assert list(state.accelerators) == [torch.device("xpu", 0)]
    two_accelerators.states[1].fill_(99)
    state.restore()
    assert two_accelerators.states[1].item() == 99
    assert state != RandomState.capture()


def test_random_state_fixes_the_current_device_at_capture(two_accelerators: TwoDevices) -> None:
    """A device without index means the one current at capture, also when another is current at restore."""
    two_accelerators.current_index = 1
    state = RandomState.capture([torch.device("xpu")])
    two_accelerators.states[1].fill_(99)
    two_accelerators.current_index = 0
    state.restore()
    assert [each.item() for each in two_accelerators.states] == [10, 20]


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cpu", MemoryKind.HOST),
        ("cuda:1", MemoryKind.CACHED),
        ("xpu", MemoryKind.CACHED),
        ("mps", MemoryKind.METAL),
        ("meta", MemoryKind.NONE),
    ],
)
def test_memory_kind(device: str, expected: MemoryKind) -> None:
    """Each kind of device has one who counts its memory."""
    assert memory_kind(torch.device(device)) is expected


def test_release_empties_caches_of_accelerators_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only a cycle of references holds is freed, and cached blocks of an accelerator are given back."""
    emptied: list[None] = []
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: emptied.append(None))
    cycle = SimpleNamespace(tensor=torch.ones(1))
    cycle.itself, tensor = cycle, weakref.ref(cycle.tensor)
    del cycle
    release(torch.device("cpu"))
    assert tensor() is None
    release(None)
    assert emptied == []
    release(torch.device("mps"))
    assert emptied == [None]


def test_device_name_falls_back_to_the_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device is called what its maker calls it, or by its kind where torch does not know."""
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda device: f"Arc {device.index}", raising=False)
    assert device_name(torch.device("xpu", 1)) == "Arc 1"
    assert device_name(torch.device("mps")) == "mps"


@pytest.mark.parametrize("device", [None, torch.device("cpu"), torch.device("meta")])
def test_autocast_state_is_the_host_s_where_a_device_has_none(device: torch.device | None) -> None:
    """A device without autocast of its own runs its function under that of the host."""
    assert autocast_state(device) == (False, torch.bfloat16)
    with torch.autocast("cpu", torch.float16):
        assert autocast_state(device) == (True, torch.float16)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_random_state_on_cuda() -> None:
    """The real generator of a CUDA device repeats its draws after a restore."""
    device = torch.device("cuda", 0)
    state = RandomState.capture([device])
    first = torch.rand(8, device=device)
    assert state != RandomState.capture([device])
    state.restore()
    assert torch.equal(first, torch.rand(8, device=device))
