"""Models in `nn.DataParallel`: their graph has as many branches as devices got rows."""

from anybatch.exact.graph import Graph

_GATHERED = "GatherBackward"


def without_replicas(graph: Graph) -> Graph:
    """The graph without what lies below the outputs that `nn.DataParallel` gathered.

    Pieces of other sizes may go to fewer devices, and would not be alike otherwise.
    """
    edges = [() if name == _GATHERED else below for name, below in zip(graph.names, graph.edges, strict=True)]
    reached = set(graph.roots)
    for place in reversed(range(len(edges))):  # parents come after their children
        if place in reached:
            reached.update(edges[place])
    places = {old: new for new, old in enumerate(sorted(reached - {-1}))}
    return Graph(
        [graph.nodes[place] for place in places],
        [tuple(places.get(child, -1) for child in edges[place]) for place in places],
        tuple(places[root] for root in graph.roots),
    )
