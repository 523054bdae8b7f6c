"""Graphs from edge lists, SciPy, NetworkX and PyG, and their symmetry."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import networkx
import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, strategies as st

from thrifty.core import GraphError
from thrifty.graph import (
    Graph,
    check_symmetric,
    from_edge_index,
    from_networkx,
    from_pyg,
    from_scipy,
    is_symmetric,
    symmetric,
)


pytestmark = pytest.mark.slow


with warnings.catch_warnings(action="ignore"):  # PyG uses features that torch warns about
    from torch_geometric import utils as pyg
    from torch_geometric.data import Data, HeteroData


NODES = 6
EDGES = st.lists(st.tuples(*[st.integers(0, NODES - 1)] * 2), max_size=20)


def pairs(edges):
    return np.array(edges, dtype=np.int64).reshape(-1, 2).T


def rows(graph):
    return [graph.neighbors(v).tolist() for v in range(graph.num_nodes)]


def naive_rows(edges, num_nodes=NODES):
    return [[s for s, d in edges if d == v] for v in range(num_nodes)]


def dense(graph):
    """Return a matrix where ``dense[s, d]`` is the number of edges from ``s`` to ``d``."""
    matrix = np.zeros((graph.num_nodes, graph.num_nodes), dtype=int)
    for v, found in enumerate(rows(graph)):
        np.add.at(matrix[:, v], found, 1)
    return matrix


# edge index


@given(EDGES)
def test_neighbors_stand_in_the_order_of_their_edges(edges):
    assert rows(from_edge_index(pairs(edges), num_nodes=NODES)) == naive_rows(edges)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.int16, np.uint64])
def test_integers_of_any_dtype(dtype):
    edges = [(0, 1), (2, 1), (1, 0)]
    assert rows(from_edge_index(pairs(edges).astype(dtype))) == naive_rows(edges, 3)


def test_edges_as_tensor_and_transposed():
    edges = torch.tensor([[0, 1], [2, 1], [1, 0]])
    assert rows(from_edge_index(edges.T)) == [[1], [0, 2], []]


def test_many_edges_as_a_stable_sort():
    rng = np.random.default_rng(0)
    edges = rng.integers(0, 40, (2, 2000))
    graph = from_edge_index(edges)
    order = np.argsort(edges[1], kind="stable")
    assert (graph.indices == edges[0][order]).all()
    assert (graph.degrees() == np.bincount(edges[1])).all()


@pytest.mark.parametrize("num_nodes", [None, 0, 4])
def test_no_edges(num_nodes):
    graph = from_edge_index(torch.empty(2, 0), num_nodes=num_nodes)
    assert (graph.num_nodes, graph.num_edges) == (num_nodes or 0, 0)


def test_rows_of_features_say_how_many_nodes_there_are():
    assert from_edge_index([[0], [1]], x=torch.ones(5, 1)).num_nodes == 5
    assert from_edge_index([[0], [1]], y=torch.ones(4)).num_nodes == 4


@pytest.mark.parametrize(
    ("edge_index", "options", "message"),
    [
        ([[0, 1], [1, 0], [2, 2]], {}, r"\(2, num_edges\); give edge_index.T"),
        ([0, 1], {}, r"shape \(2,\)"),
        ([[0.0], [1.0]], {}, "float64; give integers"),
        ([[0], [1, 2]], {}, "edge_index cannot be read"),
        ([[0, 1], [1, 5]], {"num_nodes": 3}, "edge 1 leads from node 1 to node 5, .* 0 to 2"),
        ([[0], [0]], {"num_nodes": 0}, "the graph has no nodes"),
        ([[0, -1], [1, 0]], {}, "edge 1 leads from node -1 to node 0"),
        ([[0], [2**31]], {}, "2147483649 nodes: at most"),
        ([[0], [1]], {"num_nodes": -1}, "num_nodes=-1"),
        ([[0], [1]], {"num_nodes": 2.0}, "num_nodes=2.0"),
        ([[0], [1]], {"num_nodes": True}, "num_nodes=True"),
        ([[0], [1]], {"num_nodes": 2, "x": torch.ones(3, 1)}, "each of the 2 nodes"),
        ([[0], [3]], {"y": torch.ones(2)}, "edge 0 leads from node 0 to node 3"),
    ],
)
def test_bad_edge_index(edge_index, options, message):
    with pytest.raises(GraphError, match=message):
        from_edge_index(edge_index, **options)


# SciPy


@pytest.mark.parametrize("form", ["bsr", "coo", "csc", "csr", "dia", "dok", "lil"])
def test_formats_of_scipy(form):
    matrix = np.array([[0, 1, 0.5], [0, 0, 2], [0, 0, 3]])
    graph = from_scipy(scipy.sparse.coo_array(matrix).asformat(form), y=[0, 1, 2])
    assert (dense(graph) == (matrix != 0)).all()
    assert graph.y.tolist() == [0, 1, 2]


def test_entries_stored_twice_are_added_and_zeros_no_edges():
    entries = ([1, 1, 1, -1, 0], ([0, 0, 1, 1, 2], [1, 1, 2, 2, 0]))
    graph = from_scipy(scipy.sparse.coo_array(entries, shape=(3, 3)))
    assert rows(graph) == [[], [0], []]
    twice = scipy.sparse.csr_array(([1, 1, 1, -1], [1, 1, 0, 0], [0, 4, 4]), shape=(2, 2))
    assert rows(from_scipy(twice)) == [[], [0]]


def test_the_matrix_stays_as_it_is():
    matrix = scipy.sparse.csc_array(([0.0, 1.0], [1, 0], [0, 2, 2]), shape=(2, 2))
    from_scipy(matrix)
    assert matrix.nnz == 2
    assert matrix.indices.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (np.eye(2), "a ndarray is no sparse matrix"),
        (scipy.sparse.csr_array((2, 3)), r"shape \(2, 3\)"),
        (scipy.sparse.coo_array(np.ones(3)), r"shape \(3,\)"),
    ],
)
def test_bad_matrix(matrix, message):
    with pytest.raises(GraphError, match=message):
        from_scipy(matrix)


# NetworkX


@pytest.mark.parametrize(
    "kind", [networkx.Graph, networkx.DiGraph, networkx.MultiGraph, networkx.MultiDiGraph]
)
def test_networkx_as_pyg_reads_it(kind):
    graph = kind([(3, 1), (1, 1), (1, 2), (3, 1), (2, 3)])
    graph.add_node(9)
    expected = from_edge_index(pyg.from_networkx(graph).edge_index, num_nodes=4)
    assert rows(from_networkx(graph)) == rows(expected)


def test_node_attributes():
    graph = networkx.path_graph(3)
    networkx.set_node_attributes(graph, {v: [v, 2 * v] for v in graph}, "f")
    networkx.set_node_attributes(graph, {v: v % 2 for v in graph}, "label")
    made = from_networkx(graph, x="f", y="label")
    assert made.x.tolist() == [[0, 0], [1, 2], [2, 4]]
    assert made.y.tolist() == [0, 1, 0]
    assert from_networkx(graph, x="label").num_features == 1


def test_networkx_without_nodes():
    assert from_networkx(networkx.Graph(), x="f").num_nodes == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1], "node 1 has no attribute 'f'"),
        ([[1], [1, 2]], "attribute 'f' has shapes"),
        (["a", "b"], "features are numbers"),
    ],
)
def test_bad_attributes(values, message):
    graph = networkx.path_graph(2)
    networkx.set_node_attributes(graph, dict(enumerate(values)), "f")
    with pytest.raises(GraphError, match=message):
        from_networkx(graph, x="f")


def test_no_networkx_graph():
    with pytest.raises(GraphError, match="a list is no graph"):
        from_networkx([(0, 1)])


# PyG


def test_pyg_data_with_features_and_labels():
    edge_index = torch.tensor([[0, 2], [1, 1]])
    graph = from_pyg(Data(x=torch.ones(3, 2), y=torch.arange(3), edge_index=edge_index))
    assert rows(graph) == [[], [0, 2], []]
    assert graph.num_features == 2
    assert graph.y.tolist() == [0, 1, 2]


def test_pyg_data_that_say_how_many_nodes_there_are():
    edge_index = torch.tensor([[0], [1]])
    assert from_pyg(Data(edge_index=edge_index, num_nodes=7)).num_nodes == 7
    assert from_pyg(Data(edge_index=edge_index, pos=torch.ones(5, 3))).num_nodes == 5


def test_pyg_data_that_say_nothing_warn():
    with pytest.warns(UserWarning, match="num_nodes"):
        graph = from_pyg(Data(edge_index=torch.tensor([[0], [1]])))
    assert graph.num_nodes == 2


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_transposed_adjacency_of_torch(layout):
    matrix = torch.tensor([[0, 1.0, 1], [0, 0, 0], [1, 0, 0]])
    graph = from_pyg(Data(adj_t=matrix.to_sparse(layout=layout), x=torch.ones(3, 1)))
    assert rows(graph) == [[1, 2], [], [0]]


def test_transposed_adjacency_of_torch_sparse():
    csr = (torch.tensor([0, 2, 2]), torch.tensor([0, 1]), None)
    adj_t = SimpleNamespace(csr=lambda: csr, sparse_sizes=lambda: (2, 2))
    assert rows(from_pyg(SimpleNamespace(adj_t=adj_t))) == [[0, 1], []]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (HeteroData(), "heterogeneous"),
        (Data(x=torch.ones(2, 1)), "a Data without edge_index and adj_t"),
        (Data(adj_t=torch.eye(2)), "adj_t is a Tensor"),
        (Data(adj_t=torch.ones(2, 3).to_sparse()), r"adj_t has shape \(2, 3\)"),
        (Data(edge_index=torch.ones(3, 3), num_nodes=2), "edge_index has shape"),
        (
            Data(x=torch.ones(3, 1), edge_index=torch.tensor([[0], [1]]), num_nodes=5),
            "a row for each of the 5 nodes",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_bad_data(data, message):
    with pytest.raises(GraphError, match=message):
        from_pyg(data)


# symmetry


@given(EDGES)
def test_symmetric_as_a_dense_matrix(edges):
    graph = from_edge_index(pairs(edges), num_nodes=NODES)
    matrix = dense(graph)
    assert is_symmetric(graph) == (matrix == matrix.T).all()


@given(EDGES, st.sampled_from(["keep", "remove", "add"]))
def test_symmetric_adds_what_is_missing(edges, self_loops):
    graph = from_edge_index(pairs(edges), num_nodes=NODES)
    wanted = (dense(graph) + dense(graph).T > 0).astype(int)
    if self_loops != "keep":
        np.fill_diagonal(wanted, self_loops == "add")
    both = symmetric(graph, self_loops=self_loops)
    assert (dense(both) == wanted).all()
    assert all(row == sorted(row) for row in rows(both))
    check_symmetric(both)


@given(EDGES)
def test_the_edge_that_is_named_lacks_its_reverse(edges):
    graph = from_edge_index(pairs(edges), num_nodes=NODES)
    matrix = dense(graph)
    if (matrix == matrix.T).all():
        check_symmetric(graph)
        return
    with pytest.raises(GraphError, match=r"the edge from node \d to node \d") as caught:
        check_symmetric(graph)
    words = str(caught.value).split()
    source, destination = int(words[4]), int(words[7])
    assert matrix[source, destination] > matrix[destination, source]


def test_the_same_degrees_and_yet_not_symmetric():
    with pytest.raises(GraphError, match="more often than its reverse"):
        check_symmetric(from_edge_index([[0, 1, 2], [1, 2, 0]]))


def test_symmetric_keeps_features():
    graph = symmetric(Graph([0, 1, 1], [1], x=torch.ones(2, 3), y=[4, 5]))
    assert graph.num_features == 3
    assert graph.y.tolist() == [4, 5]


def test_a_graph_without_nodes_is_symmetric():
    assert is_symmetric(Graph([0], []))
    assert symmetric(Graph([0], []), self_loops="add").num_edges == 0


def test_no_such_option():
    with pytest.raises(GraphError, match="self_loops='none'; it must be one of 'keep'"):
        symmetric(Graph([0], []), self_loops="none")
