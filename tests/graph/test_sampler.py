from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from tests.graph import twin
from tests.graph.graphs import as_lists, graph_of, graphs_and_seeds, random_graph, rows_of
from thrifty.graph import Graph, NeighborSampler, _sampler
from thrifty.graph.kernels import COMPILED


pytestmark = pytest.mark.slow


MANY = 60 if COMPILED else 25
EXAMPLES = 150 if COMPILED else 40


fanouts = st.lists(st.sampled_from([-1, 0, 1, 2, 3, 50]), min_size=1, max_size=3)
modes = st.sampled_from(["frontier", "full"])
relabels = st.sampled_from(["dense", "hash"])


def assert_same(batch, expected):
    assert batch.nodes.tolist() == expected.nodes
    assert batch.seed_rows.tolist() == expected.seed_rows
    assert batch.num_seeds == expected.num_seeds
    assert list(batch.hop_nodes) == expected.hop_nodes
    assert list(batch.hop_edges) == expected.hop_edges
    assert [(rows_of(b), b.num_src) for b in batch.blocks] == expected.blocks


# the twin


@settings(max_examples=EXAMPLES)
@example(
    case=(graph_of([]), []), fan=[2, -1], mode="full", replace=True, relabel="hash", place=(0, 0)
)
@example(
    case=(graph_of([[], []]), [1, 1]),
    fan=[1],
    mode="frontier",
    replace=True,
    relabel="dense",
    place=(0, 0),
)
@example(
    case=(graph_of([[0]]), []),
    fan=[3, 3],
    mode="frontier",
    replace=False,
    relabel="dense",
    place=(1, 2),
)
@given(
    case=graphs_and_seeds(),
    fan=fanouts,
    mode=modes,
    replace=st.booleans(),
    relabel=relabels,
    place=st.tuples(st.integers(0, 3), st.integers(0, 2**40)),
)
def test_batches_are_those_of_the_twin(case, fan, mode, replace, relabel, place):
    graph, seeds = case
    sampler = NeighborSampler(graph, fan, mode=mode, replace=replace, seed=7, relabel=relabel)
    for epoch, batch in [place, (place[0], place[1] + 1)]:
        expected = twin.sample(
            graph, seeds, fan, mode=mode, replace=replace, seed=7, epoch=epoch, batch=batch
        )
        assert_same(sampler.sample(seeds, epoch=epoch, batch=batch), expected)


@pytest.mark.parametrize("mode", ["frontier", "full"])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("degree", [63, 64, 65, 66, 130, 70_000])
def test_rows_of_many_neighbors_are_those_of_the_twin(degree, replace, mode):
    rng = np.random.default_rng(degree)
    graph = graph_of([rng.integers(0, 4, degree), [0] * 3, np.arange(degree) % 4, []])
    for fanout in (1, 20, 33, 62, 64, 65):
        options = {"mode": mode, "replace": replace, "seed": -5}
        batch = NeighborSampler(graph, [fanout, 2], **options).sample([2, 0], epoch=1, batch=3)
        expected = twin.sample(graph, [2, 0], [fanout, 2], **options, epoch=1, batch=3)
        assert_same(batch, expected)


def test_a_batch_of_known_numbers():
    graph = graph_of([[(v + n) % 10 for n in range(1, 8)] for v in range(10)])
    batch = NeighborSampler(graph, [2, 2], seed=3).sample([4, 9], epoch=1, batch=2)
    # Such a change alters the results of all users and belongs in the changelog.
    assert batch.nodes.tolist() == [4, 9, 5, 6, 1, 2, 0]
    assert rows_of(batch.blocks[0]) == [[2, 3], [0, 3], [1, 4], [5, 6]]
    assert rows_of(batch.blocks[1]) == [[2, 3], [0, 3]]


def test_room_is_counted_where_fanouts_are_large(monkeypatch):
    monkeypatch.setattr(_sampler, "_MOST_UNCOUNTED", 3)
    graph = random_graph(20, 100, isolated=5)
    for replace in (False, True):
        expected = twin.sample(
            graph, [0, 19, 1], [6, 3], mode="full", replace=replace, seed=0, epoch=0, batch=0
        )
        sampler = NeighborSampler(graph, [6, 3], mode="full", replace=replace)
        assert_same(sampler.sample([0, 19, 1]), expected)


# structure


@settings(max_examples=EXAMPLES)
@given(case=graphs_and_seeds(), fan=fanouts, mode=modes, replace=st.booleans())
def test_every_sampled_edge_is_one_of_the_graph(case, fan, mode, replace):
    graph, seeds = case
    batch = NeighborSampler(graph, fan, mode=mode, replace=replace).sample(seeds)
    nodes = batch.nodes.tolist()
    for block in batch.blocks:
        for dst, row in enumerate(rows_of(block)):
            neighbors = graph.neighbors(nodes[dst]).tolist()
            sampled = [nodes[src] for src in row]
            assert set(sampled) <= set(neighbors)
            assert replace or all(sampled.count(n) <= neighbors.count(n) for n in sampled)


@settings(max_examples=EXAMPLES)
@given(case=graphs_and_seeds(), fan=fanouts, replace=st.booleans())
def test_rows_are_as_long_as_degree_and_fanout_allow(case, fan, replace):
    graph, seeds = case
    batch = NeighborSampler(graph, fan, mode="full", replace=replace).sample(seeds)
    for block, fanout in zip(batch.blocks, reversed(fan), strict=True):
        degrees = graph.degrees()[batch.nodes.numpy()[: block.num_dst]]
        most = degrees if fanout < 0 else np.full_like(degrees, fanout)
        expected = np.where(degrees > 0, most, 0) if replace else np.minimum(degrees, most)
        assert block.indptr.diff().tolist() == expected.tolist()


@settings(max_examples=EXAMPLES)
@given(case=graphs_and_seeds(), fan=fanouts, mode=modes, replace=st.booleans())
def test_sizes_of_blocks_and_hops_agree(case, fan, mode, replace):
    graph, seeds = case
    batch = NeighborSampler(graph, fan, mode=mode, replace=replace).sample(seeds)
    ends = np.cumsum(batch.hop_nodes).tolist()
    assert ends[-1] == batch.num_nodes == len(set(batch.nodes.tolist()))
    assert [b.num_src for b in reversed(batch.blocks)] == ends[1:]
    assert [b.num_dst for b in reversed(batch.blocks)] == ends[:-1]
    edges = [b.num_edges for b in reversed(batch.blocks)]
    assert edges == (
        np.cumsum(batch.hop_edges).tolist() if mode == "frontier" else list(batch.hop_edges)
    )
    assert all(0 <= n < b.num_src for b in batch.blocks for n in b.indices.tolist())


def test_blocks_of_a_frontier_are_prefixes_of_the_first():
    batch = NeighborSampler(random_graph(40, 400), [3, 2, 2]).sample([5, 1, 39])
    first = batch.blocks[0]
    for block in batch.blocks[1:]:
        assert torch.equal(block.indptr, first.indptr[: block.num_dst + 1])
        assert torch.equal(block.indices, first.indices[: block.num_edges])


def test_a_block_is_int32_and_begins_at_zero():
    for mode in ("frontier", "full"):
        for block in NeighborSampler(random_graph(40, 400), [3, 2], mode=mode).sample([5]).blocks:
            assert block.indptr.dtype == block.indices.dtype == torch.int32
            assert block.indptr[0] == 0


def test_all_neighbors_in_the_order_of_the_graph():
    graph = graph_of([[3, 1, 1], [0], [], [2]])
    batch = NeighborSampler(graph, [-1]).sample([0])
    assert batch.nodes[batch.blocks[0].indices.long()].tolist() == [3, 1, 1]


# what results depend on


@pytest.mark.parametrize("mode", ["frontier", "full"])
@pytest.mark.parametrize("replace", [False, True])
def test_hash_is_dense(mode, replace):
    graph = random_graph(2000, 20_000, isolated=300)
    both = [
        NeighborSampler(graph, [5, 4, 3], mode=mode, replace=replace, relabel=relabel)
        for relabel in ("dense", "hash")
    ]
    for batch in range(4):
        seeds = np.arange(batch, 2000, MANY * 2)
        dense, hashed = (as_lists(s.sample(seeds, batch=batch)) for s in both)
        assert dense == hashed


@pytest.mark.parametrize("relabel", ["dense", "hash"])
def test_one_thread_is_many_threads(relabel):
    graph = random_graph(500, 6000)
    places = [(epoch, batch) for epoch in range(2) for batch in range(MANY)]

    def sample(sampler, place):
        epoch, batch = place
        seeds = np.arange(batch % 5, 500, 23)
        return as_lists(sampler.sample(seeds, epoch=epoch, batch=batch))

    alone = NeighborSampler(graph, [4, 3], relabel=relabel)
    expected = [sample(alone, place) for place in places]
    shared = NeighborSampler(graph, [4, 3], relabel=relabel)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda place: sample(shared, place), places)) == expected


def test_a_batch_does_not_change_when_others_are_sampled():
    sampler = NeighborSampler(random_graph(50, 800), [4, 4])
    batch = sampler.sample([1, 2])
    before = as_lists(batch)
    for other in range(5):
        # Sample no more nodes than before, so that memory is reused.
        sampler.sample([3, 2], batch=other)
    assert as_lists(batch) == before


def test_seed_epoch_and_batch_all_matter():
    graph = random_graph(50, 800)
    drawn = [
        as_lists(NeighborSampler(graph, [4, 4], seed=seed).sample([1, 2], epoch=epoch, batch=batch))
        for seed, epoch, batch in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    ]
    assert all(a != b for i, a in enumerate(drawn) for b in drawn[:i])


def test_a_graph_that_lies_in_a_file(tmp_path):
    graph = random_graph(50, 800)
    np.save(tmp_path / "indptr.npy", graph.indptr)
    np.save(tmp_path / "indices.npy", graph.indices)
    mapped = Graph(
        np.load(tmp_path / "indptr.npy", mmap_mode="r"),
        np.load(tmp_path / "indices.npy", mmap_mode="r"),
    )
    expected = NeighborSampler(graph, [4, 4]).sample([1, 2])
    assert as_lists(NeighborSampler(mapped, [4, 4]).sample([1, 2])) == as_lists(expected)
