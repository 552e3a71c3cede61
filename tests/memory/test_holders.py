"""Bytes of parameters, gradients and optimizer state, by arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.memory.holders import Holder, held_bytes

CPU = torch.device("cpu")
# Linear(10, 20) and Linear(20, 5) in float32.
PARAMETERS = (10 * 20 + 20 + 20 * 5 + 5) * 4


def trained(optimizer_of: Callable[..., Optimizer], **options: object) -> tuple[nn.Module, Optimizer]:
    """A net of two layers after one step."""
    net = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 5))
    optimizer = optimizer_of(net.parameters(), lr=0.1, **options)
    net(torch.ones(3, 10)).sum().backward()
    optimizer.step()
    return net, optimizer


def test_held_bytes_of_adam() -> None:
    """Adam holds two tensors per parameter, and a count of 4 bytes for each of the 4 parameters."""
    net, optimizer = trained(torch.optim.Adam)
    assert held_bytes([net], [optimizer], CPU) == {
        Holder.PARAMETERS: PARAMETERS,
        Holder.GRADIENTS: PARAMETERS,
        Holder.OPTIMIZER_STATE: 2 * PARAMETERS + 4 * 4,
    }


@pytest.mark.parametrize(("options", "copies"), [({}, 0), ({"momentum": 0.9}, 1)])
def test_held_bytes_of_sgd(options: dict[str, object], copies: int) -> None:
    """SGD holds nothing, or one tensor per parameter with momentum."""
    net, optimizer = trained(torch.optim.SGD, **options)
    assert held_bytes([net], [optimizer], CPU)[Holder.OPTIMIZER_STATE] == copies * PARAMETERS


def test_optimizer_alone_leads_to_its_parameters() -> None:
    """Without a module the parameters of the optimizer count; with both, each counts once."""
    net, optimizer = trained(torch.optim.Adam)
    assert held_bytes([], [optimizer], CPU) == held_bytes([net, net[0]], [optimizer], CPU)  # type: ignore[index]


def test_shared_storage_counts_once() -> None:
    """Tied weights and views of one storage hold its bytes once."""
    first, second = nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False)
    second.weight = first.weight
    view = nn.Linear(10, 5, bias=False)
    view.weight.data = first.weight.data[:5]
    assert held_bytes([first, second, view], [], CPU)[Holder.PARAMETERS] == 10 * 10 * 4


def test_buffers_count_as_parameters() -> None:
    """A BatchNorm of 8 features has 4 tensors of 8 floats, and a count of 8 bytes."""
    assert held_bytes([nn.BatchNorm1d(8)], [], CPU)[Holder.PARAMETERS] == 4 * 8 * 4 + 8


def test_sparse_gradients_count_what_they_store() -> None:
    """The gradient of 2 rows of 4 floats: 2 indices of 8 bytes, and 8 values of 4 bytes."""
    table = nn.Embedding(100, 4, sparse=True)
    table(torch.tensor([3, 7])).sum().backward()
    assert held_bytes([table], [], CPU)[Holder.GRADIENTS] == 2 * 8 + 2 * 4 * 4


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
def test_compressed_tensors_count_what_they_store(layout: torch.layout) -> None:
    """A 2 x 2 matrix with one value of 4 bytes: its index and 3 offsets, of 8 bytes each."""
    offsets, indices, values = torch.tensor([0, 1, 1]), torch.tensor([1]), torch.tensor([1.0])
    net = nn.Module()
    matrix = torch.sparse_compressed_tensor(
        offsets, indices, values, size=(2, 2), layout=layout, check_invariants=True
    )
    net.register_buffer("matrix", matrix)
    assert held_bytes([net], [], CPU)[Holder.PARAMETERS] == 4 + 8 + 3 * 8


def test_other_devices_do_not_count() -> None:
    """What lies on another device is not held on this one."""
    net = nn.Linear(10, 20, device="meta")
    assert held_bytes([net], [], CPU)[Holder.PARAMETERS] == 0
    assert held_bytes([net], [], torch.device("meta"))[Holder.PARAMETERS] == 220 * 4
