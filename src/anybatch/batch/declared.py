"""What the caller declares about the entries of a batch: `batch_dim`, read once per call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from anybatch.batch.containers import container_of
from anybatch.batch.leaves import is_array
from anybatch.batch.lengths import read_lengths
from anybatch.batch.rows import Possible, exactly
from anybatch.errors import BatchError

Rule = int | str | None
BatchDim = int | Mapping[str, int | str | None]

BALANCED = "balanced"
PER_ROW = ("list", BALANCED)
"""The rules under which a list holds one element per row."""

KNOWN_PATHS_SHOWN = 12


@dataclass(frozen=True)
class Declared:
    """The declared rules by path; the longest matching prefix of a path wins.

    Attributes:
        default: The rule of a path of which no prefix is declared.
        paths: The rule of each declared path: where its rows are, `None` where all rows share it, `"list"`
            where the list itself is the batch dimension, `"balanced"` where its rows differ in what they hold
            and pieces are cut by that, or the path of the entry with the lengths of its rows.
        lengths: What entries with lengths hold, by their path.
    """

    default: int = 0
    paths: Mapping[str, Rule] = field(default_factory=dict)
    lengths: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def rule(self, path: str, inherited: Rule) -> Rule:
        """The rule that holds at `path`, given that of its parent."""
        return self.paths.get(path, inherited) if self.paths else inherited

    def lengths_for(self, value: Any, rule: Rule) -> Sequence[int] | None:
        """The lengths of an entry's rows, where they lie one after another."""
        return self.lengths.get(rule) if isinstance(rule, str) and is_array(value) else None

    def rows(self, value: Any, rule: Rule) -> Possible | None:
        """The number of rows of an entry that is declared to hold them one after another."""
        lengths = self.lengths_for(value, rule)
        return None if lengths is None else exactly(len(lengths))

    def is_below(self, path: str) -> bool:
        """Whether something inside `path` is declared."""
        return any(declared.startswith(f"{path}.") for declared in self.paths)

    def is_container(self, path: str) -> bool:
        """Whether the list at `path` is declared to be a container of entries."""
        return isinstance(self.paths.get(path), int) or self.is_below(path)


def dim_of(rule: Rule) -> int:
    """The dim along which an entry's rows are; what is cut as one may have them anywhere."""
    return rule if isinstance(rule, int) else 0


def read_batch_dim(batch_dim: BatchDim, arguments: Mapping[str, Any]) -> Declared:
    """Read `batch_dim` and check it against the arguments.

    Raises:
        BatchError: It is neither an int nor a mapping of paths to int, None, "list", "balanced" or the path
            of lengths; a path leads nowhere.
    """
    if not isinstance(batch_dim, Mapping):
        if not _is_int(batch_dim):
            raise BatchError(
                f"`batch_dim`: takes an int, or {_KNOWN_RULES} for each path. Got {batch_dim!r}."
            )
        return Declared(default=batch_dim)
    lengths = _lengths(batch_dim, arguments)
    problems = [*_bad_rules(batch_dim, lengths), *_bad_paths(batch_dim, arguments)]
    if problems:
        raise BatchError("`batch_dim`: " + " ".join(problems))
    return Declared(paths=dict(batch_dim), lengths=lengths)


_KNOWN_RULES = "an int, None, 'list', 'balanced' or the path of the entry with its rows' lengths"


def _is_int(rule: Any) -> bool:
    return isinstance(rule, int) and not isinstance(rule, bool)


def _lengths(batch_dim: Mapping[str, Rule], arguments: Mapping[str, Any]) -> dict[str, list[int]]:
    found = {}
    for path, rule in batch_dim.items():
        if isinstance(rule, str) and rule not in PER_ROW and rule != path:
            lengths = read_lengths(_find(rule, "", arguments.items()))
            if lengths is not None:
                found[rule] = lengths
    return found


def _bad_rules(batch_dim: Mapping[str, Rule], lengths: Mapping[str, Sequence[int]]) -> list[str]:
    bad = {
        path: rule
        for path, rule in batch_dim.items()
        if not (_is_int(rule) or rule is None or (isinstance(rule, str) and rule in {*PER_ROW, *lengths}))
    }
    return [f"a path takes {_KNOWN_RULES}. Got {bad!r}."] if bad else []


def _bad_paths(batch_dim: Mapping[str, Rule], arguments: Mapping[str, Any]) -> list[str]:
    bad = [path for path in batch_dim if _find(path, "", arguments.items()) is _NOTHING]
    if not bad:
        return []
    known = _paths("", arguments.items())
    shown = ", ".join(known[:KNOWN_PATHS_SHOWN]) + (", ..." if len(known) > KNOWN_PATHS_SHOWN else "")
    return [f"no entry is at {', '.join(map(repr, bad))}. The entries are {shown}."]


def child_path(parent: str, key: object) -> str:
    """The path of a child, as `batch_dim` and errors spell it."""
    return f"{parent}.{key}" if parent else str(key)


_NOTHING = object()
"""What is found at a path that leads nowhere."""


def _find(wanted: object, parent: str, pairs: Any) -> Any:
    for key, child in pairs:
        path = child_path(parent, key)
        if wanted == path:
            return child
        if isinstance(wanted, str) and wanted.startswith(f"{path}."):
            container = container_of(child)
            found = _find(wanted, path, container.children(child)) if container else _NOTHING
            if found is not _NOTHING:
                return found
    return _NOTHING


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
