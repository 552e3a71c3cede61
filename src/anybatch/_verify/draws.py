"""Which modules draw random numbers: those during whose forward, and not a child's, a generator moves."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from anybatch._run import eager, light_graph
from anybatch._verify.scene import Scene
from anybatch._verify.subject import Subject
from anybatch.batch import feed


@dataclass
class Draws:
    """Who draws random numbers.

    Attributes:
        modules: In the order in which they first do.
        is_outside: Does the function draw some outside of any module?
    """

    modules: dict[Module, None] = field(default_factory=dict)
    is_outside: bool = False


def watch(subject: Subject, scene: Scene) -> Draws:
    """Runs the call forward, on all rows at once. What it changes stays, and is for the caller to undo."""
    draws = Draws()
    layout = subject.layout
    (piece,) = feed(layout, (layout.rows,), scene.device)
    with eager(), light_graph(), _attributed(draws, scene):
        subject.bound.run(piece.arguments)
    return draws


@contextmanager
def _attributed(draws: Draws, scene: Scene) -> Iterator[None]:
    running: list[Module] = []
    moment = scene.random_moment()

    def attribute() -> None:
        nonlocal moment
        if not any(generator.changes() for generator in moment):
            return
        moment = scene.random_moment()
        if running:
            draws.modules[running[-1]] = None
        else:
            draws.is_outside = True

    def enter(module: Module, _inputs: Any) -> None:
        attribute()
        running.append(module)

    def leave(_module: Module, _inputs: Any, _outputs: Any) -> None:
        attribute()
        running.pop()

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        yield
        attribute()
    finally:
        for hook in hooks:
            hook.remove()
