"""The normal form of source code."""

from __future__ import annotations

import ast
import linecache
import textwrap
from pathlib import Path
from types import FunctionType

import pytest

from tests.pack.identity._projects import project
from thrifty.pack.identity._contents import digest
from thrifty.pack.identity._syntax import code_digest, content, function_form


def form(text: str) -> str:
    return function_form(ast.parse(textwrap.dedent(text)).body[0])


SAME = {
    "comments": ("def f(x):\n  return x", "def f(x):  # why\n  # because\n  return x"),
    "layout": ("def f(x, y):\n  return x+y", "def f(\n  x,\n  y,\n):\n    return (x\n    + y)"),
    "a docstring": ("def f(x):\n  return x", "def f(x):\n  'Doc.'\n  return x"),
    "other text": ("def f(x):\n  return x", "def f(x):\n  ...\n  1\n  return x"),
    "pass": ("def f(x):\n  x += 1", "def f(x):\n  pass\n  x += 1\n  pass"),
    "quotes": ("def f():\n  return 'a' 'b'", 'def f():\n  return "ab"'),
    "annotations": ("def f(x):\n  y = x", "def f(x: int) -> int:\n  y: int = x"),
    "declarations": ("def f(x):\n  return x", "def f(x):\n  y: int\n  return x"),
    "its own name": ("def f(x):\n  return x", "def g(x):\n  return x"),
    "numbers": ("def f():\n  return 1000", "def f():\n  return 1_000"),
    "del": ("def f(a, b):\n  del a, b", "def f(a, b):\n  del (a, b)"),
    "f-strings": ("def f(x):\n  return f'a{x}b'", "def f(x):\n  return 'a' f'{x}' f'' 'b'"),
    "an empty format": ("def f(x):\n  return f'{x}'", "def f(x):\n  return f'{x:}'"),
    "u-strings": ("def f():\n  return 'a'", "def f():\n  return u'a'"),
    "nested docstrings": (
        "def f():\n  def g(): return 1\n  return g",
        "def f():\n  def g():\n    'Doc.'\n    return 1\n  return g",
    ),
}

DIFFERENT = {
    "constants": ("def f(x):\n  return x + 1", "def f(x):\n  return x + 2"),
    "types of constants": ("def f(x):\n  return x + 1", "def f(x):\n  return x + 1.0"),
    "signs of zero": ("def f(x):\n  return 0.0", "def f(x):\n  return -0.0"),
    "operators": ("def f(x, y):\n  return x + y", "def f(x, y):\n  return x - y"),
    "names": ("def f(x):\n  return abs(x)", "def f(x):\n  return len(x)"),
    "order": ("def f(x):\n  a(); b()", "def f(x):\n  b(); a()"),
    "parameters": ("def f(x, y):\n  return x", "def f(y, x):\n  return x"),
    "kinds of parameters": ("def f(x, y):\n  return x", "def f(x, *, y):\n  return x"),
    "star": ("def f(*x):\n  return x", "def f(**x):\n  return x"),
    "none in a dict": ("def f(x):\n  return {**x}", "def f(x):\n  return {None: x}"),
    "return": ("def f(x):\n  return", "def f(x):\n  return 0"),
    "async": ("def f(x):\n  return x", "async def f(x):\n  return x"),
    "conversions": ("def f(x):\n  return f'{x}'", "def f(x):\n  return f'{x!r}'"),
    "formats": ("def f(x):\n  return f'{x:2}'", "def f(x):\n  return f'{x:3}'"),
    "text in f-strings": ("def f(x):\n  return f'{x}a'", "def f(x):\n  return f'a{x}'"),
    "nested defaults": ("def f():\n  return lambda x=1: x", "def f():\n  return lambda x=2: x"),
    "nested decorators": (
        "def f():\n  @a\n  def g(): return 1",
        "def f():\n  @b\n  def g(): return 1",
    ),
    "annotations that a decorator may read": (
        "@checked\ndef f(x: int):\n  return x",
        "@checked\ndef f(x: float):\n  return x",
    ),
    "annotations in a class": (
        "def f():\n  class A:\n    if 1:\n      x: int = 1",
        "def f():\n  class A:\n    if 1:\n      x = 1",
    ),
    "branches": ("def f(x):\n  if x: a()\n  b()", "def f(x):\n  if x: a()\n  else: b()"),
}


@pytest.mark.parametrize("pair", SAME.values(), ids=SAME)
def test_what_changes_nothing(pair):
    assert form(pair[0]) == form(pair[1])


@pytest.mark.parametrize("pair", DIFFERENT.values(), ids=DIFFERENT)
def test_what_changes_the_computation(pair):
    assert form(pair[0]) != form(pair[1])


def test_the_form_is_the_same_on_every_python():
    # The form must not depend on `ast.dump`, the `repr` of a node, or the order of its fields.
    text = '''
    def f(a, /, b, *c, d=1, **e) -> "int":
        """Doc."""
        x: list = [i async for i in a if not i]
        with open(b) as h, g(): h.read()
        try:
            return f"{a!r:>{b}} and {x}" "é"
        except (A, B) as err:
            del (a, b)
        finally:
            lambda *z: (yield)
        match a:
            case {"k": [1, *_], **rest} if rest: return -1.5e300
    '''
    assert digest(form(text)) == "3733b4da024be32b0346eec7"


def module(tmp_path, monkeypatch, text):
    return project(tmp_path, monkeypatch, mine=text)


def test_source_of_functions_in_files(tmp_path, monkeypatch):
    one = module(tmp_path, monkeypatch, "def f(x):\n    return x + 1\n")
    two = module(tmp_path, monkeypatch, "# moved\n\n\ndef f(x):\n    'Doc.'\n    return (x + 1)\n")
    three = module(tmp_path, monkeypatch, "def f(x):\n    return x + 2\n")
    assert code_digest(one.f) == code_digest(two.f) != code_digest(three.f)


def test_without_source_the_compiled_code_counts():
    def made(text):
        names = {}
        exec(text, names)
        return names["f"]

    one = made("def f(x):\n    return x + 1")
    assert code_digest(one) == code_digest(made("def f(x):\n\n    'Doc.'\n    return x + 1"))
    for other in ("x + 2", "x - 1", "y + 1", "x + 1.0", "(lambda: x)()"):
        assert code_digest(one) != code_digest(made(f"def f(x):\n    return {other}"))


def test_sets_of_constants_have_no_order():
    text = "def f(x):\n    return x in {'a', 'b', 'c', 'd', 'e', 'f'}"
    names = {}
    exec(text, names)
    assert "frozenset:(str:61, str:62" in repr(content(names["f"].__code__))


def test_an_edited_file_does_not_stand_for_the_code_that_runs(tmp_path, monkeypatch):
    old = module(tmp_path, monkeypatch, "def f(x):\n    return x + 1\n")
    before = code_digest(old.f)
    Path(old.__file__).write_text("def f(x):\n    return x + 222\n")
    edited = code_digest(old.f)
    new = module(tmp_path, monkeypatch, "def f(x):\n    return x + 222\n")
    assert edited != code_digest(new.f)
    Path(old.__file__).write_text("# only moved\n\n\ndef f(x):\n    'Doc.'\n    return x + 1\n")
    assert code_digest(old.f) == before


@pytest.mark.parametrize("broken", ["def f(x:\n", "\0", ""])
def test_a_file_that_became_unreadable(tmp_path, monkeypatch, broken):
    old = module(tmp_path, monkeypatch, "def f(x):\n    return x + 1\n")
    before = code_digest(old.f)
    Path(old.__file__).write_text(broken)
    assert code_digest(old.f) != before  # the digest of the compiled code


def test_lambdas_on_one_line_are_told_apart(tmp_path, monkeypatch):
    line = "fs = [lambda x: x + 1, lambda x: x + 2, lambda y: y + 1, lambda x: x + 1]\n"
    fs = module(tmp_path, monkeypatch, line).fs
    digests = [code_digest(f) for f in fs]
    assert digests[0] == digests[3]
    assert len(set(digests)) == 3
    alone = module(tmp_path, monkeypatch, "fs = [\n    lambda x: x + 2,  # alone\n]\n").fs
    assert code_digest(alone[0]) == digests[1]


def test_nested_lambdas_on_one_line(tmp_path, monkeypatch):
    mine = module(tmp_path, monkeypatch, "f = lambda a: (lambda b: a + b, lambda b: a - b)\n")
    plus, minus = mine.f(1)
    assert len({code_digest(plus), code_digest(minus), code_digest(mine.f)}) == 3
    alone = module(tmp_path, monkeypatch, "def f(a):\n    return lambda b: a - b\n")
    assert code_digest(alone.f(1)) == code_digest(minus)


def test_decorated_and_nested_functions_have_a_source(tmp_path, monkeypatch):
    text = """
    import functools
    def twice(f):
        @functools.wraps(f)
        def inner(*a):
            return f(*a) * 2
        return inner

    @twice
    @(lambda f: f)
    def g(x):
        return x
    class A:
        @property
        def p(self):
            return [self for _ in (1, 2)]
    """
    mine = module(tmp_path, monkeypatch, text)
    again = module(tmp_path, monkeypatch, text.replace("return x", "# same\n        return (x)"))
    for read in (lambda m: m.g, lambda m: m.g.__wrapped__, lambda m: m.A.p.fget):
        assert code_digest(read(mine)) == code_digest(read(again))


def test_a_free_variable_is_not_a_global(tmp_path, monkeypatch):
    free = module(
        tmp_path, monkeypatch, "def m(w):\n    def f(x):\n        return w * x\n    return f\n"
    )
    other = module(
        tmp_path, monkeypatch, "def m(v):\n    def f(x):\n        return w * x\n    return f\n"
    )
    assert code_digest(free.m(1)) != code_digest(other.m(1))


def test_cells_of_a_notebook():
    source = "from __future__ import annotations\ny = await z()\ndef f(x: int):\n    return x + 1\n"
    name = "/tmp/ipykernel_1/123.py"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    try:
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        names = {"__name__": "__main__"}
        code = compile(source, name, "exec", flags=flags)
        inner = next(c for c in code.co_consts if getattr(c, "co_name", "") == "f")
        f = FunctionType(inner, names)
        plain = ast.parse("def g(x):\n    return (x + 1)").body[0]
        assert code_digest(f) == digest(function_form(plain))
    finally:
        del linecache.cache[name]


def test_warnings_of_the_source_are_not_given_twice(tmp_path, monkeypatch):
    text = "def f(x):\n    return x + 1\ng = lambda: 1 is 1\n"
    with pytest.warns(SyntaxWarning):
        mine = module(tmp_path, monkeypatch, text)
    code_digest(mine.f)
