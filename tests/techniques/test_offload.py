"""Offload: the same gradient from values that were elsewhere in between."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from anybatch.errors import TechniqueError
from anybatch.techniques import Checkpointing, Offload, Setting, host_memory, scratch_file
from anybatch.techniques.host_memory import HostMemory

from .catalogue import network
from .training import assert_close, assert_equal, squares, two_steps

MIB = 2**20


@pytest.fixture(autouse=True)
def _disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every folder lie on a disk, wherever the tests' own temporary folder is."""
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [])


@pytest.fixture(name="written")
def _written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of everything that is written."""
    sizes: list[int] = []
    put = scratch_file.ScratchFile.put

    def counted(self: scratch_file.ScratchFile, values: Tensor) -> Any:
        sizes.append(values.numel() * values.element_size())
        return put(self, values)

    monkeypatch.setattr(scratch_file.ScratchFile, "put", counted)
    return sizes


def data(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, 6).double() + 1, torch.randn(rows, 3).double()


def offloaded(technique: Offload, loss: Any = squares) -> Any:
    """The loss with what its forward saves offloaded."""

    def run(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with technique.forward(Setting.of(model)):
            return loss(model, x, y)

    return run


def tanhs(depth: int = 3) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(6, 6), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(6, 3)).double()


def test_two_steps_are_bit_for_bit_those_without(tmp_path: Path, written: list[int]) -> None:
    """With BatchNorm and dropout, gradients, weights and statistics are the same."""
    x, y = data(7)
    plain, model = network(), network()
    torch.manual_seed(5)
    gradients, end = two_steps(plain, x, y)
    torch.manual_seed(5)
    ours, our_end = two_steps(model, x, y, loss=offloaded(Offload(1, tmp_path)))
    assert_equal(gradients, ours)
    assert_equal(end, our_end)
    assert written
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("ub_size", [1, 3, 7])
def test_pieces_that_are_offloaded_give_the_whole_gradient(
    ub_size: int, tmp_path: Path, written: list[int]
) -> None:
    """Uneven micro-batches through `apply` add up to the gradient of plain PyTorch on the mini-batch."""
    x, y = data(7)
    gradients, end = two_steps(tanhs(), x, y)
    ours, our_end = two_steps(tanhs(), x, y, ub_size=ub_size, loss=offloaded(Offload(1, tmp_path)))
    assert_close(gradients, ours)
    assert_close(end, our_end)
    assert written


def test_each_value_is_written_once(tmp_path: Path, written: list[int]) -> None:
    """What two operations save is written once, and nothing but what is saved."""
    rows, (x, y) = 512, data(512)
    model = tanhs(3)
    with Offload(4096, tmp_path).forward(Setting.of(model)):
        loss = squares(model, x, y)
    # The batch, three outputs of tanh, each saved by tanh and by the next layer, and the difference.
    assert sorted(written) == sorted([rows * 6 * 8] * 4 + [rows * 3 * 8])
    loss.backward()


def test_values_die_with_the_forward_and_files_with_backward(tmp_path: Path) -> None:
    """After forward nothing large is in memory; after backward no file is open."""
    seen: list[StorageWeakRef] = []
    model = tanhs(3)
    for layer in model:
        if isinstance(layer, nn.Tanh):
            layer.register_forward_hook(lambda m, i, o: seen.append(StorageWeakRef(o.untyped_storage())))
    open_before = psutil.Process().num_fds()
    with Offload(1, tmp_path).forward(Setting.of(model)):
        loss = squares(model, *data(64))
    assert [each.expired() for each in seen] == [True] * 3
    assert psutil.Process().num_fds() == open_before + 1
    loss.backward()
    del loss
    assert psutil.Process().num_fds() == open_before


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's list of mappings")
def test_the_files_memory_is_not_the_process_own(tmp_path: Path) -> None:
    """Values that came back lie in a shared mapping, which no limit on a process's data counts."""
    model = tanhs(1)
    kept: list[Tensor] = []
    with Offload(1, tmp_path).forward(Setting.of(model)):
        loss = model(data(4096)[0]).sum()
    node = loss.grad_fn.next_functions[0][0]
    kept.append(node._saved_mat1)
    address = kept[0].data_ptr()
    assert _mapping_of(address).split()[1] == "rw-s"


def _mapping_of(address: int) -> str:
    lines = Path("/proc/self/maps").read_text().splitlines()
    for line in lines:
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return line
    raise AssertionError("no mapping holds it")


def test_tied_weights_stay_tied(tmp_path: Path, written: list[int]) -> None:
    """A weight with two owners stays one parameter with one gradient, and is never moved."""

    def fresh() -> nn.Module:
        torch.manual_seed(1)
        table, head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
        head.weight = table.weight
        return nn.Sequential(table, head).double()

    ids, labels = torch.randint(0, 50, (6, 5)), torch.randint(0, 50, (6, 5))

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())

    gradients, end = two_steps(fresh(), ids, labels, loss=loss)
    model = fresh()
    weight = model[0].weight
    ours, our_end = two_steps(model, ids, labels, loss=offloaded(Offload(1, tmp_path), loss))
    assert_equal(gradients, ours)
    assert_equal(end, our_end)
    assert model[0].weight is weight
    assert model[1].weight is weight
    assert len(list(model.parameters())) == 1
    assert 50 * 8 * 8 not in written


def test_a_value_written_to_between_two_uses_is_saved_as_it_was(tmp_path: Path) -> None:
    """Each use gets back what it saw."""
    x = torch.ones(5, 4, dtype=torch.float64, requires_grad=True)
    factor = torch.randn(5, 4, dtype=torch.float64)
    expected = factor + (factor + 1)
    with Offload(1, tmp_path).forward(Setting(nn.Identity())):
        loss = (x * factor).sum()
        loss = loss + (x * factor.add_(1)).sum()
    (got,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_memory_that_is_used_again_is_saved_again(tmp_path: Path, written: list[int]) -> None:
    """What has left gives its memory to others, which are saved as themselves."""
    x = torch.ones(5, 4, dtype=torch.float64, requires_grad=True)
    with Offload(1, tmp_path).forward(Setting(nn.Identity())):
        losses = [(x * torch.full((5, 4), float(at), dtype=torch.float64)).sum() for at in range(20)]
    (got,) = torch.autograd.grad(sum(losses), x)
    assert torch.equal(got, torch.full_like(x, sum(range(20))))
    assert len(written) == 20


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.expand(4, *x.shape),
        lambda x: x.transpose(0, 1),
        lambda x: x[:, ::2],
        lambda x: x[1:].chunk(2, dim=1)[1],
        lambda x: x.sum(),
        lambda x: x.to(torch.complex128).conj(),
        lambda x: x[:0],
        lambda x: x.bfloat16(),
    ],
    ids=["expanded", "permuted", "strided", "chunk", "scalar", "conjugate", "empty", "bfloat16"],
)
def test_every_kind_of_view_comes_back(make: Any, tmp_path: Path) -> None:
    """Shape, dtype and values are those that were saved."""
    x = torch.randn(6, 8, dtype=torch.float64)
    first, second = (x.clone().requires_grad_() for _ in range(2))

    def run(leaf: Tensor) -> Tensor:
        value = make(leaf * 1.5)
        return (value * value * value).abs().sum()

    run(first).backward()
    with Offload(1, tmp_path).forward(Setting(nn.Identity())):
        loss = run(second)
    loss.backward()
    torch.testing.assert_close(second.grad, first.grad, rtol=0, atol=0)


def test_slices_of_a_mini_batch_stay(tmp_path: Path, written: list[int]) -> None:
    """A piece of the caller's batch is in memory anyway, and is not written."""
    x, y = data(64)
    model = nn.Linear(6, 3).double()
    with Offload(1024, tmp_path).forward(Setting.of(model)):
        squares(model, x[:32], y[:32]).backward()
    assert written == []


def test_inputs_of_checkpoints_leave_too(tmp_path: Path, written: list[int]) -> None:
    """With checkpointing, what blocks keep of forward is their inputs, and these are written."""
    x, y = data(7)
    plain, model = network(), network()
    torch.manual_seed(5)
    gradients, end = two_steps(plain, x, y)
    torch.manual_seed(5)
    entered = Checkpointing("0.*").applied(Setting.of(model))
    ours, our_end = two_steps(model, x, y, entered, loss=offloaded(Offload(1, tmp_path)))
    assert_equal(gradients, ours)
    assert_equal(end, our_end)
    assert written.count(7 * 6 * 8) >= 3


def test_an_automatic_size_with_offload(tmp_path: Path) -> None:
    """The size of pieces can be found, and fakes are not written to a disk."""
    import anybatch

    x, y = data(9)
    model = tanhs()
    expected = torch.autograd.grad(squares(model, x, y), list(model.parameters()))
    anybatch.apply(["x", "y"], ub_size="auto", device="cpu")(offloaded(Offload(1, tmp_path)))(model, x=x, y=y)
    assert_close(list(expected), [each.grad for each in model.parameters() if each.grad is not None])


def test_on_fakes_values_leave_too_and_nothing_is_written(tmp_path: Path, written: list[int]) -> None:
    """A run that foresees memory sees what a real one will use: values die with forward."""
    model, mode = tanhs(), FakeTensorMode(allow_non_fake_inputs=True)
    seen: list[StorageWeakRef] = []
    for layer in model:
        if isinstance(layer, nn.Tanh):
            layer.register_forward_hook(lambda m, i, o: seen.append(StorageWeakRef(o.untyped_storage())))
    with mode, Offload(1, tmp_path).forward(Setting.of(model)):
        x = torch.empty(64, 6, dtype=torch.float64)
        loss = model(x).sum()
    assert [each.expired() for each in seen] == [True] * 3
    assert written == []
    with mode:
        gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert [each.shape for each in gradients] == [each.shape for each in model.parameters()]


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
def test_a_folder_in_memory_is_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that lies in memory frees none (Rule 8)."""
    root = SimpleNamespace(mountpoint="/", fstype="ext4")
    there = SimpleNamespace(mountpoint=str(tmp_path.resolve()), fstype=kind)
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [there, root])
    with pytest.raises(TechniqueError, match=f"which is a {kind} and lies in memory"):
        Offload(folder=tmp_path / ".").check(Setting.of(tanhs()))


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """Before anything runs, a missing folder is said."""
    with pytest.raises(TechniqueError, match=r"must be there and writable.*No such file"):
        Offload(folder=tmp_path / "none").check(Setting.of(tanhs()))


def test_a_full_disk_is_said_before_a_run_and_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free space is checked at the beginning and before each tensor, and nothing is left behind."""
    model = tanhs()
    free = SimpleNamespace(free=MIB // 2)
    monkeypatch.setattr(psutil, "disk_usage", lambda path: free)
    technique = Offload(1000, tmp_path)
    with pytest.raises(TechniqueError, match=r"Got 0\.5 MiB free .* tensors of 1\.0 MiB"):
        Offload(folder=tmp_path).check(Setting.of(model))
    technique.check(Setting.of(model))
    with technique.forward(Setting.of(model)):
        squares(model, *data(32))
        with pytest.raises(TechniqueError, match=r"Got 0\.5 MiB free there, and a tensor of 1\.4 MiB"):
            squares(model, *data(30000))
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the disk's in the middle reads like the others, and names its cause."""

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", fail)
    model = tanhs()
    with (
        Offload(1, tmp_path).forward(Setting.of(model)),
        pytest.raises(TechniqueError, match="No space left on device after") as caught,
    ):
        squares(model, *data(4))
    assert isinstance(caught.value.__cause__, OSError)


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    """A process that dies between forward and backward leaves no file."""
    program = (
        "import os, sys, torch\n"
        "from anybatch.techniques import Offload, Setting\n"
        "x = torch.randn(64, 64, requires_grad=True)\n"
        "with Offload(1, sys.argv[1]).forward(Setting(torch.nn.Identity())): loss = x.exp().tanh().sum()\n"
        "print('written', flush=True); os.kill(os.getpid(), 9)\n"
    )
    result = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert result.stdout == "written\n"
    assert result.returncode == -9
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("device", "reason"),
    [("mps", "shares its memory with the host"), ("meta", "holds no values to move")],
)
def test_where_it_can_not_help_it_says_so(device: str, reason: str) -> None:
    """A device whose memory is the host's, or that has none, is refused (Rule 8)."""
    with pytest.raises(TechniqueError, match=reason):
        Offload().check(Setting(nn.Identity(), None, torch.device(device)))


@pytest.fixture(name="streams")
def _streams(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Streams of a device that is the host in truth; everything that is called on them is recorded."""
    found = Mock()
    found.stack = [found.computing]
    found.computing.is_capturing.return_value = False
    found.computing.device = torch.device("cpu")

    @contextmanager
    def entered(self: Any) -> Any:
        found.stack.append(found.copying)
        yield
        found.stack.pop()

    found.copying.__enter__ = Mock(side_effect=lambda: found.stack.append(found.copying))
    monkeypatch.setattr(host_memory.CopyStream, "entered", entered)
    monkeypatch.setattr("anybatch.memory.copies.copies_asynchronously", lambda device: True)
    monkeypatch.setattr(host_memory, "copies_asynchronously", lambda device: True)
    monkeypatch.setattr(torch, "Stream", lambda device: found.copying)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: found.stack[-1])
    monkeypatch.setattr(host_memory, "page_locked", lambda values: torch.empty_like(values))
    monkeypatch.setattr(Tensor, "is_pinned", lambda self: True)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: found.record(id(stream)))
    monkeypatch.setattr(host_memory.CopyStream, "send", lambda self, source: source.clone())
    return found


def test_a_copy_out_waits_for_the_values_and_holds_their_memory(streams: Mock) -> None:
    """The copying stream waits for what was computed, and memory is not given away before the copy."""
    values = torch.arange(6.0)
    HostMemory(torch.device("cpu")).put(values)
    computed = streams.computing.record_event.return_value
    assert streams.copying.mock_calls[0] == call.wait_event(computed)
    assert streams.record.mock_calls == [call(id(streams.copying))]


def test_values_come_back_ahead_of_time_in_reverse_order(
    streams: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When backward asks for one value, the one before it is sent too, and no value is sent twice."""
    sent: list[float] = []

    def send(self: Any, source: Tensor) -> Tensor:
        sent.append(float(source[0]))
        return source.clone()

    monkeypatch.setattr(host_memory.CopyStream, "send", send)
    keeper = HostMemory(torch.device("cpu"))
    places = [keeper.put(torch.full((2,), float(at))) for at in range(4)]
    del places[1]
    assert sent == []
    assert float(places[2].get()[0]) == 3.0
    assert sent == [3.0, 2.0]
    assert float(places[1].get()[0]) == 2.0
    assert sent == [3.0, 2.0, 0.0]  # nobody asks for 1 any more
    assert float(places[0].get()[0]) == 0.0
    assert sent == [3.0, 2.0, 0.0]
    assert float(places[0].get()[0]) == 0.0
    assert sent == [3.0, 2.0, 0.0, 0.0]


def test_the_computing_stream_waits_for_what_comes_back(streams: Mock) -> None:
    """Before backward reads a value it waits for the copy, and the memory is recorded on its stream."""
    place = HostMemory(torch.device("cpu")).put(torch.arange(3.0))
    streams.reset_mock()
    place.get()
    mark = streams.copying.record_event.return_value
    assert call.wait_event(mark) in streams.computing.mock_calls
    assert streams.record.mock_calls == [call(id(streams.computing))]


def test_gradients_through_the_hosts_memory(streams: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device with streams the gradient is that of plain PyTorch, bit for bit."""
    monkeypatch.setattr("anybatch.techniques.offload.is_accelerator", lambda device: True)
    x, y = data(7)
    plain, model = network(), network()
    torch.manual_seed(5)
    gradients, end = two_steps(plain, x, y)
    torch.manual_seed(5)
    ours, our_end = two_steps(model, x, y, loss=offloaded(Offload(1)))
    assert_equal(gradients, ours)
    assert_equal(end, our_end)


def test_a_captured_graph_is_refused(streams: Mock) -> None:
    """Copies beside the work can't be captured with it."""
    streams.computing.is_capturing.return_value = True
    with pytest.raises(TechniqueError, match="captured into a graph"):
        HostMemory(torch.device("cpu"))


def test_a_device_without_second_streams_copies_and_waits() -> None:
    """Where copies can't run beside the work they are made at once."""
    place = HostMemory(torch.device("cpu")).put(torch.arange(3.0))
    assert torch.equal(place.get(), torch.arange(3.0))


def test_hooks_end_with_the_forward_also_when_it_fails(tmp_path: Path, written: list[int]) -> None:
    """What is saved after a forward, or after a failed one, stays in memory."""
    model = tanhs()
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(KeyError))
        stack.enter_context(Offload(1, tmp_path).forward(Setting.of(model)))
        raise KeyError
    squares(model, *data(4)).backward()
    assert written == []
