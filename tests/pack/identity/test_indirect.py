"""Code and values that the user's code reaches without naming them."""

from __future__ import annotations

import itertools
import sys
import textwrap
import threading
import weakref

import pytest
import torch

from tests.pack.identity._projects import load, project, write
from thrifty.core import TaskError
from thrifty.pack import task_identity
from thrifty.pack.identity import content_digest, reach


pytestmark = pytest.mark.slow

TASK = """
import importlib, sys, threading, weakref
import torch
from torch import nn
from thrifty.testing import LineTask
import nets
import family.nets

{text}

class Mine(LineTask):
    def loss(self, model, batch):
        x, y = batch
        kind = model.kind
        return {loss}
"""

NETS = "def small(x):\n    return x * {k}\n"
_NUMBERS = itertools.count()


@pytest.fixture
def identity(tmp_path, monkeypatch):
    """Return a function that gives the identity of a task in a project of several modules."""

    def of(k, text, loss):
        folder = tmp_path / f"indirect{next(_NUMBERS)}"
        for name in [each for each in sys.modules if each.partition(".")[0] in ("family", "nets")]:
            monkeypatch.delitem(sys.modules, name)
        task = TASK.format(text=text, loss=loss).replace("@K", k)
        write(folder, mine=task, nets=NETS.format(k=k))
        write(folder / "family", __init__="", nets=NETS.format(k=k), other="")
        write(folder / "family" / "deep", __init__="", last=NETS.format(k=k))
        mine = load(folder, "mine", monkeypatch=monkeypatch)
        return task_identity(mine.Mine())

    return of


SUBCLASSES = """
class Penalty:
    @classmethod
    def of(cls, name):
        return next(each for each in cls.__subclasses__() if each.name == name)()
class L1(Penalty):
    name = "l1"
class L2(L1):
    def __call__(self, x):
        return @K * x
"""

MODULES = {
    "a computed name in a module's dict": ("", "nets.__dict__[kind](x)"),
    "a computed name in a submodule's dict": ("", "family.nets.__dict__[kind](x)"),
    "a computed name in a submodule": ("", "getattr(family.nets, kind)(x)"),
    "a module imported here": (
        "def pick(kind):\n    import nets as n\n    return getattr(n, kind)",
        "pick(kind)(x)",
    ),
    "a module imported here from a package": (
        "def pick(kind):\n    from family import nets as n\n    return vars(n)[kind]",
        "pick(kind)(x)",
    ),
    "a module in a closure": (
        "def maker(lib):\n    return lambda kind: getattr(lib, kind)\npick = maker(nets)",
        "pick(kind)(x)",
    ),
    "its own module": (
        "def small(x):\n    return @K * x",
        "getattr(sys.modules[__name__], kind)(x)",
    ),
    "the module of its class": (
        "def small(x):\n    return @K * x",
        "vars(sys.modules[type(self).__module__])[kind](x)",
    ),
    "a module among the modules": ("", "sys.modules['nets'].small(x)"),
    "modules by another name": (
        "from sys import modules as loaded",
        "getattr(loaded['family.nets'], kind)(x)",
    ),
    "an f-string": ("", "importlib.import_module(f'family.{kind}').small(x)"),
    "an f-string for a package in a package": (
        "",
        "importlib.import_module(f'family.{kind}.last').small(x)",
    ),
    "the beginning of the last name": ("", "importlib.import_module(f'family.ne{kind}').small(x)"),
    "a sum": ("", "importlib.import_module('family.' + kind).small(x)"),
    "a format": ("", "__import__('family.{}'.format(kind), fromlist=['x']).small(x)"),
    "a percent sign": ("", "importlib.import_module('family.%s' % kind).small(x)"),
    "a relative name": ("", "importlib.import_module('.' + kind, 'family').small(x)"),
    "the name of a package": ("", "importlib.import_module(f'{family.__name__}.{kind}').small(x)"),
    "a global": ("NAME = 'family.nets'", "importlib.import_module(NAME).small(x)"),
    "a table": ("NAMES = {'a': ('family.nets', 1)}", "importlib.import_module(NAMES[kind][0])(x)"),
}

OBJECTS = {
    "subclasses": (SUBCLASSES, "Penalty.of('l2')(x)"),
    "subclasses of a class of a package": (
        "class Small(nn.Module):\n    def forward(self, x):\n        return @K * x",
        "nn.Module.__subclasses__()[-1]()(x)",
    ),
    "a value of this thread": (
        "settings = threading.local()\nsettings.scale = @K",
        "settings.scale * x",
    ),
    "a value of this thread in an object": (
        "class Own(threading.local):\n    pass\nown = Own()\nown.scale = @K",
        "own.scale * x",
    ),
    "code in a weak dict": (
        "def small(x):\n    return @K * x\nTABLE = weakref.WeakValueDictionary(small=small)",
        "TABLE[kind](x)",
    ),
    "a value in a dict of weak keys": (
        "class Small: pass\nTABLE = weakref.WeakKeyDictionary({Small: [@K]})",
        "TABLE[kind][0] * x",
    ),
    "code in a weak set": (
        "class Small:\n    def f(self):\n        return @K\nTABLE = weakref.WeakSet([Small])",
        "[each().f() for each in TABLE]",
    ),
    "the class of a tensor": (
        """
class Scaled(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return @K
ONE = torch.ones(1).as_subclass(Scaled)
""",
        "ONE * x",
    ),
    "the class of an array": (
        """
import numpy as np
class Scaled(np.ndarray):
    def f(self):
        return @K
ONE = np.ones(1).view(Scaled)
""",
        "ONE.f() * x",
    ),
    "what an attribute of a tensor calls": (
        "def scaled(x):\n    return @K * x\nONE = torch.ones(1)\nONE.f = lambda x: scaled(x)",
        "ONE.f(x)",
    ),
    "a hook of a tensor": (
        "W = torch.ones(1, requires_grad=True)\nhook = W.register_hook(lambda g: g * @K)",
        "W * x",
    ),
    "what a hook of a parameter calls": (
        """
def scaled(g):
    return @K * g
NET = nn.PReLU()
NET.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(scaled(1)))
""",
        "NET(x)",
    ),
}


OPERATOR = """
def more(x):
    return x * @K
@torch.library.custom_op("thrifty_mine::scale", mutates_args=())
def scale(x: torch.Tensor) -> torch.Tensor:
    return {forward}
@scale.register_fake
def _(x):
    return torch.empty_like(x)
scale.register_autograd(lambda ctx, g: {backward})
"""
FORWARD = OPERATOR.format(forward="more(x)", backward="g")
BACKWARD = OPERATOR.format(forward="x.clone()", backward="more(g)")

OPERATORS = {
    "an operator": (FORWARD, "torch.ops.thrifty_mine.scale(x)"),
    "an operator by a computed name": (FORWARD, "getattr(torch.ops.thrifty_mine, kind)(x)"),
    "the backward of an operator": (BACKWARD, "torch.ops.thrifty_mine.scale.default(x)"),
    "an operator of a namespace": (f"{FORWARD}\nOPS = torch.ops.thrifty_mine", "OPS.scale(x)"),
    "an operator among all": (f"{FORWARD}\nfrom torch import ops", "ops.thrifty_mine.scale(x)"),
    "an operator in a global": (f"{FORWARD}\nS = torch.ops.thrifty_mine.scale.default", "S(x)"),
    "what makes an operator": (BACKWARD, "scale(x)"),
    "a kernel for one device": (
        f"{FORWARD.replace('@K', '1')}\nscale.register_kernel('cpu')(lambda x: x * @K)\n",
        "torch.ops.thrifty_mine.scale(x)",
    ),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", OPERATORS.values(), ids=OPERATORS)
def test_an_edit_of_an_operator_is_seen_and_a_comment_is_not(identity, case):
    test_an_edit_is_seen_and_a_comment_is_not(identity, case)


def test_an_operator_that_no_code_names_does_not_count(identity):
    assert identity("1.5", FORWARD, "x") == identity("2.5", FORWARD.replace("more", "less"), "x")


def test_an_operator_that_was_called_is_the_same():
    @torch.library.custom_op("thrifty_mine::called", mutates_args=())
    def called(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    called.register_autograd(lambda ctx, g: g * 2)
    before = content_digest(called)
    called(torch.ones(1, requires_grad=True)).backward()
    assert content_digest(called) == before


def test_operators_of_packages_are_their_names():
    add, mul = torch.ops.aten.add, torch.ops.aten.mul
    digests = {content_digest(each) for each in (add, mul, add.Tensor, add.Scalar)}
    assert len(digests) == 4


LIBRARY = """
import torch
LIBRARY = torch.library.Library("thrifty_library", "FRAGMENT")
LIBRARY.define("scale(Tensor x) -> Tensor")
def scaled(x):
    return inner(x)
def inner(x):
    return x * 2
LIBRARY.impl("scale", scaled, "CPU")
def f(x):
    return torch.ops.thrifty_library.scale(x)
"""


def test_functions_of_a_module_that_makes_a_library_are_reached(tmp_path, monkeypatch):
    mine = project(tmp_path, monkeypatch, mine=LIBRARY)
    try:
        found = reach([mine.f])
        assert {each.name for each in found.functions} == {"f", "scaled", "inner"}
        assert content_digest(mine.LIBRARY)
    finally:
        mine.LIBRARY._destroy()


@pytest.mark.sample(12)
@pytest.mark.parametrize("case", [*MODULES.values(), *OBJECTS.values()], ids=[*MODULES, *OBJECTS])
def test_an_edit_is_seen_and_a_comment_is_not(identity, case):
    text, loss = case
    one = identity("1.5", text, loss)
    assert identity("2.5", text, loss).training_digest != one.training_digest
    assert identity("1.5", f"# a comment\n\n{text}", loss).training == one.training


def test_the_order_of_subclasses_counts(identity):
    text = "class P: pass\nclass {}(P): x = 1\nclass {}(P): x = 2"
    loss = "P.__subclasses__()[0].x * x"
    one = identity("1", text.format("A", "B").replace("x = 2", "x = 1"), loss)
    two = identity("1", text.format("B", "A").replace("x = 2", "x = 1"), loss)
    assert one.training["subclasses of P"] == "A, B"
    assert two.training["subclasses of P"] == "B, A"


def test_a_class_that_a_decorator_replaced_is_no_subclass(identity):
    text = """
        from dataclasses import dataclass
        class P:
            pass
        @dataclass(slots=True)
        class A(P):
            x: int = 1
    """
    found = identity("1", textwrap.dedent(text), "P.__subclasses__()[0].x * x")
    assert found.training["subclasses of P"] == "A"


def test_subclasses_count_only_if_code_lists_them(identity):
    text = SUBCLASSES.replace("__subclasses__", "mro")
    assert "class L2" not in identity("1", text, "Penalty.of('l2')(x)").training


def test_modules_of_a_package_are_read_only_if_the_name_is_computed(identity):
    found = identity("1", "", "importlib.import_module('family.nets').small(x)").training
    assert "function family.nets.small" in found
    assert "function family.deep.last.small" not in found


def test_a_script_in_the_package_does_not_run_again(tmp_path, monkeypatch):
    folder = tmp_path / "scripts"
    write(
        folder, mine="import importlib\ndef f(kind):\n    importlib.import_module(f'jobs.{kind}')"
    )
    write(folder / "jobs", __init__="", train="raise AssertionError", stop="raise SystemExit")
    mine = load(folder, "mine", monkeypatch=monkeypatch)
    running = str(folder / "jobs" / "train.py")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", running, raising=False)
    assert "f" in {each.name for each in reach([mine.f]).functions}


def test_equal_contents_are_equal():
    def local(**values):
        made = threading.local()
        vars(made).update(values)
        return made

    keys = [Key(), Key()]
    assert content_digest(local(a=1, b=2)) == content_digest(local(b=2, a=1))
    makers = (
        local,
        lambda: local(a=1),
        weakref.WeakValueDictionary,
        lambda: weakref.WeakValueDictionary(a=Key),
        lambda: weakref.WeakValueDictionary(b=Key),
        weakref.WeakKeyDictionary,
        lambda: weakref.WeakKeyDictionary({keys[0]: 1}),
        lambda: weakref.WeakKeyDictionary({keys[0]: 2}),
        weakref.WeakSet,
        lambda: weakref.WeakSet(keys),
        lambda: Registry(1),
        lambda: Registry(2),
    )
    digests = [content_digest(make()) for make in makers]
    assert digests == [content_digest(make()) for make in makers]
    assert len({*digests}) == len(makers)


class Key:
    pass


class Registry(weakref.WeakSet):
    def __init__(self, option):
        super().__init__([Key])
        self.option = option


def test_what_has_no_content_in_a_value_of_this_thread_is_an_error():
    made = threading.local()
    made.rows = iter([1])
    with pytest.raises(TaskError, match=r"local\['rows'\] is an iterator"):
        content_digest(made)


def test_no_method_of_a_tensor_runs_to_find_its_hooks():
    class Trap(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError

    assert {each.name for each in reach({"w": [torch.ones(1).as_subclass(Trap)]}).classes}


def test_a_global_with_more_than_one_element_is_imported_inside_a_function(tmp_path, monkeypatch):
    mine = project(
        tmp_path,
        monkeypatch,
        mine="def f():\n    from values import W\n    return W\n",
        values="import torch\nW = torch.ones(2)\n",
    )
    assert "values.W" in {each.name for each in reach([mine.f]).places}


def test_the_modules_of_the_process_are_not_read_whole(tmp_path, monkeypatch):
    mine = project(tmp_path, monkeypatch, mine="from sys import modules\ndef f(x): return modules")
    before = content_digest({"all": mine.modules})
    monkeypatch.setitem(sys.modules, "a_module_without_content", threading.Thread())
    assert content_digest({"all": mine.modules}) == before
    reach({"f": mine.f})
