"""What users' own tests get: a real limit on memory, and out-of-memory errors at a chosen operator."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import anybatch.testing
from anybatch._testing.faults import out_of_memory
from anybatch.fit.guard import is_out_of_memory
from anybatch.testing import Fault, fail_at, memory_limit

NEVER = 1 << 40
is_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts mapped memory")


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 3)
    )


def step(model: nn.Module) -> list[Tensor]:
    """One forward and backward from a fixed random state: the loss, gradients and buffers."""
    torch.manual_seed(2)
    model.zero_grad()
    loss = F.cross_entropy(model(torch.randn(5, 2, 6, 6)), torch.arange(5) % 3)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters()), *model.buffers()]


def operators_of(function: Callable[[], object], where: str) -> int:
    with fail_at(NEVER, where) as fault:
        function()
    assert fault.failed_at is None
    return fault.seen


# ---- fail_at


def test_counting_changes_no_number() -> None:
    """With nothing to fail, numbers are bit-identical to those without, and the random state is."""
    plain = [*step(net()), torch.get_rng_state()]
    with fail_at(NEVER):
        watched = [*step(net()), torch.get_rng_state()]
    assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))


def test_operators_are_counted() -> None:
    """What was seen is a number that arithmetic gives: two operators forward, three in their backward."""
    weight, x = torch.ones(3, requires_grad=True), torch.ones(3)
    with fail_at(NEVER) as fault:
        (weight * x).sin()
    assert fault.seen == 2
    y = (weight * x).sin()
    gradient = torch.ones(3)
    with fail_at(NEVER, "backward") as fault:
        torch.autograd.grad(y, weight, gradient)
    assert fault.seen == 3  # a cosine, and the product's and the sine's multiplication


def test_places_divide_the_operators() -> None:
    """Every operator is of one place, and all are there with `"any"`."""
    model = net()
    seen = {where: operators_of(lambda: step(model), where) for where in ("forward", "backward", "copy")}
    assert sum(seen.values()) == operators_of(lambda: step(model), "any")
    assert seen["forward"] > 0
    assert seen["backward"] > seen["copy"]


@pytest.mark.parametrize(
    ("copy", "copies"),
    [
        (lambda x: x.to(torch.float64), 1),
        (lambda x: x.clone(), 1),
        (lambda x: torch.empty(4).copy_(x), 1),
        (lambda x: x.to("meta"), 1),
        (lambda x: x.to("cpu"), 0),
        (lambda x: x + 1, 0),
    ],
)
def test_copies(copy: Callable[[Tensor], Tensor], copies: int) -> None:
    """Copies are what makes the same values again, somewhere else or in another dtype."""
    assert operators_of(lambda: copy(torch.ones(4)), "copy") == copies


@pytest.mark.parametrize("where", ["forward", "backward", "any"])
def test_each_operator_fails_once(where: str) -> None:
    """Every operator that is counted can be made to fail, with torch's error, and only that one fails."""
    model = net()
    count = operators_of(lambda: step(model), where)
    names = set()
    for n in range(count):
        with fail_at(n, where) as fault:
            with pytest.raises(RuntimeError, match="DefaultCPUAllocator: can't allocate memory") as caught:
                step(model)
            assert is_out_of_memory(caught.value)
            assert fault.seen == n + 1
            step(model)
            assert fault.seen > n + 1
        names.add(fault.failed_at)
    assert any(name is not None and name.startswith("aten::convolution") for name in names)
    with fail_at(count, where) as fault:
        step(model)
    assert (fault.seen, fault.failed_at) == (count, None)


def test_operator_that_fails_has_changed_nothing() -> None:
    """The error comes before the operator writes: memory is asked for first."""
    x = torch.zeros(3)
    with fail_at(0) as fault:
        with pytest.raises(RuntimeError):
            x.add_(1)
        assert x.tolist() == [0, 0, 0]
        x.add_(1)
    assert x.tolist() == [1, 1, 1]
    assert fault.failed_at == "aten::add_.Tensor (forward)"


def test_nothing_is_left_behind() -> None:
    """After the block, also after an error in it, no operator is seen any more."""
    with pytest.raises(KeyError), fail_at(5) as fault:
        {}[torch.ones(1)]
    seen = fault.seen
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []
    step(net())
    assert fault.seen == seen


def test_error_of_backward_leaves_autograd_usable() -> None:
    """After a failure inside backward the next one gives what it gives without a failure."""
    expected, model = step(net()), net()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with fail_at(4, "backward"), pytest.raises(RuntimeError):
        step(model)
    model.load_state_dict(state)
    assert all(torch.equal(one, other) for one, other in zip(expected, step(model), strict=True))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_is_backward(use_reentrant: bool) -> None:
    """What checkpointing runs again counts as backward; the forward fails in its second run."""
    block = nn.Linear(3, 3)
    x = torch.randn(4, 3, requires_grad=True)

    def run() -> None:
        block.zero_grad()
        checkpoint(lambda x: block(x).exp(), x, use_reentrant=use_reentrant).sum().backward()

    def exponentials(where: str) -> int:
        count, names = operators_of(run, where), []
        for n in range(count):
            with fail_at(n, where) as fault, pytest.raises(RuntimeError, match="memory"):
                run()
            names.append(fault.failed_at)
        return sum(name is not None and name.startswith("aten::exp ") for name in names)

    assert exponentials("forward") == 1
    assert exponentials("backward") == 1


def test_nests_with_other_modes() -> None:
    """Outside or inside of autocast and of a counter of operations, all see what they see alone."""
    model, x = net(), torch.randn(5, 2, 6, 6)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            model(x).sum().backward()

    with FlopCounterMode(display=False) as counter:
        run()
    flops, operators = counter.get_total_flops(), operators_of(run, "any")
    with FlopCounterMode(display=False) as counter, fail_at(NEVER) as inner:
        run()
    assert (counter.get_total_flops(), inner.seen) == (flops, operators)
    with fail_at(NEVER) as outer, FlopCounterMode(display=False) as counter:
        run()
    assert counter.get_total_flops() == flops
    assert outer.seen >= operators  # a counter takes some operators apart
    with fail_at(NEVER) as outer, fail_at(3) as inner, pytest.raises(RuntimeError):
        run()
    assert (outer.seen, inner.seen) == (3, 4)


def test_compiled_function_stays_compiled() -> None:
    """The operators that compiled code calls are counted and can fail; nothing is compiled anew for it."""
    model, x = nn.Linear(3, 3), torch.randn(4, 3)
    compilations = 0

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        nonlocal compilations
        compilations += 1
        return graph.forward

    compiled = torch.compile(lambda x: model(x).sin().sum(), backend=backend)
    expected = compiled(x)
    assert operators_of(lambda: compiled(x), "any") == operators_of(lambda: model(x).sin().sum(), "any")
    with fail_at(1), pytest.raises(RuntimeError, match="can't allocate memory"):
        compiled(x)
    assert torch.equal(compiled(x), expected)
    assert compilations == 1


def test_fake_tensors_do_not_count() -> None:
    """Operators on fake tensors take no memory, and do not fail."""
    with fail_at(0) as fault, FakeTensorMode():
        assert (torch.ones(3) + 1).shape == (3,)
    assert (fault.seen, fault.failed_at) == (0, None)


def test_decorates_a_function() -> None:
    """It is a context manager that can also stand above a test."""

    @fail_at(0)
    def make() -> Tensor:
        return torch.ones(1)

    with pytest.raises(RuntimeError, match="memory"):
        make()


@pytest.mark.parametrize(
    ("device", "error", "wording"),
    [
        ("cpu", RuntimeError, "can't allocate memory: you tried to allocate 2097152 bytes"),
        ("cuda:1", torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 1"),
        ("xpu", torch.OutOfMemoryError, "XPU out of memory. Tried to allocate 2.00 MiB. GPU 0"),
        ("mps", RuntimeError, "MPS backend out of memory"),
    ],
)
def test_error_is_that_of_the_device(device: str, error: type[Exception], wording: str) -> None:
    """Each device has its own class and wording, and the guard takes all for out of memory."""
    raised = out_of_memory(torch.device(device), 2 << 20)
    assert type(raised) is error
    assert wording in str(raised)
    assert is_out_of_memory(raised)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_backward_in_the_threads_of_a_device() -> None:
    """Operators that autograd runs in its own threads are counted, and raise the device's error."""
    model = net().cuda()

    def run() -> None:
        model(torch.randn(5, 2, 6, 6).cuda()).sum().backward()

    assert operators_of(run, "backward") > 5
    assert operators_of(run, "copy") == 1
    with fail_at(3, "backward"), pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        run()


@pytest.mark.parametrize("n", [-1, True])
def test_bad_number_is_refused(n: int) -> None:
    """Operators are counted from 0."""
    with pytest.raises(ValueError, match="counted from 0"), fail_at(n):
        pass


def test_unknown_place_is_refused() -> None:
    """A place that there is not is refused with those that there are."""
    with pytest.raises(ValueError, match=r"forward.*backward.*copy.*any"), fail_at(0, "optimizer"):
        pass


# ---- memory_limit


def run_apart(program: str) -> list[str]:
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return result.stdout.split()


LIMITED = """
import resource, torch
from anybatch.testing import memory_limit
torch.set_num_threads(1)
def fits(mebibytes):
    try:
        torch.empty(mebibytes << 20, dtype=torch.uint8)
    except RuntimeError:
        return False
    return True
before = resource.getrlimit(resource.RLIMIT_DATA)
with memory_limit(64 << 20{malloc}) as limit_bytes:
    print(fits(48), fits(72), resource.getrlimit(resource.RLIMIT_DATA) == (limit_bytes, before[1]))
    with memory_limit(256 << 20):
        print(fits(72))
    with memory_limit(16 << 20):
        print(fits(32))
print(fits(72), resource.getrlimit(resource.RLIMIT_DATA) == before)
try:
    with memory_limit(1 << 20):
        raise KeyError
except KeyError:
    print(fits(72), resource.getrlimit(resource.RLIMIT_DATA) == before)
"""


@is_linux
@pytest.mark.parametrize("malloc", ["", ", malloc=1 << 16"])
def test_limit_is_real_and_is_put_back(malloc: str) -> None:
    """Torch's own allocator raises beyond the limit; limits nest; the end and an error put it back."""
    lines = run_apart(LIMITED.format(malloc=malloc))
    assert lines == ["True", "False", "True", "False", "False", "True", "True", "True", "True"]


REPEATED = """
import torch
from anybatch.testing import memory_limit
torch.set_num_threads(1)
def mebibytes_in_small_tensors():
    held = []
    try:
        while True:
            held.append(torch.empty(1 << 20, dtype=torch.uint8))
    except RuntimeError:
        return len(held)
for _ in range(3):
    with memory_limit((64 << 20) + (1 << 19), malloc=1 << 16):
        print(mebibytes_in_small_tensors())
"""


@is_linux
def test_limit_with_malloc_is_repeatable() -> None:
    """With the setting of malloc as much fits the third time as did the first, and nearly all of it."""
    first, *later = map(int, run_apart(REPEATED))
    assert later == [first, first]
    assert 60 <= first <= 64


def test_limit_on_another_system_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no system call holds a process to a limit the block does not run (Rule 8)."""
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(NotImplementedError, match=r"only Linux.*darwin"), memory_limit(1 << 20):
        pytest.fail("the block ran")


@is_linux
def test_limit_that_has_no_effect_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel takes the limit and does not keep it the block does not run, and it is put back."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    monkeypatch.setattr("anybatch._testing.limit.can_map", lambda size_bytes: True)
    with pytest.raises(NotImplementedError, match="RLIMIT_DATA"), memory_limit(1 << 30):
        pytest.fail("the block ran")
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


@is_linux
def test_malloc_of_another_library_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting of malloc that can't be made is refused, before anything is limited."""
    monkeypatch.setattr("anybatch.memory.malloc._is_glibc", lambda: False)
    with pytest.raises(NotImplementedError, match="`malloc`"), memory_limit(1 << 30, malloc=1 << 20):
        pytest.fail("the block ran")


def test_negative_growth_is_refused() -> None:
    """Less than what is held can't be asked for."""
    with pytest.raises(ValueError, match="at least 0"), memory_limit(-1):
        pass


# ---- the module


def test_names() -> None:
    """The module offers what it says, and `Fault` prints what it saw without its lock."""
    assert sorted(anybatch.testing.__all__) == ["Fault", "fail_at", "memory_limit"]
    assert repr(Fault(3, "any")) == "Fault(n=3, where='any', seen=0, failed_at=None)"


def test_import_needs_no_test_framework() -> None:
    """Importing the module loads no pytest, and `import anybatch` alone does not load the module."""
    program = (
        "import sys, anybatch; print('anybatch.testing' in sys.modules);"
        "import anybatch.testing; print('pytest' in sys.modules)"
    )
    assert run_apart(program) == ["False", "False"]
