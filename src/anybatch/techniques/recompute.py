"""A block whose forward runs again in backward, and what must be as it was for that.

Rules that hold for a block:

1. What it draws the second time is what it drew the first time, from every generator that it can name.
2. What it writes to buffers it writes once; the second run starts from what the first one started from, and
   writes into copies. Early stop leaves the second run by an exception, so everything is put back at exit.
3. What it reads is as it was: inputs, parameters, modes. Where not, backward raises, as autograd does.
4. What it keeps elsewhere, as caches do, it would keep twice: that is refused, by name.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from anybatch.errors import TechniqueError
from anybatch.fit.generators import GeneratorState, is_generator
from anybatch.fit.reach import in_reach
from anybatch.memory.device import RandomState
from anybatch.techniques.marks import Mark, attributes, first_difference, marks, version_of

_Place = tuple[nn.Module, str]


@final
class Recomputed:
    """The forward of a block, of which only the inputs are kept."""

    def __init__(self, name: str, module: nn.Module, technique: str) -> None:
        self.name = f"{name} ({type(module).__name__})"
        self.module = module
        self.technique = technique
        self.generators = {id(each): each for each in _named_generators(module)}
        # By the modes of its modules: which buffers a run writes to. Nothing is known before the first run.
        self.written: dict[tuple[bool, ...], set[_Place]] = {}
        # Bound to the module, so that a deep copy of it runs its own forward.
        self._forward: Callable[..., Any] = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        forward = partial(self._forward, **kwargs)
        if torch.compiler.is_compiling():  # a compiler sees to all of this itself
            return checkpoint(forward, *args, use_reentrant=False)
        again = _Again(self, args, kwargs)
        output = checkpoint(
            forward,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,  # on mps it would be lost (torch 2.13, pytorch/pytorch#127676)
            context_fn=lambda: (nullcontext(), again),
        )
        again.first_has_run()
        return output

    def refused(self, what: str, advice: str) -> TechniqueError:
        return TechniqueError(
            f"`{self.technique}`: a block runs again in backward, and must do the same again. Got "
            f"{self.name}, {what}. {advice}, or leave the block out of `modules`."
        )


@final
class _Again:
    """What was before the first run of a block, and a context in which it is so again."""

    def __init__(self, block: Recomputed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._block = block
        self._modules = list(block.module.named_modules(prefix="block"))
        self._inputs = [*((f"argument {at}", each) for at, each in enumerate(args)), *kwargs.items()]
        self._input_marks = marks(self._inputs)
        self._weights = _weights(block.module)
        self._modes = self._modes_now()
        written = block.written.get(self._modes)
        # Closely the first time: what a module holds, a config say, can be large.
        self._is_new = written is None
        self._attribute_marks = self._look()
        self._random = RandomState.capture(_devices(self._weights, self._input_marks))
        self._generators = [(each, GeneratorState(each)) for each in self._all_generators()]
        self._buffers = dict(_buffers(self._modules))
        self._versions = {place: version_of(buffer) for place, buffer in self._buffers.items()}
        self._copies = {
            place: buffer.clone()
            for place, buffer in self._buffers.items()
            if written is None or place in written
        }
        self._entered: list[ExitStack] = []

    def first_has_run(self) -> None:
        """Looks at what the first run has changed, and keeps what the second one needs.

        Raises:
            TechniqueError: It has written where a second run would write again.
        """
        self._check_inputs("which writes to its input in place:", "Let it write to a copy")
        changed = first_difference(self._attribute_marks, self._look())
        if changed is not None:
            raise self._block.refused(
                f"which keeps something in {changed}", "Turn that off (`use_cache=False`)"
            )
        self._attribute_marks = []
        self._generators = [each for each in self._generators if each[1].has_moved()]
        self._keep_written()

    def _look(self) -> list[Mark]:
        return marks(attributes(self._modules), is_close=self._is_new)

    def _keep_written(self) -> None:
        now = dict(_buffers(self._modules))
        written = {place for place, buffer in self._buffers.items() if self._is_written(place, buffer, now)}
        unknown = written - self._copies.keys()
        if unknown:
            name = next(name for _, name in unknown)
            raise self._block.refused(
                f"which writes to the buffer {name} in some runs only", "Let it write in every run"
            )
        self._block.written.setdefault(self._modes, set()).update(written)
        self._copies = {place: copy for place, copy in self._copies.items() if place in written}
        self._buffers, self._versions = {}, {}

    def _is_written(self, place: _Place, buffer: Tensor, now: dict[_Place, Tensor]) -> bool:
        # What batch_norm itself writes does not count as a version (torch 2.13).
        is_statistic = isinstance(place[0], _NormBase)
        return is_statistic or now[place] is not buffer or version_of(buffer) != self._versions[place]

    def _all_generators(self) -> list[Any]:
        """Of the block, of the call, and of everybody."""
        self._block.generators.update((id(each), each) for each in _generators(self._attribute_marks))
        numpy = sys.modules.get("numpy.random.mtrand")
        everybodys = [random._inst, *([] if numpy is None else [numpy._rand])]
        found = [*everybodys, *self._block.generators.values(), *_generators(self._input_marks)]
        return list({id(each): each for each in found}.values())

    def _check_inputs(self, what: str, advice: str) -> None:
        changed = first_difference(self._input_marks, marks(self._inputs))
        if changed is not None:
            is_tensor = any(
                mark.path == changed and isinstance(mark.value, Tensor) for mark in self._input_marks
            )
            raise self._block.refused(
                f"{what} {changed}", advice if is_tensor else "Pass none (`use_cache=False`)"
            )

    def _check(self) -> None:
        """Is everything that the block reads as it was?"""
        self._check_inputs("whose input was written to before backward:", "Write to a copy")
        if any(version_of(weight) != version for weight, version in self._weights):
            raise self._block.refused(
                "whose parameters were written to before backward", "Step after backward"
            )
        if self._modes_now() != self._modes:
            raise self._block.refused("whose mode was changed before backward", "Change modes after backward")

    def _modes_now(self) -> tuple[bool, ...]:
        return tuple(module.training for _, module in self._modules)

    def __enter__(self) -> None:
        self._check()
        with ExitStack() as stack:
            stack.enter_context(_random_as(self._random))
            for generator, before in self._generators:
                stack.enter_context(_generator_as(generator, before))
            stack.enter_context(_buffers_as(self._copies))
            self._entered.append(stack.pop_all())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.pop().__exit__(kind, error, trace)


@contextmanager
def _random_as(before: RandomState) -> Iterator[None]:
    now = RandomState.capture(before.accelerators)
    before.restore()
    try:
        yield
    finally:
        now.restore()


@contextmanager
def _generator_as(generator: Any, before: GeneratorState) -> Iterator[None]:
    now = GeneratorState(generator)
    before.restore()
    try:
        yield
    finally:
        now.restore()


@contextmanager
def _buffers_as(copies: dict[_Place, Tensor]) -> Iterator[None]:
    """Puts copies of copies in the place of buffers: a block may run again more than once."""
    fresh = {place: copy.clone() for place, copy in copies.items()}
    now = {(module, name): module._buffers[name] for module, name in copies}
    try:
        for (module, name), buffer in fresh.items():
            module._buffers[name] = buffer
        yield
    finally:
        for (module, name), kept in now.items():
            module._buffers[name] = kept


def _buffers(modules: list[tuple[str, nn.Module]]) -> Iterator[tuple[_Place, Tensor]]:
    for _, module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield (module, name), buffer


def _weights(module: nn.Module) -> list[tuple[Tensor, int]]:
    return [(parameter, version_of(parameter)) for parameter in module.parameters()]


def _devices(weights: list[tuple[Tensor, int]], inputs: list[Mark]) -> set[torch.device]:
    given = (mark.value.device for mark in inputs if isinstance(mark.value, Tensor))
    return {*(weight.device for weight, _ in weights), *given}


def _generators(looked_at: list[Mark]) -> list[Any]:
    return [mark.value for mark in looked_at if mark.is_object and is_generator(mark.value)]


def _named_generators(module: nn.Module) -> tuple[Any, ...]:
    """Generators that the forward of a block and of its parts can name."""
    kinds = {type(each) for each in module.modules()}
    own = [kind.forward for kind in kinds if not kind.__module__.startswith("torch.")]
    return tuple(generator for forward in own for generator in in_reach(forward).generators)
