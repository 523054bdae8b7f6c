"""Code inside objects that do not show it, and in modules that code finds by computed names."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref

import numpy as np
import pytest

from tests.pack.identity._projects import load, write
from thrifty.core import TaskError
from thrifty.pack import task_identity
from thrifty.pack.identity import content_digest


pytestmark = pytest.mark.slow

TASK = """
import contextlib, ctypes, functools, importlib, itertools, operator, pkgutil, pydoc, sys, weakref
import numpy as np
import conf
import nets
import util
from thrifty.testing import LineTask

def scaled(x, *rest):
    return inner(x)
def inner(x):
    return x * @K
class Scale:
    k = 1.0
    def by(self, x):
        return inner(x)
    def __call__(self, x):
        return inner(x)
SCALE = Scale()

{text}

class Mine(LineTask):
    def loss(self, model, batch):
        return {loss} * super().loss(model, batch)
"""
UTIL = """
import importlib
def locate(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
def loaded(name):
    return importlib.import_module(name)
"""
_NUMBERS = itertools.count()


@pytest.fixture
def identity(tmp_path, monkeypatch):
    """Return a function that gives what a task's training depends on, by name."""

    def of(text, loss, k="1.5", nets="9"):
        folder = tmp_path / f"hidden{next(_NUMBERS)}"
        for name in [each for each in sys.modules if each.partition(".")[0] in _MODULES]:
            monkeypatch.delitem(sys.modules, name)
        small = f"def small(x):\n    return x * {nets}\nslope = {nets}\n"
        mine = TASK.replace("@K", k).format(text=text.replace("@K", k), loss=loss)
        write(folder, mine=mine, nets=small, lazy=small, util=UTIL)
        write(folder / "conf", __init__="from . import inside\n", inside=small)
        return task_identity(load(folder, "mine", monkeypatch=monkeypatch).Mine()).training

    return of


_MODULES = ("mine", "nets", "lazy", "util", "conf")

OBJECTS = {
    "a ufunc": ("F = np.frompyfunc(scaled, 1, 1)", "F(1.0)"),
    "a ufunc of a lambda": ("F = np.frompyfunc(lambda x: x * @K, 1, 1)", "F(1.0)"),
    "a ufunc of a method": ("F = np.frompyfunc(SCALE.by, 1, 1)", "F(1.0)"),
    "a method of a ufunc": ("F = np.frompyfunc(scaled, 2, 1).reduce", "F([1.0, 2.0])"),
    "a vectorized function": ("F = np.vectorize(scaled)", "F(1.0)"),
    "the call of a function": ("F = scaled.__call__", "F(1.0)"),
    "the call of an object": ("F = SCALE.__call__", "F(1.0)"),
    "a weak method": ("F = weakref.WeakMethod(SCALE.by)", "F()(1.0)"),
    "the object of a weak method": (
        (
            "class Other:\n    def __init__(self):\n        self.k = @K\n    def by(self):\n"
            "        return self.k\nOTHER = Other()\nF = weakref.WeakMethod(OTHER.by)"
        ),
        "F()()",
    ),
    "a weak reference to a function": ("F = weakref.ref(scaled)", "F()(1.0)"),
    "a finalizer": ("F = weakref.finalize(SCALE, scaled, 1.0)", "F()"),
    "a method by type": (
        (
            "class Many:\n    @functools.singledispatchmethod\n    def f(self, x):\n"
            "        return 0\n"
            "    @f.register\n    def _(self, x: float):\n        return inner(x)"
        ),
        "Many().f(1.0)",
    ),
    "an exit stack": ("F = contextlib.ExitStack()\nF.callback(scaled, 1.0)", "F.close()"),
    "a context": ("F = contextlib.nullcontext(scaled)", "F.enter_result(1.0)"),
    "a super object": (
        (
            "class Base:\n    def f(self):\n        return self.k * inner(1.0)\n"
            "class Other(Base):\n    k = 1.0\n    f = None\nF = super(Other, Other())"
        ),
        "F.f()",
    ),
    "the object of a super object": (
        (
            "class Base:\n    def f(self):\n        return self.k\nclass Other(Base):\n    pass\n"
            "OTHER = Other()\nOTHER.k = @K\nF = super(Other, OTHER)"
        ),
        "F.f()",
    ),
    "a method by name": ("F = operator.methodcaller('by', 1.0)", "F(SCALE)"),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("case", OBJECTS.values(), ids=OBJECTS)
def test_an_edit_of_code_that_an_object_hides_is_seen(identity, case):
    text, loss = case
    one = identity(text, loss)
    assert identity(text, loss, "2.5") != one
    assert identity(f"# a comment\n\n{text}", loss) == one


REFUSED = {
    "a function of C": ("F = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)(scaled)", "F(1.0)"),
    "a key": ("F = functools.cmp_to_key(scaled)", "F(1.0)"),
    "a map": ("F = map(scaled, [1.0])", "next(F)"),
    "a filter": ("F = filter(scaled, [1.0])", "next(F)"),
    "an iterator of itertools": ("F = itertools.starmap(scaled, [(1.0,)])", "next(F)"),
    "an iterator of calls": ("F = iter(lambda: scaled(1.0), 0)", "next(F)"),
    "a proxy": ("F = weakref.proxy(SCALE)", "F(1.0)"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_an_object_that_hides_code_for_good_is_refused(identity, case):
    with pytest.raises(TaskError, match=r"F .*thrifty cannot tell whether"):
        identity(*case)


def test_a_ufunc_of_numpy_is_its_name():
    assert content_digest(np.add) != content_digest(np.multiply)
    assert content_digest(np.add) == content_digest(np.add)


def test_a_ufunc_of_a_python_function_is_that_function():
    two, three = (np.frompyfunc(each, 1, 1) for each in (lambda x: 2 * x, lambda x: 3 * x))
    assert content_digest(two) == content_digest(np.frompyfunc(lambda x: 2 * x, 1, 1))
    assert content_digest(two) != content_digest(three)


def test_a_ufunc_without_readable_code_is_refused(monkeypatch):
    one = np.frompyfunc(lambda x: x, 1, 1)
    monkeypatch.setattr(gc, "get_referents", lambda _: [])
    with pytest.raises(
        TaskError, match=r"\['f'\] is a NumPy ufunc .*write a plain function, or .*`np.vectorize`"
    ):
        content_digest({"f": one})


def test_a_weak_method_of_a_dead_object_has_content():
    class Local:
        def f(self):
            return 1

    assert content_digest(weakref.WeakMethod(Local().f))


MODULES = {
    "a name among the globals": ("F = ('nets', 'small')", "getattr(globals()[F[0]], F[1])(1.0)"),
    "a dict among the globals": ("F = ('nets', 'small')", "vars(globals()[F[0]])[F[1]](1.0)"),
    "code that is computed": ("F = 'small'", "eval(f'nets.{F}(1.0)')"),
    "a getter in a global": ("F = operator.attrgetter('small')", "F(nets)(1.0)"),
    "a getter of a path in a global": ("F = operator.attrgetter('inside.slope')", "F(conf)"),
    "a getter in a list": ("F = [operator.attrgetter('slope')]", "F[0](nets)"),
    "a getter that is made here": (
        "def f(path):\n    return operator.attrgetter(path)(conf)",
        "f(0)",
    ),
    "a caller in a global": ("F = operator.methodcaller('small', 1.0)", "F(nets)"),
    "a caller with a keyword": ("F = operator.methodcaller('small', x=1.0)", "F(nets)"),
    "a partial": ("F = functools.partial(getattr, nets)", "F('sm' + chr(97) + 'll')(1.0)"),
    "a path": ("F = 'inside.slope'", "functools.reduce(getattr, F.split('.'), conf)"),
    "a path in a loop": (
        (
            "def f(path):\n    at = conf\n    for name in path.split('.'):\n"
            "        at = getattr(at, name)\n    return at"
        ),
        "f('inside.sl' + 'ope')",
    ),
    "a path in a loop that a closure sees": (
        (
            "def f(path, at=None):\n    at = conf\n    for name in path.split('.'):\n"
            "        at = getattr(at, name)\n    return lambda: at"
        ),
        "f('inside.sl' + 'ope')()",
    ),
    "a path in a loop of dicts": (
        (
            "def f(path):\n    at = conf\n    for name in path.split('.'):\n"
            "        at = vars(at)[name]\n    return at"
        ),
        "f('inside.sl' + 'ope')",
    ),
    "a name in a computed module": (
        "def f(a, b):\n    return getattr(getattr(conf, a), b)",
        "f('in' + chr(115) + 'ide', 'sl' + chr(111) + 'pe')",
    ),
    "a name in a computed module of this one": (
        "def f(a, b):\n    return getattr(getattr(sys.modules[__name__], a), b)",
        "f('ne' + chr(116) + 's', 'sl' + chr(111) + 'pe')",
    ),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("case", MODULES.values(), ids=MODULES)
def test_an_edit_of_a_module_that_is_found_by_name_is_seen(identity, case):
    text, loss = case
    one = identity(text, loss)
    assert identity(text, loss, nets="8") != one
    assert identity(f"# a comment\n\n{text}", loss) == one


@pytest.mark.parametrize("text", ["lazy.csv", "lazy.small", "lazy", "lazy.py", "no.such"])
def test_a_text_that_another_function_may_import_runs_no_file(identity, text):
    """A text such as "train.loss" may be a metric, and train.py a script that trains for hours."""
    identity(f"F = {text!r}\nG = util.locate", "len(F) + util.loaded.__code__.co_argcount")
    assert "lazy" not in sys.modules


def test_all_modules_count_only_where_their_names_are_computed(identity):
    found = identity("F = 'small'", "nets.small(1.0) * globals()['F'].count('s')")
    assert "global nets.slope" not in found
