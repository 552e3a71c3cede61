"""Everything that a call may change, as it was before: what lets `verify` leave no trace (Rule 7)."""

import enum
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from anybatch._verify.kept import Kept, KeptRandomState
from anybatch._verify.kept_values import KeptLeaf, KeptTensor
from anybatch._verify.names import Names
from anybatch._verify.subject import Subject
from anybatch._verify.surroundings import Surroundings
from anybatch.memory.device import device_of


class Part(enum.Enum):
    """What a call can leave changed, and a next call meet."""

    INPUTS = "inputs"
    STATE = "state"
    RANDOM = "random state"


class Scene:
    """The inputs of a call, the state of its function and modules, and the random state.

    Attributes:
        names: What tensors and modules are called.
    """

    def __init__(self, subject: Subject) -> None:
        """Copies what a call can reach."""
        self.names = Names()
        self._subject = subject
        self._found: list[Module] = []
        self._is_stripped = False
        self._surroundings = Surroundings(subject.function, subject.by_name(), self.names)
        self._random = self._default_generators()

    def add_module(self, module: Module) -> None:
        """Takes in a module that was out of reach, before it first runs."""
        if module not in self._surroundings:
            known = len(self._surroundings.leaves)
            self._found.append(module)
            self._surroundings.add_model(module, type(module).__name__)
            self._strip(self._surroundings.leaves[known:])

    def add_leaf(self, tensor: Tensor) -> None:
        """Takes in a tensor that was out of reach, before it gets a gradient."""
        if tensor not in self._surroundings:
            self._strip(self._surroundings.add_stray(tensor))

    def again(self) -> "Scene":
        """The same things, as they are now."""
        scene = Scene(self._subject)
        for module in self._found:
            scene.add_module(module)
        return scene

    def random_moment(self) -> list[Kept]:
        """All random generators in reach, as they are now."""
        return [self._default_generators(), *(each.again() for each in self._surroundings.generators)]

    def _default_generators(self) -> KeptRandomState:
        return KeptRandomState(self._subject.settings.used_devices(self.device))

    @property
    def device(self) -> torch.device | None:
        """Where the call computes: where it says, or where its modules are."""
        parameters = (kept.tensor for kept in self.tensors if isinstance(kept.tensor, Parameter))
        return self._subject.settings.device or device_of(chain(parameters, self.leaves))

    @property
    def tensors(self) -> list[KeptTensor]:
        """Everything of the function and its modules that has values."""
        return [kept for kept in self._surroundings.state if isinstance(kept, KeptTensor)]

    @property
    def leaves(self) -> list[Tensor]:
        """Every tensor into which a backward of the call may accumulate."""
        return [kept.tensor for kept in self._leaves if kept.gets_gradient and kept.tensor is not None]

    @property
    def _leaves(self) -> list[KeptLeaf]:
        return [*self._surroundings.leaves, *self._surroundings.strays]

    def strip(self) -> None:
        """Takes gradients and hooks away, until all is put back."""
        self._is_stripped = True
        self._strip(self._leaves)

    def _strip(self, leaves: Iterable[KeptLeaf]) -> None:
        for leaf in leaves if self._is_stripped else ():
            leaf.strip()

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Puts everything back at the end, whatever happens."""
        try:
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Puts everything back."""
        self.restore_state()
        self.restore_inputs()
        _restore(self._surroundings.modes)
        # After the values: a tensor takes no gradient of another dtype.
        _restore(self._leaves)
        self._is_stripped = False
        self.restore_random_state()

    def restore_state(self) -> None:
        """Puts back what the function and its modules hold; not modes, gradients and hooks."""
        _restore(self._surroundings.state)

    def restore_inputs(self) -> None:
        _restore(self._surroundings.inputs)

    def restore_random_state(self) -> None:
        """Puts back the default generators, and those of the user's own."""
        self._random.restore()
        _restore(self._surroundings.generators)

    def restore_all_but(self, part: Part) -> None:
        """Puts inputs, state and random state back, except one of them."""
        restore = {
            Part.INPUTS: self.restore_inputs,
            Part.STATE: self.restore_state,
            Part.RANDOM: self.restore_random_state,
        }
        for other in restore.keys() - {part}:
            restore[other]()

    def changed_state(self) -> list[str]:
        """The variables, buffers and attributes that are others now, by name."""
        return self._changes(self._surroundings.state)

    def changed_inputs(self) -> list[str]:
        """The arguments, or entries of them, that are others now, by name."""
        return self._changes(self._surroundings.inputs)

    def moved_generators(self) -> list[str]:
        """The random generators that have moved: libraries, for their default ones, and variables."""
        return [*self._random.changes(), *self._changes(self._surroundings.generators)]

    def _changes(self, kept: Iterable[Kept]) -> list[str]:
        return list(dict.fromkeys(self.names.shown(name) for each in kept for name in each.changes()))


def _restore(kept: Iterable[Kept]) -> None:
    with torch.no_grad():
        for each in kept:
            each.restore()
