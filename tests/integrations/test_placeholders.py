"""A placeholder tells whether code has looked at a number, or has only kept it."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
import sys
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch

from thrifty.integrations._model_copies import placeholder, watched


KEEPING = {
    "a list": lambda n: [n],
    "a key's value": lambda n: {"lr": n},
    "a tuple": lambda n: (n, 1),
    "an attribute": lambda n: setattr(torch.nn.Module(), "lr", n),
    "a copy": copy.copy,
    "a deep copy": lambda n: copy.deepcopy({"lr": [n]}),
    "its kind": lambda n: (isinstance(n, float), isinstance(n, torch.nn.Module)),
    "whether it is there": lambda n: n is None,
    "whether it is a collection": lambda n: isinstance(n, Mapping | Sequence),
    "an optimizer's defaults": lambda n: {"lr": n, "momentum": 0.9},
}

LOOKING = {
    "sum": lambda n: n + 1,
    "reflected": lambda n: 1 - n,
    "negative": lambda n: -n,
    "less": lambda n: n < 1,
    "reflected comparison": lambda n: n <= 1,
    "equal": lambda n: n == 0.1,
    "unequal": lambda n: n != 0.1,
    "among": lambda n: n in (1.0, 2.0),
    "key": lambda n: {n: 1},
    "truth": lambda n: 1 if n else 2,
    "float": float,
    "int": int,
    "round": round,
    "root": math.sqrt,
    "maximum": lambda n: max(n, 0.05),
    "index": lambda n: [1, 2][n],
    "range": range,
    "text": str,
    "format": lambda n: f"{n:.2f}",
    "old format": lambda n: "%g" % n,  # noqa: UP031
    "attribute": lambda n: n.real,
    "is there an attribute": lambda n: hasattr(n, "item"),
    "set": lambda n: setattr(n, "name", 1),
    "list of attributes": dir,
    "pickle": pickle.dumps,
    "tensor": torch.tensor,
    "product": lambda n: torch.ones(2) * n,
    "full": lambda n: torch.full((2,), n),
    "array": np.float32,
    "dropout": torch.nn.Dropout,
    "layer": lambda n: torch.nn.Linear(n, 1),
    "optimizer": lambda n: torch.optim.SGD([torch.zeros(1)], lr=n),
}


@pytest.mark.parametrize("what", KEEPING)
def test_keeping_is_not_looking(what):
    number = placeholder(0.1)
    with watched([number]) as is_kept:
        KEEPING[what](number)
    assert is_kept()


@pytest.mark.parametrize("value", [0.1, 3])
@pytest.mark.parametrize("what", LOOKING)
def test_looking_is_noticed(what, value):
    number = placeholder(value)
    with watched([number]) as is_kept, contextlib.suppress(Exception):
        LOOKING[what](number)
    # A float has no such operation, so that the error says it.
    assert not is_kept() or (what in ("index", "range") and value == 0.1)


def test_looking_gives_what_the_number_gives():
    number = placeholder(0.25)
    with watched([number]) as is_kept:
        assert (number + 1, 1 - number, number * number, -number) == (1.25, 0.75, 0.0625, -0.25)
        assert (f"{number:.1f}", str(number), repr(number)) == ("0.2", "0.25", "0.25")
        assert (number == 0.25, number < 0.5, max(0.1, number) is number) == (True, True, True)
        assert (math.sqrt(number), float(number), hash(number)) == (0.5, 0.25, hash(0.25))
        assert pickle.loads(pickle.dumps(number)) == 0.25
        assert number.is_integer() is False
        assert [1, 2, 3][placeholder(2)] == 3
    assert not is_kept()
    with pytest.raises(AttributeError):
        number.name = "rate"
    with pytest.raises(AttributeError):
        number.name  # noqa: B018


@pytest.mark.parametrize("value", [0.1, 3])
def test_it_has_the_operations_of_its_number_and_no_others(value):
    number = placeholder(value)
    for name in ("__call__", "__iter__", "__len__", "__getitem__", "__index__", "__matmul__"):
        assert hasattr(type(number), name) == hasattr(type(value), name)
    assert callable(number) == callable(value)
    assert isinstance(number, type(value))


def test_each_watch_begins_anew():
    number, other = placeholder(0.1), placeholder(1)
    with watched([number, other]) as is_kept:
        other + 1
    assert not is_kept()
    with watched([number, other]) as is_kept:
        pass
    assert is_kept()
    with watched([number, other]) as is_kept:
        0.5 < number  # noqa: B015, SIM300
    assert not is_kept()


def asks_for_a_type(number):
    return type(number) is float


def assigns_a_global(number):
    global RATE
    RATE = number


@pytest.mark.parametrize("function", [asks_for_a_type, assigns_a_global])
def test_what_cannot_be_seen_counts_as_looking(function):
    number = placeholder(0.1)
    with watched([number]) as is_kept:
        function(number)
    assert not is_kept()
    with watched([]) as is_kept:
        function(0.1)
    assert is_kept()


def test_a_profiler_is_left_at_work():
    def profiler(*_):
        """Look at nothing. That of `cProfile` is no such function from Python 3.12 on."""

    sys.setprofile(profiler)
    try:
        with watched([placeholder(0.1)]) as is_kept:
            pass
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert not is_kept()
