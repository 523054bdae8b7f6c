"""Code as a tree that is the same on every Python: the names in it, and what it contains."""

from __future__ import annotations
import __future__

import ast
import dis
import functools
import importlib.machinery
import inspect
import itertools
import linecache
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, get_args

from ._contents import digest
from ._own import is_own_module


Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def function_form(node: Function) -> str:
    """Return what a function does as one line of text.

    Comments, positions, docstrings, layout and the function's own name are left out. So are its
    defaults and decorators, because they are evaluated outside of it: other digests cover their
    values. Annotations appear only where a decorator could read them.

    >>> def form(text):
    ...     return function_form(ast.parse(text).body[0])
    >>> form("def f(x):\\n    return x+1") == form("def g(x): # one more\\n    return (x + 1)")
    True
    >>> form("def f(x):\\n    return x + 1") == form("def f(x):\\n    return x + 2")
    False
    """
    return _Writer().function(node)


def constant_form(value: Any) -> str:
    """Return a constant with its type; strings as code points, because ``repr`` follows Unicode."""
    if isinstance(value, str):
        return f"str:{value.encode('utf-8', 'surrogatepass').hex()}"
    if isinstance(value, tuple | frozenset):
        inside = [constant_form(each) for each in value]
        ordered = sorted(inside) if isinstance(value, frozenset) else inside
        return f"{type(value).__name__}:({', '.join(ordered)})"
    return f"{type(value).__name__}:{value!r}"


class _Writer:
    """A writer of nodes that knows whether it is in a class body, where annotations matter."""

    def __init__(self) -> None:
        self._in_class = False

    def function(self, node: Function) -> str:
        if isinstance(node, ast.Lambda):
            body = f"[Return(value={self._form(node.body)})]"
        else:
            body = self._statements(node.body)
        annotated = bool(getattr(node, "decorator_list", ()))
        arguments = self._arguments(node.args, annotated=annotated, defaults=False)
        kind = "async" if isinstance(node, ast.AsyncFunctionDef) else "def"
        return f"{kind}({arguments}, {body})"

    def _form(self, node: Any) -> str:
        if isinstance(node, list):
            return f"[{', '.join(map(self._form, node))}]"
        if isinstance(node, ast.Constant):
            return constant_form(node.value)
        if isinstance(node, ast.JoinedStr):
            return f"JoinedStr({', '.join(self._pieces(node))})"
        if node is None:  # not the constant: the key of ``{**x}``, a default that is not given
            return "-"
        if not isinstance(node, ast.AST):
            return constant_form(node)
        was_in_class = self._in_class
        if isinstance(node, (ast.ClassDef, *Function.__args__)):
            self._in_class = isinstance(node, ast.ClassDef)
        fields = ", ".join(self._fields(node))
        self._in_class = was_in_class
        return f"{type(node).__name__}({fields})"

    def _fields(self, node: ast.AST) -> Iterator[str]:
        """Yield the fields of a node by name, without those that are empty or are layout."""
        decorated = bool(getattr(node, "decorator_list", ()))
        for name in sorted(node._fields):
            value = getattr(node, name, None)
            if name in _LAYOUT or value is None or value == []:
                continue
            if name in ("body", "orelse", "finalbody") and isinstance(value, list):
                yield f"{name}={self._statements(value)}"
            elif isinstance(value, ast.arguments):
                yield f"{name}={self._arguments(value, annotated=decorated, defaults=True)}"
            elif isinstance(node, ast.Delete):
                yield f"{name}={self._form(_flat(value))}"
            elif name == "format_spec" and not self._pieces(value):
                continue
            elif name != "returns" or decorated:
                yield f"{name}={self._form(value)}"

    def _statements(self, body: list[Any]) -> str:
        """Write statements without those that do nothing: docstrings, constants, ``pass``."""
        kept: list[Any] = []
        for each in body:
            if isinstance(each, ast.Pass):
                continue
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                continue
            if isinstance(each, ast.AnnAssign) and each.simple and not self._in_class:
                if each.value is not None:
                    kept.append(ast.Assign(targets=[each.target], value=each.value))
                continue
            kept.append(each)
        return self._form(kept)

    def _arguments(self, node: ast.arguments, *, annotated: bool, defaults: bool) -> str:
        def one(each: ast.arg) -> str:
            if not annotated or each.annotation is None:
                return each.arg
            return f"{each.arg}: {self._form(each.annotation)}"

        groups = (node.posonlyargs, node.args, node.kwonlyargs)
        out = [f"[{', '.join(map(one, group))}]" for group in groups]
        out += ["" if rest is None else one(rest) for rest in (node.vararg, node.kwarg)]
        if defaults:
            out += [self._form(node.defaults), self._form(list(node.kw_defaults))]
        return f"arguments({', '.join(out)})"

    def _pieces(self, node: Any) -> list[str]:
        """Return the pieces of an f-string; versions of Python split its text differently."""
        out: list[str] = []
        text = ""
        for each in node.values:
            if isinstance(each, ast.Constant):
                text += str(each.value)
                continue
            if text:
                out.append(constant_form(text))
            text = ""
            out.append(self._form(each))
        return [*out, constant_form(text)] if text else out


def _flat(targets: list[ast.expr]) -> list[ast.expr]:
    """Flatten targets: ``del (a, b)`` deletes what ``del a, b`` does."""
    out: list[ast.expr] = []
    for each in targets:
        out += _flat(each.elts) if isinstance(each, ast.Tuple | ast.List) else [each]
    return out


_LAYOUT = frozenset({"ctx", "kind", "type_comment", "type_ignores"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """An import inside a function: ``from module import names`` or ``import module``.

    ``handed_on`` means that what is imported is used in any way other than reading an attribute.
    """

    module: str
    level: int = 0
    names: tuple[str, ...] = ()
    handed_on: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mentions:
    """The names in a function and in the functions inside it.

    Attributes:
        globals: Globals that the code reads.
        chains: Each global with the attributes read from it, ``("a", "b")`` for ``a.b``. If what
            that gives is a module, code that does not name it may read it.
        attributes: Each name that may be an attribute that is read. Constants such as the one in
            ``getattr(x, "scale")`` are included.
        stored: Names that are assigned.
        imports: Imports inside the function.
        texts: All texts among its constants.
        imports_by_name: Whether it may import modules by texts, as ``import_module`` does.
        assigns: Whether the code assigns to a global, or to an attribute of an object it was given.
        computes: Whether it may read attributes whose names it computes.
        computes_paths: Whether it may do so again with what it has read, as for ``"nets.small"``.
        reads_all: Whether it may read globals of its module whose names it computes.
        evaluates: Whether it may run code that it computes.
    """

    globals: frozenset[str]
    chains: frozenset[tuple[str, ...]]
    attributes: frozenset[str]
    stored: frozenset[str]
    imports: tuple[Import, ...]
    texts: frozenset[str]
    imports_by_name: bool
    assigns: bool
    computes: bool
    computes_paths: bool
    reads_all: bool
    evaluates: bool


_READS_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_READS_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_NAMED_READS = _READS_GLOBAL | _READS_ATTRIBUTE
_NAMED = frozenset(dis.hasname)
_NAMESPACES = frozenset({"globals", "eval", "exec"})
_COMPUTED = frozenset({"getattr", "vars", "dir", "__dict__", "getmembers", "attrgetter"})
_READERS = frozenset({"getattr", "vars"})
_EVALUATORS = frozenset({"eval", "exec"})
_IMPORTERS = frozenset({"import_module", "__import__"})
_BETWEEN = frozenset({"IMPORT_FROM", "POP_TOP", "SWAP", "EXTENDED_ARG"})
"""Steps of one import between those that bind names."""


@functools.lru_cache(maxsize=4096)
def assigned_to_self(code: CodeType) -> frozenset[str]:
    """Return the attributes that a method assigns to its first argument, as ``self.x = 1`` does.

    >>> def method(self, other):
    ...     self.x, other.y = 1, 2
    >>> assigned_to_self(method.__code__)
    frozenset({'x'})
    """
    if not code.co_argcount:
        return frozenset()
    found, before = set(), None
    for step in dis.get_instructions(code):
        if step.opname == "STORE_ATTR" and before is not None:
            # newer versions of Python load two variables at once; the second one is on top
            loaded = before.argval[-1] if isinstance(before.argval, tuple) else before.argval
            if before.opname.startswith("LOAD_") and loaded == code.co_varnames[0]:
                found.add(step.argval)
        before = step
    return frozenset(found)


def mentions(code: CodeType) -> Mentions:
    """Return the names in a code object, together with those in the code objects inside it."""
    read: set[str] = set()
    chains: set[tuple[str, ...]] = set()
    attributes: set[str] = set()
    imports: list[Import] = []
    stored: set[str] = set()
    texts: set[str] = set()
    assigns = False
    listings = [(each, list(dis.get_instructions(each))) for each in _with_nested(code)]
    handed_on = frozenset(itertools.chain(*itertools.starmap(_handed_on, listings)))
    for each, steps in listings:
        for constant in each.co_consts:
            texts.update(_texts(constant))
        for step in steps:
            if step.opcode in _NAMED:
                (stored if step.opname.startswith("STORE") else attributes).add(step.argval)
        read.update(step.argval for step in steps if step.opname in _READS_GLOBAL)
        chains.update(_chains(steps))
        imports += _imports(steps, handed_on)
        assigns = assigns or _assigns(each, steps)
    named = read | attributes
    steps_of_paths = any(itertools.starmap(_reads_again, listings))
    return Mentions(
        globals=frozenset(read),
        chains=frozenset(chains),
        attributes=frozenset(attributes | {text for text in texts if text.isidentifier()}),
        stored=frozenset(stored),
        imports=tuple(imports),
        texts=frozenset(texts),
        imports_by_name=bool(named & _IMPORTERS),
        assigns=assigns,
        computes=bool(named & _COMPUTED),
        computes_paths=bool(named & {"reduce", "attrgetter"}) or steps_of_paths,
        reads_all=bool(read & _NAMESPACES),
        evaluates=bool(read & _EVALUATORS),
    )


def _imports(steps: Sequence[dis.Instruction], handed_on: Collection[str]) -> Iterator[Import]:
    for index, step in enumerate(steps):
        if step.opname == "IMPORT_NAME":
            level, names = steps[index - 2].argval, steps[index - 1].argval
            yield Import(
                module=step.argval,
                level=level if isinstance(level, int) else 0,
                names=names if isinstance(names, tuple) else (),
                handed_on=any(name in handed_on for name in _bound(steps[index + 1 :])),
            )


def _bound(steps: Iterable[dis.Instruction]) -> Iterator[str]:
    """Yield the local names that the steps after an import bind."""
    for step in steps:
        if step.opname in ("STORE_FAST", "STORE_DEREF"):
            yield step.argval
        elif step.opname not in _BETWEEN:
            return


def _handed_on(code: CodeType, steps: Sequence[dis.Instruction]) -> Iterator[str]:
    """Yield the local names that are used in any way other than reading an attribute."""
    for step, after in itertools.pairwise(each for each in steps if each.opname != "EXTENDED_ARG"):
        if not step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
            continue
        # newer versions of Python load two variables at once, and cells that they only pass on
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        passed_on = () if step.opname == "LOAD_DEREF" else (*code.co_cellvars, *code.co_freevars)
        for name in names[:-1] if after.opname in _READS_ATTRIBUTE else names:
            if name not in passed_on:
                yield name


def _chains(steps: Sequence[dis.Instruction]) -> Iterator[tuple[str, ...]]:
    """Yield ``("a", "b", "c")`` for ``a.b.c`` if ``a`` is a global."""
    steps = [step for step in steps if step.opname != "EXTENDED_ARG"]
    for index, step in enumerate(steps):
        if step.opname in _READS_GLOBAL:
            after = itertools.takewhile(
                lambda each: each.opname in _READS_ATTRIBUTE, steps[index + 1 :]
            )
            yield (step.argval, *(each.argval for each in after))


def _assigns(code: CodeType, steps: Sequence[dis.Instruction]) -> bool:
    made_here = set(code.co_varnames[code.co_argcount + code.co_kwonlyargcount :])
    for before, step in itertools.pairwise(steps):
        if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            return True
        if step.opname in ("STORE_ATTR", "DELETE_ATTR"):
            # the previous step loaded the object; its argument may be two names loaded at once
            name = before.argval[-1] if isinstance(before.argval, tuple) else before.argval
            if not (before.opname.startswith("LOAD_FAST") and name in made_here):
                return True
    return False


def _reads_again(code: CodeType, steps: Sequence[dis.Instruction]) -> bool:
    """Return whether ``getattr`` or the like may be applied to what such a call has returned."""
    made_here = set(code.co_varnames[code.co_argcount + code.co_kwonlyargcount :])
    for step in steps:
        if step.opname.startswith(("STORE_FAST", "STORE_DEREF")):
            # newer versions of Python store two variables at once, or store one and load another
            stored = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            made_here.update(stored[:1] if step.opname.endswith("LOAD_FAST") else stored)
    read = [step.argval for step in steps if step.opname in _NAMED_READS]
    if read.count("__dict__") > 1 or ("__dict__" in read and _READERS & {*read}):
        return True
    plain = [step for step in steps if step.opname not in ("EXTENDED_ARG", "PUSH_NULL")]
    for step, after in itertools.pairwise(plain):
        if step.opname not in _READS_GLOBAL or step.argval not in _READERS:
            continue
        # newer versions of Python load two variables at once; the first one is the argument
        name = after.argval[0] if isinstance(after.argval, tuple) else after.argval
        is_local = after.opname.startswith(("LOAD_FAST", "LOAD_DEREF"))
        if name in _READERS or (is_local and name in made_here):
            return True
    return False


def _with_nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_nested(constant)


def _texts(constant: Any) -> Iterator[str]:
    if isinstance(constant, str):
        yield constant
    elif isinstance(constant, tuple | frozenset):
        for each in constant:
            yield from _texts(each)


Content = tuple[Any, ...]


@functools.lru_cache(maxsize=4096)
def content(code: CodeType) -> Content:
    """Return the instructions with what they refer to, and the parameters.

    Two code objects of equal content compute the same. A docstring is not part of the content,
    because no instruction loads it.
    """
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    place = {step.offset: index for index, step in enumerate(steps)}
    return (
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_kwonlyargcount,
        code.co_flags & _KINDS,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        code.co_exceptiontable,
        tuple((step.opname, _argument(step, place)) for step in steps),
    )


def _argument(step: dis.Instruction, place: dict[int, int]) -> Any:
    if step.opcode in _JUMPS:
        return place.get(step.argval, step.argval)
    if isinstance(step.argval, CodeType):
        return content(step.argval)
    if step.opcode in _CONSTANTS:
        return constant_form(step.argval)
    return step.arg if step.argval is None else repr(step.argval)


_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
_CONSTANTS = frozenset(dis.hasconst)
_KINDS = (
    inspect.CO_VARARGS
    | inspect.CO_VARKEYWORDS
    | inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ITERABLE_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)


def code_digest(function: FunctionType) -> str:
    """Return the digest of what a function does, without its defaults, closure and globals.

    The source is read from its file again and compiled. It counts only if that gives the code that
    runs, so a file edited after its import never stands for the old code. Without a matching
    source, the digest covers the compiled code and the version of Python.
    """
    code = function.__code__
    form = _form_in_source(code, function.__globals__)
    if form is None:
        version = ".".join(map(str, sys.version_info[:2]))
        form = f"compiled by Python {version}: {content(code)!r}"
    return digest(form, *sorted(code.co_freevars))


def extension_digest(module: str) -> str:
    """Return the digest of the file of the user's extension module; empty for other modules."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or not is_own_module(module) or not file.endswith(_EXTENSIONS):
        return ""
    return digest(Path(file).read_bytes())


def _form_in_source(code: CodeType, names: dict[str, Any]) -> str | None:
    linecache.checkcache(code.co_filename)
    source = "".join(linecache.getlines(code.co_filename, names))
    return _form_in(source, code, filename=code.co_filename) if source else None


@functools.lru_cache(maxsize=4096)
def _form_in(source: str, code: CodeType, *, filename: str) -> str | None:  # noqa: ARG001
    # code objects of two files may be equal, so the file is part of the cache key
    try:
        parsed = _parsed(source, flags=code.co_flags & _FUTURE)
    except (SyntaxError, ValueError, RecursionError):
        return None
    wanted = content(code)
    twins = [each for each in parsed.codes.get(code.co_qualname, ()) if content(each) == wanted]
    twins.sort(key=lambda each: abs(each.co_firstlineno - code.co_firstlineno))
    for twin in twins:
        nodes = parsed.nodes.get((twin.co_name, twin.co_firstlineno), [])
        node = nodes[0] if len(nodes) == 1 else _told_apart(source, twin)
        if node is not None:
            return function_form(node)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parsed:
    """The functions of a source: compiled by qualified name, and as syntax by name and line."""

    codes: dict[str, list[CodeType]]
    nodes: dict[tuple[str, int], list[Function]]


@functools.lru_cache(maxsize=64)
def _parsed(source: str, *, flags: int) -> _Parsed:
    tree = ast.parse(source)
    codes: dict[str, list[CodeType]] = {}
    for code in _codes(_compiled(tree, flags=flags)):
        codes.setdefault(code.co_qualname, []).append(code)
    nodes: dict[tuple[str, int], list[Function]] = {}
    for node in _functions(tree):
        nodes.setdefault((_name(node), _first_line(node)), []).append(node)
    return _Parsed(codes=codes, nodes=nodes)


def _told_apart(source: str, twin: CodeType) -> Function | None:
    """Return which of several functions that begin on one line a code object is compiled from.

    Each is moved to a line of its own, and the line in the compiled code identifies it.
    """
    tree = ast.parse(source)
    by_line: dict[int, Function] = {}
    for number, node in enumerate(_functions(tree), start=source.count("\n") + 2):
        if (_name(node), _first_line(node)) == (twin.co_name, twin.co_firstlineno):
            by_line[number] = node
    for number, node in by_line.items():
        node.lineno = node.end_lineno = number
        node.col_offset = node.end_col_offset = 0
    wanted = content(twin)
    for each in _codes(_compiled(tree, flags=twin.co_flags & _FUTURE)):
        found = by_line.get(each.co_firstlineno)
        if found is not None and each.co_name == twin.co_name and content(each) == wanted:
            return found
    return None


def _compiled(tree: ast.Module, *, flags: int) -> CodeType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they were shown when the file was imported
        # cells of a notebook may use a top-level ``await``
        top_level_await = flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code: CodeType = compile(
            tree, "<identity>", "exec", flags=top_level_await, dont_inherit=True
        )
    return code


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, get_args(Function)))


def _name(node: Function) -> str:
    return "<lambda>" if isinstance(node, ast.Lambda) else node.name


def _first_line(node: Function) -> int:
    """Return the line at which a function's code object begins: that of its first decorator."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(each.lineno for each in decorators)])


_EXTENSIONS = tuple(importlib.machinery.EXTENSION_SUFFIXES)

_FUTURE = 0
"""All flags by which ``from __future__ import ...`` changes what a source means."""
for _each in __future__.all_feature_names:
    _FUTURE |= getattr(__future__, _each).compiler_flag
