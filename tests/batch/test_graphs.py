"""Batches of PyTorch Geometric are cut by graph, and edges numbered again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.nn import GATConv, GCNConv, SAGEConv, global_max_pool, global_mean_pool

import anybatch
from anybatch.batch import feed, lay_out
from anybatch.errors import BatchError

from .exactness import CUTS, assert_exact, pieces_of


def _nodes(graph: int) -> int:
    return (3 * graph) % 5 + 2


def _graph(index: int) -> Data:
    nodes = _nodes(index)
    ring = torch.arange(nodes)
    return Data(
        x=torch.randn(nodes, 3).double(),
        edge_index=torch.stack([ring, (ring + 1) % nodes]),
        y=torch.randn(1).double(),
        name=f"g{index}",
    )


def _hetero(index: int) -> HeteroData:
    graph = HeteroData()
    graph["user"].x = torch.randn(_nodes(index), 3).double()
    graph["item"].x = torch.randn(2, 3).double()
    users = torch.arange(_nodes(index))
    graph["user", "buys", "item"].edge_index = torch.stack([users, users % 2])
    graph.y = torch.randn(1).double()
    return graph


def _batch(graphs: int, make: Any = _graph, **options: Any) -> Any:
    return Batch.from_data_list([make(index) for index in range(graphs)], **options)


class _Network(nn.Module):
    """One round of messages along the edges, then the mean over each graph's nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.head = nn.Linear(3, 4).double(), nn.Linear(4, 1).double()

    def nodes(self, graphs: Data) -> Tensor:
        source, target = graphs.edge_index
        hidden = self.message(graphs.x)
        return torch.tanh(hidden.index_add(0, target, hidden[source]))

    def forward(self, graphs: Data) -> Tensor:
        sums = torch.zeros(graphs.num_graphs, 4).double().index_add(0, graphs.batch, self.nodes(graphs))
        return self.head(sums / graphs.ptr.diff()[:, None])[:, 0]


@pytest.mark.parametrize(("graphs", "ub_size"), CUTS)
@pytest.mark.parametrize("options", [{}, {"batch_dim": {"graphs": "balanced"}}], ids=["rows", "balanced"])
@pytest.mark.parametrize("reduction", ["graphs", "nodes"])
def test_batch_of_graphs_equals_the_whole(
    graphs: int, ub_size: int, options: dict[str, Any], reduction: str
) -> None:
    """Means over graphs and over nodes have the gradient of the whole batch, however it is balanced."""
    network = _Network()

    def step(graphs: Data) -> Tensor:
        if reduction == "nodes":
            return network.nodes(graphs).pow(2).mean()
        return ((network(graphs) - graphs.y) ** 2).mean()

    assert_exact(step, {"graphs": _batch(graphs)}, network, ub_size, **options)


@pytest.mark.parametrize(("graphs", "ub_size"), CUTS)
def test_hetero_graphs_equal_the_whole(graphs: int, ub_size: int) -> None:
    """Graphs with several kinds of nodes are cut the same way."""
    network = nn.Linear(3, 1).double()

    def step(graphs: HeteroData) -> Tensor:
        users, items = graphs["user", "buys", "item"].edge_index
        score = network(graphs["user"].x)[users] * graphs["item"].x[items]
        per_graph = torch.zeros(len(graphs.y), 3).double().index_add(0, graphs["user"].batch[users], score)
        return ((per_graph.sum(1) - graphs.y) ** 2).mean()

    assert_exact(step, {"graphs": _batch(graphs, _hetero)}, network, ub_size)


@pytest.mark.parametrize("make", [_graph, _hetero])
@pytest.mark.parametrize(("graphs", "ub_size"), CUTS)
def test_graphs_stay_in_order(graphs: int, ub_size: int, make: Any) -> None:
    """Every graph comes once and in order, as it was before it was batched."""
    value = _batch(graphs, make)
    pieces = pieces_of(value, ub_size)
    assert all(type(piece) is type(value) for piece in pieces)
    found = [graph for piece in pieces for graph in piece.to_data_list()]
    assert len(found) == graphs
    for graph, expected in zip(found, value.to_data_list(), strict=True):
        assert graph.keys() == expected.keys()
        for ours, theirs in zip(graph.stores, expected.stores, strict=True):
            for key, child in theirs.items():
                assert torch.equal(ours[key], child) if isinstance(child, Tensor) else ours[key] == child


@pytest.mark.parametrize("convolution", [GCNConv, GATConv, SAGEConv])
@pytest.mark.parametrize("pool", [global_mean_pool, global_max_pool])
def test_layers_of_the_library_equal_the_whole(convolution: Any, pool: Any) -> None:
    """Convolutions and pools of PyTorch Geometric get the gradient of the whole batch."""
    layers = nn.ModuleList([convolution(3, 4), nn.Linear(4, 1)]).double()

    def step(graphs: Data) -> Tensor:
        hidden = layers[0](graphs.x, graphs.edge_index).tanh()
        pooled = pool(hidden, graphs.batch, size=graphs.num_graphs)
        return ((layers[1](pooled)[:, 0] - graphs.y) ** 2).mean()

    assert_exact(step, {"graphs": _batch(10)}, layers, ub_size=4)


def test_followed_and_shared_attributes_are_kept() -> None:
    """Batch vectors of followed attributes are made again; what is no tensor of rows passes whole."""
    value = _batch(6, follow_batch=["x"])
    value.note, value.temperature = "kept", torch.tensor(0.5)
    piece = lay_out({"graphs": value}).cut(2, 5)["graphs"]
    assert (piece.note, piece.temperature.item(), piece.num_graphs) == ("kept", 0.5, 3)
    assert torch.equal(piece.x_batch, piece.batch)
    assert piece.name == ["g2", "g3", "g4"]


def test_pieces_move_to_the_device() -> None:
    """Features, edges and batch vectors of a piece move."""
    (piece,) = feed(lay_out({"graphs": _batch(4)}), (4,), torch.device("meta"))
    moved = piece.arguments["graphs"]
    assert {moved[key].device.type for key in ("x", "edge_index", "y", "batch", "ptr")} == {"meta"}
    assert moved.num_graphs == 4


def test_list_of_graphs_is_a_list_of_rows() -> None:
    """Graphs that the function batches itself come as a list, and move to the device."""
    graphs = [_graph(index) for index in range(4)]
    pieces = list(feed(lay_out({"graphs": graphs}), (3, 1), torch.device("meta")))
    assert [len(piece.arguments["graphs"]) for piece in pieces] == [3, 1]
    assert pieces[1].arguments["graphs"][0].x.device.type == "meta"
    assert graphs[3].x.device.type == "cpu"


@pytest.mark.parametrize("graphs", [10, 8, 15])
def test_balanced_pieces_hold_nearly_the_same_number_of_nodes(graphs: int) -> None:
    """Asked for, pieces are balanced by nodes; none has more graphs than allowed."""
    value = Batch.from_data_list([Data(x=torch.ones(50 if index < 3 else 5, 1)) for index in range(graphs)])
    plain = [piece.num_nodes for piece in pieces_of(value, 6)]
    pieces = pieces_of(value, 6, batch_dim={"batch": "balanced"})
    assert len(pieces) == len(plain)
    assert sum(piece.num_graphs for piece in pieces) == graphs
    assert max(piece.num_graphs for piece in pieces) <= 6
    assert max(piece.num_nodes for piece in pieces) < max(plain)


def test_nodes_of_all_kinds_count() -> None:
    """Graphs with several kinds of nodes weigh as many as they have together."""
    layout = lay_out({"graphs": _batch(4, _hetero)}, batch_dim={"graphs": "balanced"})
    assert layout.amounts == [_nodes(graph) + 2 for graph in range(4)]


@pytest.mark.parametrize(("graphs", "ub_size"), CUTS)
def test_gradient_reaches_the_features(graphs: int, ub_size: int) -> None:
    """Node features that require grad get their gradient through the batch."""
    value, network = _batch(graphs), _Network()
    value.x.requires_grad_()
    assert_exact(
        lambda graphs: network(graphs).pow(2).mean(),
        {"graphs": value},
        [value.x, *network.parameters()],
        ub_size,
    )


def test_graph_outputs_are_joined() -> None:
    """A batch of graphs that the function returns comes back as one, its edges numbered anew."""
    value, network = _batch(10), _Network()

    @anybatch.apply(["graphs"], ub_size=4)
    def step(graphs: Data) -> tuple[Tensor, Data]:
        return network(graphs).pow(2).mean(), graphs

    _, output = step(value)
    assert output.num_graphs == 10
    assert torch.equal(output.edge_index, value.edge_index)
    assert torch.equal(output.batch, value.batch)


def test_single_graph_is_refused() -> None:
    """One graph is no batch; the error says how to make one."""
    with pytest.raises(BatchError, match=r"graph \(torch_geometric.*Data\) is one graph.*from_data_list"):
        lay_out({"graph": _graph(0)})


def test_batch_made_by_hand_is_refused() -> None:
    """A batch that doesn't know where its graphs begin can't be cut."""
    value = Batch(x=torch.ones(4, 3), batch=torch.tensor([0, 0, 1, 1]))
    with pytest.raises(BatchError, match="does not know where its graphs begin"):
        lay_out({"graphs": value})


def test_attribute_set_after_batching_is_refused() -> None:
    """A tensor that was set on the batch itself belongs to no known graph."""
    value = _batch(4)
    value.weight = torch.ones(4)
    with pytest.raises(BatchError, match="was given weight after its graphs were put together"):
        lay_out({"graphs": value})


def test_graphs_without_nodes_are_not_balanced() -> None:
    """Where the nodes of each graph are not known, pieces can't be balanced by them."""
    value = Batch.from_data_list([Data(y=torch.ones(1)) for _ in range(4)])
    assert lay_out({"graphs": value}).rows == 4
    with pytest.raises(BatchError, match=r"graphs .* does not know how many nodes"):
        lay_out({"graphs": value}, batch_dim={"graphs": "balanced"})
