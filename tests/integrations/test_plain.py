"""State values of other libraries survive a checkpoint unchanged."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings, strategies as st

from tests.integrations._drive import stored
from thrifty.integrations._adapters import from_plain, to_plain
from thrifty.pack import pack_state, unpack_state


PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.floats(allow_nan=False)
    | st.text(max_size=3)
)
KEYS = st.integers(-9, 9) | st.text(max_size=3)
VALUES: st.SearchStrategy[Any] = st.recursive(
    PLAIN
    | st.sets(KEYS, max_size=3)
    | st.frozensets(KEYS, max_size=3)
    | st.lists(KEYS, max_size=3).map(Counter)
    | st.builds(deque, st.lists(PLAIN, max_size=3), st.none() | st.just(3)),
    lambda inside: (
        st.lists(inside, max_size=3)
        | st.lists(inside, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inside, max_size=3)
    ),
    max_leaves=8,
)


def returned(value):
    return from_plain(unpack_state(stored(pack_state(to_plain(value)))))


def kinds(value):
    """Return the types of a value and of all values in it."""
    if isinstance(value, deque):
        return deque, value.maxlen
    if isinstance(value, dict):
        return type(value), {key: kinds(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [kinds(inside) for inside in value]
    return type(value)


@settings(deadline=None)
@given(VALUES)
def test_values_come_back(value):
    found = returned({"x": value})["x"]
    assert found == value
    assert kinds(found) == kinds(value)


def test_numbers_and_arrays_of_numpy():
    state = {
        "best": np.float64(0.5),
        "array": np.arange(3),
        "weights": OrderedDict(w=torch.ones(2)),
    }
    found = returned(state)
    assert type(found["best"]) is float
    assert found["array"].dtype == np.int64
    assert found["array"].tolist() == [0, 1, 2]
    assert found["weights"]["w"].tolist() == [1, 1]


def test_an_array_is_copied():
    array = np.zeros(2)
    kept = to_plain(array)
    array[:] = 1
    assert from_plain(kept).tolist() == [0, 0]


def test_a_model_s_state_keeps_the_versions_of_its_modules():
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
    assert returned({"state_dict": state})["state_dict"]._metadata == state._metadata
