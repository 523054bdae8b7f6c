"""Attributes are JSON, copied when they are set, and limited in size; errors say what to do."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from thrifty.core import MAX_ATTRIBUTE_BYTES, Attributes, TaskError, UsageError


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.text(min_size=1, max_size=20), values, max_size=4))
def test_what_is_set_is_what_is_taken_and_json(given_values):
    attributes = Attributes()
    for key, value in given_values.items():
        assert attributes.set(key, value) == value
    taken = attributes.take()
    assert taken == given_values
    assert json.loads(json.dumps(taken)) == given_values
    assert attributes.take() == {}


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ((1, (2, 3)), [1, [2, 3]]),
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (torch.tensor(2.0), 2.0),
        ({"a": np.float64(1.5)}, {"a": 1.5}),
        ("half a pair \ud800, \0", "half a pair \ud800, \0"),
    ],
)
def test_scalars_of_libraries_and_tuples_become_plain(value, kept):
    assert Attributes().set("k", value) == kept


def test_numbers_that_are_not_finite_stay():
    assert math.isnan(Attributes().set("k", math.nan))
    assert Attributes().set("k", [math.inf]) == [math.inf]


def test_later_changes_do_not_reach_what_was_set():
    attributes, value = Attributes(), {"a": [1]}
    returned = attributes.set("k", value)
    value["a"].append(2)
    returned["a"].append(3)
    assert attributes.take() == {"k": {"a": [1]}}


class Odd:
    def __repr__(self) -> str:
        return "\x1b[31mred"


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def endless():
    value = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        (3, "a", "a text of 1 to 255 characters, got 3"),
        ("", "a", "a text of 1 to 255 characters, got ''"),
        ("k" * 256, "a", "a text of 1 to 255 characters"),
        (Odd(), "a", r"got \\x1b\[31mred"),
        ("k", Odd(), "has a Odd; give a text, a number"),
        ("k", {1, 2}, "has a set; give a text"),
        ("k", b"bytes", "has a bytes; give"),
        ("k", 1j, "has a complex; give"),
        ("k", np.complex64(1j), "has a complex64; convert it with .tolist()"),
        ("k", np.zeros(3), "has a ndarray; convert it with .tolist()"),
        ("k", torch.zeros(3), "has a Tensor; convert it with .tolist()"),
        ("k", {1: "a"}, r"keys of dicts must be texts, got 1; convert it with str\(\)"),
        ("k", nested(40), "nested in more than 32 levels"),
        ("k", endless(), "nested in more than 32 levels"),
        pytest.param("k", 10**5000, "cannot be written as JSON", id="digits"),
        pytest.param(
            "k", "a" * MAX_ATTRIBUTE_BYTES, "65,536 bytes as JSON, got 65,5", id="characters"
        ),
    ],
)
def test_what_cannot_be_kept(key, value, told):
    attributes = Attributes()
    attributes.set("before", 1)
    with pytest.raises(TaskError, match=told):
        attributes.set(key, value)
    assert attributes.take() == {"before": 1}


def test_the_limit_holds_for_all_attributes_of_an_epoch():
    attributes = Attributes()
    half = "a" * (MAX_ATTRIBUTE_BYTES // 2)
    attributes.set("a", half)
    attributes.set("a", half)  # replaces the first one
    with pytest.raises(TaskError, match=r"'b', \.\.\.\): the attributes of one epoch may take"):
        attributes.set("b", half)
    attributes.take()
    attributes.set("b", half)


def test_errors_name_the_call():
    attributes = Attributes(call="tell(user_attrs={{{key}: ...}})", error=UsageError)
    with pytest.raises(
        UsageError, match=r"tell\(user_attrs=\{'k': \.\.\.\}\): the value has a set"
    ):
        attributes.set("k", set())


def test_a_key_that_no_table_takes_is_refused():
    with pytest.raises(TaskError, match="the key must be a text"):
        Attributes().set("\ud800", 1)


def test_nested_errors_name_the_call_once():
    ring = []
    ring.append(ring)
    with pytest.raises(TaskError) as caught:
        Attributes().set("r", ring)
    assert str(caught.value).count("set_user_attr") == 1
