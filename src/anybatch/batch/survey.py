"""Find the entries that speak for a number of rows, and the number on which they all agree."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from anybatch.batch.amounts import row_amounts
from anybatch.batch.containers import container_of
from anybatch.batch.declared import BALANCED, Declared, Rule, child_path, dim_of
from anybatch.batch.entries import is_entry, name_of, possible_rows, why_not, why_unknown
from anybatch.batch.kinds import CannotCut
from anybatch.batch.leaves import is_strided
from anybatch.batch.lengths import read_lengths
from anybatch.batch.lists import read_list
from anybatch.batch.rows import ANY, Possible, together
from anybatch.errors import BatchError

ENTRIES_SHOWN = 20


@dataclass(frozen=True, eq=False)
class Entry:
    """A tensor, an array or an undecided list, outside of other undecided lists.

    Attributes:
        path: Where it is, as `batch_dim` spells it.
        value: What is there.
        rule: The rule that holds there.
        problem: Why it can't be part of a mini-batch; empty where it can.
    """

    path: str
    value: Any
    rule: Rule
    problem: str = ""

    def possible(self, declared: Declared, wanted: int | None = None) -> Possible:
        """The numbers of rows that it can stand for; with `wanted`, only whether that one is among them."""
        if self.is_list:
            return read_list(self.value, self.path, self.rule, declared, wanted).possible
        return declared.rows(self.value, self.rule) or possible_rows(self.value, dim_of(self.rule))

    @property
    def is_list(self) -> bool:
        return not is_entry(self.value)


def count_rows(arguments: Mapping[str, Any], declared: Declared) -> int:
    """The number of rows on which all entries of the named arguments agree.

    Raises:
        BatchError: They disagree, several numbers are possible, none has rows, or an entry can't be cut.
    """
    found = [
        entry
        for name, value in arguments.items()
        for entry in _entries(value, name, declared.default, declared)
    ]
    problems = [entry.problem for entry in found if entry.problem]
    entries = [entry for entry in found if not entry.problem]
    agreed = _agreement(entries, declared)
    if agreed.is_impossible:
        problems.append(_disagreement(entries, declared))
    elif not problems and not agreed.candidates:
        problems.append(_nothing_to_cut(arguments))
    elif not problems and len(agreed.candidates) > 1:
        problems.append(_several(entries, agreed, declared))
    elif not problems and agreed.candidates == (0,):
        problems.append(
            f"a mini-batch has at least one row. Got 0 rows in {_paths(entries)}. Skip an empty batch."
        )
    refuse(problems)
    return agreed.candidates[0]


def refuse(problems: list[str]) -> None:
    """Raise one error for all problems, if there are any."""
    if len(problems) == 1:
        raise BatchError(f"`apply`: {problems[0]}")
    if problems:
        raise BatchError("`apply`: the batch can't be cut.\n- " + "\n- ".join(problems))


def _entries(
    value: Any, path: str, inherited: Rule, declared: Declared, is_named: bool = True
) -> Iterator[Entry]:
    rule = declared.rule(path, inherited)
    container = container_of(value)
    if rule is None and not declared.is_below(path):
        return
    if rule == "list":
        yield Entry(path, value, rule, _why_no_list(value, path, declared))
    elif rule == BALANCED and (
        is_entry(value) or _is_list(value) or (path in declared.paths and not container)
    ):
        yield Entry(path, value, rule, _why_not_balanced(value, path))
    elif is_entry(value):
        problem = _why_not_so(value, path, rule, declared) or why_not(value, path, dim_of(rule), is_named)
        if problem or rule is not None:
            yield Entry(path, value, rule, problem)
    elif container is None:
        problem = why_not(value, path, dim_of(rule), is_named)
        if problem:
            yield Entry(path, value, rule, problem)
    elif container.is_list and not declared.is_container(path):
        yield Entry(path, value, rule)
    else:
        children = list(container.children(value))
        found = [
            entry
            for key, child in children
            for entry in _entries(child, child_path(path, key), rule, declared, is_named=False)
        ]
        if container.is_object and is_named and not found:
            yield Entry(path, value, rule, why_unknown(value, path))
        yield from found


def _is_list(value: Any) -> bool:
    container = container_of(value)
    return container is not None and container.is_list


def _why_not_balanced(value: Any, path: str) -> str:
    problem = why_not(value, path, 0, is_named=False)
    try:
        if problem or row_amounts(value) is not None:
            return problem
    except CannotCut as reason:
        return f"{path} ({name_of(value)}) {reason}"
    return (
        f"{path} is declared 'balanced', but its rows all hold the same ({name_of(value)}). Declare that for "
        "graphs, jagged and packed sequences or a list."
    )


def _why_not_so(value: Any, path: str, rule: Rule, declared: Declared) -> str:
    """Why an entry is not what it is declared to be."""
    if declared.is_below(path):
        return f"{path} ({name_of(value)}) is cut as one. Declare nothing inside it."
    lengths = declared.lengths_for(value, rule)
    if lengths is None:
        return ""
    if is_strided(value) and value.ndim and value.shape[0] == sum(lengths):
        return ""
    return (
        f"{path} is declared to hold one row after another, of the lengths in {rule}: {sum(lengths)} in all. "
        f"Got shape {tuple(value.shape)}. Concatenate its rows along dim 0."
    )


def _why_no_list(value: Any, path: str, declared: Declared) -> str:
    container = container_of(value)
    if container is None or not container.is_list:
        return f"{path} is declared 'list'. Got {type(value).__name__}. Give a list or tuple of rows."
    if declared.is_below(path):
        return f"{path} is declared 'list', so its elements are rows. Declare nothing inside it."
    return ""


def _agreement(entries: list[Entry], declared: Declared) -> Possible:
    """What all entries can stand for together; tensors first, for they narrow the readings of lists."""
    firm = together(entry.possible(declared) for entry in entries if not entry.is_list)
    known = next(iter(firm.rows)) if firm.rows and not firm.fits_any else None
    lists = (entry.possible(declared, known) for entry in entries if entry.is_list)
    return firm & together(lists)


def _disagreement(entries: list[Entry], declared: Declared) -> str:
    return (
        f"all entries must have the same number of rows. Got {_listing(entries, declared)}. "
        f"{_how_to_run(entries)}"
        f"Declare an entry that all rows share: `batch_dim={{{_first_odd(entries, declared)!r}: None}}`."
    )


def _how_to_run(entries: list[Entry]) -> str:
    """How to declare rows one after another, where an entry is as long as all lengths in another."""
    for entry in entries:
        if not (isinstance(entry.value, Tensor) and is_strided(entry.value) and entry.value.ndim):
            continue
        for other in entries:
            lengths = read_lengths(other.value) or []
            if sum(lengths) == entry.value.shape[0] != len(lengths):
                return (
                    f"Declare rows that lie one after another, with their lengths in {other.path}: "
                    f"`batch_dim={{{entry.path!r}: {other.path!r}}}`. "
                )
    return ""


def _first_odd(entries: list[Entry], declared: Declared) -> str:
    """The first entry that can't go with those before it."""
    agreed = ANY
    for entry in entries:
        agreed &= entry.possible(declared)
        if agreed.is_impossible:
            return entry.path
    return entries[-1].path


def _several(entries: list[Entry], agreed: Possible, declared: Declared) -> str:
    undecided = next(entry.path for entry in entries if len(entry.possible(declared).rows) > 1)
    candidates = " or ".join(map(str, agreed.candidates))
    return (
        f"the number of rows is ambiguous, {candidates}. Got {_listing(entries, declared)}. "
        f"{how_to_declare(undecided)}"
    )


def how_to_declare(path: str) -> str:
    """The two ways of declaring what a list is."""
    return (
        f"Declare `batch_dim={{{path!r}: 'list'}}` if it holds one element per row, or "
        f"`batch_dim={{{path!r}: 0}}` if it holds entries with rows of their own."
    )


def _nothing_to_cut(arguments: Mapping[str, Any]) -> str:
    kinds = ", ".join(f"{name}: {type(value).__name__}" for name, value in arguments.items())
    return (
        f"one of the named arguments must have rows. Got {kinds or 'none'}. Name a tensor or a list of rows."
    )


def _listing(entries: list[Entry], declared: Declared) -> str:
    shown = [f"{entry.path}: {_rows_in_words(entry, declared)}" for entry in entries[:ENTRIES_SHOWN]]
    return ", ".join(shown) + (", ..." if len(entries) > ENTRIES_SHOWN else "")


def _rows_in_words(entry: Entry, declared: Declared) -> str:
    possible = entry.possible(declared)
    counts = " or ".join(map(str, sorted(possible.rows)))
    if not counts:
        return "any number of rows" if possible.fits_any else "no rows in either reading of the list"
    unit = "row" if counts == "1" else "rows"
    return f"{counts} {unit}" + (" (passes whole)" if possible.fits_any else "")


def _paths(entries: Iterable[Entry]) -> str:
    return ", ".join(entry.path for entry in entries)
