"""Every neighbour, and every set of neighbours, has the right probability.

Seeds are fixed, so a test gives the same verdict each time. A test fails if its p-value is below
1e-4, or so near 1 that the draws are too even.
"""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
import pytest
import torch

from tests.graph import twin
from thrifty.graph import Graph, NeighborSampler
from thrifty.graph.kernels import COMPILED, choose, wrapping


pytestmark = pytest.mark.slow


ROWS = 40_000 if COMPILED else 3000
TOSSES = 2000
LOW, HIGH = 1e-4, 1 - 1e-4


def draws(degree, fanout, *, num=ROWS, replace=False, key=12345):
    """Return picks from 0 to ``degree - 1`` of ``num`` rows, shape ``(num, fanout)``."""
    indptr = np.array([7, 7 + degree])
    starts = np.zeros(num + 1, dtype=np.int32)
    picks = np.empty(num * fanout, dtype=np.int64)
    with wrapping():
        choose(
            indptr, np.zeros(num, dtype=np.int64), fanout, replace, np.uint64(key), starts, picks
        )
    return picks.reshape(num, fanout) - 7


def chi_square(statistic, freedom):
    """Return the probability of a larger statistic."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(*half).item()


def p_of_counts(counts):
    """Return the p-value of counts that should be equal apart from chance."""
    expected = counts.sum() / counts.size
    assert expected >= 5, "too few draws for a chi-square test"
    return chi_square(((counts - expected) ** 2 / expected).sum(), counts.size - 1)


def p_of_inclusion(picks, degree):
    """Return the p-value of how often each neighbour is in a sample without replacement.

    Each has probability fanout / degree.
    """
    num, fanout = picks.shape
    counts = np.bincount(picks.ravel(), minlength=degree)
    # The counts of a sample are correlated; this factor makes the sum of squares that of degree - 1
    # independent ones.
    variance = num * fanout * (degree - fanout) / degree**2
    squares = ((counts - num * fanout / degree) ** 2).sum() / variance
    return chi_square(squares * (degree - 1) / degree, degree - 1)


def p_of_pairs(left, right, *, bins=8):
    """Return the p-value of two sequences that should be independent."""
    return p_of_counts(np.bincount(left * bins + right, minlength=bins**2))


def p_of_tails(tails, num=TOSSES):
    """Return the exact two-sided p-value of a fair coin."""
    fewer = min(tails, num - tails)
    return min(1.0, 2 * sum(comb(num, k) for k in range(fewer + 1)) / 2**num)


def is_fair(p):
    return LOW < p < HIGH


@pytest.mark.parametrize(
    ("degree", "fanout"),
    [
        (3, 1),
        (3, 2),
        (6, 5),
        (16, 15),
        (64, 63),
        (64, 1),
        (64, 10),
        (65, 64),
        (65, 1),
        (65, 10),
        (66, 10),
        (65, 32),
        (65, 33),
        (128, 10),
        (129, 40),
        (1000, 100),
        (1000, 999),
    ],
)
def test_every_neighbor_is_included_equally_often(degree, fanout):
    num = ROWS if fanout * ROWS < 2e6 else ROWS // 20
    assert is_fair(p_of_inclusion(draws(degree, fanout, num=num), degree))


@pytest.mark.parametrize(("fanout", "num"), [(10, ROWS), (100, ROWS // 10)])
@pytest.mark.parametrize("degree", [5000, 65_535, 65_536, 100_003])
def test_a_hub_s_neighbors_are_included_equally_often(degree, fanout, num):
    picks = draws(degree, fanout, num=num)
    # Counts are binned because each neighbour is drawn rarely. Without replacement they vary less,
    # by the factor below.
    bins = 50
    edges = np.linspace(0, degree, bins + 1).astype(np.int64)
    counts = np.histogram(picks, bins=edges)[0]
    expected = picks.size * np.diff(edges) / degree
    squares = ((counts - expected) ** 2 / expected).sum() * (degree - 1) / (degree - fanout)
    assert is_fair(chi_square(squares, bins - 1))
    assert picks.min() < degree / 50
    assert picks.max() > degree - degree / 50


@pytest.mark.skipif(not COMPILED, reason="needs many draws")
def test_each_of_a_hub_s_neighbors_is_included_equally_often():
    assert is_fair(p_of_inclusion(draws(5000, 10), 5000))


def test_one_of_two_neighbors_is_a_fair_coin():
    assert p_of_tails(int((draws(2, 1, num=TOSSES) == 0).sum())) > LOW


@pytest.mark.parametrize(("degree", "fanout"), [(4, 2), (5, 2), (5, 3), (6, 3), (7, 6), (9, 2)])
def test_every_set_of_neighbors_is_equally_likely(degree, fanout):
    sets = {set_: n for n, set_ in enumerate(combinations(range(degree), fanout))}
    which = [sets[tuple(row)] for row in np.sort(draws(degree, fanout), axis=1).tolist()]
    assert is_fair(p_of_counts(np.bincount(which, minlength=len(sets))))


@pytest.mark.skipif(not COMPILED, reason="needs many draws")
@pytest.mark.parametrize("degree", [64, 65])
def test_every_pair_of_neighbors_is_equally_likely(degree):
    low, high = np.sort(draws(degree, 2), axis=1).T
    counts = np.bincount(low * degree + high, minlength=degree**2).reshape(degree, degree)
    assert is_fair(p_of_counts(counts[np.triu_indices(degree, 1)]))


@pytest.mark.parametrize("degree", [5, 64, 65, 5000])
def test_no_neighbor_is_picked_twice(degree):
    for fanout in {1, 2, degree // 2, min(degree - 1, 40)}:
        picks = np.sort(draws(degree, fanout, num=ROWS // 100), axis=1)
        assert (np.diff(picks, axis=1) > 0).all()
        assert picks.min() >= 0
        assert picks.max() < degree


@pytest.mark.parametrize("degree", [1, 2, 7, 64, 65, 300])
def test_with_replacement_every_draw_is_equally_likely(degree):
    picks = draws(degree, 5, replace=True)
    assert degree == 1 or is_fair(p_of_counts(np.bincount(picks.ravel(), minlength=degree)))
    assert picks.min() == 0
    assert picks.max() == degree - 1


# the tests above must be able to fail


def rows_of_twin(degree, fanout, *, biased, num=4000):
    return np.array([
        twin.floyd(fanout, degree, twin.Draws(99, row), biased=biased) for row in range(num)
    ])


@pytest.mark.parametrize(("degree", "fanout"), [(3, 1), (6, 5), (10, 3), (65, 10)])
def test_floyd_with_a_draw_below_j_is_found_out(degree, fanout):
    assert is_fair(p_of_inclusion(rows_of_twin(degree, fanout, biased=False), degree))
    assert not is_fair(p_of_inclusion(rows_of_twin(degree, fanout, biased=True), degree))


def test_a_last_neighbor_that_is_never_taken_is_found_out():
    tails = {b: rows_of_twin(2, 1, biased=b, num=TOSSES).sum() for b in (False, True)}
    assert p_of_tails(int(tails[False])) > LOW
    assert p_of_tails(int(tails[True])) < LOW


def test_streams_that_overlap_are_found_out():
    # The second number of a row equals the first of the next one, as if rows continued each other's
    # stream.
    words = [twin.mix(n * twin.GOLDEN & twin.WORD) for n in range(1, ROWS + 2)]
    numbers = np.array([twin.below(word, 8) for word in words])
    first, second = numbers[:-1], numbers[1:]
    assert is_fair(p_of_pairs(first, second))
    assert not is_fair(p_of_pairs(first[1:], second[:-1]))


# streams


def test_draws_of_a_row_are_independent():
    first, second = draws(8, 2, replace=True).T
    assert is_fair(p_of_pairs(first, second))


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_draws_of_rows_are_independent(shift):
    first, second = draws(8, 2, replace=True).T
    assert is_fair(p_of_pairs(first[shift:], first[:-shift]))
    assert is_fair(p_of_pairs(first[shift:], second[:-shift]))
    assert is_fair(p_of_pairs(second[shift:], first[:-shift]))


NODES = ROWS // 4
EIGHT = Graph(np.arange(NODES + 1) * 8, np.tile(np.arange(8, dtype=np.int32), NODES))
"""Graph in which all nodes have the same eight neighbours."""


def sampled(*, seed=0, epoch=0, batch=0):
    """Return each node's neighbours at the first and second hop, if expanded at both."""
    sampler = NeighborSampler(EIGHT, [1, 1], mode="full", seed=seed)
    found = sampler.sample(np.arange(NODES), epoch=epoch, batch=batch)
    second, first = (found.nodes[block.indices.long()].numpy() for block in found.blocks)
    return first, second


@pytest.mark.parametrize(
    "place",
    [
        {"seed": 1},
        {"epoch": 1},
        {"batch": 1},
        {"epoch": 1, "batch": 1},
        {"seed": -1},
        {"batch": 2**63},
    ],
)
def test_batches_epochs_and_seeds_are_independent(place):
    for mine, other in zip(sampled(), sampled(**place), strict=True):
        assert is_fair(p_of_pairs(mine, other))


def test_hops_are_independent():
    assert is_fair(p_of_pairs(*sampled()))


def test_one_row_is_fair_over_batches():
    hub = Graph(np.r_[0, 20, np.full(19, 20)], np.arange(20, dtype=np.int32))
    sampler = NeighborSampler(hub, [5])
    picks = []
    for n in range(ROWS // 20):
        batch = sampler.sample([0], epoch=n % 7, batch=n // 7)
        picks.append(batch.nodes[batch.blocks[0].indices.long()].numpy())
    assert is_fair(p_of_inclusion(np.array(picks), 20))
