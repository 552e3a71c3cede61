"""What the caller declares about the entries of a batch: `batch_dim`, read once per call."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from anybatch.batch.containers import container_of
from anybatch.errors import BatchError

Rule = int | Literal["list"] | None
BatchDim = int | Mapping[str, int | Literal["list"] | None]

KNOWN_PATHS_SHOWN = 12


@dataclass(frozen=True)
class Declared:
    """The declared rules by path; the longest matching prefix of a path wins.

    Attributes:
        default: The rule of a path of which no prefix is declared.
        paths: The rule of each declared path: where its rows are, `None` where all rows share it, `"list"`
            where the list itself is the batch dimension.
    """

    default: int = 0
    paths: Mapping[str, Rule] = field(default_factory=dict)

    def rule(self, path: str, inherited: Rule) -> Rule:
        """The rule that holds at `path`, given that of its parent."""
        return self.paths.get(path, inherited) if self.paths else inherited

    def is_below(self, path: str) -> bool:
        """Whether something inside `path` is declared."""
        return any(declared.startswith(f"{path}.") for declared in self.paths)

    def is_container(self, path: str) -> bool:
        """Whether the list at `path` is declared to be a container of entries."""
        return isinstance(self.paths.get(path), int) or self.is_below(path)


def read_batch_dim(batch_dim: BatchDim, arguments: Mapping[str, Any]) -> Declared:
    """Read `batch_dim` and check it against the arguments.

    Raises:
        BatchError: It is neither an int nor a mapping of paths to int, None or "list"; a path leads nowhere.
    """
    if not isinstance(batch_dim, Mapping):
        if not _is_int(batch_dim):
            raise BatchError(
                f"`batch_dim`: takes an int, or an int, None or 'list' for each path. Got {batch_dim!r}."
            )
        return Declared(default=batch_dim)
    problems = [*_bad_rules(batch_dim), *_bad_paths(batch_dim, arguments)]
    if problems:
        raise BatchError("`batch_dim`: " + " ".join(problems))
    return Declared(paths=dict(batch_dim))


def _is_int(rule: Any) -> bool:
    return isinstance(rule, int) and not isinstance(rule, bool)


def _bad_rules(batch_dim: Mapping[str, Rule]) -> list[str]:
    bad = {
        path: rule
        for path, rule in batch_dim.items()
        if not (_is_int(rule) or rule is None or rule == "list")
    }
    return [f"a path takes an int, None or 'list'. Got {bad!r}."] if bad else []


def _bad_paths(batch_dim: Mapping[str, Rule], arguments: Mapping[str, Any]) -> list[str]:
    bad = [path for path in batch_dim if not _exists(path, "", arguments.items())]
    if not bad:
        return []
    known = _paths("", arguments.items())
    shown = ", ".join(known[:KNOWN_PATHS_SHOWN]) + (", ..." if len(known) > KNOWN_PATHS_SHOWN else "")
    return [f"no entry is at {', '.join(map(repr, bad))}. The entries are {shown}."]


def child_path(parent: str, key: object) -> str:
    """The path of a child, as `batch_dim` and errors spell it."""
    return f"{parent}.{key}" if parent else str(key)


def _exists(wanted: object, parent: str, pairs: Any) -> bool:
    for key, child in pairs:
        path = child_path(parent, key)
        if wanted == path:
            return True
        if isinstance(wanted, str) and wanted.startswith(f"{path}."):
            container = container_of(child)
            if container and _exists(wanted, path, container.children(child)):
                return True
    return False


def _paths(parent: str, pairs: Any) -> list[str]:
    """Every path down to the first lists."""
    found = []
    for key, child in pairs:
        path = child_path(parent, key)
        found.append(path)
        container = container_of(child)
        if container and not container.is_list:
            found += _paths(path, container.children(child))
    return found
