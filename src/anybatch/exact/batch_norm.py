"""What BatchNorm layers do in a call: what they normalise with, and when their running statistics move.

Each way is a `Norms`. Layers are hooked one by one for the length of a call. Compiled layers are not, for new
hooks would have them compiled again in each call, and they, as replicas of `nn.DataParallel`, may be out of
reach; `missed` tells.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from anybatch.exact.compiled import is_compiled


def batch_norms(modules: Iterable[Module]) -> list[Module]:
    """Those of the modules that normalise with the statistics of the batch."""
    return [
        module
        for module in modules
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
    ]


class Norms:
    """Layers do in each piece what they do by themselves (`"micro"`).

    Attributes:
        coupled: What is said where layers normalise with the statistics of the piece.
        changes_layers: Does it make layers do something else than they do by themselves?
        out_of_reach: What is said of layers that ran by themselves where they were to be changed.
    """

    coupled = (
        "BatchNorm in training mode takes its statistics over each micro-batch, not over the mini-batch: "
        '{layers}. Use GroupNorm, `batch_norm="frozen"`, or put these layers in eval mode'
    )

    changes_layers = False
    out_of_reach = ""

    def enter(self, module: Module) -> None:
        """Takes note of a module before it runs."""

    def begin(self, module: Module) -> None:
        """Begins the forward of a module that was entered too late for new hooks of its own."""

    @contextmanager
    def piece(self) -> Iterator[None]:
        """The forward run of a piece that counts; what runs a layer again, for backward, is no part of it."""
        yield

    def taking_batch_statistics(self, modules: Iterable[Module]) -> list[Module]:
        """Those of the modules that normalise with the statistics of the piece."""
        return batch_norms(modules)

    def missed(self) -> list[Module]:
        """Layers that ran out of reach, as they do by themselves."""
        return []

    def commit(self) -> None:
        """Writes the running statistics of the whole mini-batch."""

    def close(self) -> None:
        """Leaves the layers as they were found."""


class HookedNorms(Norms):
    """The ways that change what a layer does: something before its forward, and something after."""

    changes_layers = True
    out_of_reach = (
        "BatchNorm in compiled code or in replicas is out of reach of `batch_norm`, and takes and tracks "
        "the statistics of each micro-batch: {layers}. Put these layers in eval mode, or "
        "compile less of the model"
    )

    def __init__(self, *, is_compiled: bool) -> None:
        """Takes whether the function is compiled, and all its layers with it."""
        self._is_compiled = is_compiled
        self._compiled: set[Module] = set()
        self._handles: dict[_BatchNorm, tuple[RemovableHandle, ...]] = {}
        self._versions: dict[_BatchNorm, int] = {}
        self._open: dict[_BatchNorm, Any] = {}

    def enter(self, module: Module) -> None:
        if is_compiled(module):
            self._compiled.update(module.modules())
        if isinstance(module, _BatchNorm) and module not in self._versions:
            self._versions[module] = _version(module)
            if self._is_compiled or module in self._compiled:
                self._hold(module)
            else:
                self._hook(module)

    def begin(self, module: Module) -> None:
        if isinstance(module, _BatchNorm) and module in self._handles:
            self._before(module, ())

    def _hold(self, layer: _BatchNorm) -> None:
        """Changes a compiled layer for the length of the call, if that can be."""

    def _hook(self, layer: _BatchNorm) -> None:
        self._handles[layer] = (
            layer.register_forward_pre_hook(self._before),
            # First, so that the user's own hooks see the layer as it was; and when forward fails, too.
            layer.register_forward_hook(self._after, prepend=True, with_kwargs=True, always_call=True),
        )

    def missed(self) -> list[Module]:
        return [layer for layer, version in self._versions.items() if _version(layer) != version]

    def close(self) -> None:
        for layer in list(self._open):
            self._put_back(layer, self._open.pop(layer))
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()

    def _before(self, layer: _BatchNorm, inputs: tuple[Any, ...]) -> None:
        if not torch.compiler.is_compiling() and self._reaches(layer):
            self._open[layer] = self._take(layer)

    def _after(
        self, layer: _BatchNorm, inputs: tuple[Any, ...], named: Mapping[str, Any], output: Tensor | None
    ) -> None:
        if not torch.compiler.is_compiling() and layer in self._open:
            self._put_back(layer, self._open.pop(layer))

    def _reaches(self, layer: _BatchNorm) -> bool:
        """Is the layer one to be changed, as it is now?"""
        return tracks(layer)

    def _take(self, layer: _BatchNorm) -> Any:
        """Changes a layer that is about to run, and returns what puts it back."""
        raise NotImplementedError

    def _put_back(self, layer: _BatchNorm, kept: Any) -> None:
        raise NotImplementedError


class FrozenNorms(HookedNorms):
    """Layers in training mode normalise with their running statistics and leave them alone (`"frozen"`)."""

    coupled = (
        "BatchNorm without running statistics can't be frozen, and takes those of each micro-batch: "
        "{layers}. Use GroupNorm in its place"
    )

    def __init__(self, *, is_compiled: bool) -> None:
        super().__init__(is_compiled=is_compiled)
        self._held: list[Module] = []

    def _hold(self, layer: _BatchNorm) -> None:
        if tracks(layer):
            layer.training = False
            self._held.append(layer)

    def taking_batch_statistics(self, modules: Iterable[Module]) -> list[Module]:
        return [layer for layer in batch_norms(modules) if not tracks(layer)]

    def close(self) -> None:
        super().close()
        while self._held:
            self._held.pop().training = True

    def _take(self, layer: _BatchNorm) -> None:
        layer.training = False

    def _put_back(self, layer: _BatchNorm, kept: None) -> None:
        layer.training = True


def tracks(module: Module) -> bool:
    """Does a layer take the batch's statistics now, although it has running ones?"""
    return module.training and isinstance(module.running_mean, Tensor)


def _version(layer: _BatchNorm) -> int:
    """Counts what was written to a layer's statistics; batch_norm itself does not count (torch 2.13)."""
    tracked = layer.num_batches_tracked
    return -1 if tracked is None or tracked.is_inference() else tracked._version
