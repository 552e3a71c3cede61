"""The blocks of a model: repeated parts of the same kind, or what the caller names."""

from collections import Counter
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from torch import nn

from anybatch.errors import TechniqueError

Blocks = dict[str, nn.Module]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_MOST_NAMES = 6


def repeated_blocks(model: nn.Module) -> Blocks:
    """Children of one parent and one class, at the level where a step keeps the least.

    A step in which blocks run again keeps about one value for each block, all of the largest block, and all
    outside of blocks; layers are counted, for their bytes are not known before they run.

    Source: Chen, Xu, Zhang and Guestrin, "Training deep nets with sublinear memory cost", 2016, section 4.
    """
    level = dict(_repeated("", model))
    best = level
    while deeper := _deeper(level):
        level = deeper
        if _kept(model, level) < _kept(model, best):
            best = level
    return best


def named_blocks(model: nn.Module, wanted: Iterable[str | type[nn.Module]], technique: str) -> Blocks:
    """The modules that names, patterns or classes tell, in the order of the model; of nested ones the outer.

    A `*` in a name stands for anything between two dots.

    Raises:
        TechniqueError: One of them tells no module, or one that has no forward.
    """
    found: set[str] = set()
    for each in wanted:
        names = [name for name, module in model.named_modules() if _is_meant(name, module, each)]
        if not names:
            raise TechniqueError(_unknown(model, each, technique))
        found.update(names)
    blocks = {name: module for name, module in model.named_modules() if name in found}
    for name, module in blocks.items():
        if isinstance(module, _CONTAINERS):
            raise TechniqueError(
                f"`{technique}`: a block is a module that runs. Got {name}, a {type(module).__name__}, "
                f'which has no forward. Name what is in it: "{name}.*".'
            )
    return {name: module for name, module in blocks.items() if not _is_inside(name, blocks)}


def _repeated(prefix: str, parent: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Repeated children of a module, or those of its children, and so on; parts of layers are no blocks."""
    kinds = Counter(type(child) for child in parent.children())
    for name, child in parent.named_children():
        path = f"{prefix}.{name}" if prefix else name
        is_block = kinds[type(child)] > 1 and _has_parts(child) and not isinstance(child, _CONTAINERS)
        if is_block:
            yield path, child
        else:
            yield from _repeated(path, child)


def _has_parts(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _deeper(blocks: Blocks) -> Blocks:
    """The same blocks, each cut into its own repeated blocks where it has some; empty where none has."""
    inner = {name: dict(_repeated(name, module)) for name, module in blocks.items()}
    if not any(inner.values()):
        return {}
    return {
        path: part
        for name, module in blocks.items()
        for path, part in (inner[name] or {name: module}).items()
    }


def _kept(model: nn.Module, blocks: Blocks) -> int:
    inside = [_layers(module) for module in blocks.values()]
    return len(blocks) + max(inside, default=0) + _layers(model) - sum(inside)


def _layers(module: nn.Module) -> int:
    return sum(not _has_parts(each) for each in module.modules())


def _is_meant(name: str, module: nn.Module, wanted: str | type[nn.Module]) -> bool:
    if not isinstance(wanted, str):
        return isinstance(module, wanted)
    return matches(name, wanted)


def matches(name: str, pattern: str) -> bool:
    """Does a dotted name match a pattern, part by part?"""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _is_inside(name: str, blocks: Blocks) -> bool:
    return any(name != outer and (not outer or name.startswith(f"{outer}.")) for outer in blocks)


def _unknown(model: nn.Module, wanted: str | type[nn.Module], technique: str) -> str:
    names = [name for name, _ in model.named_modules() if name]
    shown = ", ".join(names[:_MOST_NAMES]) + (" and so on" if len(names) > _MOST_NAMES else "")
    what = repr(wanted) if isinstance(wanted, str) else f"the class {wanted.__name__}"
    return (
        f"`{technique}`: every name and class must tell modules of {type(model).__name__}. Got {what}, "
        f"which tells none. It has {shown or 'no modules'}."
    )
