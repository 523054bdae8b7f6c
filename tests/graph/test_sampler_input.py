from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.graph.graphs import as_lists, graph_of, random_graph
from thrifty.core import GraphError
from thrifty.graph import NeighborSampler, _sampler


# seeds


def test_duplicate_seeds_have_one_row():
    batch = NeighborSampler(random_graph(9, 40), [2]).sample([7, 2, 7, 7, 0])
    assert batch.seeds.tolist() == [7, 2, 0]
    assert batch.seed_rows.tolist() == [0, 1, 0, 0, 2]


def test_no_seeds_give_a_batch_without_nodes():
    batch = NeighborSampler(random_graph(9, 40), [2, -1]).sample([])
    assert (batch.num_nodes, batch.num_seeds, batch.num_edges) == (0, 0, 0)
    assert [(b.num_src, b.num_dst) for b in batch.blocks] == [(0, 0), (0, 0)]


def test_isolated_seeds_have_empty_rows():
    batch = NeighborSampler(graph_of([[], [0], []]), [2, 2], replace=True).sample([2, 0])
    assert batch.nodes.tolist() == [2, 0]
    assert [b.indptr.tolist() for b in batch.blocks] == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    "seeds",
    [
        (3, 1, 3),
        np.array([3, 1, 3], dtype=np.uint8),
        np.array([3, 0, 1, 0, 3], dtype=np.int32)[::2],
        torch.tensor([3, 1, 3]),
        torch.tensor([3, 1, 3], dtype=torch.int16),
    ],
)
def test_seeds_of_any_integer_type(seeds):
    sampler = NeighborSampler(random_graph(9, 40), [2, 2])
    assert as_lists(sampler.sample(seeds)) == as_lists(sampler.sample([3, 1, 3]))


def test_seeds_that_cannot_be_written():
    seeds = np.array([3, 1])
    seeds.flags.writeable = False
    assert NeighborSampler(random_graph(9, 40), [2]).sample(seeds).seeds.tolist() == [3, 1]


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        ([0, 9], "seed 9 does not exist: the graph has nodes 0 to 8"),
        ([-1, 9], "seed -1 does not exist"),
        (np.array([2**63], dtype=np.uint64), "seed 9223372036854775808 does not exist"),
        ([0.0], r"dtype float64; give node numbers"),
        (torch.ones(2, dtype=torch.bfloat16), "give node numbers"),
        ([[0]], r"shape \(1, 1\)"),
        (3, r"shape \(\)"),
        ([[0], [1, 2]], "seeds are no array"),
        (["0"], "give node numbers"),
        (np.ones(9, dtype=bool), "flatnonzero"),
        ([2**70], "give node numbers"),
    ],
)
def test_seeds_that_are_none(seeds, message):
    with pytest.raises(GraphError, match=message):
        NeighborSampler(random_graph(9, 40), [2]).sample(seeds)


def test_an_empty_graph_has_no_seeds():
    sampler = NeighborSampler(graph_of([]), [2])
    with pytest.raises(GraphError, match="seed 0 does not exist: the graph has no nodes"):
        sampler.sample([0])
    assert sampler.sample([]).num_nodes == 0


# options


@pytest.mark.parametrize("fan", [[], "12", 5, None])
def test_fanouts_that_are_no_sequence(fan):
    with pytest.raises(GraphError, match="give one number for each layer"):
        NeighborSampler(random_graph(9, 40), fan)


@pytest.mark.parametrize("fan", [[2, -2], [True], [1.5], [None]])
def test_fanouts_that_are_no_numbers_of_neighbors(fan):
    with pytest.raises(GraphError, match="is no fanout"):
        NeighborSampler(random_graph(9, 40), fan)


@pytest.mark.parametrize("fan", [(2, 1), np.array([2, 1]), torch.tensor([2, 1]), [np.int8(2), 1]])
def test_fanouts_of_any_sequence(fan):
    assert NeighborSampler(random_graph(9, 40), fan).fanouts == (2, 1)


@pytest.mark.parametrize("option", ["mode", "relabel"])
def test_options_that_do_not_exist(option):
    with pytest.raises(GraphError, match=f"{option}='best'; it must be one of"):
        NeighborSampler(random_graph(9, 40), [1], **{option: "best"})


@pytest.mark.parametrize("name", ["epoch", "batch"])
def test_a_place_that_is_no_integer(name):
    with pytest.raises(GraphError, match=rf"{name}=1\.5; give an integer"):
        NeighborSampler(random_graph(9, 40), [1]).sample([0], **{name: 1.5})


def test_a_seed_that_is_no_integer():
    with pytest.raises(GraphError, match="seed='x'; give an integer"):
        NeighborSampler(random_graph(9, 40), [1], seed="x")


def test_integers_of_numpy_draw_what_those_of_python_draw():
    graph = random_graph(30, 300)
    ours = NeighborSampler(graph, [2, 2], seed=4).sample([1, 2], epoch=5, batch=6)
    theirs = NeighborSampler(graph, [2, 2], seed=np.int64(4)).sample(
        [1, 2], epoch=np.int32(5), batch=torch.tensor(6)
    )
    assert as_lists(ours) == as_lists(theirs)


def test_a_fanout_beyond_all_degrees_is_all_neighbors():
    graph = random_graph(30, 300)
    assert as_lists(NeighborSampler(graph, [10**30]).sample([1, 2])) == as_lists(
        NeighborSampler(graph, [-1]).sample([1, 2])
    )


@pytest.mark.parametrize(("table_bytes", "expected"), [(36, "dense"), (35, "hash")])
def test_relabelling_by_the_memory_there_is(table_bytes, expected):
    graph = random_graph(9, 40)
    assert NeighborSampler(graph, [1], table_bytes=table_bytes).relabel == expected


@pytest.mark.parametrize("relabel", ["dense", "hash"])
def test_too_many_edges_and_the_batch_after_that(monkeypatch, relabel):
    graph = random_graph(50, 800)
    sampler = NeighborSampler(graph, [4, 4], relabel=relabel)
    expected = as_lists(sampler.sample([1, 2], batch=1))
    with monkeypatch.context() as patch:
        patch.setattr(_sampler, "_MOST_EDGES", 12)
        with pytest.raises(GraphError, match="more than 12 edges; sample fewer seeds"):
            sampler.sample([1, 2])
    assert as_lists(sampler.sample([1, 2], batch=1)) == expected


def test_with_replacement_no_fanout_takes_all_memory():
    with pytest.raises(GraphError, match="edges; sample fewer seeds or smaller fanouts"):
        NeighborSampler(graph_of([[0]]), [10**30], replace=True).sample([0])
