"""All or nothing (Rule 3): what a call changes is committed at its end, or as it was."""

import traceback
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Self

import torch
from torch.amp import GradScaler
from torch.nn import Module

from anybatch.errors import LossError
from anybatch.exact.batch_norm import Norms
from anybatch.fit.gradients import Gradients, touched
from anybatch.fit.guard import is_out_of_memory
from anybatch.fit.modules import watching
from anybatch.fit.reach import Reach
from anybatch.fit.scaler import LossScaler
from anybatch.fit.snapshot import Snapshot
from anybatch.memory.device import release


class Transaction:
    """The state of one call: gradients, buffers, modes and random states.

    Attributes:
        has_met_strays: Did a module run that nothing in reach leads to?
    """

    def __init__(
        self,
        reach: Reach,
        devices: Iterable[torch.device],
        function: str,
        norms: Norms | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        """Takes note of what is known beforehand.

        Args:
            reach: What the function can name. Modules count with their children.
            devices: Whose random state may move.
            function: The name of the user's function, for errors.
            norms: What BatchNorm layers do meanwhile; None for what they do by themselves.
            scaler: The caller's scaler of losses.
        """
        self._devices = tuple(devices)
        self.snapshot = Snapshot(self._devices, reach.generators)
        self.gradients = Gradients()
        self.norms = norms or Norms()
        self.scaler = LossScaler(scaler)
        self.function = function
        self._reach = reach
        self._entered: set[Module] = set()
        self._watching = ExitStack()
        self.has_met_strays = False

    def enter(self, module: Module) -> None:
        """Takes note of a module and its children, before it runs: it may change a child that does not."""
        if module in self._entered:
            return
        self._entered.add(module)
        self.snapshot.add(module)
        self.norms.enter(module)
        kind = type(module).__name__
        self.gradients.watch(
            ((f"{kind}.{name}", leaf) for name, leaf in module._parameters.items() if leaf is not None),
            lasts=True,
        )
        for child in module._modules.values():
            if child is not None:
                self.enter(child)

    def _enter_running(self, module: Module) -> None:
        """Takes note of a module that is about to run, and may be out of reach otherwise."""
        if module in self._entered:
            return
        self.has_met_strays = True
        self.enter(module)
        self.norms.begin(module)

    @contextmanager
    def open(self) -> Iterator[Self]:
        """Takes note of every module that runs; on any exception everything is as it was.

        Raises:
            LossError: The function ran backward itself.
        """
        # Weights may have changed since autocast last cast them, in a region that is open over several calls.
        torch.clear_autocast_cache()
        try:
            for module in self._reach.modules:
                self.enter(module)
            self.gradients.watch((("a tensor", leaf) for leaf in self._reach.leaves), lasts=True)
            with self._watching:
                self._watching.enter_context(watching(self._enter_running))
                yield self
        except BaseException as error:
            is_explained = self.gradients.explain(error)
            if not self.gradients.is_committed:
                self.roll_back(error)
            if is_explained:
                raise LossError(touched(self.function, "a parameter")) from error
            raise
        finally:
            self.norms.close()
            torch.clear_autocast_cache()

    def stop_watching(self) -> None:
        """Lets modules run by themselves from now on: torch calls them faster without a hook."""
        self._watching.close()

    def commit(self) -> None:
        """Keeps what the call computed: gradients and running statistics."""
        self.norms.commit()
        self.gradients.commit()

    def roll_back(self, error: BaseException | None = None) -> None:
        """Puts everything back.

        Comparing buffers may take memory, of which there is none while a failed attempt is alive. So that one
        is freed, where it has to be, and all is put back once more.

        Args:
            error: What ended the attempt; its traceback keeps the attempt alive.
        """
        self.norms.close()
        try:
            self._restore()
            return
        except Exception as failure:  # any error, to ask the one guard about it
            if not is_out_of_memory(failure):
                raise
        if error is not None:
            traceback.clear_frames(error.__traceback__)
        for device in self._devices or (None,):
            release(device)
        self._restore()

    def _restore(self) -> None:
        """Each part can be put back again: it is done from the start where it was cut short."""
        self.gradients.roll_back()
        self.scaler.restore()
        self.snapshot.restore()
