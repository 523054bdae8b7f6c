"""Spaces from the texts that a study stores of them, without running any code."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

from thrifty.core import SpaceError, ThriftyError

from . import schedules
from ._domain import Choice, Condition, Float, Int
from ._space import Space
from ._units import epochs, steps, tokens


_CALLS: Mapping[str, Callable[..., Any]] = {
    **{each.__name__: each for each in (Choice, Condition, Float, Int)},
    **{each.__name__: each for each in (epochs, steps, tokens)},
    **{
        name: each
        for name, each in vars(schedules).items()
        if isinstance(each, type) and issubclass(each, schedules.Schedule)
    },
}
_MOST_CHARACTERS = 100_000


def space_from_json(texts: Mapping[str, Any]) -> Space:
    """Return the space whose ``to_json`` wrote the texts.

    Domains, the schedules of this package and plain values are read; nothing else is called.

    Raises:
        SpaceError: A hyper-parameter has something else in its domain, such as a schedule of the
            user's own.

    >>> space = Space(lr=Choice([0.1, schedules.Step(Float(0.1, 1.0), [Int(1, 3)])]), width=64)
    >>> space_from_json(space.to_json()).to_json() == space.to_json()
    True
    """
    found = {}
    for name, text in texts.items():
        try:
            if len(text) > _MOST_CHARACTERS:
                raise ValueError("the text is too long")
            value = _value(ast.parse(text, mode="eval").body)
        except (ThriftyError, ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            value = None
        if repr(value) != text:
            raise SpaceError(
                f"the domain of {name!r} can only be read by the code of its study: "
                f"{str(text)[:200]}"
            )
        found[name] = value
    return Space(**found)


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        given = {each.arg: _value(each.value) for each in node.keywords if each.arg is not None}
        if node.func.id not in _CALLS or len(given) < len(node.keywords):
            raise ValueError(f"{node.func.id} is not read")
        return _CALLS[node.func.id](*map(_value, node.args), **given)
    if isinstance(node, ast.Tuple):
        return tuple(map(_value, node.elts))
    return ast.literal_eval(node)
