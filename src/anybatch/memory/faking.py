"""Fakes instead of tensors: same shape, dtype and device, no memory."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["FakeMode", "Untraceable", "faked_modules"]

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_STRIDED_TYPES = (*_PLAIN_TYPES, FakeTensor)
_COPIED_TYPES = (list, tuple, dict, set, deque)
_MODULE_FIELDS = frozenset(vars(torch.nn.Module()))
_LIFTS = frozenset({"aten::lift_fresh", "aten::lift"})


class Untraceable(Exception):
    """A program can't be run on fakes, so its memory can't be foreseen; nothing of it has been changed.

    Attributes:
        reason: Why not.
        operator: The operator that needs values, `aten::nonzero` for example; None where nobody says.
    """

    def __init__(self, reason: str, operator: str | None = None) -> None:
        super().__init__(reason if operator is None else f"{operator}: {reason}")
        self.reason = reason
        self.operator = operator


@final
class FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch's mode has no types
    """Runs operators on fakes alone: a real tensor that comes in is replaced by its fake first.

    torch's own mode runs an operator for real where all its tensors are real, which would change them.
    Leaves that come in get a gradient of `None`; `give_back` undoes that.
    """

    def __init__(self) -> None:
        # A fallback kernel would be run on real memory of the size that is asked about.
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self._fakes: dict[int, tuple[Tensor, Tensor]] = {}
        self._gradients: dict[int, tuple[Tensor, Tensor | None]] = {}

    def fake(self, tensor: Tensor) -> Tensor:
        """The fake of a tensor; always the same one."""
        known = self._fakes.get(id(tensor))
        if known is not None:
            return known[1]
        made = tensor if isinstance(tensor, FakeTensor) else self._made_like(tensor)
        self._fakes[id(tensor)] = tensor, made
        self._fakes[id(made)] = made, made
        return made

    def known(self, tensor: Tensor) -> Tensor | None:
        """The fake of a tensor that has one already."""
        known = self._fakes.get(id(tensor))
        return None if known is None else known[1]

    def fakes(self) -> list[Tensor]:
        """All fakes that stand for a tensor."""
        return list({id(made): made for _, made in self._fakes.values()}.values())

    def fake_together(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """New fakes; those of tensors that share a storage share one, as large as what they see of it."""
        groups: dict[Any, list[Tensor]] = {}
        for tensor in {id(tensor): tensor for tensor in tensors}.values():
            groups.setdefault(_sharing_key(tensor), []).append(tensor)
        made: dict[int, Tensor] = {}
        for group in groups.values():
            made |= self._made_as_views(group)
        return [made[id(tensor)] for tensor in tensors]

    def constant(self, tensor: Tensor) -> Tensor:
        """The fake of a single number that knows its value, as counters need."""
        value = tensor.item()
        with self:
            return torch.tensor(value, dtype=tensor.dtype, device=tensor.device)

    def give_back(self) -> None:
        """Gives the leaves that came in the gradients that they had, and forgets all fakes."""
        for leaf, gradient in self._gradients.values():
            leaf.grad = gradient
        self._gradients.clear()
        self._fakes.clear()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch 2.13 has every operator pass through its compiler twice.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = func.name()
        if name == "aten::_local_scalar_dense" and type(args[0]) in _PLAIN_TYPES:
            return func(*args)
        if name not in _LIFTS:
            args = [self._without_real(argument, func) for argument in args]
            kwargs = {key: self._without_real(argument, func) for key, argument in (kwargs or {}).items()}
        return super().__torch_dispatch__(func, types, args, kwargs or {})

    def _without_real(self, argument: Any, func: Any) -> Any:
        if type(argument) in _PLAIN_TYPES:
            return self._fake_of_foreign(argument, func)
        if isinstance(argument, list | tuple) and any(type(each) in _PLAIN_TYPES for each in argument):
            return [self._without_real(each, func) for each in argument]
        return argument

    def _fake_of_foreign(self, tensor: Tensor, func: Any) -> Tensor:
        if tensor.requires_grad and id(tensor) not in self._gradients:
            self._take_gradient(tensor, func)
        return self.fake(tensor)

    def _take_gradient(self, tensor: Tensor, func: Any) -> None:
        if tensor.grad_fn is not None:
            if func.name() == "aten::detach":
                return
            raise Untraceable(
                "it takes a tensor with a graph from before, which backward would use up", func.name()
            )
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise Untraceable("it takes a leaf from outside whose hooks would run", func.name())
        self._gradients[id(tensor)] = tensor, tensor.grad
        tensor.grad = None

    def _made_like(self, tensor: Tensor) -> Tensor:
        if torch.nn.parameter.is_lazy(tensor):
            raise Untraceable("a lazy module has no parameters yet")
        if type(tensor) not in _STRIDED_TYPES or tensor.layout is not torch.strided or tensor.is_quantized:
            copied = self.from_tensor(tensor)
            copied.grad = None
            return copied
        with self:
            made = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
        return _with_traits_of(tensor, made)

    def _made_as_views(self, group: list[Tensor]) -> dict[int, Tensor]:
        if len(group) == 1:
            return {id(group[0]): self._made_like(group[0])}
        first = min(tensor.storage_offset() for tensor in group)
        last = max(tensor.storage_offset() + _span(tensor) for tensor in group)
        with self, torch.no_grad():
            base = torch.empty(last - first, dtype=group[0].dtype, device=group[0].device)
            views = [
                base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset() - first).detach()
                for tensor in group
            ]
        return {id(tensor): _with_traits_of(tensor, view) for tensor, view in zip(group, views, strict=True)}


def _sharing_key(tensor: Tensor) -> Any:
    is_plain = type(tensor) in _STRIDED_TYPES and tensor.layout is torch.strided and tensor.numel() > 0
    return (tensor.untyped_storage()._cdata, tensor.dtype) if is_plain else id(tensor)


def _span(tensor: Tensor) -> int:
    """Elements from a tensor's first to its last in its storage."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))


def _with_traits_of(tensor: Tensor, made: Tensor) -> Tensor:
    if isinstance(tensor, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    elif tensor.requires_grad:
        made.requires_grad_()
    if not isinstance(tensor, FakeTensor):
        for name, value in vars(tensor).items():
            vars(made).setdefault(name, value)
    return made


@contextmanager
def faked_modules(modules: Iterable[torch.nn.Module], fake: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Has modules hold fakes for the duration of a block: parameters, buffers, and tensors in attributes.

    Afterwards every module, with all that it contains, has the attributes that it had, whatever the block
    set, and the same objects in its parameters, buffers and parts.
    """
    found = {id(part): part for module in modules for part in module.modules()}
    kept = [_Fields(part) for part in found.values()]
    try:
        for part in found.values():
            _fill_with_fakes(part, fake)
        yield
    finally:
        for fields in kept:
            fields.put_back()


class _Fields:
    """The attributes of a module, and what its parameters, buffers and parts are."""

    def __init__(self, module: torch.nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            raise Untraceable("a module is compiled by torch.jit")
        self._fields = vars(module)
        self._values = dict(self._fields)
        self._members = [
            (members, copy.copy(members))
            for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
            if (members := self._fields.get(name)) is not None
        ]

    def put_back(self) -> None:
        for name in self._fields.keys() - self._values.keys():
            del self._fields[name]
        self._fields.update(self._values)
        for members, before in self._members:
            members.clear()
            members.update(before)


def _fill_with_fakes(module: torch.nn.Module, fake: Callable[[Tensor], Tensor]) -> None:
    for members in (module._parameters, module._buffers):
        for name, tensor in members.items():
            if tensor is not None:
                cast(dict[str, Tensor], members)[name] = fake(tensor)
    fields = vars(module)
    for name in fields.keys() - _MODULE_FIELDS:
        fields[name] = _copied_with_fakes(fields[name], fake)


def _copied_with_fakes(value: Any, fake: Callable[[Tensor], Tensor]) -> Any:
    """A tensor's fake; a copy of a container, so that what is put into the container goes with the copy."""
    if isinstance(value, Tensor):
        return fake(value)
    kind = type(value)
    if kind not in _COPIED_TYPES:
        return value
    if kind is dict:
        return {key: fake(each) if isinstance(each, Tensor) else each for key, each in value.items()}
    parts = [fake(each) if isinstance(each, Tensor) else each for each in value]
    return deque(parts, value.maxlen) if kind is deque else kind(parts)
