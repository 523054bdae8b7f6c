"""What classes hold outside of their attributes: fields of dataclasses, enumerations, patterns."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.pack.identity._projects import project
from thrifty.pack import task_identity
from thrifty.pack.identity import content_digest


pytestmark = pytest.mark.slow

TASK = """
import dataclasses, enum, functools, types
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import NamedTuple
from thrifty.testing import LineTask

def scaled(x=1.0):
    return inner(x)
def inner(x):
    return x * {k}
class Scale:
    def __init__(self, k):
        self.k = k

{text}

class Mine(LineTask):
    def loss(self, model, batch):
        return {read} * super().loss(model, batch)
"""


@pytest.fixture
def identity(tmp_path, monkeypatch):
    """Return a function that gives what a task's training depends on, by name."""

    def of(text, read, k="1.5", other="9"):
        task = TASK.format(text=text, read=read, k="9").replace("@K", k).replace("@L", other)
        task = task.replace("@FIRST", "B").replace("@SECOND", "A") if k == "2.5" else task
        task = task.replace("@FIRST", "A").replace("@SECOND", "B")
        return task_identity(project(tmp_path, monkeypatch, mine=task).Mine()).training

    return of


SLOTS = "@dataclass(slots=True)\nclass C:\n"

CLASSES = {
    "a default": (f"{SLOTS}    k: float = @K", "C().k"),
    "a default of a frozen class": (
        "@dataclass(frozen=True, slots=True, kw_only=True)\nclass C:\n    k: float = @K",
        "C().k",
    ),
    "a default that init does not take": (
        f"{SLOTS}    k: float = field(init=False, default=@K)",
        "C().k",
    ),
    "a default of a keyword": (f"{SLOTS}    _: KW_ONLY\n    k: float = @K", "C().k"),
    "a default that is a tuple": (f"{SLOTS}    k: tuple = (1, (@K,))", "C().k[1][0]"),
    "a default that is an object": (f"{SLOTS}    k: Scale = Scale(@K)", "C().k.k"),
    "a default that is a function": (
        f"def f():\n    return @K\n{SLOTS}    k: object = f",
        "C().k()",
    ),
    "a default that is an object with code": (
        f"def f():\n    return @K\n{SLOTS}    k: object = functools.partial(scaled, f)",
        "C().k()",
    ),
    "an inherited default": (
        f"{SLOTS}    k: float = @K\n@dataclass(slots=True)\nclass D(C):\n    j: int = 1",
        "D().k",
    ),
    "a default of a class made by a function": (
        (
            "def made():\n    @dataclass(slots=True)\n    class C:\n        k: float = @K\n"
            "    return C\nC = made()"
        ),
        "C().k",
    ),
    "a default of a class that is made by its fields": (
        "C = dataclasses.make_dataclass('C', [('k', float, field(default=@K))], slots=True)",
        "C().k",
    ),
    "a default beside a class attribute": (
        "@dataclass\nclass C:\n    k: float = @K\nC.k = 5.0",
        "C().k",
    ),
    "a factory that is a partial": (
        "@dataclass\nclass C:\n    k: list = field(default_factory=functools.partial(list, [@K]))",
        "C().k[0]",
    ),
    "which of two lambdas makes which field": (
        (
            "@dataclass\nclass C:\n    A: list = field(default_factory=lambda: '@FIRST')\n"
            "    B: list = field(default_factory=lambda: '@SECOND')"
        ),
        "len(C().A)",
    ),
    "which function makes a field": (
        f"def A(): return 1\ndef B(): return 2\n{SLOTS}    k: int = field(default_factory=@FIRST)",
        "C().k * A() * B()",
    ),
    "metadata": (
        "@dataclass\nclass C:\n    k: float = field(default=0.0, metadata={'weight': @K})",
        "dataclasses.fields(C)[0].metadata['weight']",
    ),
    "metadata with slots": (
        f"{SLOTS}    k: float = field(default=0.0, metadata={{'weight': [@K]}})",
        "dataclasses.fields(C)[0].metadata['weight'][0]",
    ),
    "code in metadata": (
        (
            "def f():\n    return g()\ndef g():\n    return @K\n"
            "@dataclass\nclass C:\n    k: float = field(default=0.0, metadata={'read': f})"
        ),
        "dataclasses.fields(C)[0].metadata['read']()",
    ),
    "the order of arguments that only init takes": (
        (
            "@dataclass\nclass C:\n    @FIRST: InitVar[float]\n    @SECOND: InitVar[float]\n"
            "    def __post_init__(self, first, second):\n        self.k = first"
        ),
        "C(1.0, 2.0).k",
    ),
    "code in a default of a named tuple": (
        (
            "def f():\n    return g()\ndef g():\n    return @K\n"
            "class C(NamedTuple):\n    k: object = f"
        ),
        "C().k()",
    ),
    "a pattern's order": (
        (
            "class C:\n    __match_args__ = ('@FIRST', '@SECOND')\n    A, B = 1.0, 2.0\n"
            "def f(c):\n    match c:\n        case C(x):\n            return x"
        ),
        "f(C())",
    ),
    "a pattern's order of a dataclass": (
        (
            "@dataclass\nclass C:\n    A: float = 1.0\n    B: float = 2.0\n"
            "    __match_args__ = ('@FIRST', '@SECOND')\n"
            "def f(c):\n    match c:\n        case C(x):\n            return x"
        ),
        "f(C())",
    ),
    "a missing member": (
        (
            "class C(enum.Enum):\n    A = 1.0\n    B = 2.0\n    @classmethod\n"
            "    def _missing_(cls, value):\n        return cls.@FIRST"
        ),
        "C('x').value",
    ),
    "the next value": (
        (
            "class C(enum.Enum):\n    @staticmethod\n"
            "    def _generate_next_value_(name, start, count, last):\n        return @K\n"
            "    A = 1.0"
        ),
        "C._generate_next_value_('B', 1, 1, [])",
    ),
    "what a member is compared by": (
        (
            "class C(enum.Enum):\n    A = 1.0\n"
            "    __call__ = functools.partialmethod(lambda self, k: k, @K)"
        ),
        "C.A()",
    ),
    "a property of members": (
        (
            "class C(enum.Enum):\n    A = 1.0\n    @enum.property\n"
            "    def scale(self):\n        return @K"
        ),
        "C.A.scale",
    ),
    "a member by another name": (
        "class C(enum.Enum):\n    A = 1.0\n    B = 2.0\nC.DEFAULT = C.@FIRST",
        "C.DEFAULT.value",
    ),
    "what unknown flags do": (
        "class C(enum.Flag, boundary=enum.KEEP if @K < 2 else enum.CONFORM):\n    A = 1",
        "C(9).value",
    ),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("case", CLASSES.values(), ids=CLASSES)
def test_an_edit_of_a_class_is_seen_and_a_comment_is_not(identity, case):
    text, read = case
    one = identity(text, read)
    assert identity(text, read, "2.5") != one
    assert identity(f"# a comment\n\n{text}", read) == one


def test_the_names_of_what_fields_hold(identity):
    text = f"{SLOTS}    k: float = field(default=@K, metadata={{'weight': 1}})"
    found = identity(text, "C().k")
    assert found["attribute C.k"] == "1.5"
    assert "attribute C.k.metadata" in found


UNCHANGED = {
    "a dataclass": (
        "@dataclass\nclass C:\n    k: float = 1.0\n    j: list = field(default_factory=list)",
        {"attribute C.k"},
    ),
    "a factory of the user's": (
        "@dataclass\nclass C:\n    k: float = field(default_factory=scaled)",
        set(),
    ),
    "a lambda": ("@dataclass\nclass C:\n    k: float = field(default_factory=lambda: 1.0)", set()),
    "slots without a default": (f"{SLOTS}    k: float", set()),
    "a static method": (
        "@dataclass\nclass C:\n    k: object = staticmethod(scaled)",
        {"attribute C.k"},
    ),
}


@pytest.mark.parametrize("case", UNCHANGED.values(), ids=UNCHANGED)
def test_fields_that_attributes_show_do_not_count_again(identity, case):
    """The identities of such classes are in databases of users."""
    text, names = case
    found = {name for name in identity(text, "C.__name__") if name.startswith("attribute C.")}
    assert found - {"attribute C.__hash__"} == names


def test_what_python_adds_to_an_enumeration_does_not_count(identity):
    text = "class C(enum.IntFlag):\n    A = 1\n    def __eq__(self, other):\n        return True"
    found = identity(text, "C.A.value")
    assert {name for name in found if " C" in name} == {"class C", "function C.__eq__"}


def test_generated_patterns_do_not_count(identity):
    text = (
        "@dataclass\nclass C:\n    A: float\n    B: InitVar[float]\n"
        "class N(NamedTuple):\n    A: int"
    )
    found = identity(text, "C(1, 2).A * N(1).A")
    assert not [name for name in found if "__match_args__" in name]


def test_a_local_class_with_slots_is_told_apart_by_its_defaults():
    def made(default):
        @dataclass(slots=True)
        class Local:
            k: float = default

        return Local

    assert content_digest(made(1.0)) == content_digest(made(1.0))
    assert content_digest(made(1.0)) != content_digest(made(2.0))
