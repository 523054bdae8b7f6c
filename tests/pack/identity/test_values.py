"""Values are identified by their content."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import functools
import io
import logging
import operator
import os
import pathlib
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import types
import typing
import uuid
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import sklearn.linear_model
import torch

from thrifty.core import TaskError
from thrifty.pack.identity._contents import Names
from thrifty.pack.identity._values import Values


pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.slow,
]


def of(value) -> str:
    return Values(Names(home=__name__)).digest(value, path="task.x")


class Mode(enum.Enum):
    FAST = "fast"
    SLOW = "slow"


@dataclass
class Options:
    rate: float = 0.1
    parts: tuple = ()


@dataclass(frozen=True, slots=True)
class Frozen:
    rate: float = 0.1


class Pair(typing.NamedTuple):
    a: int
    b: int


class Plain:
    def __init__(self, x=0):
        self.x = x

    def method(self):
        return self.x


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


class Mine(dict):
    pass


class Text(str):
    pass


class Stated:
    def __init__(self, x):
        self.x, self.noise = x, object()

    def __getstate__(self):
        return {"x": self.x}


class Reduced:
    def __init__(self, x):
        self.x = x

    def __reduce__(self):
        return Reduced, (self.x,)


class Said:
    def __init__(self, x):
        self.x, self.file = x, io.BytesIO()

    def __thrifty_identity__(self):
        return {"x": self.x}


class SaidMore(Said):
    def __init__(self, x, more):
        super().__init__(x)
        self.more = more


class Net(torch.nn.Module):
    def __init__(self, p=0.5, *, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.drop = torch.nn.Dropout(p)
        self.b.load_state_dict(self.a.state_dict())
        if tied:
            self.b.weight = self.a.weight


def hooked(*functions):
    net = Net()
    for function in functions:
        net.register_forward_hook(function)
    return net


def scaled(k):
    def f(x, *, by=2):
        return x * k * by

    return f


def nothing(*_):
    return None


def frozen_net():
    net = Net()
    net.a.weight.requires_grad_(False)
    return net


def evaluated():
    return Net().eval()


def tensor(dtype=torch.float32, *values):
    return torch.tensor(values or (1, 2, 3)).to(dtype)


def at(function, key="k"):
    return {key: function}


def generator(seed):
    return torch.Generator().manual_seed(seed)


def frame(**columns):
    return pd.DataFrame(columns or {"a": [1, 2], "b": ["x", "y"]})


def fitted(c=1.0):
    model = sklearn.linear_model.LogisticRegression(C=c).fit([[0.0], [1.0]], [0, 1])
    # the last bits of a fit depend on how its arrays lie in memory
    model.coef_, model.intercept_ = np.array([[c / 2]]), np.array([-c / 4])
    return model


def cycle(x):
    out = [x]
    out.append(out)
    return out


def shared(inner):
    return [inner, inner]


MADE = {
    "none": lambda: None,
    "zero": lambda: 0,
    "one": lambda: 1,
    "true": lambda: True,
    "float one": lambda: 1.0,
    "minus zero": lambda: -0.0,
    "nan": lambda: float("nan"),
    "complex": lambda: 1j,
    "text": lambda: "1",
    "other text": lambda: "\u00e9",
    "bytes": lambda: b"1",
    "ellipsis": lambda: ...,
    "an object": object,
    "a list": lambda: [1, 2],
    "another order": lambda: [2, 1],
    "nested": lambda: [[1], 2],
    "flat": lambda: [1, [2]],
    "a tuple": lambda: (1, 2),
    "a named tuple": lambda: Pair(1, 2),
    "a range": lambda: range(3),
    "a slice": lambda: slice(1, 3),
    "another slice": lambda: slice(1, 4),
    "a set": lambda: {"a", "b", "c", "d", (1, "e")},
    "a frozen set": lambda: frozenset({"a", "b", "c", "d"}),
    "a dict": lambda: {"a": 1, "b": 2},
    "a dict in another order": lambda: {"b": 2, "a": 1},
    "a dict of objects": lambda: {Mode.FAST: Plain()},
    "an ordered dict": lambda: collections.OrderedDict(a=1, b=2),
    "a default dict": lambda: collections.defaultdict(list, a=1, b=2),
    "another default": lambda: collections.defaultdict(dict, a=1, b=2),
    "a proxy": lambda: types.MappingProxyType({"a": 1}),
    "a deque": lambda: collections.deque([1, 2]),
    "a short deque": lambda: collections.deque([1, 2], maxlen=2),
    "a counter": lambda: collections.Counter("aab"),
    "a dict of the user's": lambda: Mine(a=1),
    "text of the user's": lambda: Text("a"),
    "other text of the user's": lambda: Text("b"),
    "an enum": lambda: Mode.FAST,
    "another member": lambda: Mode.SLOW,
    "a dataclass": Options,
    "another field": lambda: Options(rate=0.2),
    "a frozen one": Frozen,
    "another frozen one": lambda: Frozen(rate=0.2),
    "an instance": Plain,
    "another attribute": lambda: Plain(1),
    "instances inside": lambda: Plain(Plain(Plain())),
    "slots": lambda: Slotted(1),
    "other slots": lambda: Slotted(2),
    "an empty slot": lambda: Slotted.__new__(Slotted),
    "a state": lambda: Stated(1),
    "another state": lambda: Stated(2),
    "reduced": lambda: Reduced(1),
    "otherwise reduced": lambda: Reduced(2),
    "what it says itself": lambda: Said(1),
    "what it says else": lambda: Said(2),
    "a namespace": lambda: types.SimpleNamespace(x=1),
    "another namespace": lambda: types.SimpleNamespace(x=2),
    "a path": lambda: pathlib.Path("a/b"),
    "another path": lambda: pathlib.Path("a/c"),
    "a date": lambda: datetime.date(2026, 1, 2),
    "a moment": lambda: datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
    "a naive moment": lambda: datetime.datetime(2026, 1, 2),
    "a duration": lambda: datetime.timedelta(2),
    "a decimal": lambda: decimal.Decimal("1.0"),
    "another decimal": lambda: decimal.Decimal("1.00"),
    "a fraction": lambda: Fraction(1, 2),
    "a uuid": lambda: uuid.UUID(int=1),
    "a pattern": lambda: re.compile("a+"),
    "its flags": lambda: re.compile("a+", re.I),
    "a class": lambda: Plain,
    "a class of a package": lambda: torch.nn.Linear,
    "a type": lambda: list[int],
    "another type": lambda: list[str],
    "a union": lambda: int | str,
    "an annotated type": lambda: typing.Annotated[int, Plain(1)],
    "otherwise annotated": lambda: typing.Annotated[int, Plain(2)],
    "a function": lambda: nothing,
    "another function": lambda: of,
    "a closure": lambda: scaled(1),
    "another closure": lambda: scaled(2),
    "a partial": lambda: functools.partial(nothing, 1, k=2),  # type: ignore[call-arg]
    "another partial": lambda: functools.partial(nothing, 1, k=3),  # type: ignore[call-arg]
    "a method": lambda: Plain(1).method,
    "of another": lambda: Plain(2).method,
    "a method of a list": lambda: [1].append,
    "of another list": lambda: [2].append,
    "built in": lambda: len,
    "of torch": lambda: torch.relu,
    "another of torch": lambda: torch.tanh,
    "of NumPy": lambda: np.add,
    "another of NumPy": lambda: np.multiply,
    "a descriptor": lambda: str.lower,
    "another descriptor": lambda: str.upper,
    "an item": lambda: operator.itemgetter(1),
    "another item": lambda: operator.itemgetter(2),
    "cached": lambda: functools.lru_cache(maxsize=3)(nothing),
    "otherwise cached": lambda: functools.lru_cache(maxsize=4)(nothing),
    "code": lambda: nothing.__code__,
    "an array": lambda: np.arange(6),
    "another array": lambda: np.arange(1, 7),
    "its shape": lambda: np.arange(6).reshape(2, 3),
    "its transpose": lambda: np.arange(6).reshape(2, 3).T,
    "its type": lambda: np.arange(6, dtype=np.int32),
    "big-endian": lambda: np.arange(6, dtype=">i8"),
    "an empty array": lambda: np.zeros((0, 3)),
    "an array without axes": lambda: np.array(3.0),
    "a scalar of NumPy": lambda: np.float64(3.0),
    "another scalar": lambda: np.float32(3.0),
    "an array of objects": lambda: np.array([Plain(1), None], dtype="O"),
    "an array of other objects": lambda: np.array([Plain(2), None], dtype="O"),
    "an array of text": lambda: np.array(["a", "b"]),
    "records": lambda: np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]),
    "other records": lambda: np.zeros(2, dtype=[("a", "i4"), ("c", "f8")]),
    "dates": lambda: np.array(["2026-01-01"], dtype="datetime64[D]"),
    "masked": lambda: np.ma.masked_array([1, 2], mask=[0, 1]),
    "otherwise masked": lambda: np.ma.masked_array([1, 2], mask=[1, 0]),
    "a dtype": lambda: np.dtype("f4"),
    "a tensor": tensor,
    "bfloat16": lambda: tensor(torch.bfloat16),
    "float16": lambda: tensor(torch.float16),
    "another bfloat16": lambda: tensor(torch.bfloat16, 1, 2, 4),
    "eight bits": lambda: tensor(torch.float8_e4m3fn),
    "booleans": lambda: tensor(torch.bool),
    "complex numbers": lambda: tensor(torch.complex64),
    "their conjugates": lambda: tensor(torch.complex64, 1j).conj(),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "no gradient": lambda: torch.nn.Parameter(torch.ones(2), requires_grad=False),
    "a tensor without axes": lambda: torch.tensor(1.0),
    "an empty tensor": lambda: torch.zeros(0, 2),
    "meta": lambda: torch.zeros(2, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "otherwise sparse": lambda: (2 * torch.eye(3)).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "a torch dtype": lambda: torch.float32,
    "a device": lambda: torch.device("cpu"),
    "a size": lambda: torch.Size([1, 2]),
    "a generator of torch": lambda: generator(0),
    "another seed": lambda: generator(1),
    "a generator of NumPy": lambda: np.random.default_rng(0),
    "another seed of NumPy": lambda: np.random.default_rng(1),
    "an old generator": lambda: np.random.RandomState(0),
    "seeds": lambda: np.random.SeedSequence(1),
    "other seeds": lambda: np.random.SeedSequence(2),
    "random": lambda: random.Random(0),
    "another random": lambda: random.Random(1),
    "system random": random.SystemRandom,
    "a module": Net,
    "its rate": lambda: Net(0.1),
    "tied": lambda: Net(tied=True),
    "frozen": frozen_net,
    "for evaluation": evaluated,
    "hooked": lambda: hooked(nothing),
    "otherwise hooked": lambda: hooked(scaled(1)),
    "hooked twice": lambda: hooked(nothing, scaled(1)),
    "layers": lambda: torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()),
    "other layers": lambda: torch.nn.Sequential(torch.nn.Tanh(), torch.nn.ReLU()),
    "a data set": lambda: torch.utils.data.TensorDataset(torch.arange(3)),
    "a subset": lambda: torch.utils.data.Subset([1, 2], [0]),
    "a loader": lambda: torch.utils.data.DataLoader([1, 2], batch_size=2),
    "another loader": lambda: torch.utils.data.DataLoader([1, 2], batch_size=1),
    "a frame": frame,
    "another frame": lambda: frame(a=[1, 3], b=["x", "y"]),
    "a categorical column": lambda: frame(a=pd.Categorical(["x", "y"])),
    "other categories": lambda: frame(a=pd.Categorical(["x", "y"], categories=["y", "x"])),
    "missing values": lambda: frame(a=pd.array([1, None], dtype="Int64")),
    "zones": lambda: frame(a=pd.to_datetime(["2026-01-01"]).tz_localize("UTC")),
    "a series": lambda: pd.Series([1, 2], name="a"),
    "another name": lambda: pd.Series([1, 2], name="b"),
    "levels": lambda: pd.MultiIndex.from_tuples([(1, 2), (3, 4)]),
    "an estimator": sklearn.linear_model.LogisticRegression,
    "a fitted estimator": fitted,
    "another option": lambda: fitted(2.0),
    "a cycle": lambda: cycle(1),
    "another cycle": lambda: cycle(2),
    "one list twice": lambda: shared([1]),
    "two equal lists": lambda: [[1], [1]],
    "a logger": lambda: logging.getLogger("a"),
    "another logger": lambda: logging.getLogger("b"),
    "a lock": threading.Lock,
    "a package": lambda: np,
    "standard output": lambda: sys.stdout,
    "the environment": lambda: os.environ,
    "a weak reference": lambda: weakref.ref(Plain),
    "a property": lambda: property(nothing),
    "a static method": lambda: staticmethod(nothing),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_equal_content_has_equal_digests(make):
    assert of(make()) == of(make())


def test_different_content_has_different_digests():
    names = collections.defaultdict(list)
    for name, make in MADE.items():
        names[of(make())].append(name)
    assert {digest: same for digest, same in names.items() if len(same) > 1} == {}


def test_the_same_in_every_process(tmp_path):
    script = tmp_path / "show.py"
    script.write_text(
        "from tests.pack.identity import test_values as t\n"
        "for name, make in t.MADE.items():\n    print(name, t.of(make()))\n"
    )
    # The new process has a different hash seed.
    run = subprocess.run(
        [sys.executable, script],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.splitlines() == [f"{name} {of(make())}" for name, make in MADE.items()]


def test_layout_in_memory_does_not_count():
    array = np.arange(12).reshape(3, 4)
    assert of(array[:, ::2]) == of(array[:, ::2].copy())
    assert of(np.asfortranarray(array)) == of(array)
    one = torch.arange(12).reshape(3, 4)
    assert of(one[:, ::2]) == of(one[:, ::2].clone())
    frame_ = frame()
    columns = pd.DataFrame({"a": [1, 2]})
    columns["b"] = ["x", "y"]
    assert of(frame_) == of(columns)


def test_large_arrays_are_read_in_slices(monkeypatch):
    monkeypatch.setattr("thrifty.pack.identity._arrays.CHUNK_BYTES", 64)
    array = np.arange(600).reshape(100, 6)
    assert of(array[:, ::2]) == of(array[:, ::2].copy())
    one = torch.arange(600).reshape(100, 6)
    assert of(one.T) == of(one.T.contiguous())


def test_a_file_in_memory_is_its_content(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.arange(6))
    one, two = np.load(path, mmap_mode="r"), np.load(path, mmap_mode="c")
    assert of(one) == of(two)
    two[0] = 7
    assert of(one) != of(two)


def test_the_order_in_which_attributes_were_set_does_not_count():
    one, two = types.SimpleNamespace(a=1, b=2), types.SimpleNamespace(b=2, a=1)
    a, b = Plain(), Plain()
    a.y, a.z, b.z, b.y = 1, 2, 2, 1
    assert of(a) == of(b)
    assert of(one) == of(two)


def test_what_a_property_caches_does_not_count():
    class Lazy:
        @functools.cached_property
        def value(self):
            return [1]

    one, two = Lazy(), Lazy()
    assert one.value
    assert of(one) == of(two)


def test_cycles_through_objects_and_sets():
    def ring():
        one, two = Plain(), Plain()
        one.x, two.x = {two}, (one, frozenset({two}))
        return one

    assert of(ring()) == of(ring())


def test_classes_made_by_a_function_are_told_apart():
    def make(k):
        class Made:
            rate = k

        return Made

    assert of(make(1)) == of(make(1)) != of(make(2))
    assert of(make(1)()) != of(make(2)())


def test_a_function_known_elsewhere_is_its_name():
    values = Values(Names(home=__name__))
    assert values.digest(nothing, path="x", known_as="nothing") != of(nothing)
    wrapped = staticmethod(nothing)
    assert values.digest(wrapped, path="x", known_as="nothing") != of(wrapped)


def test_wrappers_of_packages_count_with_what_they_hold():
    assert of(torch.no_grad()(nothing)) == of(torch.no_grad()(nothing))
    assert of(torch.no_grad()(nothing)) != of(torch.enable_grad()(nothing))


def test_what_packages_keep_for_themselves_in_wrappers_does_not_count():
    def wrapper(option, *, cache):
        """Return a wrapper as a package would make it."""
        names = {"__name__": "torch.wrappers"}
        exec(
            "class Context:\n    pass\n"
            "def wrap(function, context):\n    return lambda *a: context.enter(function, *a)",
            names,
        )
        context = names["Context"]()
        context.option, context.cache = option, cache
        return names["wrap"](nothing, context)

    assert of(wrapper(1, cache=[1])) == of(wrapper(1, cache=iter([2])))
    assert of(wrapper(1, cache=[1])) != of(wrapper(2, cache=[1]))


def test_compiled_functions_count_as_what_they_are_compiled_from():
    numba = pytest.importorskip("numba")
    fast, slow = numba.njit(fastmath=True)(scaled(1)), numba.njit(scaled(1))
    assert of(numba.njit(scaled(1))) == of(slow) != of(numba.njit(scaled(2)))
    assert of(fast) != of(slow)


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_scripted_and_compiled_modules():
    net = torch.nn.Sequential(torch.nn.Linear(1, 1))
    other = torch.nn.Sequential(torch.nn.Linear(1, 1))
    compiled = [torch.compile(each, backend="eager") for each in (net, net, other)]
    assert of(compiled[0]) == of(compiled[1]) != of(compiled[2])
    one, two = torch.jit.script(net), torch.jit.script(other)
    assert of(one) == of(one) != of(two)


def test_code_that_was_never_pickled_stays_so():
    class Trap:
        def __reduce__(self):
            return print, ("unpickled",)

    assert of(Trap()) == of(Trap())


class Broken:
    def __init__(self, x):
        self.x = x

    def __getstate__(self):
        raise TypeError("not today")


def test_an_object_that_cannot_be_pickled_is_its_attributes():
    assert of(Broken(1)) == of(Broken(1)) != of(Broken(2))


def deep():
    out = []
    for _ in range(100_000):
        out = [out]
    return out


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: (_ for _ in ()), "is a generator"),
        (lambda: iter([1]), "is an iterator"),
        (lambda: map(len, []), "is an iterator"),
        (tempfile.TemporaryFile, "is an open file"),
        (io.StringIO, "is an open file"),
        (socket.socket, "is a socket"),
        (lambda: threading.Thread(target=nothing), "is a thread"),
        (lambda: ThreadPoolExecutor(1), "is a pool of workers"),
        (lambda: sys._getframe(), "is a frame of running code"),
        (lambda: __import__("sqlite3").connect(":memory:"), "does not say what it holds"),
        (lambda: Broken.__new__(Broken), "does not say what it holds"),
        (deep, "is nested too deeply"),
    ],
)
def test_what_has_no_content_is_an_error_that_says_where_it_is(make, what):
    value = make()
    with pytest.raises(TaskError, match=r"task\.x.*" + what + ".*__thrifty_identity__"):
        of(value)
    if hasattr(value, "close"):
        value.close()


def test_the_error_names_the_way_to_the_value():
    inner = Plain([Plain({"key": iter([])})])
    with pytest.raises(TaskError, match=r"task\.x\.x\[0\]\.x\['key'\] is an iterator"):
        of(inner)


def test_what_the_hook_of_a_base_class_cannot_know_counts():
    assert of(SaidMore(1, 2)) == of(SaidMore(1, 2))
    assert of(SaidMore(1, 2)) != of(SaidMore(1, 3))
    assert of(SaidMore(1, 2)) != of(SaidMore(2, 2))
