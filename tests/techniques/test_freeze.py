"""Freeze: what is told by name is not trained, and all else is trained as before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

import anybatch
from anybatch.errors import TechniqueError
from anybatch.techniques import Freeze, Setting

from .training import assert_close, assert_equal, saved_bytes, squares


def data(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, 6).double(), torch.randn(rows, 3).double()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), nn.Linear(6, 6), nn.Linear(6, 3)
    ).double()


@pytest.mark.parametrize("ub_size", [None, 1, 3])
def test_two_steps_train_the_rest_as_before(ub_size: int | None) -> None:
    """Frozen weights stay, in spite of weight decay, and the others' gradients are those of plain PyTorch."""
    x, y = data(7)
    plain, ours = model(), model()
    results = []
    for net, technique in ((plain, None), (ours, Freeze("0"))):
        trained = [*net[1].parameters(), *net[2].parameters()]
        optimizer = torch.optim.AdamW(trained if technique is None else net.parameters(), lr=0.05)
        entered = Freeze("0").applied(Setting.of(net, optimizer))
        with entered:
            for _ in range(2):
                optimizer.zero_grad()
                if ub_size is None or technique is None:
                    squares(net, x, y).backward()
                else:
                    anybatch.apply(["x", "y"], ub_size=ub_size)(squares)(net, x=x, y=y)
                gradients = [each.grad.clone() for each in trained if each.grad is not None]
                optimizer.step()
        results.append([*gradients, *net.state_dict().values()])
    assert_close(*results)
    assert_equal(list(model()[0].state_dict().values()), list(ours[0].state_dict().values()))


def test_gradients_of_the_rest_are_those_without_freezing() -> None:
    """The gradient of what is trained does not depend on what is frozen."""
    x, y = data(5)
    net = model()
    expected = torch.autograd.grad(squares(net, x, y), [*net[1].parameters(), *net[2].parameters()])
    with Freeze(("0.*", "1.bias")).applied(Setting.of(net)):
        squares(net, x, y).backward()
    assert_equal(
        [expected[0], *expected[2:]], [each.grad for each in net.parameters() if each.grad is not None]
    )


def test_gradients_that_were_there_are_put_aside() -> None:
    """A gradient from before is not stepped with, and is there again afterwards."""
    net = model()
    squares(net, *data(5)).backward()
    kept = [each.grad for each in net[0].parameters()]
    before = [each.detach().clone() for each in net[0].parameters()]
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, weight_decay=0.5)
    with Freeze("0").applied(Setting.of(net, optimizer)):
        assert [each.grad for each in net[0].parameters()] == [None] * 4
        optimizer.step()
    assert_equal(before, list(net[0].parameters()))
    for gradient, each in zip(kept, net[0].parameters(), strict=True):
        assert each.grad is gradient


def test_what_was_frozen_already_stays_so() -> None:
    """Only what was trained before is trained again afterwards."""
    net = model()
    net[0][0].requires_grad_(False)
    with Freeze("0").applied(Setting.of(net)):
        pass
    assert [each.requires_grad for each in net.parameters()] == [False] * 2 + [True] * 6


def test_saved_bytes_and_flops() -> None:
    """Frozen layers at the beginning save nothing, and their gradients are not computed."""
    rows, (x, y) = 8, data(8)
    net = model()

    def flops() -> int:
        with FlopCounterMode(display=False) as counter:
            squares(net, x, y).backward()
        return counter.get_total_flops()

    _, plain = saved_bytes(net, lambda: net(x).sum())
    plain_flops = flops()
    with Freeze("0").applied(Setting.of(net)):
        _, ours = saved_bytes(net, lambda: net(x).sum())
        frozen_flops = flops()
    # The inputs of all layers but the first; of the last one, when frozen. What is a leaf is not counted: the
    # batch, and what frozen layers give, which the third layer saves.
    assert plain == 3 * rows * 6 * 8
    assert ours == rows * 6 * 8
    # Two layers' gradients of weights, and those of the inputs of the second and third layer.
    assert plain_flops - frozen_flops == 4 * 2 * rows * 6 * 6


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("0", {"0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias"}),
        ("0.*.weight", {"0.0.weight", "0.1.weight"}),
        (("*.bias", "0.1"), {"0.1.weight", "0.1.bias", "1.bias", "2.bias"}),
        ("[12]", {"1.weight", "1.bias", "2.weight", "2.bias"}),
    ],
)
def test_names_tell_modules_and_parameters(names: str, expected: set[str]) -> None:
    """A module's name tells all that is in it; `*` stands for one part of a name."""
    assert set(Freeze(names).parameters(model())) == expected


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("nothing.here", "Got 'nothing.here', which tells none. It has 0.0, 0.1, 1, 2"),
        ("*", "which is all that is trained"),
    ],
)
def test_names_that_freeze_nothing_or_everything_are_refused(names: str, message: str) -> None:
    """Neither an unknown name nor a run without training passes in silence (Rule 8)."""
    with pytest.raises(TechniqueError, match=message.replace(".", r"\.")):
        Freeze(names).check(Setting.of(model()))


def test_what_is_frozen_already_is_refused() -> None:
    """To freeze what is not trained would change nothing."""
    net = model()
    net[0].requires_grad_(False)
    with pytest.raises(TechniqueError, match="where nothing is trained"):
        Freeze("0").check(Setting.of(net))


def test_tied_weights_are_frozen_under_all_names_or_not_at_all() -> None:
    """A weight with two owners is not frozen behind the back of one of them."""
    net = nn.ModuleDict({"table": nn.Embedding(5, 4), "head": nn.Linear(4, 5), "other": nn.Linear(2, 2)})
    net["head"].weight = net["table"].weight
    with pytest.raises(TechniqueError, match=r"Got table\.weight, which is tied to head\.weight"):
        Freeze("table").check(Setting.of(net))
    assert set(Freeze(["table", "head"]).parameters(net)) == {"table.weight", "head.bias"}


def test_a_distributed_model_is_refused() -> None:
    """What waits for all gradients would wait for those of frozen parameters."""
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    with pytest.raises(TechniqueError, match="Freeze before wrapping"):
        Freeze("0").check(Setting(wrapped))
