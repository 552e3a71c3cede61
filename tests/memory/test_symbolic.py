"""Runs on fakes: what they see, and that nothing of the caller's is different afterwards."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from anybatch.memory.symbolic import Fakes, Untraceable, run_symbolically


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))


def test_nothing_of_a_module_changes() -> None:
    """Values, objects, gradients, counters, modes and attributes are those of before."""
    net = _net()
    net(torch.randn(4, 6)).sum().backward()
    net[2].eval()
    values = copy.deepcopy(net.state_dict())
    objects = {name: id(each) for name, each in (*net.named_parameters(), *net.named_buffers())}
    gradients = {name: (id(each.grad), each.grad.clone()) for name, each in net.named_parameters()}
    x = torch.randn(3, 6)

    def run(fakes: Fakes) -> None:
        assert all(each.grad is None for each in net.parameters())
        net.train()
        net.invented = torch.ones(3)
        net(fakes.fake(x)).sum().backward()

    assert run_symbolically(run, [net]).trace.peak_bytes > 0
    assert {name: id(each) for name, each in (*net.named_parameters(), *net.named_buffers())} == objects
    assert all(torch.equal(value, values[name]) for name, value in net.state_dict().items())
    for name, parameter in net.named_parameters():
        assert id(parameter.grad) == gradients[name][0]
        assert torch.equal(parameter.grad, gradients[name][1])
    assert not net[2].training
    assert net[0].training
    assert not hasattr(net, "invented")


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_nothing_changes_when_the_step_fails(error: type[BaseException]) -> None:
    """An error in the middle of a step leaves the module as it was, too."""
    net = _net()
    before = [id(each) for each in (*net.parameters(), *net.buffers())]

    def run(fakes: Fakes) -> None:
        net(fakes.fake(torch.randn(3, 6)))
        raise error

    with pytest.raises(Untraceable if issubclass(error, Exception) else error):
        run_symbolically(run, [net])
    assert [id(each) for each in (*net.parameters(), *net.buffers())] == before
    assert int(net[1].num_batches_tracked) == 0
    assert type(torch.ones(2) + 1) is Tensor


def test_random_state_of_all_three_kinds_is_kept() -> None:
    """torch's, Python's and numpy's random numbers go on as if the run had not been."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def run(fakes: Fakes) -> None:
        F.dropout(torch.rand(5))
        torch.manual_seed(random.randrange(100) + np.random.randint(100))

    run_symbolically(run)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2][1].tolist()  # type: ignore[union-attr, index]


def test_tensors_of_a_closure_do_not_change() -> None:
    """A counter that only real tensors feed, and leaves with and without a gradient, are left alone."""
    counter, leaf, other = (
        torch.zeros(2),
        torch.ones(3, requires_grad=True),
        torch.ones(3, requires_grad=True),
    )
    other.grad = gradient = torch.full((3,), 7.0)

    def run(fakes: Fakes) -> None:
        counter.add_(1)
        counter.add_(fakes.fake(torch.ones(2)))
        (leaf * other * fakes.fake(torch.ones(3))).sum().backward()
        assert leaf.grad is not None

    run_symbolically(run)
    assert counter.tolist() == [0, 0]
    assert leaf.grad is None
    assert other.grad is gradient
    assert gradient.tolist() == [7, 7, 7]


def test_graph_of_before_is_not_used_up() -> None:
    """A tensor that hangs on a graph of the caller's is refused: backward would free that graph."""
    weight = torch.ones(3, requires_grad=True)
    hidden = weight.exp()
    with pytest.raises(Untraceable, match="graph from before"):
        run_symbolically(lambda fakes: (hidden * fakes.fake(torch.ones(3))).sum().backward())
    hidden.sum().backward()
    assert weight.grad is not None


def test_leaf_with_hooks_is_refused() -> None:
    """A hook of a leaf (a step in backward, say) would see fakes, so that the run is refused."""
    weight = torch.ones(3, requires_grad=True)
    seen: list[Tensor] = []
    weight.register_post_accumulate_grad_hook(seen.append)
    with pytest.raises(Untraceable, match="hooks"):
        run_symbolically(lambda fakes: (weight * fakes.fake(torch.ones(3))).sum().backward())
    assert seen == []
    assert weight.grad is None


def test_tensors_in_attributes_are_faked() -> None:
    """Tensors and lists of tensors in attributes of a module are fakes, and real again afterwards."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain, self.listed, self.seen = torch.zeros(2), [torch.zeros(2)], [0]

        def forward(self, x: Tensor) -> Tensor:
            self.plain.add_(1)
            self.listed[0].add_(1)
            self.listed.append(x)
            self.plain = x
            self.seen.append(1)
            return x

    odd = Odd()
    plain = odd.plain
    result = run_symbolically(lambda fakes: odd(fakes.fake(torch.ones(2))), [odd])
    assert result.kept == ()
    assert odd.plain is plain
    assert plain.tolist() == [0, 0]
    assert [each.tolist() for each in odd.listed] == [[0, 0]]
    assert odd.seen == [0]


def test_fakes_that_are_kept_are_told() -> None:
    """Fakes that the step puts where nobody takes them out again are named."""
    attic: list[Tensor] = []
    result = run_symbolically(lambda fakes: attic.append(fakes.fake(torch.ones(5)) * 2))
    assert result.kept == ("20 bytes, made by aten::mul.Tensor",)
    attic.clear()
    assert run_symbolically(lambda fakes: fakes.fake(torch.ones(5)) * 2).kept == ()


def test_fakes_in_a_cycle_are_not_kept() -> None:
    """What only a cycle of references holds is collected, and not taken for state of the program."""

    def step(fakes: Fakes) -> None:
        cycle: list[object] = [fakes.fake(torch.ones(5))]
        cycle.append(cycle)

    assert run_symbolically(step).kept == ()


def test_kept_parameters_are_told() -> None:
    """A fake of a parameter that the step keeps is named as well."""
    net, attic = nn.Linear(2, 3), []
    result = run_symbolically(lambda fakes: attic.append(net.weight), [net])
    assert result.kept == ("24 bytes, made by begin",)
    attic.clear()


def _packed(fakes: Fakes) -> None:
    x = fakes.fake(torch.ones(3, 5, 2))
    pack_padded_sequence(x, fakes.fake(torch.tensor([5, 4, 2])), batch_first=True)


@pytest.mark.parametrize(
    ("step", "operator"),
    [
        (lambda fakes: fakes.fake(torch.ones(1)).item(), "aten::_local_scalar_dense"),
        (lambda fakes: bool(fakes.fake(torch.ones(1)) > 0), "aten::_local_scalar_dense"),
        (lambda fakes: fakes.fake(torch.ones(4))[fakes.fake(torch.ones(4)) > 0], "aten::nonzero"),
        (lambda fakes: fakes.fake(torch.ones(4)).numpy(), None),
        (lambda fakes: fakes.fake(torch.ones(4)).tolist(), None),
        (lambda fakes: torch.unique(fakes.fake(torch.ones(4))), "aten::_unique2"),
        (_packed, None),
    ],
    ids=["item", "bool", "mask", "numpy", "tolist", "unique", "packed"],
)
def test_what_needs_values_is_refused(step: Callable[[Fakes], object], operator: str | None) -> None:
    """A step that looks at values raises one error, which names the operator where there is one."""
    with pytest.raises(Untraceable) as caught:
        run_symbolically(step)
    if operator is not None:
        assert caught.value.operator is not None
        assert caught.value.operator.startswith(operator)


def test_refusal_says_where_and_keeps_no_fakes() -> None:
    """The reason names the caller's line; the error holds no frames and no fakes."""

    def step(fakes: Fakes) -> None:
        raise ValueError("only on Mondays")

    with pytest.raises(
        Untraceable, match=r"ValueError: only on Mondays \(.*test_symbolic\.py:\d+\)"
    ) as caught:
        run_symbolically(step)
    assert caught.value.__cause__ is None


def test_inputs_count_like_copies() -> None:
    """A fake input has the bytes of its piece, not of the mini-batch, and dies when it is let go."""
    batch = torch.zeros(1000, 4)
    trace = run_symbolically(lambda fakes: fakes.fake(batch[:3])).trace
    assert (trace.begin_bytes, trace.peak_bytes, trace.end_bytes) == (0, 48, 48)
    assert run_symbolically(lambda fakes: fakes.fake(batch[:3], counts=False)).trace.peak_bytes == 0

    def lets_go(fakes: Fakes) -> None:
        fakes.fake(batch[:3])
        fakes.fake(batch[:5])

    assert run_symbolically(lets_go).trace.peak_bytes == 80


def test_views_of_one_storage_stay_views() -> None:
    """Inputs that share a storage share one as fakes, as large as what they see; traits stay."""
    base = torch.arange(100.0)
    inputs = {
        "a": base[10:20],
        "b": [base[15:25].view(5, 2)],
        "c": torch.ones(3, requires_grad=True),
        "d": "text",
    }

    def run(fakes: Fakes) -> object:
        made = fakes.fake(inputs)
        a, b, c = made["a"], made["b"][0], made["c"]
        assert a.untyped_storage()._cdata == b.untyped_storage()._cdata  # type: ignore[union-attr]
        assert b.stride() == (2, 1)  # type: ignore[union-attr]
        assert b.storage_offset() - a.storage_offset() == 5  # type: ignore[union-attr]
        assert c.requires_grad  # type: ignore[union-attr]
        assert c.is_leaf  # type: ignore[union-attr]
        assert made["d"] == "text"
        return made

    assert run_symbolically(run).trace.end_bytes == 15 * 4 + 3 * 4


def test_ties_stay_tied() -> None:
    """A weight that two modules share is one fake, with one gradient."""
    net = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    net[1].weight = net[0].weight

    def run(fakes: Fakes) -> None:
        assert net[0].weight is net[1].weight
        assert isinstance(net[0].weight, nn.Parameter)
        net[1](net[0](fakes.fake(torch.ones(2, 4)))).sum().backward()

    assert run_symbolically(run, [net]).trace.holders(0) == {}
    with_modules = run_symbolically(run, [net], counts_modules=True).trace
    assert with_modules.begin_bytes == 64
    assert with_modules.end_bytes == 64 + 64


def test_surrounding_autocast_keeps_no_fakes() -> None:
    """Casts of fakes do not stay in the cache of an autocast that surrounds the run."""
    net = nn.Linear(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        result = run_symbolically(lambda fakes: net(fakes.fake(torch.ones(2, 4))).sum().backward(), [net])
        assert result.kept == ()
        net(torch.ones(2, 4)).sum().backward()
    assert type(net.weight.grad) is Tensor


def test_hidden_workspace_is_named() -> None:
    """A fused LSTM is reported, as its fake shows no workspace; a GRU is made of visible operators."""

    def hidden(kind: type[nn.LSTM] | type[nn.GRU]) -> tuple[str, ...]:
        net = kind(4, 5, batch_first=True)
        x = torch.ones(3, 7, 4)
        return run_symbolically(lambda fakes: net(fakes.fake(x))[0].sum().backward(), [net]).hidden

    assert [each.split(": ")[0] for each in hidden(nn.LSTM)] == [
        "aten::mkldnn_rnn_layer",
        "aten::mkldnn_rnn_layer_backward",
    ]
    assert hidden(nn.GRU) == ()


def test_compiled_module_runs_as_it_is_written() -> None:
    """A compiled module gives the trace of the module itself, and nothing is compiled."""
    net, x = _net(), torch.ones(3, 6)

    def never(graph: object, inputs: object) -> None:
        raise AssertionError("it was compiled")

    compiled = torch.compile(net, backend=never)
    traces = [
        run_symbolically(lambda fakes, each=each: each(fakes.fake(x)).sum().backward(), [each]).trace
        for each in (net, compiled)
    ]
    assert traces[0].operators == traces[1].operators
    assert traces[0].live_bytes.tolist() == traces[1].live_bytes.tolist()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_saved(mode: Callable[[], AbstractContextManager[None]]) -> None:
    """Evaluation keeps no activations: at the end there are only the outputs."""
    net, x = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1)), torch.ones(3, 6)
    with mode():
        trace = run_symbolically(lambda fakes: net(fakes.fake(x)), [net]).trace
    # The interpreter's frame holds the input until the step is over.
    assert trace.peak_bytes == 4 * (3 * 6 + 3 * 8 + 3)
    assert trace.end_bytes == 4 * 3


def test_garbage_collector_is_as_before() -> None:
    """The collector that rests during a run is on again, or off where it was off."""
    seen: list[bool] = []
    assert gc.isenabled()
    run_symbolically(lambda fakes: seen.append(gc.isenabled()))
    assert seen == [False]
    assert gc.isenabled()
    gc.disable()
    try:
        run_symbolically(lambda fakes: None)
        assert not gc.isenabled()
    finally:
        gc.enable()
