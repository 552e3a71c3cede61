"""Every kind of container is opened, and rebuilt as its own type around new children."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from anybatch.batch import lay_out, register
from anybatch.batch.containers import (
    _container_for,
    _registered,
    container_of,
    holds_arrays,
    holds_tensors,
    map_tensors,
)

from .kinds import LISTS, MAPPINGS, RECORDS, Derived, Frozen, NamedDict, Namespace, Pair, Sample

ROWS = 6


@pytest.fixture
def registry() -> Iterator[None]:
    """Forget afterwards what a test registers."""
    before = dict(_registered)
    yield
    _registered.clear()
    _registered.update(before)
    _container_for.cache_clear()


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    container = container_of(value)
    assert container is not None
    return container.rebuild(value, [change(child) for _, child in container.children(value)])


@pytest.mark.parametrize("make", MAPPINGS.values(), ids=list(MAPPINGS))
def test_mapping_is_rebuilt_as_its_own_type(make: Callable[[dict[str, Any]], Any]) -> None:
    """A mapping keeps its type, its keys and their order; the given one stays as it was."""
    value = make({"b": 1, "a": 2})
    new = _rebuilt(value, lambda child: child * 10)
    assert type(new) is type(value)
    assert list(new.items()) == [("b", 10), ("a", 20)]
    assert list(value.items()) == [("b", 1), ("a", 2)]


@pytest.mark.parametrize("make", RECORDS.values(), ids=list(RECORDS))
def test_record_is_rebuilt_as_its_own_type(make: Callable[..., Any]) -> None:
    """A named tuple or dataclass keeps its type and its fields; the given one stays as it was."""
    value = make(1, second=2)
    new = _rebuilt(value, lambda child: child * 10)
    assert type(new) is type(value)
    assert (new.first, new.second) == (10, 20)
    assert (value.first, value.second) == (1, 2)


@pytest.mark.parametrize("make", LISTS.values(), ids=list(LISTS))
def test_list_is_rebuilt_as_its_own_type(make: Callable[[list[Any]], Any]) -> None:
    """A list or tuple keeps its type; the given one stays as it was."""
    value = make([1, 2, 3])
    new = _rebuilt(value, lambda child: child * 10)
    assert type(new) is type(value)
    assert list(new) == [10, 20, 30]
    assert list(value) == [1, 2, 3]


def test_default_factory_is_kept() -> None:
    """A defaultdict still makes what is missing."""
    assert _rebuilt(defaultdict(list, a=1), lambda child: child)["missing"] == []


@pytest.mark.parametrize("make", [MAPPINGS["dict subclass"], LISTS["list subclass"]])
def test_attributes_of_a_subclass_are_kept(make: Callable[[Any], Any]) -> None:
    """What a subclass of dict or list carries besides its items stays."""
    value = make({"a": 1}) if make is MAPPINGS["dict subclass"] else make([1])
    assert _rebuilt(value, lambda child: child * 10).name == "kept"


def test_attribute_that_is_an_item_follows_it() -> None:
    """An attribute that stands for an item of a mapping never shows the old one."""
    value = NamedDict(x=torch.arange(3))
    value.name = value["x"]
    new = _rebuilt(value, lambda child: child * 10)
    assert new.name is new["x"]


def test_namespace_stays_one() -> None:
    """In a mapping whose keys are attributes too, both show the new child."""
    new = _rebuilt(Namespace(x=1), lambda child: child * 10)
    assert (new["x"], new.x) == (10, 10)
    new.y = 5
    assert new["y"] == 5


def test_key_that_a_subclass_normalises_is_not_doubled() -> None:
    """A mapping that changes keys on the way in is rebuilt with the keys that it has."""

    class Lower(dict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            super().__setitem__(f"{key.lower()}_", value)

    value = Lower()
    value["A"] = 1
    assert dict(_rebuilt(value, lambda child: child * 10)) == {"a_": 10}


def test_user_dict_is_rebuilt() -> None:
    """A mutable mapping that is no dict is rebuilt by its own copy."""
    value = UserDict(a=1)
    new = _rebuilt(value, lambda child: child * 10)
    assert type(new) is UserDict
    assert (new["a"], value["a"]) == (10, 1)


def test_worked_out_fields_and_attributes_are_cut_like_the_others() -> None:
    """What a dataclass worked out is cut with the rest, and a cached property is forgotten."""
    value = Derived(torch.arange(ROWS))
    assert value.total == 15
    piece = lay_out({"batch": value}).cut(2, 4)["batch"]
    assert type(piece) is Derived
    assert [t.tolist() for t in (piece.first, piece.second, piece.third)] == [[2, 3], [4, 6], [6, 9]]
    assert piece.total == 5
    assert value.total == 15


def test_field_that_is_not_set_stays_so() -> None:
    """A dataclass with an unset field is rebuilt without it."""
    value = Derived.__new__(Derived)
    value.first = 1
    new = _rebuilt(value, lambda child: child * 10)
    assert new.first == 10
    assert not hasattr(new, "second")


def test_named_tuple_subclass_keeps_its_methods() -> None:
    """A subclass of a named tuple is rebuilt without its constructor."""

    class Both(Pair):
        def __new__(cls, both: int) -> Both:
            return super().__new__(cls, both, both)

    new = _rebuilt(Both(2), lambda child: child * 10)
    assert type(new) is Both
    assert new == (20, 20)


def test_structs_of_torch_are_rebuilt() -> None:
    """What `torch.max` returns is a record, not a list of rows."""
    value = torch.arange(ROWS * 2.0).view(ROWS, 2).max(dim=1)
    piece = lay_out({"batch": value}).cut(1, 3)["batch"]
    assert type(piece) is type(value)
    assert piece.values.tolist() == [3, 5]
    assert piece.indices.tolist() == [1, 1]


def test_model_output_is_rebuilt_with_its_missing_fields() -> None:
    """transformers' outputs, a dict and a dataclass at once, keep keys, attributes and absent fields."""
    from transformers.modeling_outputs import CausalLMOutput

    logits = torch.arange(ROWS * 2).view(ROWS, 2)
    value = CausalLMOutput(loss=None, logits=logits, hidden_states=(logits, logits[:, :1]))
    piece = lay_out({"batch": value}).cut(2, 4)["batch"]
    assert type(piece) is CausalLMOutput
    assert list(piece) == ["logits", "hidden_states"]
    assert piece.logits.tolist() == [[4, 5], [6, 7]]
    assert piece["logits"] is piece.logits is piece[0]
    assert [h.tolist() for h in piece.hidden_states] == [[[4, 5], [6, 7]], [[4], [6]]]
    assert piece.loss is None
    assert value.logits is logits


def test_batch_encoding_keeps_its_tokens_with_their_rows() -> None:
    """What a tokenizer returns is cut with the tokenizer's own view of each row."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BatchEncoding, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[PAD]": 2}, unk_token="[PAD]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    value = tokenizer(["a b", "b", "b a a"], padding=True, return_tensors="pt")
    piece = lay_out({"batch": value}).cut(1, 3)["batch"]
    assert type(piece) is BatchEncoding
    assert piece["input_ids"].tolist() == [[1, 2, 2], [1, 0, 0]]
    assert piece.tokens(1) == ["b", "a", "a"]
    assert value.tokens(1) == ["b", "[PAD]", "[PAD]"]
    assert value["input_ids"].shape == (3, 3)


@pytest.mark.parametrize(
    "value", ["text", 1.5, None, torch.arange(3), torch.Size([1, 2]), {1, 2}, range(3), int]
)
def test_what_is_no_container_is_left_closed(value: Any) -> None:
    """Scalars, tensors, shapes, sets, ranges and classes are not opened."""
    assert container_of(value) is None


class Graphs:
    """A container that nobody knows."""

    def __init__(self, nodes: Any, label: Any) -> None:
        self.nodes, self.label = nodes, label


@pytest.mark.usefixtures("registry")
def test_registered_kind_is_cut_and_so_are_its_subclasses() -> None:
    """A registered container is opened by its own functions and comes back as what they build."""

    class Labelled(Graphs):
        pass

    register(Graphs, lambda graphs: vars(graphs).items(), lambda graphs, new: type(graphs)(*new))
    piece = lay_out({"batch": Labelled(torch.arange(ROWS), [f"g{i}" for i in range(ROWS)])}).cut(4, 6)[
        "batch"
    ]
    assert type(piece) is Labelled
    assert piece.nodes.tolist() == [4, 5]
    assert piece.label == ["g4", "g5"]


@pytest.mark.usefixtures("registry")
def test_registered_kind_beats_what_is_built_in() -> None:
    """A class that happens to be a list is opened as registered, and the most specific class wins."""

    class Stack(list[Any]):
        pass

    class Tower(Stack):
        pass

    register(Stack, lambda stack: [("top", stack[0])], lambda stack, new: Stack([*new, *stack[1:]]))
    register(Tower, lambda tower: [], lambda tower, new: tower)
    container, tower = container_of(Stack()), container_of(Tower([1]))
    assert container is not None
    assert tower is not None
    assert not container.is_list
    assert list(container.children(Stack([1, 2]))) == [("top", 1)]
    assert list(tower.children(Tower([1]))) == []


@pytest.mark.usefixtures("registry")
def test_registering_again_replaces() -> None:
    """The last registration of a class counts, also after the first was in use."""
    register(Graphs, lambda graphs: [("nodes", graphs.nodes)], lambda graphs, new: Graphs(*new, None))
    assert holds_tensors(Graphs(torch.ones(1), None))
    register(Graphs, lambda graphs: [], lambda graphs, new: graphs)
    assert not holds_tensors(Graphs(torch.ones(1), None))


def test_registering_what_is_no_class_is_refused() -> None:
    """`register` takes a class, not an instance."""
    with pytest.raises(TypeError, match="must be a class"):
        register(Graphs(1, 2), lambda graphs: [], lambda graphs, new: graphs)  # type: ignore[arg-type]


def test_map_tensors_changes_tensors_at_any_depth() -> None:
    """Every tensor is replaced, and nothing else."""
    value = {
        "a": [torch.tensor(1), ("x", Sample(torch.tensor(2), None))],
        "b": OrderedDict(c=torch.tensor(3)),
    }
    new = map_tensors(value, lambda tensor: tensor * 10)
    assert new["a"][0] == 10
    assert new["a"][1][0] == "x"
    assert new["a"][1][1].first == 20
    assert new["b"]["c"] == 30
    assert value["b"]["c"] == 3


def test_map_tensors_leaves_the_same_object_where_nothing_changes() -> None:
    """A container in which no tensor changes is not rebuilt."""
    kept, changed = Frozen([1, "x"]), {"x": torch.tensor(1)}
    new = map_tensors([kept, changed], lambda tensor: tensor + 1)
    assert new[0] is kept
    assert new[1] is not changed
    assert map_tensors(changed, lambda tensor: tensor) is changed


def test_holding_tensors_is_seen_at_any_depth() -> None:
    """Tensors and arrays are found inside of nested containers, and only there."""

    def deep(value: Any) -> Any:
        return {"a": [1, ("x", Sample(value))]}

    array = torch.ones(2).numpy()
    found: list[tuple[Any, bool, bool]] = [
        (torch.ones(2), True, True),
        (array, False, True),
        ("x", False, False),
    ]
    for leaf, has_tensor, has_array in found:
        assert (holds_tensors(deep(leaf)), holds_arrays(deep(leaf))) == (has_tensor, has_array)


def test_parameter_counts_as_tensor() -> None:
    """A subclass of tensor is a tensor."""
    seen: list[Tensor] = []
    map_tensors([torch.nn.Parameter(torch.ones(1))], lambda tensor: seen.append(tensor) or tensor)
    assert len(seen) == 1
