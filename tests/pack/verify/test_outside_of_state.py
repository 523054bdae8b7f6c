"""State that a restored trial lacks is named, wherever an object holds it."""

from __future__ import annotations

import functools
import itertools
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from thrifty.pack.verify import contents_of, outside_of_state


class Holder:
    """Something with one attribute, as a trial has."""

    def __init__(self, value):
        self.f = value


class Slots:
    __slots__ = ("n",)

    def __init__(self):
        self.n = 0


class MoreSlots(Slots):
    __slots__ = ("later",)


@dataclass(slots=True)
class SlotsOfData:
    n: int = 0


class Numbers(list):
    """A list with an attribute."""

    n = 0


class Lying(dict):
    """A dict whose methods tell nothing of its content."""

    def items(self):
        raise AssertionError

    def __iter__(self):
        raise AssertionError

    def __len__(self):
        raise AssertionError


Pair = namedtuple("Pair", ["a", "b"])


def closing_over(value):
    def f():
        nonlocal value
        value += 1

    return f


def closing_over_a_list():
    found = [0]
    return lambda: found.append(1)


def with_attribute():
    def f():
        f.n += 1

    f.n = 0
    return f


def with_default():
    def f(first, c=[0]):  # noqa: B006
        c[0] += first

    return f


def with_keyword():
    def f(*, c=[0]):  # noqa: B006
        c[0] += 1

    return f


def wrapped():
    """Return a function that one of torch wraps."""
    return torch.no_grad()(closing_over(0))


def closing_over_an_object():
    one = Slots()

    def f():
        one.n += 1

    return f


def bump(counts, by=1):
    counts["n"] += by


def flags():
    i = 0
    while True:
        yield i > 5
        i += 1


def at_one_place(known):
    while True:
        yield known.popleft()


class Stage:
    def __init__(self):
        self.n = 0

    def step(self):
        self.n += 1


def calls(value):
    value()


CASES = {
    "slots": (Slots, lambda v: setattr(v, "n", 1), ["self.f.n"]),
    "inherited slots": (MoreSlots, lambda v: setattr(v, "n", 1), ["self.f.n"]),
    "a slot set later": (MoreSlots, lambda v: setattr(v, "later", 1), ["self.f.later"]),
    "dataclass with slots": (SlotsOfData, lambda v: setattr(v, "n", 1), ["self.f.n"]),
    "slots in a list": (lambda: [Slots()], lambda v: setattr(v[0], "n", 1), ["self.f[0].n"]),
    "slots in a deque": (
        lambda: deque([Slots()]),
        lambda v: setattr(v[0], "n", 1),
        ["self.f[0].n"],
    ),
    "Counter": (Counter, lambda v: v.update("n"), ["self.f"]),
    "defaultdict": (lambda: defaultdict(int), lambda v: v["n"], ["self.f"]),
    "OrderedDict": (lambda: OrderedDict(a=1, b=2), lambda v: v.move_to_end("a"), ["self.f"]),
    "dict that overrides": (lambda: Lying(a=1), lambda v: v.update(a=2), ["self.f"]),
    "list subclass": (lambda: Numbers([1]), lambda v: v.append(2), ["self.f"]),
    "its attribute": (lambda: Numbers([1]), lambda v: setattr(v, "n", 2), ["self.f.n"]),
    "named tuple": (lambda: Pair([1], 2), lambda v: v.a.append(2), ["self.f"]),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda v: v.append(3), ["self.f"]),
    "set": (lambda: {"a", "b"}, lambda v: v.add("c"), ["self.f"]),
    "bytearray": (lambda: bytearray(b"a"), lambda v: v.extend(b"b"), ["self.f"]),
    "closure": (lambda: closing_over(0), calls, ["self.f.value (closure)"]),
    "closed-over list": (closing_over_a_list, calls, ["self.f.found (closure)"]),
    "closed-over object": (closing_over_an_object, calls, ["self.f.one.n"]),
    "attribute of a function": (with_attribute, calls, ["self.f.n"]),
    "wrapped function": (wrapped, calls, ["self.f.value (closure)"]),
    "default": (with_default, lambda v: v(1), ["self.f.c (default)"]),
    "keyword default": (with_keyword, calls, ["self.f.c (default)"]),
    "partial": (lambda: functools.partial(bump, {"n": 0}), calls, ["self.f.counts (argument)"]),
    "partial keyword": (
        lambda: functools.partial(bump, counts={"n": 0}),
        calls,
        ["self.f.counts (argument)"],
    ),
    "partial of an iterator": (
        lambda: functools.partial(next, itertools.count()),
        calls,
        ["self.f.args[0] (argument)"],
    ),
    "bound method": (lambda: Stage().step, calls, ["self.f.n"]),
    "method of an iterator": (lambda: itertools.count().__next__, calls, ["self.f"]),
    "function in a dict": (
        lambda: {"a": closing_over(0)},
        lambda v: v["a"](),
        ["self.f[0].value (closure)"],
    ),
    "cycle": (lambda: itertools.cycle("aab"), next, ["self.f"]),
    "list iterator": (lambda: iter([False] * 5), next, ["self.f"]),
    "tuple iterator": (lambda: iter((1, 1, 1)), next, ["self.f"]),
    "range iterator": (lambda: iter(range(5)), next, ["self.f"]),
    "dict iterator": (lambda: iter({"a": 1, "b": 2}), next, ["self.f"]),
    "count": (itertools.count, next, ["self.f"]),
    "enumerate": (lambda: enumerate([1, 1]), next, ["self.f"]),
    "zip": (lambda: zip([1, 1], [2, 2], strict=True), next, ["self.f"]),
    "map": (lambda: map(str, [1, 1]), next, ["self.f"]),
    "pairwise": (lambda: itertools.pairwise([1, 1, 1]), next, ["self.f"]),
    "generator": (flags, next, ["self.f"]),
    "generator expression": (lambda: (i for i in range(9)), next, ["self.f"]),
    "generator that ends": (lambda: (i for i in range(1)), list, ["self.f"]),
    "generator at one place": (lambda: at_one_place(deque([1, 2, 3])), next, ["self.f"]),
}


@pytest.mark.parametrize(("make", "change", "names"), CASES.values(), ids=CASES)
def test_what_an_attribute_holds_is_compared(make, change, names):
    live, restored = Holder(make()), Holder(make())
    before = contents_of({"self": live})
    assert outside_of_state({"self": live}, {"self": restored}) == []
    change(live.f)
    assert outside_of_state({"self": live}, {"self": restored}) == names
    # the names agree with those of stand-ins
    after = contents_of({"self": live})
    assert all(before.get(name) != after[name] for name in names)
    change(restored.f)
    assert outside_of_state({"self": live}, {"self": restored}) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: iter([1, 2, 3]),
        lambda: itertools.cycle([1, 2, 3]),
        lambda: itertools.islice(itertools.count(1), 3),
        lambda: (i for i in (1, 2, 3)),
        lambda: iter({1: 1, 2: 2, 3: 3}.values()),
        lambda: map(int, "123"),
        lambda: itertools.tee([1, 2, 3])[1],
        lambda: itertools.chain([1], [2, 3]),
    ],
)
def test_no_iterator_is_advanced(make):
    live, restored = Holder(make()), Holder(make())
    for _ in range(2):
        assert outside_of_state({"self": live}, {"self": restored}) == []
    assert [next(live.f), next(live.f), next(live.f)] == [1, 2, 3]


def test_a_cycle_is_compared_after_its_first_round():
    live, restored = Holder(itertools.cycle("aab")), Holder(itertools.cycle("aab"))
    for holder in (live, restored):
        for _ in range(4):
            next(holder.f)
    assert outside_of_state({"self": live}, {"self": restored}) == []
    next(live.f)
    assert outside_of_state({"self": live}, {"self": restored}) == ["self.f"]


@pytest.mark.parametrize(
    "make",
    [
        object,
        lambda: {object(), 1},
        lambda: {"a": object()},
        lambda: deque([object()]),
        lambda: closing_over(object()),
        lambda: functools.partial(bump, object()),
        lambda: {nn.Parameter(torch.ones(2))},
        lambda: (each for each in [object()]),
        lambda: map(closing_over(0), [object()]),
        lambda: nn.Linear(1, 1).forward,
    ],
)
def test_what_differs_only_in_identity_is_equal(make):
    assert outside_of_state({"self": Holder(make())}, {"self": Holder(make())}) == []


def test_variables_of_installed_packages_are_left_alone():
    live, restored = (Holder(torch.no_grad()(len)) for _ in range(2))
    assert outside_of_state({"self": live}, {"self": restored}) == []
    live, restored = Holder(Path("a/b")), Holder(Path("a/b"))
    str(live.f), hash(live.f)  # kept in slots
    assert outside_of_state({"self": live}, {"self": restored}) == []


def test_another_function_is_a_difference():
    live, restored = Holder(closing_over(0)), Holder(with_default())
    assert outside_of_state({"self": live}, {"self": restored}) == ["self.f"]


def test_variables_that_are_meant_are_left_out():
    live, restored = Holder(closing_over(0)), Holder(closing_over(0))
    live.f()
    for name in ("f", "value"):
        assert outside_of_state({"self": live}, {"self": restored}, meant=[name]) == []


def test_a_function_that_holds_itself_is_compared_once():
    def make():
        def f():
            return f, n

        n = [0]
        return f

    live, restored = Holder(make()), Holder(make())
    assert outside_of_state({"self": live}, {"self": restored}) == []
    live.f()[1].append(1)
    assert outside_of_state({"self": live}, {"self": restored}) == ["self.f.n (closure)"]


def test_hooks_of_modules_are_no_state():
    live, restored = nn.Linear(1, 1), nn.Linear(1, 1)
    live.register_forward_hook(lambda *_, **__: None, with_kwargs=True, always_call=True)
    live.register_forward_pre_hook(lambda *_, **__: None, with_kwargs=True)
    assert outside_of_state({"model": live}, {"model": restored}) == []
