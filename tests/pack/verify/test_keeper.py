"""Values are saved with everything inside them, compared and restored."""

from __future__ import annotations

import os
import random
import threading
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from contextvars import ContextVar
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

from thrifty.pack.identity import Place
from thrifty.pack.verify import Keeper, Watch, cached_places, same, training_places
from thrifty.pack.verify._keeper import MAX_BYTES, MAX_RESULTS


def keeper_of(value) -> tuple[Keeper, dict]:
    space = {"x": value}
    return Keeper([Place(name="x", kind="global", holder=space, key="x")]), space


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: [1], lambda v: v.append(2)),
        (lambda: [[1]], lambda v: v[0].append(2)),
        (lambda: ([1],), lambda v: v[0].append(2)),
        (lambda: {"a": 1}, lambda v: v.update(a=2)),
        (lambda: {"a": {"b": [1]}}, lambda v: v["a"]["b"].clear()),
        (lambda: {1}, lambda v: v.add(2)),
        (lambda: deque([1]), lambda v: v.append(2)),
        (lambda: bytearray(b"a"), lambda v: v.append(1)),
        (lambda: Counter("a"), lambda v: v.update("a")),
        (lambda: OrderedDict(a=1, b=2), lambda v: v.move_to_end("a")),
        (lambda: defaultdict(list), lambda v: v["a"].append(1)),
        (lambda: torch.ones(2), lambda v: v.add_(1)),
        (lambda: torch.ones(2), lambda v: v.data.mul_(2)),
        (lambda: np.ones(2), lambda v: v.__setitem__(0, 2)),
        (lambda: torch.Generator(), lambda v: torch.rand(1, generator=v)),
        (lambda: np.random.default_rng(0), lambda v: v.random()),
        (lambda: np.random.RandomState(0), lambda v: v.rand()),
        (lambda: random.Random(0), lambda v: v.random()),
        (lambda: torch.nn.Linear(1, 1), lambda v: v.weight.data.fill_(3)),
        (lambda: torch.nn.BatchNorm1d(1), lambda v: v.running_mean.fill_(3)),
    ],
    ids=lambda value: "",
)
def test_what_is_inside_is_noticed_and_put_back(make, change):
    value = make()
    keeper, space = keeper_of(value)
    assert keeper.changed() == []
    change(value)
    assert keeper.changed() == ["x"]
    keeper.put_back()
    assert keeper.changed() == []
    assert space["x"] is value


def test_a_value_in_the_place_of_another():
    first = [1]
    keeper, space = keeper_of(first)
    space["x"] = [1]
    assert keeper.changed() == []
    space["x"] = [2]
    assert keeper.changed() == ["x"]
    keeper.put_back()
    assert space["x"] is first


def test_a_tensor_that_was_resized():
    value = torch.ones(2)
    keeper, _ = keeper_of(value)
    value.data = torch.zeros(3)
    assert keeper.changed() == ["x"]
    keeper.put_back()
    assert same(value, torch.ones(2))


def test_attributes_that_come_and_go():
    class Thing:
        pass

    thing = Thing()
    thing.a, thing.b = 1, 2
    places = [
        Place(name=f"thing.{key}", kind="attribute", holder=thing, key=key) for key in ("a", "b")
    ]
    keeper = Keeper(places)
    thing.new = 3
    del thing.b
    assert sorted(keeper.changed()) == ["thing.b", "thing.new"]
    keeper.put_back()
    assert vars(thing) == {"a": 1, "b": 2}
    assert keeper.keys == {(id(thing), "a"), (id(thing), "b")}


def test_the_same_places_at_another_time():
    value = [1]
    early, _ = keeper_of(value)
    value.append(2)
    late = early.now()
    value.append(3)
    late.put_back()
    assert value == [1, 2]
    early.put_back()
    assert value == [1]


def test_large_tensors_are_left_alone():
    large = torch.empty(MAX_BYTES // 4 + 1)
    keeper, _ = keeper_of(large)
    large.add_(1)
    assert keeper.changed() == []


class Table(dict):
    """A user-defined container."""

    def update(self, *args, **kwargs):
        raise AssertionError("no code of the user's runs")


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: array("d", [1.0]), lambda v: v.append(2.0)),
        (lambda: array("d", [1.0]), lambda v: v.__setitem__(0, 2.0)),
        (threading.local, lambda v: setattr(v, "n", 1)),
        (lambda: ContextVar("x", default=1), lambda v: v.set(2)),
        (lambda: Table(a=[1]), lambda v: v["a"].append(2)),
        (lambda: Table(a=[1]), lambda v: v.pop("a")),
        (lambda: {1: {2: {3: {4: {5: [6]}}}}}, lambda v: v[1][2][3][4][5].append(7)),
    ],
)
def test_holders_of_any_class(make, change):
    value = make()
    keeper, _ = keeper_of(value)
    watch = Watch({"read": lambda: value})
    assert (keeper.changed(), watch.changed()) == ([], None)
    change(value)
    assert keeper.changed() == ["x"]
    assert watch.changed() is not None
    keeper.put_back()
    assert (keeper.changed(), watch.changed()) == ([], None)


def test_a_context_variable_that_was_set():
    value = ContextVar("x")
    value.set([1])
    keeper, _ = keeper_of(value)
    value.get().append(2)
    assert keeper.changed() == ["x"]
    keeper.put_back()
    assert value.get() == [1]
    value.set([3])
    keeper.put_back()
    assert value.get() == [1]


def counts(seen=OrderedDict()):  # noqa: B006 (as user code does)
    seen["n"] = seen.get("n", 0) + 1
    counts.calls = getattr(counts, "calls", 0) + 1
    Noted.calls = getattr(Noted, "calls", 0) + 1
    return seen


class Noted:
    """A class that a test gives an attribute."""


def test_what_functions_and_classes_are_given():
    keeper = Keeper(training_places({"counts": counts}))
    counts()
    assert sorted(keeper.changed()) == ["Noted.calls", "counts default 'seen'", "counts.calls"]
    keeper.put_back()
    assert keeper.changed() == []
    assert (counts.__dict__, vars(Noted).get("calls"), counts.__defaults__) == ({}, None, ({},))


def test_settings_of_the_process(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path.parent)
    keeper, watch = Keeper(training_places({"counts": counts})), Watch({"counts": counts})
    torch.set_default_dtype(torch.float64)
    monkeypatch.chdir(tmp_path)
    try:
        assert keeper.changed() == ["torch.get_default_dtype()", "os.getcwd()"]
        assert watch.changed().name == "torch.get_default_dtype()"
        keeper.put_back()
        assert (torch.get_default_dtype(), Path.cwd()) == (torch.float32, tmp_path.parent)
    finally:
        torch.set_default_dtype(torch.float32)


def reads_the_environment():
    return [os.environ.get(name) for name in ("THRIFTY_TEST_KEEPER",)] + [
        os.getenv("THRIFTY_TEST_OTHER")
    ]


def test_variables_of_the_environment_that_code_names(monkeypatch):
    monkeypatch.setenv("THRIFTY_TEST_OTHER", "1")
    keeper = Keeper(training_places({"read": reads_the_environment}))
    monkeypatch.setenv("THRIFTY_TEST_UNREAD", "1")
    assert keeper.changed() == []
    monkeypatch.setenv("THRIFTY_TEST_KEEPER", "1")
    monkeypatch.delenv("THRIFTY_TEST_OTHER")
    names = ("THRIFTY_TEST_KEEPER", "THRIFTY_TEST_OTHER")
    assert sorted(keeper.changed()) == [f"os.environ[{name!r}]" for name in names]
    keeper.put_back()
    assert reads_the_environment() == [None, "1"]


@lru_cache(maxsize=2)
def few(key):
    return [key]


@cache
def endless(key):
    return {"key": key}


class WithMethod:
    @staticmethod
    @cache
    def kept():
        return [0]


@pytest.mark.parametrize(
    ("cached", "keys"), [(few, (1, 2)), (endless, (1, 2)), (WithMethod.kept, ((),))]
)
def test_results_of_cached_functions_are_saved_and_put_back(cached, keys):
    cached.cache_clear()
    cached.note = "an attribute is no result"
    results = [cached(key) if key else cached() for key in keys]
    keeper = Keeper(cached_places([cached]))
    assert not keeper.changed()
    results[0].clear()
    assert keeper.changed() == [f"{cached.__wrapped__.__qualname__}(...)"]
    keeper.put_back()
    assert results[0]
    assert not keeper.changed()


def test_of_many_results_some_are_saved():
    endless.cache_clear()
    results = [endless(key) for key in range(10 * MAX_RESULTS)]
    keeper = Keeper(cached_places([endless]))
    results[-1].clear()
    assert not keeper.changed()
    results[0].clear()
    assert keeper.changed() == ["endless(...)"]
    endless.cache_clear()


def test_an_empty_cache_in_each_place_of_a_cached_function():
    def code():
        return few(1), other(1), WithMethod.kept()

    other = few
    places = training_places({"code": code})
    keeper, empty = Keeper(places), {}
    before = code()
    keeper.empty_caches(empty)
    after = code()
    assert after[0] is after[1]
    assert [a is b for a, b in zip(after, before, strict=True)] == [False] * 3
    keeper.put_back()
    assert [a is b for a, b in zip(code(), before, strict=True)] == [True] * 3
