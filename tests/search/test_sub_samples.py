import math
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from bench.search.literal_sub_sampling import is_good, leader
from thrifty.search._sub_sampling_rule import bar, difference, threshold, total


pytestmark = pytest.mark.slow


NAN, INF = math.nan, math.inf
SCORES = st.lists(
    st.sampled_from([-INF, NAN, -1.5, -0.1, 0.0, 0.1, 0.2, 0.3, 0.7, 1.0]), max_size=8
)


def is_good_naive(challenger, leader, *, c):
    """Decide by the definition, in exact fractions and block by block."""
    n = len(challenger)
    if n >= len(leader):
        return False
    if n == 0:
        return True
    mine = mean(challenger)
    if mine == -INF:
        return False
    if n < c:
        return True
    return any(mine >= mean(leader[j : j + n]) for j in range(len(leader) - n + 1))


def mean(scores):
    if any(math.isnan(s) or s == -INF for s in scores):
        return -INF
    return sum(Fraction(s) for s in scores) / len(scores)


@given(SCORES, SCORES, st.sampled_from([0.5, 1.0, 1.8, 3.0]))
def test_is_good_as_defined(challenger, leader, c):
    # Sums that differ by less than rounding count as equal.
    if is_good(challenger, leader, c=c) != is_good_naive(challenger, leader, c=c):
        n = len(challenger)
        gaps = [mean(challenger) - mean(leader[j : j + n]) for j in range(len(leader) - n + 1)]
        assert is_good(challenger, leader, c=c)
        assert any(abs(gap) < 1e-15 for gap in gaps)


@given(SCORES, SCORES)
def test_the_bar_is_where_good_begins(challenger, leader):
    if 0 < len(challenger) < len(leader):
        reaches = total(tuple(challenger)) >= bar(leader, len(challenger))
        assert reaches == is_good(challenger, leader, c=0.0)


def test_is_good_in_long_histories():
    values = [((i * 7919) % 1009) / 1024 for i in range(600)]
    for n in (1, 7, 100, 300, 599):
        for start in (0, 1, 450):
            challenger = [v - 0.2 for v in values[start : start + n]]
            both = [f(challenger, values, c=1.0) for f in (is_good, is_good_naive)]
            assert both[0] == both[1]


def test_the_same_scores_tie_exactly():
    # Prefix sums of these differ in the last bit from the sum of the block alone.
    shared = [0.1, 0.7, 0.3, 0.2, 0.6]
    for n in range(1, 6):
        assert is_good(shared[-n:], [9.9, *[1e3 / 3] * 50, *shared, 5.5], c=0.0)
        less = [*shared[: n - 1], shared[n - 1] - 1e-12]
        assert not is_good(less, [*shared[:n], *[9.0] * n], c=0.0)


def test_only_the_leaders_worst_block_of_the_same_length_counts():
    assert is_good([0.4], [0.9, 0.3, 0.9], c=0.0)
    assert not is_good([0.4, 0.4], [0.9, 0.3, 0.9], c=0.0)


def test_forced_exploration_is_neither_floored_nor_rounded():
    c = threshold(29, "sqrt-log")
    assert 1 < c < 2
    assert is_good([0.0], [0.5, 0.6], c=c)
    assert not is_good([0.0], [0.5, 0.6], c=int(c))
    assert not is_good([0.0, 0.0], [0.5, 0.6, 0.7], c=c)


def test_whoever_has_as_many_observations_is_no_challenger():
    assert not is_good([1.0, 1.0], [0.0, 0.0], c=9.0)


@pytest.mark.parametrize("bad", [NAN, -INF])
def test_what_is_not_a_number_is_the_worst(bad):
    assert not is_good([bad], [0.1, 0.2], c=9.0)
    assert not is_good([bad, 0.9], [bad, bad, bad], c=0.0)
    assert is_good([-1e9], [0.1, bad, 0.2], c=0.0)
    assert leader({0: [bad], 1: [-5.0]}) == 1
    assert difference([bad], [0.0]) == difference([bad], [bad]) == -INF
    assert difference([0.0], [bad]) == INF


def test_huge_scores_do_not_overflow():
    assert is_good([1e308, 1e308], [1e308, 1e308, 1e308], c=0.0)
    assert not is_good([1e308, -1e308], [1e308, 1e308, 1e308], c=0.0)
    assert is_good([INF], [1.0, INF], c=0.0)
    assert difference([INF], [INF]) == 0.0


def test_leader_has_most_observations_then_the_best_mean():
    assert leader({0: [0.9], 1: [0.0, 0.1]}) == 1
    assert leader({0: [0.9, 0.0], 1: [0.5, 0.5]}) == 1  # not by the last or the best score
    assert leader({0: [0.5], 1: [0.5], 2: [0.4]}) == 0


def test_difference_is_at_equal_epochs():
    assert difference([0.5], [0.25, 0.9]) == 0.25
    assert difference([0.5, 0.75], [0.25]) == 0.25
    assert difference([], [0.25]) == 0.0


def test_threshold_of_nothing():
    assert threshold(0, "log") == threshold(1, "sqrt-log") == 0.0
