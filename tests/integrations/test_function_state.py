"""What a training function gives to ``trial.epochs`` keeps its state, or is refused."""

from __future__ import annotations

import random
import types
from collections import Counter, defaultdict
from copy import deepcopy
from typing import NamedTuple

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris
from sklearn.linear_model import SGDClassifier

from thrifty.core import TaskError
from thrifty.integrations.functions._function_state import Kept


def everything(seed):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    return {
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters()),
        "torch": torch.Generator().manual_seed(seed),
        "numpy": np.random.default_rng(seed),
        "old numpy": np.random.RandomState(seed),
        "python": random.Random(seed),
        "tensor": torch.full((2,), float(seed)),
        "array": np.full(2, float(seed)),
        "list": [seed, (seed, "text")],
        "dict": {"best": seed, "none": None},
        "number": np.float64(seed),
        "text": "same",
    }


def test_all_kinds_of_values_get_their_state_back_in_place():
    one, other = everything(1), everything(2)
    one["model"][0].weight.requires_grad_(False)
    one["model"][1].eval()
    kept, again = Kept(one), Kept(other)
    plain = {name: other[name] for name in ("tensor", "array", "list", "dict")}
    assert kept.marks() != again.marks()
    again.load(kept.state())
    assert kept.marks() == again.marks()
    assert all(other[name] is value for name, value in plain.items())
    assert not other["model"][0].weight.requires_grad
    assert not other["model"][1].training
    assert other["list"] == [1, (1, "text")]
    assert other["number"] == 1.0
    for name in ("numpy", "old numpy"):
        assert one[name].uniform() == other[name].uniform()
    assert one["python"].random() == other["python"].random()
    assert torch.equal(
        torch.rand(3, generator=one["torch"]), torch.rand(3, generator=other["torch"])
    )


def test_values_of_another_shape_are_replaced():
    kept = Kept({"tensor": torch.ones(3), "array": np.ones(3), "number": 2})
    given = {"tensor": torch.ones(2), "array": np.ones(2), "number": 1}
    Kept(given).load(kept.state())
    assert given["tensor"].shape == given["array"].shape == (3,)
    assert given["number"] == 2


def test_a_single_object_and_nothing():
    model = torch.nn.Linear(1, 1)
    assert Kept(model).model is model
    assert Kept(None).model is None
    assert Kept(None).state() == {}
    assert Kept({"model": model, "teacher": torch.nn.Linear(1, 1)}).model is model
    assert Kept({"a": model, "b": torch.nn.Linear(1, 1)}).model is None


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (3, "got an object of type int; give a dict"),
        ({1: 2}, "the key 1 is no text"),
        ({"file": object()}, "'file' is an object of type object, whose state cannot be kept"),
        ({"deep": {"list": [object()]}}, "'deep' is an object of type dict"),
    ],
)
def test_what_cannot_be_kept(given, told):
    with pytest.raises(TaskError, match=told):
        Kept(given)


def test_the_dict_must_keep_its_keys_and_objects():
    given = {"model": torch.nn.Linear(1, 1)}
    kept = Kept(given)
    given["more"] = 1
    with pytest.raises(TaskError, match="had model, and has model, more now"):
        kept.check()
    del given["more"]
    given["model"] = torch.nn.Linear(1, 1)
    with pytest.raises(TaskError, match=r"'model' in the dict .* is another object now"):
        kept.check()


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({}, "got model, and the kept state has nothing"),
        (Kept({"model": torch.nn.Linear(2, 1)}).state(), "'model' does not take the state"),
    ],
)
def test_a_state_of_something_else(state, told):
    with pytest.raises(TaskError, match=told):
        Kept({"model": torch.nn.Linear(1, 1)}).load(state)


def test_a_value_in_a_mapping_that_cannot_change():
    given = types.MappingProxyType({"number": 1})
    with pytest.raises(TaskError, match="'number' is in a mapping that cannot change"):
        Kept(given).load(Kept({"number": 2}).state())


def test_estimators_get_their_state_back_in_place():
    one = SGDClassifier(random_state=0)
    x, y = load_iris(return_X_y=True)
    one.partial_fit(x[::2], y[::2], classes=range(3))
    kept, other = Kept({"model": one}), SGDClassifier(random_state=1)
    Kept({"model": other}).load(kept.state())
    assert np.array_equal(one.coef_, other.coef_)
    for model in (one, other):
        model.partial_fit(x[1::2], y[1::2])
    assert np.array_equal(one.coef_, other.coef_)


def test_tensors_that_training_has_computed_are_kept_without_their_graph():
    weight = torch.ones(2, requires_grad=True)
    hidden = {"h": 2 * weight, "both": (weight, [3 * weight])}
    found = Kept(hidden).state()
    other = {"h": torch.zeros(2), "both": (torch.zeros(2), [torch.zeros(2)])}
    Kept(other).load(found)
    assert other["h"].tolist() == [2.0, 2.0]
    assert other["both"][1][0].tolist() == [3.0, 3.0]
    assert not other["h"].requires_grad


class Pair(NamedTuple):
    one: int
    two: int


@pytest.mark.parametrize(
    "value",
    [Counter("aab"), defaultdict(int, a=1), Pair(1, 2), np.array(["text"]), np.array([None])],
    ids=["counter", "default", "named", "texts", "objects"],
)
def test_kinds_of_values_that_would_come_back_as_others_are_refused(value):
    for given in ({"value": value}, {"value": [1, {"deep": value}]}):
        with pytest.raises(TaskError, match=r"'value' is .*, whose state cannot be kept"):
            Kept(given)


@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.float16, np.float32, np.bool_])
def test_numbers_of_numpy_keep_their_type(kind):
    given = {"number": kind(1), "deep": [kind(0)]}
    other = {"number": kind(0), "deep": [kind(1)]}
    Kept(other).load(Kept(given).state())
    assert (other["number"], other["deep"]) == (1, [0])
    assert type(other["number"]) is type(other["deep"][0]) is kind


def test_an_ordered_dict_of_weights_is_kept():
    model = torch.nn.Linear(1, 1)
    best = deepcopy(model.state_dict())
    kept = Kept({"model": model, "best": best})
    kept.check()
    assert Kept({"model": model, "best": None}).load(kept.state()) is None


def test_a_value_in_the_memory_of_another_one_is_refused():
    model = torch.nn.Linear(1, 1)
    given = {"model": model, "best": None}
    kept = Kept(given)
    given["best"] = model.state_dict()
    with pytest.raises(TaskError, match=r"'best' has a tensor in the memory of 'model'.*clone"):
        kept.check()
    given["best"] = {name: each.clone() for name, each in model.state_dict().items()}
    kept.check()
