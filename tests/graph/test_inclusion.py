"""Inclusion probabilities against exact values and real batches, and the feature cache."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from thrifty.core import GraphError
from thrifty.graph import (
    FeatureCache,
    Graph,
    NeighborSampler,
    from_edge_index,
    inclusion_probabilities,
    top_nodes,
)
from thrifty.graph.kernels import COMPILED


pytestmark = pytest.mark.slow


# Node 0 samples 1, 2 and 3. Node 1 samples 4 and 5. Node 2 samples 6.
TREE = from_edge_index([[1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 1, 2]])


def enumerated(graph, seed_sets, fanouts):
    """Return the exact probability of each node by enumerating all samples."""
    found = [Fraction(0)] * graph.num_nodes

    def visit(nodes, frontier, hop, chance):
        if hop == len(fanouts):
            for node in nodes:
                found[node] += chance
            return
        choices = []
        for v in sorted(frontier):
            neighbors = graph.neighbors(v).tolist()
            num = len(neighbors) if fanouts[hop] < 0 else min(fanouts[hop], len(neighbors))
            choices.append(list(combinations(neighbors, num)))
        samples = list(product(*choices))
        for sample in samples:
            new = {u for row in sample for u in row} - nodes
            visit(nodes | new, new, hop + 1, chance / len(samples))

    for seeds in seed_sets:
        visit(set(seeds), set(seeds), 0, Fraction(1, len(seed_sets)))
    return [float(chance) for chance in found]


@pytest.mark.parametrize("fanouts", [[1], [2], [-1], [0], [2, 1], [1, 1], [-1, -1], [5, 1], [0, 2]])
def test_exact_on_a_tree_from_its_root(fanouts):
    found = inclusion_probabilities(TREE, [0], fanouts, batch_size=1)
    assert found == pytest.approx(enumerated(TREE, [[0]], fanouts))


def test_neighbors_are_reached_against_the_direction_of_edges():
    # Messages go from 0 to 1: node 1 needs node 0, and node 0 needs no other node.
    graph = from_edge_index([[0], [1]])
    assert inclusion_probabilities(graph, [1], [1], batch_size=1).tolist() == [1, 1]
    assert inclusion_probabilities(graph, [0], [1], batch_size=1).tolist() == [1, 0]


def test_seeds_are_drawn_without_replacement():
    found = inclusion_probabilities(TREE, [3, 4, 5, 6], [1], batch_size=3)
    assert found.tolist() == [0, 0, 0, 0.75, 0.75, 0.75, 0.75]
    assert not np.signbit(found).any()


def test_a_seed_that_is_listed_twice_is_drawn_more_often():
    seeds = [3, 3, 4, 5]
    draws = [tuple(seeds[i] for i in places) for places in combinations(range(4), 2)]
    found = inclusion_probabilities(TREE, seeds, [1], batch_size=2)
    assert found == pytest.approx(enumerated(TREE, draws, [1]))


@pytest.mark.parametrize("batch_size", [2, 3, 100])
def test_a_batch_of_all_seeds(batch_size):
    found = inclusion_probabilities(TREE, [3, 4], [2], batch_size=batch_size)
    assert found.tolist() == [0, 0, 0, 1, 1, 0, 0]


def test_rare_nodes_keep_their_digits():
    seeds = np.append(np.full(999_999, 3), 0)
    found = inclusion_probabilities(TREE, seeds, [1, 1], batch_size=1)
    assert found[0] == pytest.approx(1e-6, rel=1e-14)
    assert found[6] == pytest.approx(1e-6 / 3, rel=1e-14)


def test_no_seeds_no_nodes():
    assert inclusion_probabilities(TREE, [], [3], batch_size=2).tolist() == [0] * 7
    assert inclusion_probabilities(Graph([0], []), [], [3], batch_size=2).tolist() == []


@pytest.mark.parametrize("mode", ["frontier", "full"])
def test_as_often_as_in_real_batches(mode):
    rng = np.random.default_rng(0)
    num, num_batches = (400, 600) if COMPILED else (100, 150)
    popular = (np.arange(num) + 3.0) ** -0.7
    ends = [rng.choice(num, 4 * num, p=popular / popular.sum()) for _ in range(2)]
    graph = from_edge_index(np.stack(ends), num_nodes=num)
    seeds = rng.choice(num, num // 4, replace=False)
    sampler = NeighborSampler(graph, [4, 2], mode=mode, seed=1)
    counts = np.zeros(num)
    for batch in range(num_batches):
        drawn = rng.choice(seeds, num // 50, replace=False)
        counts[sampler.sample(drawn, batch=batch).nodes.numpy()] += 1
    seen = counts / num_batches
    found = inclusion_probabilities(graph, seeds, [4, 2], batch_size=num // 50)
    assert np.corrcoef(found, seen)[0, 1] > 0.97
    assert found.mean() == pytest.approx(seen.mean(), rel=0.1)


@pytest.mark.parametrize(
    ("seeds", "fanouts", "batch_size", "message"),
    [
        ([9], [1], 1, "seed 9 does not exist"),
        ([0], [], 1, "fanouts="),
        ([0], [-2], 1, "is no fanout"),
        ([0], [1], 0, "batch_size=0"),
        ([0], [1], 1.5, "batch_size=1.5"),
        ([0], [1], True, "batch_size=True"),
    ],
)
def test_bad_call(seeds, fanouts, batch_size, message):
    with pytest.raises(GraphError, match=message):
        inclusion_probabilities(TREE, seeds, fanouts, batch_size=batch_size)


@given(st.lists(st.integers(0, 4), max_size=12), st.integers(0, 14))
def test_top_nodes_as_by_sorting(values, num):
    nodes = sorted((v for v in range(len(values)) if values[v]), key=lambda v: (-values[v], v))
    assert top_nodes(np.array(values, dtype=float), num).tolist() == nodes[:num]


@pytest.mark.parametrize(
    ("probabilities", "num", "message"),
    [
        ([[0.5]], 1, r"shape \(1, 1\)"),
        (["a"], 1, "give numbers"),
        ([0.5, float("nan")], 1, "node 1 is not a number"),
        ([0.5], -1, "num=-1"),
        ([0.5], 0.5, "num=0.5"),
        ([0.5], True, "num=True"),
    ],
)
def test_bad_probabilities(probabilities, num, message):
    with pytest.raises(GraphError, match=message):
        top_nodes(probabilities, num)


# the cache

FEATURES = torch.arange(20.0).reshape(10, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kept", [[], [7, 2, 5], list(range(10))])
@pytest.mark.parametrize("nodes", [[], [7], [0, 1], [5, 0, 2, 2, 9, 0]])
def test_gather_is_indexing(device, dtype, kept, nodes):
    features = FEATURES.to(dtype)
    found = FeatureCache(features, kept, device).gather(nodes)
    assert found.device.type == device.type
    assert found.dtype == dtype
    assert torch.equal(found.cpu(), features[torch.tensor(nodes, dtype=torch.int64)])


def test_hits_come_from_the_cache():
    features = FEATURES.clone()
    cache = FeatureCache(features, np.array([1, 3]), "cpu")
    features[:] = -1
    assert cache.gather(torch.tensor([3, 4])).tolist() == [[6, 7], [-1, -1]]


def test_hit_rate():
    cache = FeatureCache(FEATURES, [1, 3], "cpu")
    assert cache.hit_rate([1, 2, 3, 3]) == 0.75
    assert cache.hit_rate([]) == 1.0


def test_its_size():
    cache = FeatureCache(FEATURES, [1, 3], "cpu")
    assert cache.num_kept == 2
    assert repr(cache) == "FeatureCache(num_kept=2 of 10, device='cpu')"


@pytest.mark.parametrize(
    ("features", "kept", "message"),
    [
        (FEATURES.numpy(), [0], "features are a ndarray"),
        (FEATURES[0], [0], r"Tensor of shape \(2,\)"),
        (FEATURES.to("meta"), [0], "features lie on meta"),
        (FEATURES, [1, 4, 4], "node 4 is listed twice"),
        (FEATURES, [10], "node 10 does not exist: the graph has nodes 0 to 9"),
        (FEATURES, [-1], "node -1 does not exist"),
        (FEATURES, [0.5], "nodes have shape"),
        (FEATURES, [[1]], "nodes have shape"),
    ],
)
def test_bad_cache(features, kept, message):
    with pytest.raises(GraphError, match=message):
        FeatureCache(features, kept, "cpu")


def test_bad_nodes():
    cache = FeatureCache(FEATURES, [0], "cpu")
    with pytest.raises(GraphError, match="node 10 does not exist"):
        cache.gather([10])
    with pytest.raises(GraphError, match="node -2 does not exist"):
        cache.hit_rate([-2])
