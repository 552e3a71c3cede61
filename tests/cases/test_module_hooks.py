"""Hooks of the user's own on modules: once per piece, and exact or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch.errors import InexactError

from .whole import assert_whole

CUTS = [(10, 4), (9, 1), (12, 3), (10, 9)]
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "counted": lambda z, label: F.cross_entropy(z, label),
    "sum": lambda z, label: F.cross_entropy(z, label, reduction="sum"),
    "two denominators": lambda z, label: F.cross_entropy(z, label) + z.square().mean(),
}


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))


def _batch(rows: int) -> dict[str, Tensor]:
    label = torch.randint(4, (rows,))
    label[1::3] = -100
    return {"x": torch.randn(rows, 3), "label": label}


def test_forward_hooks_run_once_per_piece_in_row_order() -> None:
    """After the first call, which looks at the loss, forward hooks see each row once."""
    net, batch = _net(), _batch(10)
    call = anybatch.apply(["x", "label"], 4)(lambda x, label: F.cross_entropy(net(x), label))
    call(**batch)
    seen: list[Tensor] = []
    net[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    net[0].register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    call(**batch)
    assert [len(one) for one in seen] == [4, 4, 3, 3, 3, 3]
    assert torch.equal(torch.cat(seen[::2]), batch["x"])
    torch.testing.assert_close(torch.cat(seen[1::2]), net[0](batch["x"]).detach())


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_backward_hooks_see_the_gradients_of_the_whole(loss: str, rows: int, ub_size: int) -> None:
    """What a backward hook sees of each row is what it sees of it in the whole mini-batch."""
    net, batch = _net(), _batch(rows)
    seen: list[tuple[Tensor, Tensor]] = []
    net[2].register_full_backward_hook(lambda module, into, out: seen.append((into[0], out[0])))
    LOSSES[loss](net(batch["x"]), batch["label"]).backward()
    ((into, out),) = seen
    call = anybatch.apply(["x", "label"], ub_size)(lambda x, label: LOSSES[loss](net(x), label))
    call(**batch)
    seen.clear()
    call(**batch)
    assert len(seen) == -(-rows // ub_size)
    torch.testing.assert_close(torch.cat([one for one, _ in seen]), into, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat([one for _, one in seen]), out, rtol=1e-10, atol=1e-12)


def _scaled_outputs(net: nn.Sequential) -> Any:
    return net[0].register_forward_hook(lambda module, inputs, output: 2 * output)


def _replaced_inputs(net: nn.Sequential) -> Any:
    return net[1].register_forward_pre_hook(lambda module, inputs: (inputs[0].clamp(-1, 1),))


def _scaled_gradients(net: nn.Sequential) -> Any:
    return net[2].register_full_backward_hook(lambda module, into, out: (3 * into[0],))


def _clamped_gradients(net: nn.Sequential) -> Any:
    return net[2].register_full_backward_hook(lambda module, into, out: (into[0].clamp(-0.01, 0.01),))


def _clamped_gradients_before(net: nn.Sequential) -> Any:
    return net[1].register_full_backward_pre_hook(lambda module, out: (out[0].clamp(-0.01, 0.01),))


def _rows_of_unit_gradient(net: nn.Sequential) -> Any:
    return net[2].register_full_backward_hook(lambda module, into, out: (F.normalize(into[0], dim=1),))


PER_ROW = [
    *(_scaled_outputs, _replaced_inputs, _scaled_gradients),
    *(_clamped_gradients, _clamped_gradients_before, _rows_of_unit_gradient),
]


@pytest.mark.parametrize("install", PER_ROW, ids=lambda install: install.__name__.strip("_"))
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_hook_that_changes_rows_one_by_one_is_exact(
    install: Callable[[nn.Sequential], Any], loss: str, rows: int, ub_size: int
) -> None:
    """A hook on a module that treats rows by themselves gives the gradient of the whole mini-batch."""
    net = _net()
    install(net)
    assert_whole(lambda x, label: LOSSES[loss](net(x), label), _batch(rows), net, ub_size)


def _centred_outputs(net: nn.Sequential) -> Any:
    return net[0].register_forward_hook(lambda module, inputs, output: output - output.mean(0))


def _normed_gradients(net: nn.Sequential) -> Any:
    return net[2].register_full_backward_hook(lambda module, into, out: (into[0] / into[0].norm(),))


@pytest.mark.parametrize("install", [_centred_outputs, _normed_gradients])
@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_hook_that_looks_across_rows_is_refused(
    install: Callable[[nn.Sequential], Any], rows: int, ub_size: int
) -> None:
    """A hook that mixes rows, forward or backward, gives another result in pieces: refused."""
    net = _net()
    install(net)
    call = anybatch.apply(["x", "label"], ub_size)(lambda x, label: F.cross_entropy(net(x), label))
    with pytest.raises(InexactError):
        call(**_batch(rows))
    assert all(parameter.grad is None for parameter in net.parameters())
