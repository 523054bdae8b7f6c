"""The search space in words: what each hyper-parameter may be, and when it exists."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from ._models import Parameter


_MAX_LENGTH = 20_000
"""Longest record that is parsed; longer ones are shown as they are."""
_INTERVALS = {"Float": "real number", "Int": "whole number"}


def parameters(space: Mapping[str, Any]) -> list[Parameter]:
    """Return the hyper-parameters of a recorded space in words.

    >>> from thrifty.space import Float, Space
    >>> (found,) = parameters(Space(lr=Float(1e-4, 0.1, log=True)).to_json())
    >>> found.kind, found.options
    ('real number', ['0.0001 to 0.1 (log)'])
    """
    return [_parameter(str(name), str(domain)) for name, domain in space.items()]


def _parameter(name: str, domain: str) -> Parameter:
    try:
        if len(domain) > _MAX_LENGTH:
            raise ValueError
        node = ast.parse(domain, mode="eval").body
        kind, options, when = _kind(node), _options(node), _when(node)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # Another version may have written the record: show it as it is.
        kind, options, when = "", [domain], ""
    return Parameter(name=name, domain=domain, kind=kind, options=options, when=when)


def _kind(node: ast.expr) -> str:
    if not isinstance(node, ast.Call):
        return "fixed"
    called = _called(node)
    return "choice" if called == "Choice" else _INTERVALS.get(called, "schedule")


def _options(node: ast.expr) -> list[str]:
    return [_text(option) for option in _choices(node)]


def _choices(node: ast.expr) -> list[ast.expr]:
    """Return the options of a choice; any other value is its only option."""
    if not isinstance(node, ast.Call) or _called(node) != "Choice":
        return [node]
    given = _arguments(node, ("options",)).get("options")
    return given.elts if isinstance(given, ast.Tuple | ast.List) else [node]


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return _text_of_call(node)
    if isinstance(node, ast.Tuple | ast.List):
        return f"[{', '.join(_text(item) for item in node.elts)}]"
    if isinstance(node, ast.Constant) and isinstance(node.value, float):
        return f"{node.value:.4g}"
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ast.unparse(node)


def _text_of_call(node: ast.Call) -> str:
    called = _called(node)
    if called in _INTERVALS:
        return _interval(_arguments(node, ("low", "high")), default_step=called == "Int")
    if called == "Choice":
        options = _choices(node)
        return ast.unparse(node) if options == [node] else " or ".join(map(_text, options))
    given = [_text(each) for each in node.args]
    given += [f"{each.arg}={_text(each.value)}" for each in node.keywords]
    return f"{called}({', '.join(given)})"


def _interval(given: Mapping[str, ast.expr], *, default_step: bool) -> str:
    low, high = (_text(given[end]) if end in given else "?" for end in ("low", "high"))
    text = f"{low} to {high}"
    step = _constant(given.get("step"))
    if step is not None and not (default_step and step == 1):
        text += f" in steps of {_text(given['step'])}"
    return f"{text} (log)" if _constant(given.get("log")) is True else text


def _when(node: ast.expr) -> str:
    """Return the conditions of a domain, such as ``optimizer is sgd``."""
    if not isinstance(node, ast.Call):
        return ""
    conditions = _arguments(node, ()).get("conditions")
    if not isinstance(conditions, ast.Tuple | ast.List):
        return ""
    return " and ".join(_condition(each) for each in conditions.elts)


def _condition(node: ast.expr) -> str:
    given = _arguments(node, ("name", "values")) if isinstance(node, ast.Call) else {}
    values = given.get("values")
    if "name" not in given or not isinstance(values, ast.Tuple | ast.List):
        return ast.unparse(node)
    return f"{_text(given['name'])} is {' or '.join(_text(value) for value in values.elts)}"


def _called(node: ast.Call) -> str:
    return ast.unparse(node.func)


def _arguments(node: ast.Call, names: tuple[str, ...]) -> dict[str, ast.expr]:
    """Return the arguments of a call by name; ``names`` are those of positional ones."""
    given = dict(zip(names, node.args, strict=False))
    return {**given, **{each.arg: each.value for each in node.keywords if each.arg}}


def _constant(node: ast.expr | None) -> Any:
    return node.value if isinstance(node, ast.Constant) else None
