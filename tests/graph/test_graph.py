"""``Graph``: accepted inputs, refused inputs, and inputs that are not copied."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pytest
import torch

from thrifty.core import GraphError
from thrifty.graph import Graph


INDPTR = np.array([0, 1, 3, 3])
INDICES = np.array([1, 0, 2], dtype=np.int32)


def shared(a, b):
    return np.shares_memory(a, b)


def test_neighbors_are_rows():
    graph = Graph(INDPTR, INDICES)
    assert [graph.neighbors(v).tolist() for v in range(3)] == [[1], [0, 2], []]
    assert graph.degrees().tolist() == [1, 2, 0]


def test_an_array_of_the_right_dtype_is_not_copied():
    graph = Graph(INDPTR, INDICES)
    assert shared(graph.indptr, INDPTR)
    assert shared(graph.indices, INDICES)


def test_a_tensor_is_not_copied():
    x, y = torch.ones(3, 2), torch.arange(3)
    graph = Graph(torch.from_numpy(INDPTR), torch.from_numpy(INDICES), x=x, y=y)
    assert shared(graph.indices, INDICES)
    assert graph.x.data_ptr() == x.data_ptr()
    assert graph.y.data_ptr() == y.data_ptr()


def test_mapped_files_stay_mapped(tmp_path):
    np.save(tmp_path / "indptr.npy", INDPTR)
    np.save(tmp_path / "indices.npy", INDICES)
    np.save(tmp_path / "x.npy", np.ones((3, 2), dtype=np.float16))
    indptr, indices, x = (
        np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("indptr", "indices", "x")
    )
    graph = Graph(indptr, indices, x=x)
    assert shared(graph.indptr, indptr)
    assert shared(graph.indices, indices)
    assert shared(graph.x.numpy(), x)


def test_plain_arrays_for_kernels_also_of_mapped_files(tmp_path):
    np.save(tmp_path / "indices.npy", INDICES)
    graph = Graph(INDPTR, np.load(tmp_path / "indices.npy", mmap_mode="r"))
    assert type(graph.indices) is np.ndarray


def test_read_only_arrays_need_no_warning():
    x = np.ones((3, 2), dtype=np.float32)
    x.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Graph(INDPTR, INDICES, x=x).num_features == 2


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint32, np.int64, np.uint64, ">i4"])
def test_any_integers_become_int32(dtype):
    graph = Graph(INDPTR.astype(dtype), INDICES.astype(dtype))
    assert graph.indptr.dtype == np.int64
    assert graph.indices.dtype == np.int32
    assert graph.indices.tolist() == [1, 0, 2]


def test_strided_arrays_are_made_contiguous():
    graph = Graph(INDPTR, np.repeat(INDICES, 2)[::2], y=np.arange(3)[::-1])
    assert graph.indices.flags.c_contiguous
    assert graph.y.tolist() == [2, 1, 0]


def test_lists_do():
    graph = Graph([0, 1, 1], [1], x=[[0.5], [1.5]], y=[3, 4])
    assert graph.x.dtype == torch.float32
    assert graph.y.dtype == torch.int64


def test_a_graph_without_nodes():
    graph = Graph([0], [], x=torch.empty(0, 4), y=[])
    assert (graph.num_nodes, graph.num_edges, graph.num_features) == (0, 0, 4)


def test_a_graph_without_edges():
    assert Graph([0, 0, 0], []).neighbors(1).tolist() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_feature_dtypes(dtype):
    assert Graph(INDPTR, INDICES, x=torch.ones(3, 2, dtype=dtype)).x.dtype == dtype


def test_replace_keeps_the_rest():
    graph = Graph(INDPTR, INDICES, x=torch.ones(3, 2), y=torch.arange(3))
    other = graph.replace(x=torch.ones(3, 5))
    assert other.num_features == 5
    assert other.y is not None
    assert shared(other.indices, graph.indices)


def test_a_graph_comes_back_from_its_pickle():
    graph = pickle.loads(pickle.dumps(Graph(INDPTR, INDICES, y=[1, 2, 3])))
    assert graph.indices.tolist() == INDICES.tolist()
    assert graph.y.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("indptr", "indices", "message"),
    [
        ([], [], "indptr has shape"),
        ([[0]], [], "indptr has shape"),
        ([0.0, 1.0], [0], "indptr has shape"),
        ([0, [1, 2]], [0], "indptr cannot be read"),
        (torch.ones(2, dtype=torch.bfloat16), [0], "indptr cannot be read"),
        ([0, 1], [[0]], "indices have shape"),
        ([0, 1], [0.5], "indices have shape"),
        ([0, 1], [True], "indices have shape"),
        ([0, 1], [0, 0], "from 0 to 1.*number of edges, 2"),
        ([1, 1], [0], "from 1 to 1"),
        ([0, 2, 1, 2], [0, 0], "falls after node 1"),
        ([0, 1], [-1], "edge 0 comes from node -1"),
        ([0, 1, 2], [1, 2], "edge 1 comes from node 2, .* nodes 0 to 1"),
        ([0, 2], np.array([0, 2**32]), "edge 1 comes from node 4294967296"),
        ([0, 1], np.array([2**32 - 1], dtype=np.uint32), "comes from node 4294967295"),
        ([0], np.array([0], dtype=np.int32), "goes from 0 to 0"),
        (np.broadcast_to(np.int64(0), 2**31 + 1), [], "2147483648 nodes: at most"),
    ],
)
def test_bad_edges(indptr, indices, message):
    with pytest.raises(GraphError, match=message):
        Graph(indptr, indices)


def test_int64_indices_are_checked_before_they_are_cut():
    with pytest.raises(GraphError, match="4294967296"):
        Graph([0, 1], np.array([2**32]), check=False)


def test_an_edge_in_a_graph_without_nodes():
    with pytest.raises(GraphError, match="no nodes"):
        Graph([0], np.array([0]), check=False)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(3, 2, dtype=torch.float64), r"float64; give float32"),
        (torch.ones(3, 2, dtype=torch.int64), r"int64; give float32"),
        (torch.ones(3), r"shape \(3,\); give \(num_nodes, num_features\)"),
        (torch.ones(2, 2), "a row for each of the 3 nodes"),
        (torch.tensor(1.0), "a row for each of the 3 nodes"),
        (np.array(1.0), "a row for each of the 3 nodes"),
        (torch.ones(3, 2).to_sparse(), "x is sparse"),
        (torch.nn.Parameter(torch.ones(3, 2)), "x requires gradients"),
        (torch.ones(3, 2, device="meta"), "x lies on meta"),
        ([[1.0], [1.0, 2.0], [3.0]], "x cannot be read"),
        ([["a"], ["b"], ["c"]], "no tensors"),
    ],
)
def test_bad_features(x, message):
    with pytest.raises(GraphError, match=message):
        Graph(INDPTR, INDICES, x=x)


def test_too_few_labels():
    with pytest.raises(GraphError, match="y has shape"):
        Graph(INDPTR, INDICES, y=[1])


@pytest.mark.parametrize("node", [-1, 3])
def test_no_such_node(node):
    with pytest.raises(GraphError, match=f"no node {node}: the graph has nodes 0 to 2"):
        Graph(INDPTR, INDICES).neighbors(node)
