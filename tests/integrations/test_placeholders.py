"""A placeholder tells whether code has looked at a number, or has only kept it."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import pickle

import numpy as np
import pytest
import torch

from thrifty.integrations._placeholders import Placeholder, UsedError, value_of, watched


KEEPING = {
    "a list": lambda n: [n],
    "a key's value": lambda n: {"lr": n},
    "a tuple": lambda n: (n, 1),
    "an attribute": lambda n: setattr(torch.nn.Module(), "lr", n),
    "a copy": copy.copy,
    "a deep copy": lambda n: copy.deepcopy({"lr": [n]}),
    "its kind": lambda n: (isinstance(n, float), isinstance(n, torch.nn.Module)),
    "whether it is there": lambda n: n is None,
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
    number = Placeholder(0.1)
    with watched(number) as is_kept:
        KEEPING[what](number)
    assert is_kept()


@pytest.mark.parametrize("value", [0.1, 3])
@pytest.mark.parametrize("what", LOOKING)
def test_looking_is_noticed_also_if_its_error_is_caught(what, value):
    number = Placeholder(value)
    with watched(number) as is_kept, contextlib.suppress(Exception):
        LOOKING[what](number)
    assert not is_kept()


def test_looking_fails():
    number = Placeholder(0.1)
    with watched(number), pytest.raises(UsedError):
        number * 2


def test_what_fails_unnoticed_fails():
    number = Placeholder(0.1)
    with watched(number), pytest.raises(TypeError):
        json.dumps(number)


def test_each_watch_begins_anew():
    number, other = Placeholder(0.1), Placeholder(1)
    with watched(number, other) as is_kept, contextlib.suppress(UsedError):
        other + 1
    assert not is_kept()
    with watched(number, other) as is_kept:
        pass
    assert is_kept()


def test_one_that_is_left_somewhere_acts_as_its_number():
    number = Placeholder(0.25)
    assert (number + 1, 1 - number, number * number, -number) == (1.25, 0.75, 0.0625, -0.25)
    assert (f"{number:.1f}", str(number), repr(number)) == ("0.2", "0.25", "0.25")
    assert (number == 0.25, number < 0.5, max(0.1, number) is number) == (True, True, True)
    assert (math.sqrt(number), float(number), hash(number)) == (0.5, 0.25, hash(0.25))
    assert pickle.loads(pickle.dumps(number)) == 0.25
    assert number.is_integer() is False
    assert [1, 2, 3][Placeholder(2)] == 3
    with pytest.raises(AttributeError):
        number.name = "rate"
    with pytest.raises(AttributeError):
        number.name  # noqa: B018


def test_the_number_itself():
    assert value_of(Placeholder(2)) == 2
    assert type(value_of(Placeholder(2))) is int
