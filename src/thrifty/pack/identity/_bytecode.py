"""The content of a code object, without positions and without what it never uses."""

from __future__ import annotations

import dis
import functools
import inspect
from types import CodeType
from typing import Any

from ._syntax import constant_form


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
