"""Which functions and values the user's code reaches."""

from __future__ import annotations

import collections
import enum
import functools
import json
import logging
import subprocess
import sys
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch

from tests.pack.identity._projects import load, project
from thrifty.pack.identity import MISSING, Place, Reach, is_own, is_own_module, reach
from thrifty.testing import LineTask


pytestmark = pytest.mark.slow


SCALE = 2.0
ALIAS = json
UNUSED = "read by no function"


def scaled(x, offset=1, *, power=2):
    return (SCALE * x + offset) ** power


def calls_scaled(x):
    return scaled(x)


def places(found: Reach) -> dict[str, object]:
    return {place.name: place.get() for place in found.places}


def place(found: Reach, name: str) -> Place:
    return next(each for each in found.places if each.name == name)


def functions(found: Reach) -> set[str]:
    return {each.name for each in found.functions}


def test_globals_and_defaults_of_a_function():
    assert places(reach([scaled])) == {
        "SCALE": 2.0,
        "scaled default 'offset'": 1,
        "scaled default 'power'": 2,
    }


def test_a_function_reaches_what_it_calls():
    found = reach([calls_scaled])
    assert functions(found) == {"calls_scaled", "scaled"}
    assert "SCALE" in places(found)


def test_a_closure_cell_can_be_read_and_set():
    def make(weight):
        def loss(x):
            return weight * x

        return loss

    loss = make(3)
    name = f"{loss.__qualname__}.<closure>.weight"
    cell = place(reach([loss]), name)
    assert cell.get() == 3
    cell.set(4)
    assert loss(1) == 4


def test_an_empty_cell_is_missing():
    def outer():
        def inner():
            return later

        if not inner:  # type: ignore[truthy-function]
            later = 1
        return inner

    inner = outer()
    cell = reach([inner]).places[0]
    assert cell.get() is MISSING
    assert repr(cell.get()) == "MISSING"
    cell.set(5)
    assert inner() == 5
    cell.set(MISSING)
    cell.set(MISSING)
    assert cell.get() is MISSING


def test_defaults_can_be_set():
    def f(a, b=1, *, c=2):
        return a, b, c

    name = f.__qualname__
    found = reach([f])
    place(found, f"{name} default 'b'").set(10)
    place(found, f"{name} default 'c'").set(20)
    assert f(0) == (0, 10, 20)
    f.__defaults__ = f.__kwdefaults__ = None
    assert {p.get() for p in found.places} == {MISSING}


def test_a_global_can_be_set_and_removed(tmp_path, monkeypatch):
    mine = project(tmp_path, monkeypatch, mine="X = 1\ndef f():\n    return X\n")
    x = place(reach([mine.f]), "X")
    x.set(2)
    assert mine.f() == 2
    x.set(MISSING)
    assert x.get() is MISSING


def test_a_global_that_is_defined_later_is_a_place(tmp_path, monkeypatch):
    mine = project(tmp_path, monkeypatch, mine="def f():\n    return len(later)\n")
    assert places(reach([mine.f])) == {"later": MISSING}


def test_attributes_of_own_modules_are_named_after_them(tmp_path, monkeypatch):
    mine = project(
        tmp_path,
        monkeypatch,
        mine="import helpers\ndef f(x):\n    return helpers.scale(x)\n",
        helpers="SCALE = 3\nOTHER = 4\ndef scale(x):\n    return SCALE * x\n",
    )
    found = reach([mine.f])
    assert functions(found) == {"f", "helpers.scale"}
    assert places(found)["helpers.SCALE"] == 3
    assert "helpers.OTHER" not in places(found)


@pytest.mark.parametrize(
    "body",
    [
        "from helpers import scale\n    return scale(x)",
        "import helpers\n    return helpers.scale(x)",
        "import helpers as h\n    return h.scale(x)",
        "import helpers\n    return getattr(helpers, 'scale')(x)",
    ],
)
def test_imports_inside_functions(tmp_path, monkeypatch, body):
    mine = project(
        tmp_path,
        monkeypatch,
        mine=f"def f(x):\n    {body}\n",
        helpers="SCALE = 3\ndef scale(x):\n    return SCALE * x\n",
    )
    assert places(reach([mine.f]))["helpers.SCALE"] == 3


def test_a_module_of_the_users_that_cannot_be_imported_is_left_to_training(tmp_path, monkeypatch):
    mine = project(
        tmp_path, monkeypatch, mine="def f(x):\n    import broken\n", broken="raise ValueError\n"
    )
    assert functions(reach([mine.f])) == {"f"}


def test_submodules_by_either_way(tmp_path, monkeypatch):
    folder = tmp_path / "packaged" / "pkg"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "deep.py").write_text("X = 1\nY = 2\n")
    (folder / "near.py").write_text("def f():\n    from . import deep\n    return deep.X\n")
    (folder.parent / "mine.py").write_text(
        "import pkg.near\nimport pkg.deep\n"
        "def f():\n    return pkg.near.f()\n"
        "def g():\n    return pkg.deep.Y\n"
        "def h():\n    import pkg.deep\n    return pkg.deep.Y\n"
    )
    mine = load(folder.parent, "mine", monkeypatch=monkeypatch)
    assert places(reach([mine.f]))["pkg.deep.X"] == 1
    assert places(reach([mine.f, mine.g]))["pkg.deep.Y"] == 2
    assert places(reach([mine.h]))["pkg.deep.Y"] == 2


@pytest.mark.parametrize(
    "body",
    [
        "def f():\n    lib = helpers\n    return lib.X",
        "def f():\n    return read(helpers)\ndef read(lib):\n    return lib.X",
        "LIBS = [helpers]\ndef f():\n    return LIBS[0].X",
        "def m():\n    lib = helpers\n    def f():\n        return lib.X\n    return f\nf = m()",
    ],
)
def test_a_module_that_is_handed_on(tmp_path, monkeypatch, body):
    mine = project(tmp_path, monkeypatch, mine=f"import helpers\n{body}\n", helpers="X = 3\n")
    assert places(reach([mine.f]))["helpers.X"] == 3


@pytest.mark.parametrize("read", ["globals()['X']", "globals()['x'.upper()]", "eval('X + 1')"])
def test_globals_by_computed_access_to_the_namespace(tmp_path, monkeypatch, read):
    mine = project(tmp_path, monkeypatch, mine=f"X = 3\ndef f():\n    return {read}\n")
    assert places(reach([mine.f]))["X"] == 3


def test_attributes_of_a_module_by_computed_names(tmp_path, monkeypatch):
    mine = project(
        tmp_path,
        monkeypatch,
        mine="import helpers\ndef f(kind):\n    return getattr(helpers, kind)()\n",
        helpers="def net():\n    return 1\ndef other():\n    return 2\n",
    )
    assert functions(reach([mine.f])) == {"f", "helpers.net", "helpers.other"}


@pytest.mark.parametrize("text", ["helpers", "package.inner"])
def test_modules_imported_by_a_text(tmp_path, monkeypatch, text):
    folder = tmp_path / "texts"
    (folder / "package").mkdir(parents=True)
    for path in ("helpers.py", "package/__init__.py", "package/inner.py"):
        (folder / path).write_text("def net():\n    return 1\n")
    (folder / "mine.py").write_text(
        "from importlib import import_module\n"
        f"def f(kind):\n    'Not a module.'\n    return import_module('{text}').net()\n"
    )
    mine = load(folder, "mine", monkeypatch=monkeypatch)
    found = reach([mine.f])
    assert functions(found) == {"f", f"{text}.net"}
    assert not found.packages


def test_code_inside_lambdas_and_comprehensions_counts(tmp_path, monkeypatch):
    mine = project(
        tmp_path,
        monkeypatch,
        mine="A = 1\nB = 2\ndef f(xs):\n    return [(lambda x: x + A)(x) + B for x in xs]\n",
    )
    assert places(reach([mine.f])) == {"A": 1, "B": 2}


class Base:
    margin = 0.1

    def helper(self):
        return SCALE


class Digits(Base):
    rate = 0.5

    def __init__(self, threshold=None):
        self.threshold = threshold

    def loss(self, x, k=1):
        return self.helper() * self.margin * x * k

    @property
    def wide(self):
        return calls_scaled(1)

    @staticmethod
    def fixed(a=7):
        return a

    @classmethod
    def made(cls, b=8):
        return cls(b)

    @functools.cached_property
    def cached(self):
        return scaled(1)


def test_a_class_reaches_its_members_and_bases():
    found = reach([Digits])
    assert {each.name for each in found.classes} == {"Digits", "Base"}
    assert {
        "Digits.loss", "Digits.wide", "Digits.fixed", "Digits.made", "Digits.cached",
        "Digits.__init__", "Base.helper", "calls_scaled", "scaled",
    } == functions(found)  # fmt: skip
    values = places(found)
    assert values["Digits.rate"] == 0.5
    assert values["Base.margin"] == 0.1
    assert values["Digits.loss default 'k'"] == 1
    assert values["Digits.fixed default 'a'"] == 7
    assert values["Digits.made default 'b'"] == 8
    assert not [name for name in values if "__module__" in name or "__dict__" in name]


def test_class_attributes_can_be_set_and_removed():
    class Mine:
        x = 1

        def read(self):
            return self.x

    x = place(reach([Mine]), f"{Mine.__qualname__}.x")
    x.set(2)
    assert Mine().read() == 2
    x.set(MISSING)
    x.set(MISSING)
    assert not hasattr(Mine, "x")


def test_an_instance_reaches_its_attributes_and_its_class():
    task = Digits(threshold=3)
    found = reach([task])
    threshold = place(found, "Digits.threshold")
    assert threshold.get() == 3
    threshold.set(4)
    assert task.threshold == 4
    assert "Digits.loss" in functions(found)


def test_instances_inside_containers_are_reached():
    task = Digits(threshold={"a": [Digits(threshold=5)]})
    assert places(reach({"task": task}))["task.threshold['a'][0].threshold"] == 5


def test_members_can_be_left_out():
    found = reach([Digits(threshold=3)], without={"loss", "threshold"})
    assert "Digits.loss" not in functions(found)
    assert "Digits.threshold" not in places(found)
    assert "Digits.made" in functions(found)


def test_something_else_can_stand_for_the_attributes_of_an_object():
    inner = Digits(threshold=scaled)
    task = Digits(threshold=inner)

    def instead(value):
        return [wrapping] if value is inner else MISSING

    found = reach({"task": task}, instead=instead)
    assert "task.threshold" in places(found)
    assert "task.threshold.threshold" not in places(found)
    assert "wrapping" in functions(found)


def test_places_at_which_other_values_are_followed():
    task = Digits(threshold=decorated)
    found = reach([task], values_at=lambda p: () if p.key == "threshold" else (p.get(),))
    assert "Digits.threshold" in places(found)
    assert "decorated" not in functions(found)


def test_slots_are_reached_also_empty_ones():
    class Slotted:
        __slots__ = ("x", "y")

        def __init__(self):
            self.x = 1

    it = Slotted()
    found = reach({"it": it})
    assert places(found)["it.x"] == 1
    y = place(found, "it.y")
    assert y.get() is MISSING
    y.set(2)
    assert it.y == 2
    y.set(MISSING)
    y.set(MISSING)
    assert not hasattr(it, "y")


def test_keywords_of_a_partial_are_places():
    part = functools.partial(scaled, 1, power=3)
    found = reach({"part": part})
    assert "scaled" in functions(found)
    keyword = place(found, "part keyword 'power'")
    keyword.set(1)
    assert part() == 3.0


def test_methods_and_callable_objects():
    class Call:
        weight = 3

        def __call__(self, x):
            return calls_scaled(x) * self.weight

    assert "scaled" in functions(reach([Call()]))
    assert "Digits.rate" in places(reach([Digits().loss]))
    task = Digits(threshold=[scaled])
    assert "scaled" in functions(reach([task.threshold.append], home=__name__))


def wrapping(function):
    count = 3

    @functools.wraps(function)
    def inner(*args):
        return [function(*args)] * count

    return inner


@wrapping
@torch.no_grad()
@functools.lru_cache
def decorated(x):
    return calls_scaled(x)


def test_decorated_functions_are_reached_through_their_wrappers():
    found = reach([decorated])
    assert {"decorated", "calls_scaled", "scaled"} <= functions(found)
    assert len([each for each in found.functions if each.name == "decorated"]) == 2
    assert 3 in places(found).values()
    assert "torch" in found.packages


def test_attributes_of_functions():
    def f():
        return f.calls

    f.calls = 0
    found = reach({"f": f})
    calls = next(each for each in found.places if each.name.endswith("f.calls"))
    calls.set(1)
    assert f() == 1


@dataclass
class Options:
    rate: float = 0.1
    parts: list = field(default_factory=lambda: [SCALE])

    def double(self):
        return 2 * self.rate


class Pair(NamedTuple):
    a: int
    b: int = 2

    def total(self):
        return self.a + self.b


class Mode(enum.Enum):
    FAST = "fast"
    SLOW = enum.member(functools.partial(scaled, 1))  # from Python 3.13 on, none by itself

    def quick(self):
        return self is Mode.FAST


def test_dataclasses_give_their_methods_and_factories_only():
    found = reach({"options": Options()})
    assert functions(found) == {"Options.double", "Options.<lambda>"}
    assert places(found)["options.rate"] == 0.1
    assert "SCALE" in places(found)


def test_named_tuples_and_enums_give_their_own_methods_only():
    assert functions(reach([Pair])) == {"Pair.total"}
    assert functions(reach([Mode])) == {"Mode.quick", "scaled"}
    assert functions(reach([Mode.SLOW])) == {"Mode.quick", "scaled"}
    assert {name for name in places(reach([Mode])) if "Mode." in name} == {"Mode.quick"}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
        self.temperature = 2.0

    def forward(self, x):
        return scaled(self.inner(x)) / self.temperature


def test_modules_give_their_attributes_their_childrens_and_their_hooks():
    net = Net()
    net.inner[0].register_forward_hook(lambda *_: calls_scaled(1))
    found = reach({"net": net})
    values = places(found)
    assert values["net.temperature"] == 2.0
    assert values["net.inner.1.p"] == 0.5
    assert values["net.inner.1.training"] is True
    assert {"Net.forward", "scaled", "calls_scaled"} <= functions(found)
    assert not [name for name in values if "_parameters" in name or "_hooks" in name]
    place(found, "net.inner.1.p").set(0.25)
    assert net.inner[1].p == 0.25


def test_users_code_inside_installed_objects_is_reached():
    data = torch.utils.data.DataLoader([1, 2], collate_fn=calls_scaled)
    found = reach({"task": Digits(threshold=data)})
    assert "scaled" in functions(found)
    assert not place(found, "task.threshold.collate_fn").own


def test_cycles_end():
    a, b = Digits(), Digits()
    a.threshold, b.threshold = b, [a, {}]
    b.threshold[1]["self"] = b.threshold
    assert "a.threshold.threshold" in places(reach({"a": a}))


def test_what_containers_make_is_reached():
    table = collections.defaultdict(calls_scaled, {scaled: 1})
    assert functions(reach({"t": Digits(threshold=table)})) >= {"calls_scaled", "scaled"}


def test_packages_are_named_and_the_standard_library_is_not(tmp_path, monkeypatch):
    mine = project(
        tmp_path,
        monkeypatch,
        mine="import json, torch, numpy as np\nimport sklearn.metrics\n"
        "LOG = __import__('logging').getLogger('x')\n"
        "def f(x):\n    import pandas\n    LOG.info(json.dumps(x))\n"
        "    return torch.relu(x) + np.mean(sklearn.metrics.accuracy_score(x, x))\n",
    )
    found = reach([mine.f])
    assert found.packages == {"torch", "numpy", "sklearn", "pandas"}
    assert functions(found) == {"f"}


def test_nothing_of_the_users_runs(tmp_path, monkeypatch):
    mine = project(
        tmp_path,
        monkeypatch,
        mine="""
        class Trap(dict):
            def __getattr__(self, name): raise RuntimeError(name)
            def __getattribute__(self, name): raise RuntimeError(name)
            def items(self): raise RuntimeError
            def __iter__(self): raise RuntimeError
            def __eq__(self, other): raise RuntimeError
            def __hash__(self): raise RuntimeError
            @property
            def value(self): raise RuntimeError
            def read(self): return 1
        trap = Trap(a=1)
        def f(): return trap.value
        """,
    )
    found = reach([mine.f])
    assert "Trap.read" in functions(found)


def test_the_same_places_in_the_same_order_each_time():
    task = Digits(threshold={"b": scaled, "a": Net()})
    one, two = (reach({"task": task}) for _ in range(2))
    assert [p.name for p in one.places] == [p.name for p in two.places]


def test_whose_code_it_is():
    assert is_own(scaled)
    assert is_own(Digits)
    assert is_own(LineTask)
    assert is_own(sys.modules[__name__])
    assert not is_own(torch.nn.Linear)
    assert not is_own(logging.getLogger)
    assert not is_own(reach)
    assert not is_own(len)
    assert not is_own(type(type(torch._C.ScriptFunction)))
    assert not is_own(torch._C.ScriptFunction.__mro__[1])  # a class of a module without a file
    assert not is_own_module("torch.fx")
    assert is_own_module("nowhere_to_be_found")
    assert is_own_module("__main__")
    assert not is_own_module("sklearn.metrics")
    assert not is_own_module("sys")


def test_what_is_no_module_among_the_modules(monkeypatch):
    monkeypatch.setitem(sys.modules, "odd_one", 3)
    assert is_own_module("odd_one.inner")


def test_a_script_and_its_module_give_the_same_names(tmp_path):
    (tmp_path / "task.py").write_text(
        "from thrifty.pack.identity import reach\n"
        "X = 1\n"
        "class Mine:\n    y = 2\n    def f(self):\n        return X\n"
        "print(sorted(p.name for p in reach([Mine]).places))\n"
    )
    (tmp_path / "other.py").write_text("import task\n")
    lines = [
        subprocess.run(
            [sys.executable, name], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout
        for name in ("task.py", "other.py")
    ]
    assert lines[0] == lines[1] == "['Mine.f', 'Mine.y', 'X']\n"
