"""Checkpointing: the same gradient from blocks that run again."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.flop_counter import FlopCounterMode

from anybatch.errors import TechniqueError
from anybatch.techniques import Checkpointing, Setting

from .catalogue import network
from .training import assert_close, assert_equal, saved_bytes, squares, two_steps


def data(rows: int, columns: int = 6, out: int = 3) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, columns).double() + 1, torch.randn(rows, out).double()


def stack(block: Callable[[], nn.Module], depth: int = 3, width: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(*(block() for _ in range(depth))), nn.Linear(width, 3)).double()


@pytest.mark.parametrize("modules", ["auto", "0.*", nn.BatchNorm1d, ("0.1", "0.2", nn.Dropout), "0"])
@pytest.mark.parametrize("every", [1, 2])
def test_two_steps_are_bit_for_bit_those_without(modules: object, every: int) -> None:
    """With BatchNorm and dropout in the blocks, gradients, weights and statistics are the same."""
    x, y = data(7)
    plain, model = network(), network()
    torch.manual_seed(5)
    gradients, end = two_steps(plain, x, y)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    technique = Checkpointing(modules, every=every)  # type: ignore[arg-type]
    ours, our_end = two_steps(model, x, y, technique.applied(Setting.of(model)))
    assert_equal(gradients, ours)
    assert_equal(end, our_end)
    assert torch.equal(after, torch.get_rng_state())


@pytest.mark.parametrize("ub_size", [1, 3, 4, 7])
def test_pieces_with_blocks_that_run_again_give_the_whole_gradient(ub_size: int) -> None:
    """Uneven micro-batches through `apply` add up to the gradient of plain PyTorch on the mini-batch."""
    x, y = data(7)
    plain, model = (stack(lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh())) for _ in "ab")
    gradients, end = two_steps(plain, x, y)
    ours, our_end = two_steps(model, x, y, Checkpointing().applied(Setting.of(model)), ub_size)
    assert_close(gradients, ours)
    assert_close(end, our_end)


@pytest.mark.parametrize("batch_norm", ["micro", "deferred", "frozen"])
def test_statistics_are_those_of_the_same_call_without(batch_norm: str) -> None:
    """In every way of `batch_norm`, a call in pieces with checkpointing does what it does without."""
    import anybatch

    x, y = data(7)
    results = []
    for technique in (None, Checkpointing()):
        model = stack(lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()))
        step = anybatch.apply(["x", "y"], ub_size=4, batch_norm=batch_norm, on_inexact="ignore")(squares)
        if technique is None:
            step(model, x=x, y=y)
        else:
            with technique.applied(Setting.of(model)):
                step(model, x=x, y=y)
        results.append(
            [*(each.grad for each in model.parameters()), *(each.double() for each in model.buffers())]
        )
    assert_equal(*results)


def test_what_is_saved_is_the_inputs_of_blocks() -> None:
    """Each block saves nothing but its input; what is outside of blocks saves what it saved before."""
    rows, width, x = 8, 6, data(8)[0].requires_grad_()
    model = stack(lambda: nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 6), nn.Tanh()))
    _, plain = saved_bytes(model, lambda: model(x).sum())
    with Checkpointing().applied(Setting.of(model)):
        _, ours = saved_bytes(model, lambda: model(x).sum())
    # Plain: both tanh outputs of three blocks. Then: the inputs of the second and third block, and of the
    # head; that of the first is the batch.
    assert plain == 3 * rows * (24 + width) * 8
    assert ours == 3 * rows * width * 8


def test_inner_values_die_with_the_forward() -> None:
    """Values inside of a block are freed when the block has run."""
    seen: list[StorageWeakRef] = []
    model = stack(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Tanh()))
    for block in model[0]:
        block[1].register_forward_hook(lambda m, i, o: seen.append(StorageWeakRef(o.untyped_storage())))
    with Checkpointing().applied(Setting.of(model)):
        loss = model(data(4)[0]).sum()
        assert len(seen) == 3
        assert all(each.expired() for each in seen)
        loss.backward()


def test_flops_are_one_more_forward_of_the_blocks() -> None:
    """A step costs the blocks' forward once more, and not an operation besides."""
    model, x = (
        stack(lambda: nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 6), nn.Tanh())),
        data(8)[0],
    )

    def flops() -> int:
        with FlopCounterMode(display=False) as counter:
            model(x).sum().backward()
        return counter.get_total_flops()

    plain = flops()
    with Checkpointing().applied(Setting.of(model)):
        ours = flops()
    assert ours - plain == 3 * 2 * (2 * 8 * 6 * 24)


def test_hooks_of_a_block_run_once() -> None:
    """The user's forward hooks on a block see one run."""
    calls = []
    model = stack(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    model[0][0].register_forward_hook(lambda *_: calls.append(1))
    with Checkpointing().applied(Setting.of(model)):
        model(data(3)[0]).sum().backward()
    assert calls == [1]


def test_auto_takes_the_level_that_keeps_least() -> None:
    """Of nested repeats the middle one is taken: neither the stages nor the single convolutions."""
    conv = lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh())  # noqa: E731
    layer = lambda: nn.ModuleDict({"a": conv(), "b": conv()})  # noqa: E731

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = layer()

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(4))

    model = nn.ModuleDict({"stages": nn.ModuleList(Stage() for _ in range(3)), "head": nn.Linear(2, 2)})
    blocks = Checkpointing().blocks(model)
    assert list(blocks) == [f"stages.{i}.layers.{j}" for i in range(3) for j in range(4)]


def test_every_third_block() -> None:
    """`every=3` takes the first of each three."""
    model = stack(lambda: nn.Sequential(nn.Linear(6, 6)), depth=7)
    assert list(Checkpointing("0.*", every=3).blocks(model)) == ["0.0", "0.3", "0.6"]


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ("no.such", "'no.such', which tells none"),
        (nn.Conv2d, "the class Conv2d, which tells none"),
        ("list", "ModuleList, which has no forward"),
    ],
)
def test_names_that_tell_nothing_are_refused(modules: str, message: str) -> None:
    """A name or class without modules says so, and shows what there is."""
    model = nn.ModuleDict({"list": nn.ModuleList([nn.Linear(2, 2)])})
    with pytest.raises(TechniqueError, match=message):
        Checkpointing(modules).blocks(model)


def test_auto_refuses_a_model_without_repeated_blocks() -> None:
    """A flat network has no blocks; that is said, not passed over (Rule 8)."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    with pytest.raises(TechniqueError, match="has none"):
        Checkpointing().check(Setting.of(model))


class _Noise(nn.Module):
    """Draws from generators of its own, and from those of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.generators = {"own": torch.Generator().manual_seed(5)}

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.rand(x.shape, generator=self.generators["own"]) > 0.5
        return (self.linear(x) * mask * (0.5 + random.random()) * (0.5 + GLOBAL.random())) ** 2


GLOBAL = random.Random(3)


def test_private_generators_draw_the_same_again() -> None:
    """Generators in a block's attributes, in globals and Python's own are put back for the second run."""
    x, y = data(5)
    results = []
    for technique in (None, Checkpointing()):
        model = stack(_Noise)
        random.seed(0)
        GLOBAL.seed(3)
        torch.manual_seed(0)
        entered = None if technique is None else technique.applied(Setting.of(model))
        gradients, end = two_steps(model, x, y, entered)
        drawn = torch.tensor([random.random(), GLOBAL.random()])
        states = [each.generators["own"].get_state().double() for each in model[0]]
        results.append([*gradients, *end, drawn, *states])
    assert_equal(*results)


def test_buffers_that_forward_reads_and_writes_are_as_they_were() -> None:
    """Spectral normalisation iterates once a step; the second run starts where the first did."""
    x, y = data(5)
    results = []
    for technique in (None, Checkpointing()):
        model = stack(lambda: nn.Sequential(spectral_norm(nn.Linear(6, 6)), nn.Tanh()))
        entered = None if technique is None else technique.applied(Setting.of(model))
        results.append([each for part in two_steps(model, x, y, entered) for each in part])
    assert_equal(*results)


class _Cache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return self.linear(x)


def test_a_cache_in_a_block_is_named() -> None:
    """A block that keeps something from run to run is refused with its name and the place."""
    model = stack(_Cache)
    with (
        Checkpointing().applied(Setting.of(model)),
        pytest.raises(TechniqueError, match=r"Got 0\.0 \(_Cache\), which keeps something in block\.seen"),
    ):
        model(data(2)[0])


class _Store:
    def __init__(self) -> None:
        self.keys: list[Tensor] = []


class _Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, cache: _Store | None = None) -> Tensor:
        if cache is not None:
            cache.keys.append(x)
        return torch.tanh(self.linear(x))


def test_a_cache_that_is_passed_is_named() -> None:
    """An argument that a block writes to is refused with the name of the argument."""
    block = stack(_Reads)[0][0]
    with (
        Checkpointing("0").applied(Setting.of(nn.Sequential(block))),
        pytest.raises(TechniqueError, match=r"cache\.keys.*use_cache=False"),
    ):
        block(data(2)[0], cache=_Store())


class _InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(2))


def test_an_input_written_in_place_is_named() -> None:
    """A block that changes its input would start from something else the second time."""
    model = stack(_InPlace)
    with (
        Checkpointing().applied(Setting.of(model)),
        pytest.raises(TechniqueError, match="writes to its input in place: argument 0"),
    ):
        model(data(2)[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model, x: x.add_(1), "modified by an inplace operation"),
        (lambda model, x: _write(model), "parameters were written"),
        (lambda model, x: model.eval(), "mode was changed"),
    ],
)
def test_what_changes_before_backward_is_noticed(
    change: Callable[[nn.Module, Tensor], object], message: str
) -> None:
    """Where the second run would see something else, backward raises in place of a wrong gradient."""
    model, x = stack(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh())), data(2)[0]
    with Checkpointing("0.0").applied(Setting.of(model)):
        loss = model(x).sum()
        change(model, x)
        with pytest.raises((TechniqueError, RuntimeError), match=message):
            loss.backward()


def test_a_named_argument_that_changes_before_backward_is_noticed() -> None:
    """The same holds for arguments that are passed by name."""
    block, x = stack(_Reads)[0][0], data(2)[0]
    with Checkpointing("0").applied(Setting.of(nn.Sequential(block))):
        loss = block(x=x).sum()
        x.add_(1)
        with pytest.raises(TechniqueError, match="input was written to before backward: x"):
            loss.backward()


def _write(model: nn.Module) -> None:
    with torch.no_grad():
        model[0][0][0].weight.add_(1)


def test_a_failure_in_the_second_run_leaves_statistics_and_random_state() -> None:
    """An error in a block's second run leaves running statistics and random state as the first left them."""
    model, x = network(), data(7)[0]
    with Checkpointing("0.*").applied(Setting.of(model)):
        loss = model(x).sum()
        fails = model[0][1][3].register_forward_pre_hook(_fail)
        buffers = [(each, each.clone()) for each in model.buffers()]
        state = torch.get_rng_state()
        with pytest.raises(KeyError, match="mine"):
            loss.backward()
        fails.remove()
        assert all(a is b for (a, _), b in zip(buffers, model.buffers(), strict=True))
        assert_equal([copied for _, copied in buffers], list(model.buffers()))
        assert torch.equal(state, torch.get_rng_state())


def _fail(*_: object) -> None:
    raise KeyError("mine")


def test_backward_twice_through_the_same_graph() -> None:
    """With `retain_graph`, a block may run again more than once."""
    model, x = network(), data(7)[0]
    torch.manual_seed(2)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    model = network()
    with Checkpointing("0.*").applied(Setting.of(model)):
        torch.manual_seed(2)
        loss = model(x).sum()
        for _ in range(2):
            got = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            assert_equal(list(expected), list(got))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_inputs_with_and_without_grad(needs_grad: bool) -> None:
    """A block whose input needs no gradient trains all the same, and gradients of inputs are right."""
    model, x = stack(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh())), data(4)[0].requires_grad_(needs_grad)
    inputs = [*model.parameters(), *([x] if needs_grad else [])]
    expected = torch.autograd.grad(squares(model, x, data(4)[1]), inputs)
    with Checkpointing().applied(Setting.of(model)):
        got = torch.autograd.grad(squares(model, x, data(4)[1]), inputs)
    assert_equal(list(expected), list(got))


def test_without_gradients_a_block_runs_as_it_is() -> None:
    """In evaluation nothing is kept and nothing is refused."""
    model = stack(_Cache)
    with Checkpointing().applied(Setting.of(model)), torch.no_grad():
        model(data(2)[0])
    assert [len(each.seen) for each in model[0]] == [1, 1, 1]


def test_a_copy_of_the_model_runs_its_own_blocks() -> None:
    """A deep copy that is made during a run, for averaged weights say, computes with its own weights."""
    model, x = stack(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh())), data(2)[0]
    with Checkpointing().applied(Setting.of(model)):
        other = copy.deepcopy(model)
        with torch.no_grad():
            for each in other.parameters():
                each.zero_()
        assert not other(x).any()
        assert model(x).any()


def test_a_block_of_the_caller_keeps_the_forward_it_was_given() -> None:
    """A forward that somebody else has put on a block is used, and is there again afterwards."""
    model = stack(lambda: nn.Sequential(nn.Linear(6, 6)))
    block, calls = model[0][0], []
    original = block.forward
    block.forward = lambda x: calls.append(1) or original(x)
    own = block.forward
    with Checkpointing().applied(Setting.of(model)):
        model(data(2)[0]).sum().backward()
    assert vars(block)["forward"] is own
    assert calls == [1, 1]


def test_replicas_are_refused() -> None:
    """Replicas of a block would run the forward of the one they were copied from."""
    with pytest.raises(TechniqueError, match="Apply it without DataParallel"):
        Checkpointing().check(Setting.of(nn.DataParallel(network())))


def test_a_generator_that_is_passed_draws_the_same_again() -> None:
    """A generator among the arguments is put back, and no more is held than the blocks themselves hold."""

    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor, generator: torch.Generator) -> Tensor:
            return (self.linear(x) * torch.rand(x.shape, generator=generator)) ** 2

    model = nn.Sequential(stack(Drops)[0][0])
    results = []
    for technique in (None, Checkpointing("0")):
        generator = torch.Generator().manual_seed(3)
        model.zero_grad()
        with technique.applied(Setting.of(model)) if technique else contextlib.nullcontext():
            model[0](data(5)[0], generator).sum().backward()
            if technique:
                assert model[0].forward.generators == {}
        grads = [each.grad.clone() for each in model.parameters() if each.grad is not None]
        results.append([*grads, generator.get_state().double()])
    assert_equal(*results)


def test_two_at_a_time_are_refused() -> None:
    """A block that runs again already is not taken twice."""
    model = network()
    with (
        Checkpointing("0.*").applied(Setting.of(model)),
        pytest.raises(TechniqueError, match="runs again already"),
        Checkpointing("0.*").applied(Setting.of(model)),
    ):
        pass


def test_autocast_is_the_same_again() -> None:
    """A block that ran under autocast runs again under autocast, though backward is outside of it."""
    x = data(4)[0].float()
    results = []
    for technique in (None, Checkpointing()):
        model = stack(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh())).float()
        with (technique or Checkpointing("1")).applied(Setting.of(model)):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().sum()
            loss.backward()
        results.append([each.grad for each in model.parameters()])
    assert_equal(*results)


def test_an_automatic_size_with_blocks_that_run_again() -> None:
    """The size of pieces can be found while blocks run again, on fakes too; the gradient is exact."""
    import anybatch

    x, y = data(9)
    model = stack(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    expected = torch.autograd.grad(squares(model, x, y), list(model.parameters()))
    with Checkpointing().applied(Setting.of(model)):
        anybatch.apply(["x", "y"], ub_size="auto", device="cpu")(squares)(model, x=x, y=y)
    assert_close(list(expected), [each.grad for each in model.parameters() if each.grad is not None])


@pytest.mark.models
def test_a_language_model_of_transformers() -> None:
    """Its layers are found, its dropout is drawn again, and the cache that it fills by default is named."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=3, n_embd=16, n_head=2, vocab_size=40, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    model, ids = GPT2LMHeadModel(config).double(), torch.randint(0, 40, (3, 8))
    assert list(Checkpointing().blocks(model)) == [f"transformer.h.{at}" for at in range(3)]

    def gradients() -> list[Tensor]:
        torch.manual_seed(1)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        return list(torch.autograd.grad(loss, list(model.parameters())))

    expected = gradients()
    with Checkpointing().applied(Setting.of(model)):
        assert_equal(expected, gradients())
        with pytest.raises(TechniqueError, match=r"h\.0 \(GPT2Block\).*use_cache=False"):
            model(input_ids=ids, labels=ids)
