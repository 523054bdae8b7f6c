from bisect import bisect_left, insort

import numpy as np
import pytest
from hypothesis import given, strategies as st

from thrifty.search import _history
from thrifty.search._history import SortedList


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(_history, "BLOCK", 3)


@given(st.lists(st.integers(0, 9)), st.lists(st.integers(0, 9)), st.randoms())
def test_is_a_sorted_list(first, later, random):
    fast, slow = SortedList(first), sorted(first)
    for item in later:
        fast.add(item)
        insort(slow, item)
        if random.random() < 0.4:
            gone = random.choice(slow)
            fast.remove(gone)
            slow.remove(gone)
    assert list(fast) == slow
    assert len(fast) == len(slow)
    assert [fast.rank(item) for item in range(11)] == [bisect_left(slow, i) for i in range(11)]
    assert [fast[index] for index in range(len(slow))] == slow


def test_indices_and_slices_are_those_of_a_list():
    items = list(range(20))
    made = SortedList(items)
    assert (made[-1], made[-20]) == (19, 0)
    for part in (slice(3), slice(2, 11), slice(-4, None), slice(5, 2), slice(None, None, -2)):
        assert made[part] == items[part]
    assert [list(made.iterate(at)) for at in (0, 7, 20)] == [items, items[7:], []]


@pytest.mark.parametrize("index", [3, -4])
def test_there_is_no_item_beyond_the_ends(index):
    with pytest.raises(IndexError, match=f"index {index} of a list of 3"):
        SortedList([1, 2, 3])[index]


def test_blocks_stay_short():
    made = SortedList[float]()
    for item in np.random.default_rng(0).random(200).tolist():
        made.add(item)
    assert max(map(len, made._blocks)) <= 6
