"""State that a restored trial lacks is named, wherever an object holds it."""

from __future__ import annotations

import ctypes
import functools
import io
import itertools
import multiprocessing
import queue
import re
import threading
import weakref
from array import array
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from thrifty.pack.verify import contents_of, is_unread, outside_of_state
from thrifty.pack.verify._stand_ins import _sum_on_device, array_content, tensor_content


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


def write_last(value):
    value[len(value) - 1] = 1.0


def count(value):
    value.value += 1


def deep():
    value = Holder([])
    for _ in range(5):
        value = Holder([value])
    return value


def deepest(value):
    while isinstance(value.f, list) and value.f and isinstance(value.f[0], Holder):
        value = value.f[0]
    return value.f


NESTED = ["self.f[0][0].n"]


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
    "the end of a tensor": (lambda: torch.zeros(5000), write_last, ["self.f"]),
    "the end of an array": (lambda: np.zeros(5000), write_last, ["self.f"]),
    "the end of a list": (lambda: [0.0] * 5000, write_last, ["self.f"]),
    "a value in a large dict": (lambda: dict.fromkeys(range(5000), 0), write_last, ["self.f"]),
    "array of objects": (lambda: np.array([{}, None]), lambda v: v[0].update(a=1), ["self.f"]),
    "array": (lambda: array("d"), lambda v: v.append(1.0), ["self.f"]),
    "ctypes": (lambda: ctypes.c_double(0.0), count, ["self.f"]),
    "shared memory": (lambda: multiprocessing.Value("d", 0.0), count, ["self.f._obj"]),
    "seeds": (lambda: np.random.SeedSequence(3), lambda v: v.spawn(1), ["self.f"]),
    "file in memory": (io.BytesIO, lambda v: v.write(b"a"), ["self.f"]),
    "deep in objects": (deep, lambda v: deepest(v).append(1), [f"self.f{'.f[0]' * 5}.f"]),
    "in lists in lists": (lambda: [[Slots()]], lambda v: setattr(v[0][0], "n", 1), NESTED),
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


def test_a_frame_is_compared():
    pandas = pytest.importorskip("pandas")
    live, restored = (Holder(pandas.DataFrame({"a": np.zeros(9)})) for _ in range(2))
    assert outside_of_state({"self": live}, {"self": restored}) == []
    live.f.loc[1, "a"] = 1.0
    assert outside_of_state({"self": live}, {"self": restored}) == ["self.f"]


class RaisingError(Exception):
    """An object of compiled code that cannot be pickled."""

    def __reduce__(self):
        raise KeyError


class Bottomless:
    def __init__(self, depth=12):
        self.f = Bottomless(depth - 1) if depth else 0


class ManyBytesError(Exception):
    def __reduce__(self):
        return str, (b"a" * 2**25,)


@pytest.mark.parametrize(
    "make",
    [
        queue.SimpleQueue,
        RaisingError,
        ManyBytesError,
        Bottomless,
        lambda: Exception(closing_over(0)),
        lambda: set(range(5000)),
        lambda: [Slots()] * 1000,
        lambda: [[[[[[[[[[1]]]]]]]]]],
        lambda: torch.ones(9, 9),
        lambda: torch.ones(9, 9).T,
        lambda: np.ones((9, 9)),
        lambda: np.ones((9, 9)).T,
        lambda: memoryview(bytes(400)),
    ],
)
def test_what_cannot_be_read_whole_is_told(make, monkeypatch):
    monkeypatch.setattr("thrifty.pack.verify._stand_ins.MAX_BYTES", 300)
    live, restored = Holder(make()), Holder(make())
    found = contents_of({"self": live})
    assert any(map(is_unread, found.values()))
    assert outside_of_state({"self": live}, {"self": restored}) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, device="meta"),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.ones(3, dtype=torch.complex64).conj(),
        lambda: torch.ones(5001, dtype=torch.int8)[3:],
        lambda: torch.tensor(1.0, dtype=torch.bfloat16),
        lambda: Exception([nn.Linear(1, 1).state_dict]),
        lambda: ZeroDivisionError(torch.ones(2), Path, len),
        threading.Lock,
        lambda: re.compile("a"),
        lambda: weakref.ref(Path),
        lambda: slice(1),
        lambda: Path(__file__).open().close(),
    ],
)
def test_what_can_be_read_whole_is_told(make):
    live = Holder(make())
    assert not any(map(is_unread, contents_of({"self": live}).values()))


def test_a_file_that_is_read_is_not_compared(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(3))
    one = np.load(tmp_path / "a.npy", mmap_mode="r")
    assert not is_unread(contents_of({"self": Holder(one)})["self.f"])


def test_hooks_of_modules_are_no_state():
    live, restored = nn.Linear(1, 1), nn.Linear(1, 1)
    live.register_forward_hook(lambda *_, **__: None, with_kwargs=True, always_call=True)
    live.register_forward_pre_hook(lambda *_, **__: None, with_kwargs=True)
    assert outside_of_state({"model": live}, {"model": restored}) == []


def signs(one):
    one.neg_()


def crosses(one):
    """Change four values so that the sums of all rows and columns of a table stay equal."""
    for at, change in ((0, 1), (1, -1), (1024, -1), (1025, 1)):
        one[at] += change


def swapped(one):
    one[[0, 2048]] = one[[2048, 0]]


@pytest.mark.parametrize("change", [signs, crosses, swapped])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_usual_change_leaves_the_content_of_a_tensor_equal(change, dtype):
    one = (torch.arange(4096) % 100 + 1).to(dtype)
    other = one.clone()
    change(other)
    assert tensor_content(one) == tensor_content(one.clone())
    assert tensor_content(one) != tensor_content(other)
    words, others = (each.view(torch.int64) for each in (one, other))
    assert _sum_on_device(words) == _sum_on_device(words.clone())
    assert _sum_on_device(words) != _sum_on_device(others)
    if dtype != torch.bfloat16:
        assert array_content(one.numpy()) != array_content(other.numpy())
