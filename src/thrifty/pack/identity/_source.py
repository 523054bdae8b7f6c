"""The content of a code object, without positions and without what it never uses."""

from __future__ import annotations
import __future__

import ast
import dis
import functools
import importlib.machinery
import inspect
import linecache
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, get_args

from ._contents import digest
from ._own import is_own_module
from ._syntax import Function, constant_form, function_form


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
